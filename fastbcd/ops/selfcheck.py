"""Every kernel compared with its formula in the reference, on small random tensors.

The schema of a kernel's operator names its arguments; `_arguments` draws one for each name.
Elementwise results must be equal to the last bit, sums over the batch nearly so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbcd import kernels
from fastbcd.kernels.geometry import compute_dtype
from fastbcd.ops.registry import KERNELS, by_formula, by_kernel

TRIALS = ("none", "stacked", "shared x", "shared residual", "both shared")
ELEMENTWISE = ("y", "dx", "dresidual")  # all other results are sums
T, B, SITE = 3, 5, (24, 7, 6)


class Check(NamedTuple):
    """One call of a kernel."""

    kernel: str
    dtype: torch.dtype
    channels_last: bool
    full: bool  # with every optional argument, or with none
    trials: str = "none"

    def __str__(self) -> str:
        words = [self.kernel, str(self.dtype).removeprefix("torch.")]
        words += ["channels_last" if self.channels_last else "contiguous"]
        words += ["full" if self.full else "bare", self.trials.replace(" ", "_")]
        return "-".join(words)


def checks(kernel: str, dtype: torch.dtype) -> Iterator[Check]:
    """The calls of a kernel that are compared."""
    for channels_last, full in product((False, True), repeat=2):
        stacked = TRIALS[1 : 5 if full else 3] if "bool trials" in KERNELS[kernel].schema else ()
        for trials in ("none", *stacked):
            yield Check(kernel, dtype, channels_last, full, trials)


def comparisons(device: str) -> Iterator[tuple[str, list[str]]]:
    """(what was compared, what differs) for every kernel that this device uses."""
    module: Any = kernels.module_for(torch.empty(0, device=device))
    for kernel, dtype in product(KERNELS, getattr(module, "DTYPES", ())):
        for check in checks(kernel, dtype) if hasattr(module, kernel) else ():
            bad = disagreement(check, getattr(module, kernel), device)
            if bad is not None:
                yield str(check), bad


def disagreement(check: Check, function: Callable[..., None], device: Any) -> list[str] | None:
    """How a kernel differs from its formula in one call; None if no kernel takes the call."""
    schema, lay_out, formula = KERNELS[check.kernel]
    found, wanted = (lay_out(*_arguments(check, schema, device)) for _ in range(2))
    if not found.fits:
        return None
    by_kernel(function, found)
    by_formula(formula, wanted)
    names = re.findall(r"Tensor (\w+)", schema.partition("->")[2]) or ["y"]
    got, want = (
        {n: t for n, t in zip(names, call.outputs, strict=True) if t is not None}
        for call in (found, wanted)
    )
    # All results of a batch norm depend on sums.
    return differences(got, want, () if check.kernel.startswith("norm") else ELEMENTWISE)


def _arguments(check: Check, schema: str, device: Any) -> list[Any]:
    """The arguments of an operator, the same every time."""
    g = torch.Generator().manual_seed(0)
    stacked = check.trials != "none"
    lead = (T,) if stacked else ()
    shared = {n: check.trials in (f"shared {n}", "both shared") for n in ("x", "residual")}
    values = {"trials": stacked, "want_residual": check.full, "eps": 1e-5}
    values |= {"x_shared": shared["x"], "residual_shared": shared["residual"]}
    big = ("x", "residual", "grad", "y")
    shapes = {n: (*(() if shared.get(n) else lead), B, *SITE) for n in big}
    shapes |= {"mask": (*lead, *SITE), "alpha": SITE, "aux": SITE, "coef": (3, SITE[0])}
    shapes |= {"statistics": (2, SITE[0]), "c": (B, T, 9), "a": (B, 9), "bits": (B, T)}

    def draw(kind: str, name: str) -> Any:
        if kind in ("bool", "float"):
            return values.get(name, check.full)
        if kind == "Tensor?" and not check.full:
            return None
        t = torch.randn(shapes.get(name, SITE[:1]), generator=g, dtype=torch.float64)
        if name in ("mask", "bits"):
            t = (t > 0).to(torch.bool if name == "mask" else torch.uint8)
        else:
            t = t.abs() if name == "statistics" else t
            t = t.to(check.dtype if name in (*big, "c", "a") else compute_dtype(check.dtype))
        if check.channels_last and t.ndim >= len(SITE) and name != "c":
            channel = t.ndim - len(SITE)
            t = t.movedim(channel, -1).contiguous().to(device).movedim(-1, channel)
        return t.to(device)

    inputs = re.findall(r"(Tensor\??|bool|float) (\w+)", schema.partition("->")[0])
    return [draw(kind, name) for kind, name in inputs]


def differences(
    found: dict[str, Tensor], wanted: dict[str, Tensor], elementwise: tuple[str, ...] = ELEMENTWISE
) -> list[str]:
    """How results differ: elementwise ones in any bit, sums by more than rounding."""
    lines = []
    for name, want in wanted.items():
        got = found[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            lines.append(f"{name} is {got.dtype} {tuple(got.shape)}, not {tuple(want.shape)}")
            continue
        same = (got == want) | (got.isnan() & want.isnan())
        if name not in elementwise and want.numel():
            size = 1 + want.nan_to_num(0, 0, 0).abs().max()
            same |= (got - want).abs() <= 128 * torch.finfo(want.dtype).eps * size
        if not same.all():
            at = tuple((~same).nonzero()[0].tolist())
            lines.append(
                f"{name}: {(~same).sum().item()} of {same.numel()} differ, "
                f"first at {at}: {got[at].item()!r}, expected {want[at].item()!r}"
            )
    return lines
