"""Precision and repeatability of GPU and CPU libraries while something runs.

A GPU may round the factors of a float32 product to 10 bits (TF32); convolutions do so by default.
Engines would then differ in the third digit, and with them decisions, so scoring turns it off.

These are settings of the whole process, combined over all threads that ask for some, and restored
when the last of them is done. `fp32_precision` says what is used; the older flags (`allow_tf32`,
`set_float32_matmul_precision`) are set to agree with it: otherwise torch refuses to read them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

_backends: Any = torch.backends


def _attribute(place: Any, name: str = "fp32_precision") -> tuple[Any, Any]:
    return partial(getattr, place, name), partial(setattr, place, name)


# (read, write), in the order of writing: the first two change some of the others.
_SETTINGS: dict[str, tuple[Any, Any]] = {
    "old_matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "old_conv": _attribute(_backends.cudnn, "allow_tf32"),
    "matmul": _attribute(_backends.cuda.matmul),
    "conv": _attribute(_backends.cudnn.conv),
    "rnn": _attribute(_backends.cudnn.rnn),
    "cpu_matmul": _attribute(_backends.mkldnn.matmul),
    "cpu_conv": _attribute(_backends.mkldnn.conv),
    "enabled": _attribute(_backends.cudnn, "enabled"),
    "benchmark": _attribute(_backends.cudnn, "benchmark"),
    "deterministic": _attribute(_backends.cudnn, "deterministic"),
}
_STRICT = ("ieee", "highest", False)
_lock = threading.Lock()
_requests: list[dict[str, Any]] = []
_before: dict[str, Any] = {}


@contextmanager
def _requested(request: dict[str, Any]) -> Iterator[None]:
    """Apply settings until the end of the block. The stricter of two precisions is used."""
    with _lock:
        if not _requests:
            _before.clear()
            for name, (read, _) in _SETTINGS.items():
                with suppress(RuntimeError):  # an old flag that the user has made unreadable
                    _before[name] = read()
        _requests.append(request)
        _apply()
    try:
        yield
    finally:
        with _lock:
            _requests[:] = [r for r in _requests if r is not request]
            _apply()


def _apply() -> None:
    for name, before in _before.items():
        wanted = [r[name] for r in _requests if name in r]
        strict = [value for value in wanted if value in _STRICT]
        _SETTINGS[name][1]((strict or wanted or [before])[-1])


def _convolutions(tf32: bool) -> dict[str, Any]:
    new = "tf32" if tf32 else "ieee"
    return {"old_conv": tf32, "conv": new, "rnn": new}


@contextmanager
def products(tf32: bool) -> Iterator[None]:
    """Matrix products and convolutions in float32, or in TF32 on a GPU.

    >>> with products(tf32=False):
    ...     torch.backends.cudnn.conv.fp32_precision
    'ieee'
    """
    old, new = ("high", "tf32") if tf32 else ("highest", "ieee")
    cpu = {"cpu_matmul": "ieee", "cpu_conv": "ieee"}
    with _requested({**_convolutions(tf32), "old_matmul": old, "matmul": new, **cpu}):
        yield


@contextmanager
def own_precision(device: torch.device, precision: str) -> Iterator[None]:
    """Products in "float32", "tf32" or "bf16" (autocast), whatever autocast the caller is in.

    >>> x = torch.ones(2, 2)
    >>> with torch.autocast("cpu", torch.bfloat16), own_precision(x.device, "float32"):
    ...     (x @ x).dtype
    torch.float32
    """
    bf16 = precision == "bf16"
    with (
        torch.autocast(device.type, torch.bfloat16, enabled=bf16),
        products(tf32=precision != "float32"),
    ):
        try:
            yield
        finally:
            if bf16:  # the cache of converted weights would outlive them in the caller's autocast
                torch.clear_autocast_cache()


@contextmanager
def repeatable_convolutions(tf32: bool | None = None) -> Iterator[None]:
    """cuDNN takes algorithms that give the same result every time; tf32: None leaves it as it is.

    >>> with repeatable_convolutions():
    ...     torch.backends.cudnn.deterministic
    True
    """
    request = {} if tf32 is None else _convolutions(tf32)
    with _requested({**request, "enabled": True, "benchmark": False, "deterministic": True}):
        yield


@contextmanager
def fast_convolutions() -> Iterator[None]:
    """cuDNN measures its algorithms and takes the fastest; TF32 is allowed.

    >>> with fast_convolutions():
    ...     torch.backends.cudnn.benchmark
    True
    """
    request = {"enabled": True, "benchmark": True, "deterministic": False}
    with _requested({**_convolutions(True), **request}):
        yield
