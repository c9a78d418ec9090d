"""What runs here and why not the rest: `python -m fastbcd.info` (the same as `fastbcd info`).

With --check every kernel is compared with the reference on the devices that are present, in
seconds: the first thing to run on a new machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import platform
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fastbcd
from fastbcd import kernels, ops, reference
from fastbcd.reference import compute_dtype

# Each op's differentiable arguments; the soft ones take no trials and no scale.
OPS = {
    "masked_relu": ("x", "scale", "shift", "residual"),
    "masked_poly": ("x", "coef", "scale", "shift", "residual"),
    "soft_relu": ("x", "alpha", "residual"),
    "indicator_poly": ("x", "coef", "aux", "residual"),
}
PACKAGES = ("torch", "triton", "numpy", "safetensors", "torchvision", "matplotlib")


def versions() -> dict[str, str]:
    """Installed versions by package; a missing one says so."""
    found = {"fastbcd": fastbcd.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def devices() -> list[str]:
    """cpu, and every CUDA device."""
    return ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def cases(device: str) -> Iterator[dict[str, Any]]:
    """Arguments of the ops over dtypes, memory orders, trials and optional operands."""
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    dtypes += [torch.float64] if device == "cpu" else []
    trials_of = {"single": (False, False), "stacked": (True, False), "shared": (True, True)}
    for dtype, last, (name, (trials, shared)), extras in itertools.product(
        dtypes, (False, True), trials_of.items(), (False, True)
    ):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, dtype: torch.dtype = dtype, g: Any = generator) -> Tensor:
            return torch.randn(shape, generator=g).to(dtype).to(device)

        batch, site, lead = 5, (24, 7, 6), (3,) if trials else ()
        x = draw(*(() if shared else lead), batch, *site)
        residual = draw(*lead, batch, *site) if extras else None
        if last:
            x = x.movedim(-3, -1).contiguous().movedim(-1, -3)
        small = compute_dtype(dtype)
        yield {
            "label": f"{str(dtype)[6:]} {'channels_last' if last else 'contiguous'} {name}"
            + (" scale+residual" if extras else ""),
            "x": x,
            "mask": (torch.rand((*lead, *site), generator=generator) > 0.5).to(device),
            "coef": draw(3, site[0], dtype=small),
            "scale": draw(site[0], dtype=small) if extras else None,
            "shift": draw(site[0], dtype=small) if extras else None,
            "residual": residual,
            "trials": trials,
            "alpha": (units := draw(*site, dtype=small)),
            "aux": units,
        }


def compare(case: dict[str, Any], op: str) -> list[str]:
    """One case through the op and through the reference's formulas; what differs, by name.

    Elementwise results must be equal to the last bit, sums over batch or trials nearly so.
    """
    leaves = {k: case[k].clone().requires_grad_() for k in OPS[op] if case[k] is not None}
    fixed = {"mask": case["mask"]} if op != "soft_relu" else {}
    fixed |= {"trials": case["trials"]} if op.startswith("masked") else {}
    ours = getattr(ops, op)(**fixed, **leaves)
    grad = ours.detach().cos()
    ours.backward(grad)
    found = {"y": ours.detach(), **{f"d{k}": v.grad for k, v in leaves.items()}}
    truth = (_truth if op.startswith("masked") else _soft_truth)(case, grad, op)
    shared = case["trials"] and case["x"].ndim == case["mask"].ndim
    exact = {"y", "dresidual"} | (set() if shared else {"dx"})
    bad = []
    for name, value in found.items():
        same = torch.equal if name in exact else _close
        if not same(value, truth[name]):
            error = (value.double() - truth[name].double()).abs().max().item()
            bad.append(f"{name} differs by {error:.2e}")
    return bad


def _truth(case: dict[str, Any], grad: Tensor, op: str) -> dict[str, Any]:
    x, mask, coef, scale, shift, residual, trials = (
        case[k] for k in ("x", "mask", "coef", "scale", "shift", "residual", "trials")
    )
    if op == "masked_poly":
        y = reference.masked_poly(x, mask, coef, scale, shift, residual, trials)
        dx, dresidual, dcoef, daffine = reference.masked_poly_backward(
            grad, x, mask, coef, scale, shift, residual, trials
        )
    else:
        y = reference.masked_relu(x, mask, scale, shift, residual, trials)
        dcoef = None
        dx, dresidual, daffine = reference.masked_relu_backward(
            grad, y, mask, None if scale is None else x, scale, trials,
            reference.is_shared(x, mask, trials), False,
        )  # fmt: skip
    dscale, dshift = (None, None) if daffine is None else daffine
    return {"y": y, "dx": dx, "dresidual": dresidual, "dcoef": dcoef,
            "dscale": dscale, "dshift": dshift}  # fmt: skip


def _soft_truth(case: dict[str, Any], grad: Tensor, op: str) -> dict[str, Any]:
    x, mask, coef, units, residual = (case[k] for k in ("x", "mask", "coef", "aux", "residual"))
    if op == "soft_relu":
        dx, dalpha = reference.soft_relu_backward(grad, x, units, residual)
        y = reference.soft_relu(x, units, residual)
        return {"y": y, "dx": dx, "dresidual": dx, "dalpha": dalpha}
    dx, dcoef, daux = reference.indicator_poly_backward(grad, x, mask, coef, units, residual)
    y = reference.masked_poly(x, mask, coef, None, None, residual)
    return {"y": y, "dx": dx, "dresidual": dx, "dcoef": dcoef, "daux": daux}


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to the order of a sum, in the tensor's own precision."""
    tolerance = 4 * torch.finfo(a.dtype).eps
    scale = b.double().abs().max().clamp(min=1)
    return bool(((a.double() - b.double()).abs() <= max(tolerance, 1e-6) * scale).all())


def check() -> int:
    """Compare every kernel with the reference on every device; return the number of failures."""
    failures = 0
    for device in devices():
        start, done = time.perf_counter(), 0
        module = kernels.choose(torch.empty(0, device=device))
        name = module.DESCRIPTION if module else "the reference itself"
        for case, op in itertools.product(cases(device), OPS):
            if case["trials"] and not op.startswith("masked"):
                continue
            bad = compare(case, op)
            done += 1
            if bad:
                failures += 1
                print(f"  FAILED {device} {op} {case['label']}: {'; '.join(bad)}")
        seconds = time.perf_counter() - start
        print(f"{device}: {done} cases of {name} against the reference in {seconds:.1f} s")
    print("all kernels agree with the reference" if not failures else f"{failures} cases failed")
    return failures


def main(arguments: list[str] | None = None) -> int:
    """Print versions and backends; with --check, compare kernels with the reference."""
    parser = argparse.ArgumentParser(prog="fastbcd info", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare every kernel here")
    options = parser.parse_args(arguments)
    for name, version in versions().items():
        print(f"{name:<12} {version}")
    for device in devices()[1:]:
        print(f"{device:<12} {torch.cuda.get_device_name(device)}")
    print()
    for backend in fastbcd.backends():
        print(backend)
    if not options.check:
        return 0
    print()
    return 1 if check() else 0


if __name__ == "__main__":
    sys.exit(main())
