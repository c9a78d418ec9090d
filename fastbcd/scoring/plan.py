"""How a call of score will run: which engine, why, in which portions, at what cost."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from torch import Tensor, nn

from fastbcd.masking.masks import MaskSet
from fastbcd.runtime.ranks import world
from fastbcd.scoring.collapsed.engine import Collapsed, keep_form
from fastbcd.scoring.collapsed.linear_rules import NotAffine
from fastbcd.scoring.costs import Bill, stacked_multiply_adds
from fastbcd.scoring.portions import peak_bytes, portions
from fastbcd.scoring.program import NotTraceable
from fastbcd.scoring.sequential import Sequential
from fastbcd.scoring.stacked import Stacked

WORTH = 2e10  # multiply-adds below which no form is built: the call is over in a moment anyway
ROWS = {"cpu": 1024, "cuda": 8192}  # hypotheses × images in a GEMM of collapsed
_said: set[str] = set()


class Plan(NamedTuple):
    """What `explain=True` prints."""

    engine: Any
    why: str
    images: int
    hypotheses: int
    batch: int  # images at a time
    lanes: int  # hypotheses at a time
    multiply_adds: int  # of the whole call; 0 if unknown
    bytes: int  # largest amount of memory that values take at a time
    details: str = ""

    def __str__(self) -> str:
        cost = f"{self.multiply_adds / 1e9:,.1f} G multiply-adds" if self.multiply_adds else "?"
        return (
            f"engine      {self.engine.name}: {self.why}\n"
            f"work        {self.hypotheses} hypotheses + base, {self.images:,} images, {cost}\n"
            f"{self.details}"
            f"chunk       {self.batch} images x {self.lanes} hypotheses, "
            f"{self.bytes / 2**20:,.1f} MiB of values at a time"
        )


class Request(NamedTuple):
    """What is to be scored: example holds two images as the net sees them."""

    net: nn.Module
    masks: MaskSet
    removals: list[Tensor]  # all of them, or some that stand for all
    hypotheses: int
    images: int
    example: Tensor
    batch_size: int | None
    memory: int  # bytes that this call may take


def make_plan(request: Request, engine: str) -> Plan:
    """Choose the engine and the portions."""
    if engine == "sequential":
        return sequential_plan(request, "asked for")
    try:
        stacked = Stacked(request.net, request.masks, request.example)
    except NotTraceable as reason:
        name = type(request.net).__name__
        if engine != "auto":
            raise ValueError(
                f"engine={engine!r} cannot score {name}: {reason}; use engine='sequential'"
            ) from None
        _say_once(f"fastbcd scores {name} one hypothesis at a time: {reason}")
        return sequential_plan(request, f"stacked cannot: {reason}")
    if engine == "stacked":
        return stacked_plan(request, stacked, "asked for")
    try:
        bill = Bill(request, stacked.program)
        if engine == "collapsed":
            return collapsed_plan(request, bill, "asked for")
        cost = stacked_multiply_adds(request, stacked.program)
        if cost < WORTH or not bill.could_be_below(cost):
            return stacked_plan(request, stacked, "the least multiply-adds")
        ours = bill.weighted()
        if ours >= cost or bill.bytes > request.memory:
            why = f"collapsed would cost {ours / 1e9:,.0f} G multiply-adds and {_mib(bill.bytes)}"
            return stacked_plan(request, stacked, why)
        why = f"stacked would cost {cost / 1e9:,.0f} G multiply-adds"
        return collapsed_plan(request, bill, why)
    except NotAffine as reason:
        if engine == "collapsed":
            raise ValueError(
                f"engine='collapsed' cannot score {type(request.net).__name__}: {reason}; "
                f"use engine='stacked'"
            ) from None
        return stacked_plan(request, stacked, f"collapsed cannot: {reason}")


def sequential_plan(request: Request, why: str) -> Plan:
    chosen = Sequential(request.net, request.masks)
    batch = request.batch_size or 128
    return Plan(chosen, why, request.images, request.hypotheses, batch, 1, 0, 0)


def stacked_plan(request: Request, engine: Stacked, why: str) -> Plan:
    program, hypotheses = engine.program, request.hypotheses
    spent = stacked_multiply_adds(request, program)
    full = sum(program.multiply_adds.values()) * (1 + hypotheses) * request.images
    per_image = peak_bytes(program)
    batch, lanes = portions(per_image, max(program.bytes_per_image.values()), hypotheses,
                            request.example.device, request.batch_size, request.memory)  # fmt: skip
    batch = min(batch, max(request.images, 1))
    saved = 1 - spent / full if full else 0.0
    details = f"prefix      {saved:.1%} of the multiply-adds saved by shared prefixes\n"
    return Plan(
        engine, why, request.images, hypotheses, batch, lanes, spent,
        per_image * batch * (1 + lanes), details,
    )  # fmt: skip


def collapsed_plan(request: Request, bill: Bill, why: str) -> Plan:
    """Take the form at hand or build it, if it fits into memory."""
    if bill.bytes > request.memory:
        raise ValueError(
            f"the collapsed form of {bill.kinks:,} ReLUs takes {_mib(bill.bytes)}, and "
            f"{_mib(request.memory)} may be used; pass memory=... or use engine='stacked'"
        )
    form = bill.form
    if form is None:
        form = bill.builder.build(bill.with_image)
        keep_form(request.net, form)
    left = request.memory - bill.bytes
    form.known.begin(request.example, left // 2)
    engine = Collapsed(form, bill.builder)
    engine.check(request.net, request.example)
    share = -(-request.images // world())
    rows = ROWS.get(request.example.device.type, 1024)
    batch = request.batch_size or max(1, min(share, 128))
    # A row holds c, and its GEMM's output is a part of it.
    affordable = max(1, left // 4 // (max(bill.kinks, 1) * request.example.element_size()))
    lanes = max(1, min(request.hypotheses, rows // batch, affordable // batch))
    total = bill.build + bill.affine + bill.trials
    details = (
        f"form        {bill.kinks:,} kinks, {_mib(bill.bytes)}, "
        f"{'at hand' if bill.form is not None else 'built'}\n"
        f"spent on    form {bill.build / 1e9:,.1f} G, affine part {bill.affine / 1e9:,.1f} G, "
        f"hypotheses {bill.trials / 1e9:,.1f} G\n"
    )
    values = (lanes + 2) * batch * bill.kinks * request.example.element_size()
    return Plan(
        engine, why, request.images, request.hypotheses, batch, lanes, total, values, details
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)
