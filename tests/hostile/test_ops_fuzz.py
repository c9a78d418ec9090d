"""Random calls of every op against its reference: shapes, strides, dtypes, trials, operands."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastbcd import ops
from helpers.hostile import seeds
from helpers.op_cases import (
    DIFFERENTIABLE,
    MASKED,
    SALIENCY,
    TRIALS,
    Case,
    arguments,
    disagreement,
    equal,
    formula,
    parameters,
    results,
)

OPS = (*DIFFERENTIABLE, *SALIENCY)
DTYPES = ("float32", "float64", "float16", "bfloat16")


def random_case(op: str, r: random.Random) -> Case:
    spatial = [r.choice((1, 1, 2, 3, 7, 16, 33)) for _ in range(r.randrange(4))]
    sizes = (r.choice((1, 2, 3, 33)), r.choice((0, 1, 2, 5, 9)), r.choice((1, 2, 3, 8, 65)))
    while sizes[0] * max(sizes[1], 1) * sizes[2] * product(spatial) > 200_000:
        spatial.pop()
    return Case(
        op,
        r.choice(DTYPES),
        r.choice(TRIALS) if op in MASKED else "none",
        r.choice(("contiguous", "channels_last", "sliced")),
        r.choice(("contiguous", "channels_last")),
        affine=op in MASKED and r.random() < 0.5,
        residual=r.random() < 0.5,
        sizes=(*sizes, *spatial),
        special=r.random() < 0.3,
        frozen=op in DIFFERENTIABLE and r.random() < 0.2,
    )


def product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def restrided(t: Tensor, r: random.Random) -> Tensor:
    """The same values with random strides and a random offset into a larger tensor."""
    dims = list(range(t.ndim))
    r.shuffle(dims)
    steps = [r.choice((1, 1, 2, 3)) for _ in dims]
    starts = [r.randrange(3) for _ in dims]
    shape = [start + step * size for start, step, size in
             zip(starts, steps, (t.shape[d] for d in dims), strict=True)]  # fmt: skip
    big = torch.full(shape, 7 if t.dtype == torch.uint8 else 1, dtype=t.dtype)
    if t.is_floating_point():
        big.fill_(float("nan"))
    view = big[tuple(slice(a, None, s) for a, s in zip(starts, steps, strict=True))]
    view = view.permute([dims.index(d) for d in range(t.ndim)])
    assert view.shape == t.shape
    view.copy_(t)
    return view


def check_strides(case: Case, given: dict[str, Any], r: random.Random) -> list[str]:
    changed = {
        n: restrided(t, r) if t is not None and t.ndim and r.random() < 0.5 else t
        for n, t in given.items()
    }
    found = results(case, changed)
    return disagreement(case, given, found)


def check_out(case: Case, given: dict[str, Any], r: random.Random) -> list[str]:
    """out= somewhere in the memory of an input, in a random memory order."""
    want = formula(case, given)
    if want.numel() == 0:
        return []
    memory = torch.zeros(4 * want.numel(), dtype=want.dtype)
    a = parameters(given, case)
    target = r.choice([n for n in ("x", "residual") if a[n] is not None])
    dims = list(range(want.ndim))
    if r.random() < 0.5:
        r.shuffle(dims)
    start = r.randrange(2 * want.numel())
    out = memory[start : start + want.numel()].view([want.shape[d] for d in dims])
    out = out.permute([dims.index(d) for d in range(want.ndim)])
    at = r.choice((start, r.randrange(2 * want.numel())))
    own = memory[at : at + a[target].numel()].view(a[target].shape)
    own.copy_(a[target])
    function = getattr(ops, case.op)
    function(**{**a, target: own}, mask=given["mask"], trials=case.stacked, out=out)
    return [] if equal(out, want) else [f"out= in the memory of {target} differs"]


def attack(op: str, seed: int) -> None:
    r = random.Random(seed)
    case = random_case(op, r)
    given = arguments(case, seed=seed)
    checks: list[Callable[..., list[str]]] = [check_strides]
    checks += [check_out] if case.op in MASKED else []
    for check in checks:
        wrong = check(case, given, r)
        assert not wrong, f"seed {seed}, {check.__name__}, {case}: {wrong}"


@pytest.mark.parametrize("op", OPS)
def test_random_calls(op) -> None:
    for seed in seeds(40):
        attack(op, seed)
