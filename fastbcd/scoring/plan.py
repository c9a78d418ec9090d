"""How a call of score will run: which engine, why, in which portions, at what cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fastbcd.runtime.ranks import world
from fastbcd.runtime.warn_once import warn_once
from fastbcd.scoring.collapsed.affine_net import AffineNet, check_linear
from fastbcd.scoring.collapsed.build import CollapsedCost, FormBuilder
from fastbcd.scoring.collapsed.engine import Collapsed
from fastbcd.scoring.collapsed.form import Signature, cached_form, drop_form, keep_form
from fastbcd.scoring.collapsed.linear_rules import NotAffine
from fastbcd.scoring.engine import Request, ScoringEngine
from fastbcd.scoring.metric import DEFAULT, Criterion
from fastbcd.scoring.program import NotTraceable, Program, make_program, with_flat_output
from fastbcd.scoring.sequential import Sequential
from fastbcd.scoring.stacked import Stacked, peak_bytes, portions, stacked_multiply_adds

WORTH = 2e10  # multiply-adds below which no form is built: the call takes a moment anyway
ROWS = {"cpu": 1024, "cuda": 8192}  # hypotheses × images in a GEMM of collapsed


@dataclass
class Plan:
    """What `explain=True` prints."""

    engine: ScoringEngine
    why: str
    request: Request
    batch: int  # images at a time
    lanes: int  # hypotheses at a time
    multiply_adds: int = 0  # of the whole call; 0 if unknown
    bytes: int = 0  # largest amount of memory that values take at a time
    details: str = ""
    criterion: Criterion = DEFAULT

    def use_fewer_lanes(self, alive: int, error: torch.OutOfMemoryError) -> None:
        """After an out-of-memory error: half as many hypotheses at a time."""
        before, self.lanes = self.lanes, min(self.lanes, alive) // 2
        if not self.lanes:
            raise torch.OutOfMemoryError(
                f"{self.batch} images of one hypothesis do not fit into memory ({error}); use "
                f"fewer: Engine(batch_size={max(1, self.batch // 2)})"
            ) from error
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        warn_once(
            f"fastbcd scores {self.lanes} hypotheses at a time instead of {before}: out of memory"
        )

    def __str__(self) -> str:
        hypotheses, images = self.request.hypotheses, self.request.images
        cost = f"{self.multiply_adds / 1e9:,.1f} G multiply-adds" if self.multiply_adds else "?"
        return (
            f"engine      {self.engine.name}: {self.why}\n"
            f"work        {hypotheses} hypotheses + base, {images:,} images, {cost}\n"
            f"{self.details}"
            f"chunk       {self.batch} images x {self.lanes} hypotheses, "
            f"{self.bytes / 2**20:,.1f} MiB of values at a time"
        )


def make_plan(request: Request, engine: str) -> Plan:
    """Choose the engine and the portions. The net is traced once, whichever engine is chosen."""
    if engine == "sequential":
        return sequential_plan(request, "asked for")
    name, dtype = type(request.net).__name__, request.example.dtype
    try:
        if dtype not in (torch.float32, torch.float64):
            raise NotTraceable(f"in {dtype} its logits would depend on the engine by rounding")
        program = make_program(request.net, request.example[:1])
        plan: Plan | str = "asked for"
        try:
            if engine != "stacked":
                plan = collapsed_plan(request, program, required=engine == "collapsed")
        except NotAffine as reason:
            if engine == "collapsed":
                raise
            plan = f"collapsed cannot: {reason}"
        return stacked_plan(request, program, plan) if isinstance(plan, str) else plan
    except (NotTraceable, NotAffine) as reason:
        other = "stacked" if isinstance(reason, NotAffine) else "sequential"
        if engine != "auto":
            raise ValueError(
                f"engine={engine!r} cannot score {name}: {reason}; use engine={other!r}"
            ) from None
        warn_once(f"fastbcd scores {name} one hypothesis at a time: {reason}")
        return sequential_plan(request, f"stacked cannot: {reason}")


def sequential_plan(request: Request, why: str) -> Plan:
    engine = Sequential(request.net, request.masks)
    return Plan(engine, why, request, request.batch_size or 128, 1)


def stacked_plan(request: Request, program: Program, why: str) -> Plan:
    engine = Stacked(program, request.masks)
    engine.check(request)
    spent = stacked_multiply_adds(request, program)
    full = sum(program.multiply_adds.values()) * (1 + request.hypotheses) * request.images
    per_image = peak_bytes(program)
    batch, lanes = portions(request, per_image, max(program.bytes_per_image.values()))
    saved = 1 - spent / full if full else 0.0
    details = f"prefix      {saved:.1%} of the multiply-adds saved by shared prefixes\n"
    return Plan(engine, why, request, batch, lanes, spent, per_image * batch * (1 + lanes), details)


def collapsed_plan(request: Request, program: Program, required: bool) -> Plan | str:
    """A plan with the cached form or a new one; or, unless required, why stacked is better."""
    if not isinstance(program.output, fx.Node):
        raise NotAffine("it returns several tensors instead of one")
    shape = program.shapes[program.output][1:]
    program = program if len(shape) == 1 else with_flat_output(program)
    builder = FormBuilder(AffineNet(program), request.masks, request.example)
    signature = Signature(program)
    form = cached_form(request.net, signature, request.masks)
    cost = CollapsedCost(request, builder, form)
    of_stacked = stacked_multiply_adds(request, program)
    if not required and (of_stacked < WORTH or cost.trials >= of_stacked):
        return "the least multiply-adds"
    check_linear(request.net, signature.facts, program, request.example)
    fits = cost.peak_bytes <= request.memory
    if not required and (cost.weighted() >= of_stacked or not fits):
        ours = f"{cost.weighted() / 1e9:,.0f} G multiply-adds and {_mib(cost.peak_bytes)}"
        return f"collapsed would cost {ours}"
    if not fits:
        raise ValueError(
            f"the collapsed form of {cost.kinks:,} ReLUs takes {_mib(cost.form_bytes)}, "
            f"{_mib(cost.peak_bytes)} while it is built, and {_mib(request.memory)} may be used; "
            f"allow more with Engine(memory=...) or use engine='stacked'"
        )
    why = "asked for" if required else f"stacked would cost {of_stacked / 1e9:,.0f} G multiply-adds"
    if form is None:
        form = builder.build(cost.with_image)
        keep_form(request.net, signature, form)
    engine = Collapsed(form, builder, shape)
    try:
        engine.check(request)
    except NotAffine:
        drop_form(request.net)
        raise
    left = request.memory - cost.form_bytes
    form.affine.begin(request.example, left // 2)
    rows = ROWS.get(request.example.device.type, 1024)
    # A GEMM on a GPU needs all of its rows; a wave has few hypotheses.
    wanted = 128 if rows == ROWS["cpu"] else max(128, rows // max(request.hypotheses, 1))
    batch = request.batch_size or max(1, min(-(-request.images // world()), wanted))
    # A row holds c, and the output of its GEMM is a part of it.
    affordable = max(1, left // 4 // (max(cost.kinks, 1) * cost.itemsize))
    lanes = max(1, min(request.hypotheses, rows // batch, affordable // batch))
    details = (
        f"form        {cost.kinks:,} kinks, {_mib(cost.form_bytes)}, "
        f"{'cached' if cost.form is not None else 'built'}\n"
        f"spent on    form {cost.build / 1e9:,.1f} G, affine part {cost.affine / 1e9:,.1f} G, "
        f"hypotheses {cost.trials / 1e9:,.1f} G\n"
    )
    spent, held = cost.build + cost.affine + cost.trials, (lanes + 2) * batch * cost.kinks
    return Plan(engine, why, request, batch, lanes, spent, held * cost.itemsize, details)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
