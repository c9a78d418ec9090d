"""The C++ kernels for CPU tensors (*.cpp), loaded as the operators `fastbcd_cpu::*`."""

from __future__ import annotations

import json
from pathlib import Path

import torch

_HERE = Path(__file__).parent


def _load() -> None:
    found = sorted(_HERE.glob("_kernels*.so")) + sorted(_HERE.glob("_kernels*.pyd"))
    if found:
        torch.ops.load_library(str(found[0]))
        return
    report = _HERE / "build.json"
    reason = json.loads(report.read_text())["reason"] if report.exists() else None
    raise ImportError(
        f"the C++ kernels are not built: "
        f"{reason or 'run `pip install --no-build-isolation .` where g++ is installed'}"
    )


_load()
_ops = torch.ops.fastbcd_cpu
masked_forward = _ops.masked_forward.default
masked_backward = _ops.masked_backward.default
kink = _ops.kink.default
# y or dx from the arguments of the op, or None where they must be checked or copied first.
masked_plain = _ops.masked_plain.default
masked_backward_plain = _ops.masked_backward_plain.default

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TRUSTED = True  # tests compare them with the reference where they are built


def describe() -> str:
    """What runs, in one line."""
    return f"C++, {_ops.instruction_set()}, {torch.get_num_threads()} threads"
