"""One call of a Triton kernel as a `Case`: its tensors, its run, and what it must give.

Shared by the three ways of testing them: interpreted (test_interpreter.py), compiled ahead of
time (test_compiled.py) and executed on a GPU (test_gpu.py). Outputs start out as NaN, so an
element that a kernel does not write shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from fastbcd.kernels.geometry import geometry, new_output
from fastbcd.ops import reference

TRIALS = ("none", "stacked", "shared x", "shared residual", "both shared")
KERNELS = tuple(product(("relu", "poly"), ("forward", "backward")))
# What SNL and AutoReP train; without trials and affine. The indicator's forward is poly's.
# The saliency's is absolute for ReLU and signed for poly.
SOFT_KERNELS = (
    ("soft", "forward"),
    ("soft", "backward"),
    ("indicator", "backward"),
    ("saliency", "backward"),
    ("saliency_poly", "backward"),
)
DTYPES = ("float32", "float16", "bfloat16")
GROUPS = [*product(KERNELS, DTYPES, TRIALS), *product(SOFT_KERNELS, DTYPES, TRIALS[:1])]


class Case(NamedTuple):
    """One call. `sizes` are T, B, C and the spatial sizes."""

    op: str
    direction: str
    dtype: str = "float32"
    affine: bool = True
    residual: bool = True
    last: bool = False
    mask_last: bool = False
    trials: str = "none"
    sizes: tuple[int, ...] = (2, 2, 5, 3, 3)
    frozen: bool = False  # no gradients of the affine and the residual are asked for

    @property
    def x_shared(self) -> bool:
        return self.trials in ("shared x", "both shared")

    @property
    def residual_shared(self) -> bool:
        return self.trials in ("shared residual", "both shared")

    def __str__(self) -> str:
        words = [self.op, self.direction, self.dtype]
        words += ["affine"] * self.affine + ["residual"] * self.residual + ["frozen"] * self.frozen
        words += ["channels_last" if self.last else "channels_first"]
        words += ["mask_other"] * (self.last != self.mask_last)
        words += [self.trials.replace(" ", "_"), "x".join(map(str, self.sizes))]
        return "-".join(words)


def grid() -> Iterator[Case]:
    """Every variant of every kernel, at one tiny odd size."""
    flags = (False, True)
    for kernel, dtype, trials in product(KERNELS, DTYPES, TRIALS):
        for affine, residual, last, mask_last in product(flags, repeat=4):
            if residual or trials not in ("shared residual", "both shared"):
                yield Case(*kernel, dtype, affine, residual, last, mask_last, trials)
    for kernel, dtype in product(SOFT_KERNELS, DTYPES):
        for residual, last, mask_last in product(flags, repeat=3):
            yield Case(*kernel, dtype, False, residual, last, mask_last)


def odd_cases() -> Iterator[Case]:
    """Sizes at the edges: several tiles, more trials than a word has bits, ones, no space."""
    sizes = {
        "many tiles": (2, 3, 7, 12, 13),
        "one item": (1, 1, 3, 5, 1),
        "one channel": (2, 4, 1, 3, 3),
        "no space": (3, 5, 17),
        "one dimension": (2, 5, 6, 7),
        "three dimensions": (2, 3, 4, 2, 3, 2),
        "one element": (2, 2, 1),
    }
    for kernel in KERNELS:
        for size, last, trials in product(sizes.values(), (False, True), ("stacked", "shared x")):
            yield Case(*kernel, "float32", True, True, last, True, trials, size)
        for dtype, trials in product(("float32", "float16"), TRIALS):
            yield Case(*kernel, dtype, True, True, True, False, trials, frozen=True)
        for trials, count in product(TRIALS[2:], (32, 33)):  # a full word of bits, and beyond
            yield Case(*kernel, "float16", True, True, False, True, trials, (count, 1, 2, 3))
        yield Case(*kernel, "float16", True, True, True, False, "stacked", sizes["many tiles"])
    for kernel, size, last in product(SOFT_KERNELS, sizes.values(), (False, True)):
        yield Case(*kernel, "float32", False, True, last, True, sizes=size)
        yield Case(*kernel, "float16", False, False, last, False, sizes=size)


def op_cases() -> Iterator[Case]:
    """Calls of the public ops, forward and backward."""
    orders = ((False, False), (True, False))
    trials = ("none", "stacked", "both shared", "shared residual")
    for op, dtype in product(("relu", "poly"), ("float32", "bfloat16")):
        for (last, mask_last), sharing in product(orders, trials):
            yield Case(op, "backward", dtype, True, True, last, mask_last, sharing)


def soft_op_cases() -> Iterator[Case]:
    """The same of the ops without trials."""
    ops = ("soft", "indicator", "saliency", "saliency_poly")
    for op, dtype in product(ops, ("float32", "bfloat16")):
        for residual, last in product((False, True), repeat=2):
            yield Case(op, "backward", dtype, False, residual, last)


class Tensors(NamedTuple):
    """The operands of a case; y is the reference's output."""

    x: Tensor
    mask: Tensor
    coef: Tensor
    scale: Tensor | None
    shift: Tensor | None
    residual: Tensor | None
    grad: Tensor
    y: Tensor
    units: Tensor  # alpha or aux, a number a unit, in x's memory order


def tensors(case: Case, seed: int = 0) -> Tensors:
    """Random operands. Channel 0 has NaN, infinities, zeros and a value large for fp16.

    The other channels stay finite, so that their sums can be compared.
    """
    generator = torch.Generator().manual_seed(seed)
    trials, batch, channels, *space = case.sizes
    dtype = getattr(torch, case.dtype)
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 6e4])

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def operand(shared: bool) -> Tensor:
        stacked = case.trials != "none" and not shared
        t = random(*([trials] if stacked else []), batch, channels, *space)
        first = t.select(2 if stacked else 1, 0)
        which = torch.randint(len(special) * 2, first.shape, generator=generator)
        first.copy_(torch.where(which < len(special), special[which % len(special)], first))
        return ordered(t.to(dtype), 2 if stacked else 1, case.last)

    x = operand(case.x_shared)
    residual = operand(case.residual_shared) if case.residual else None
    lead = [] if case.trials == "none" else [trials]
    bits = torch.randint(4, (*lead, channels, *space), generator=generator)
    # Both kinds of mask; a byte counts as kept whatever it is, if not 0.
    mask = bits > 1 if case.dtype == "float32" else torch.tensor([0, 0, 1, 255])[bits].byte()
    mask = ordered(mask, len(lead), case.mask_last)
    coef, affine = random(3, channels), random(2, channels)
    scale, shift = affine if case.affine else (None, None)
    units = ordered(random(channels, *space), 0, case.last)
    y = forward_reference(case, x, mask, coef, scale, shift, residual, units)
    y = ordered(y, len(lead) + 1, case.last)
    grad = ordered(random(*y.shape).to(dtype), len(lead) + 1, case.last)
    return Tensors(x, mask, coef, scale, shift, residual, grad, y, units)


def ordered(t: Tensor, channel: int, last: bool) -> Tensor:
    """t as dense memory in one of the two item orders."""
    return t.movedim(channel, -1).contiguous().movedim(-1, channel) if last else t.contiguous()


def forward_reference(case, x, mask, coef, scale, shift, residual, units) -> Tensor:
    trials = case.trials != "none"
    if case.op == "soft":
        return reference.soft_relu(x, units, residual)
    if case.op in ("relu", "saliency"):
        return reference.masked_relu(x, mask, scale, shift, residual, trials)
    return reference.masked_poly(x, mask, coef, scale, shift, residual, trials)


def expected(case: Case, t: Tensors) -> dict[str, Tensor]:
    """What the call must write, by the reference."""
    if case.direction == "forward":
        return {"y": t.y}
    if case.op == "soft":
        values = reference.soft_relu_backward(t.grad, t.x, t.units, t.residual)
        return dict(zip(("dx", "dalpha"), values, strict=True))
    if case.op == "indicator":
        found = backward_reference(case, t, False)
        dmask = reference.indicator_sums(t.grad, t.x, t.coef, t.residual)
        return {"dx": found["dx"], "dcoef": found["dcoef"], "dmask": dmask}
    if case.op in ("saliency", "saliency_poly"):
        values = reference.saliency_backward(*saliency_arguments(case, t))
        return dict(zip(("dx", "sums"), values, strict=True))
    found = backward_reference(case, t, case.trials != "none")
    for name, shared in (("dx", case.x_shared), ("dresidual", case.residual_shared)):
        if shared:
            found[name] = sum_in_order(case, t, name)
    if not case.residual or case.frozen:
        del found["dresidual"]
    return {name: value for name, value in found.items() if value is not None}


def saliency_arguments(case: Case, t: Tensors) -> tuple:
    """grad, x, mask, coef, residual, absolute."""
    poly = case.op == "saliency_poly"
    return t.grad, t.x, t.mask, t.coef if poly else None, t.residual, not poly


def backward_reference(case: Case, t: Tensors, trials: bool) -> dict[str, Tensor | None]:
    if case.op == "relu":
        names = ("dx", "dresidual", "daffine")
        x = t.x if case.affine and not case.frozen else None
        shared = (case.x_shared and trials, case.residual_shared and trials)
        values = reference.masked_relu_backward(t.grad, t.y, t.mask, x, t.scale, trials, *shared)
    else:
        names = ("dx", "dresidual", "dcoef", "daffine")
        affine = (t.scale, t.shift)
        values = reference.masked_poly_backward(
            t.grad, t.x, t.mask, t.coef, *affine, t.residual, trials
        )
    return dict(zip(names, values, strict=True))


def sum_in_order(case: Case, t: Tensors, name: str) -> Tensor:
    """The gradient of a shared operand: trial after trial in fp32, rounded once."""
    total = torch.zeros(t.grad.shape[1:])
    for i in range(len(t.mask)):
        own = {"mask": t.mask[i], "grad": t.grad[i].float(), "y": t.y[i].float()}
        own["x"] = (t.x if case.x_shared else t.x[i]).float()
        if t.residual is not None:
            own["residual"] = (t.residual if case.residual_shared else t.residual[i]).float()
        total += backward_reference(case, t._replace(**own), trials=False)[name]
    return total.to(t.grad.dtype)


def run(case: Case, t: Tensors, kernels: ModuleType, y: Tensor | None = None) -> dict[str, Tensor]:
    """The same by the kernels. A given y is written in place, it may be an operand."""
    trials = case.trials != "none"
    g = geometry(t.x, t.mask, t.residual, trials)
    affine = (t.scale, t.shift)
    if (case.op, case.direction) in SOFT_KERNELS:
        return run_soft(case, t, kernels, y)
    if case.direction == "forward":
        y = nan(new_output(t.x, t.mask, trials)) if y is None else y
        if case.op == "relu":
            kernels.relu_forward(y, t.x, t.mask, *affine, t.residual, g)
        else:
            kernels.poly_forward(y, t.x, t.mask, t.coef, *affine, t.residual, g)
        return {"y": y}

    dx = new_gradient(t.grad, case.x_shared)
    wanted = case.residual and not case.frozen
    dresidual = new_gradient(t.grad, case.residual_shared) if wanted else None
    sums = case.affine and not (case.frozen and case.op == "relu")
    daffine = nan(t.coef.new_empty(2, g.channels)) if sums else None
    found = {"dx": dx, "dresidual": dresidual, "daffine": daffine}
    if case.op == "relu":
        x = t.x if sums else None
        kernels.relu_backward(dx, dresidual, daffine, t.grad, t.y, t.mask, x, t.scale, g)
    else:
        found["dcoef"] = dcoef = nan(torch.empty_like(t.coef))
        operands = (t.grad, t.x, t.mask, t.coef, *affine, t.residual)
        kernels.poly_backward(dx, dresidual, dcoef, daffine, *operands, g)
    return {name: value for name, value in found.items() if value is not None}


def run_soft(case: Case, t: Tensors, kernels: ModuleType, y: Tensor | None) -> dict[str, Tensor]:
    g = geometry(t.x, t.mask, None, False)
    if case.direction == "forward":
        y = nan(torch.empty_like(t.x)) if y is None else y
        kernels.soft_forward(y, t.x, t.units, t.residual, g)
        return {"y": y}
    dx, dunits = nan(torch.empty_like(t.x)), nan(torch.empty_like(t.units))
    if case.op == "soft":
        kernels.soft_backward(dx, dunits, t.grad, t.x, t.units, t.residual, g)
        return {"dx": dx, "dalpha": dunits}
    if case.op != "indicator":
        kernels.saliency_backward(dx, dunits, *saliency_arguments(case, t), g)
        return {"dx": dx, "sums": dunits}
    dcoef = nan(torch.empty_like(t.coef))
    operands = (t.grad, t.x, t.mask, t.coef, t.residual)
    kernels.indicator_backward(dx, dcoef, dunits, *operands, g)
    return {"dx": dx, "dcoef": dcoef, "dmask": dunits}


def nan(t: Tensor) -> Tensor:
    return t.fill_(math.nan)


def new_gradient(grad: Tensor, shared: bool) -> Tensor:
    return nan(torch.empty_like(grad[0] if shared else grad))


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor], ulps: int = 0) -> list[str]:
    """What differs. Elementwise results to the bit (or `ulps` in bf16), sums to 1e-5."""
    if found.keys() != wanted.keys():
        return [f"wrote {sorted(found)}, expected {sorted(wanted)}"]
    lines = []
    for name, want in wanted.items():
        got = found[name].to(want.device)
        if got.shape != want.shape or got.dtype != want.dtype:
            lines.append(f"{name}: {got.dtype} {tuple(got.shape)}, not {tuple(want.shape)}")
        elif name in ("daffine", "dcoef"):
            finite = want[want.isfinite()].abs()
            atol = 1e-5 * finite.max().item() if finite.numel() else 0.0
            same = torch.isclose(got, want, rtol=1e-5, atol=atol, equal_nan=True)
            lines += _report(name, got, want, same)
        elif name in ("dalpha", "daux", "dmask", "sums"):  # by channel: the first has huge values
            finite = want.nan_to_num(0, 0, 0).abs().flatten(1 if want.ndim > 1 else 0)
            largest = finite.amax(-1).reshape(-1, *(1,) * (want.ndim - 1))
            near = (got - want).abs() <= 1e-5 * (largest + want.abs())
            same = near | (got == want) | (got.isnan() & want.isnan())
            lines += _report(name, got, want, same)
        else:
            same = (got == want) | (got.isnan() & want.isnan())
            if ulps and want.dtype == torch.bfloat16:
                same |= ~(got.isnan() | want.isnan()) & (_steps(got, want) <= ulps)
            lines += _report(name, got, want, same)
    return lines


def _steps(a: Tensor, b: Tensor) -> Tensor:
    """How many bf16 numbers lie between."""
    a, b = (t.contiguous().view(torch.int16).int() for t in (a, b))
    a, b = (torch.where(t < 0, -(t & 0x7FFF), t) for t in (a, b))
    return (a - b).abs()


def _report(name: str, got: Tensor, want: Tensor, same: Tensor) -> list[str]:
    if same.all():
        return []
    at = tuple((~same).nonzero()[0].tolist())
    return [
        f"{name}: {(~same).sum().item()} of {same.numel()} differ, "
        f"first at {at}: {got[at].item()!r}, expected {want[at].item()!r}"
    ]
