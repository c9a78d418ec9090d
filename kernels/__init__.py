"""The kernels behind `fastbcd.ops`, and why one of them may not be in use.

Two backends with the same functions (`relu_forward`, `relu_backward`, `poly_forward`,
`poly_backward`, `soft_forward`, `soft_backward`, `indicator_backward`, `saliency_backward`) on
dense memory described by a `fastbcd.kernels.geometry.Geometry`, and `kinks` (scoring/kinks.py):

    fastbcd.kernels.cpu      C++ (cpu/*.cpp), CPU tensors, built when the package is installed
    fastbcd.kernels.triton   Triton, CUDA tensors; with TRITON_INTERPRET=1 also CPU tensors
"""

from __future__ import annotations

import importlib
import os
import warnings
from types import ModuleType
from typing import NamedTuple

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Backend(NamedTuple):
    """One way to run the ops: its module, or the reason why there is none."""

    name: str
    device: str
    module: ModuleType | None
    reason: str

    def __str__(self) -> str:
        state = "in use" if self.module else "not in use"
        return f"{self.name:<10} {self.device:<6} {state:<11} {self.reason}"


def _load(name: str, device: str) -> Backend:
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except (ImportError, OSError, RuntimeError) as error:
        return Backend(name, device, None, f"{error}")
    except AttributeError as error:  # an operator that the built library does not have
        reason = f"it was built from older sources ({error}); install fastbcd again"
        return Backend(name, device, None, reason)
    return Backend(name, device, module, module.DESCRIPTION)


def _load_triton() -> Backend:
    if not INTERPRETED and not torch.cuda.is_available():
        built = "is a CPU build" if torch.version.cuda is None else "finds no CUDA device"
        return Backend("triton", "cuda", None, f"torch {torch.__version__} {built}")
    return _load("triton", "cpu" if INTERPRETED else "cuda")


CPU = _load("cpu", "cpu")
TRITON = _load_triton()
_warned: set[str] = set()


def backends() -> list[Backend]:
    """What runs here, and why not the rest.

    >>> [(backend.name, backend.device) for backend in backends()]
    [('cpu', 'cpu'), ('triton', 'cuda')]
    >>> print(backends()[0])  # doctest: +SKIP
    cpu        cpu    in use      C++, avx2, 2 threads
    """
    return [CPU, TRITON]


def choose(x: torch.Tensor) -> ModuleType | None:
    """The kernels for tensors like x; None for the reference, with one warning that says why."""
    device = x.device.type
    backend = TRITON if device == "cuda" or INTERPRETED else CPU
    if device not in ("cpu", "cuda"):
        reason = f"there are no kernels for {device} tensors"
    elif backend.module is None:
        reason = backend.reason
    elif x.dtype not in backend.module.DTYPES:
        reason = f"{backend.name} kernels do not take {x.dtype}"
    else:
        return backend.module
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"fastbcd runs its slow reference on {device} tensors: {reason}. "
            f"`python -m fastbcd.info` tells more.",
            RuntimeWarning,
            stacklevel=2,
        )
    return None
