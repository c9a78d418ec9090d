"""The C++ kernels for CPU tensors (*.cpp), loaded as the ops `fastbcd_cpu::*`."""

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
relu_forward = _ops.relu_forward.default
relu_backward = _ops.relu_backward.default
poly_forward = _ops.poly_forward.default
poly_backward = _ops.poly_backward.default
soft_forward = _ops.soft_forward.default
soft_backward = _ops.soft_backward.default
indicator_backward = _ops.indicator_backward.default
saliency_backward = _ops.saliency_backward.default
kinks = _ops.kinks.default

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DESCRIPTION = f"C++, {_ops.instruction_set()}, {torch.get_num_threads()} threads"
