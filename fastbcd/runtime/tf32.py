"""Precision and repeatability of GPU and CPU libraries while something runs.

A GPU may round the factors of a float32 product to 10 bits (TF32); convolutions do so by default.
Engines would then differ in the third digit, and with them decisions, so scoring turns it off.

These are settings of the whole process. They are set through one interface (`fp32_precision`),
combined over all threads that ask for some, and restored when the last of them is done.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_backends: Any = torch.backends
_SETTINGS: dict[str, tuple[Any, str]] = {
    "matmul": (_backends.cuda.matmul, "fp32_precision"),
    "conv": (_backends.cudnn.conv, "fp32_precision"),
    "cpu_matmul": (_backends.mkldnn.matmul, "fp32_precision"),
    "cpu_conv": (_backends.mkldnn.conv, "fp32_precision"),
    "enabled": (_backends.cudnn, "enabled"),
    "benchmark": (_backends.cudnn, "benchmark"),
    "deterministic": (_backends.cudnn, "deterministic"),
}
_lock = threading.Lock()
_requests: list[dict[str, Any]] = []
_before: dict[str, Any] = {}


@contextmanager
def _requested(request: dict[str, Any]) -> Iterator[None]:
    """Apply settings until the end of the block. The stricter of two precisions is used."""
    with _lock:
        if not _requests:
            _before.update({name: getattr(*place) for name, place in _SETTINGS.items()})
        _requests.append(request)
        _apply()
    try:
        yield
    finally:
        with _lock:
            _requests[:] = [r for r in _requests if r is not request]
            _apply()


def _apply() -> None:
    for name, place in _SETTINGS.items():
        wanted = [r[name] for r in _requests if name in r]
        value = "ieee" if "ieee" in wanted else wanted[-1] if wanted else _before[name]
        if getattr(*place) != value:
            setattr(*place, value)


@contextmanager
def products(tf32: bool) -> Iterator[None]:
    """Matrix products and convolutions in float32, or in TF32 on a GPU.

    >>> with products(tf32=False):
    ...     torch.backends.cudnn.conv.fp32_precision
    'ieee'
    """
    gpu = "tf32" if tf32 else "ieee"
    with _requested({"matmul": gpu, "conv": gpu, "cpu_matmul": "ieee", "cpu_conv": "ieee"}):
        yield


@contextmanager
def own_precision(device: torch.device, tf32: bool) -> Iterator[None]:
    """`products`, whatever autocast the caller is in.

    >>> x = torch.ones(2, 2)
    >>> with torch.autocast("cpu", torch.bfloat16), own_precision(x.device, tf32=False):
    ...     (x @ x).dtype
    torch.float32
    """
    with torch.autocast(device.type, enabled=False), products(tf32):
        yield


@contextmanager
def repeatable_convolutions(tf32: bool | None = None) -> Iterator[None]:
    """cuDNN takes algorithms that give the same result every time; tf32: None leaves it as it is.

    >>> with repeatable_convolutions():
    ...     torch.backends.cudnn.deterministic
    True
    """
    request: dict[str, Any] = {"enabled": True, "benchmark": False, "deterministic": True}
    if tf32 is not None:
        request["conv"] = "tf32" if tf32 else "ieee"
    with _requested(request):
        yield
