"""The kernels behind `fastbcd.ops`, and the reasons why a backend is not in use.

Two backends, with the kernels of an op under its own name (`masked_relu_forward`, ...):

    fastbcd.kernels.cpu      C++ (cpu/*.cpp), CPU tensors, built when the package is installed
    fastbcd.kernels.triton   Triton, CUDA tensors; with TRITON_INTERPRET=1 also CPU tensors

A kernel takes its outputs, its inputs and a `fastbcd.kernels.geometry.Geometry`, all tensors as
dense memory.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

import torch

from fastbcd.runtime.warn_once import warn_once

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Backend(NamedTuple):
    """One way to run the ops: its module, or None and the reason."""

    name: str
    device: str
    module: Any
    reason: str  # why there is no module; `backends` writes what is in use

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
    return Backend(name, device, module, "")


def _load_triton() -> Backend:
    if not INTERPRETED and not torch.cuda.is_available():
        built = (
            "is a CPU build" if torch.version.cuda is None else "finds no CUDA device"
        )
        return Backend("triton", "cuda", None, f"torch {torch.__version__} {built}")
    return _load("triton", "cpu" if INTERPRETED else "cuda")


CPU = _load("cpu", "cpu")
TRITON = _load_triton()


def backends() -> list[Backend]:
    """The backends of this machine; `reason` says why one is not in use.

    >>> [(backend.name, backend.device) for backend in backends()]
    [('cpu', 'cpu'), ('triton', 'cuda')]
    >>> print(backends()[0])  # doctest: +SKIP
    cpu        cpu    in use      C++, avx2, 2 threads
    """
    return [
        b._replace(reason=b.module.describe()) if b.module else b for b in (CPU, TRITON)
    ]


def module_for(x: torch.Tensor) -> Any:
    """The kernels for tensors like x. None means the reference, with one warning that says why."""
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
    warn_once(
        f"fastbcd runs its slow reference on {device} tensors: {reason}. "
        f"See `python -m fastbcd.info`."
    )
    return None


def choose(name: str, x: torch.Tensor) -> Any:
    """The kernel `name` for tensors like x, or None: then the reference runs."""
    return getattr(module_for(x), name, None)
