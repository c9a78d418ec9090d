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
from operator import attrgetter
from typing import Any

import torch

# A function of torch; the others are in torch.backends.
_MATMUL = "float32_matmul_precision"
# In the order of writing: the first two change some of the others.
_SETTINGS = (
    _MATMUL,
    "cudnn.allow_tf32",
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
)
_STRICT = ("ieee", "highest", False)
_lock = threading.Lock()
_requests: list[dict[str, Any]] = []
_before: dict[str, Any] = {}


def _read(name: str) -> Any:
    if name == _MATMUL:
        return torch.get_float32_matmul_precision()
    return attrgetter(name)(torch.backends)


def _write(name: str, value: Any) -> None:
    if name == _MATMUL:
        torch.set_float32_matmul_precision(value)
    else:
        owner, _, attribute = name.rpartition(".")
        setattr(attrgetter(owner)(torch.backends), attribute, value)


@contextmanager
def _requested(request: dict[str, Any]) -> Iterator[None]:
    """Apply settings until the end of the block. The stricter of two precisions is used."""
    with _lock:
        if not _requests:
            _before.clear()
            for name in _SETTINGS:
                # An old flag may have been made unreadable by the user.
                with suppress(RuntimeError):
                    _before[name] = _read(name)
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
        _write(name, (strict or wanted or [before])[-1])


def _convolutions(tf32: bool) -> dict[str, Any]:
    new = "tf32" if tf32 else "ieee"
    names = ("cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision")
    return {"cudnn.allow_tf32": tf32, **dict.fromkeys(names, new)}


def _repeatable(yes: bool) -> dict[str, Any]:
    return {
        "cudnn.enabled": True,
        "cudnn.benchmark": not yes,
        "cudnn.deterministic": yes,
    }


@contextmanager
def products(tf32: bool) -> Iterator[None]:
    """Matrix products and convolutions in float32, or in TF32 on a GPU.

    >>> with products(tf32=False):
    ...     torch.backends.cudnn.conv.fp32_precision
    'ieee'
    """
    request = _convolutions(tf32)
    request[_MATMUL] = "high" if tf32 else "highest"
    request["cuda.matmul.fp32_precision"] = "tf32" if tf32 else "ieee"
    request["mkldnn.matmul.fp32_precision"] = "ieee"
    request["mkldnn.conv.fp32_precision"] = "ieee"
    with _requested(request):
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
            # The cache of converted weights would outlive them in the caller's autocast.
            if bf16:
                torch.clear_autocast_cache()


@contextmanager
def repeatable_convolutions(tf32: bool | None = None) -> Iterator[None]:
    """cuDNN takes algorithms that give the same result every time; tf32: None leaves it as it is.

    >>> with repeatable_convolutions():
    ...     torch.backends.cudnn.deterministic
    True
    """
    request = {} if tf32 is None else _convolutions(tf32)
    with _requested(request | _repeatable(True)):
        yield


@contextmanager
def fast_convolutions() -> Iterator[None]:
    """cuDNN measures its algorithms and takes the fastest; TF32 is allowed.

    >>> with fast_convolutions():
    ...     torch.backends.cudnn.benchmark
    True
    """
    with _requested(_convolutions(True) | _repeatable(False)):
        yield
