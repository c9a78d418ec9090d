"""How a call of score will run: which engine, why, in which portions, at what cost."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from fastbcd.masking.masks import set_masks
from fastbcd.runtime.malloc import kept_memory
from fastbcd.runtime.ranks import from_first, world
from fastbcd.runtime.warn_once import warn_once
from fastbcd.scoring.collapsed.affine_net import AffineNet, check_linear
from fastbcd.scoring.collapsed.build import CollapsedCost, FormBuilder
from fastbcd.scoring.collapsed.engine import Collapsed
from fastbcd.scoring.collapsed.form import Signature, cached_form, drop_form, keep_form
from fastbcd.scoring.collapsed.linear_rules import NotAffine
from fastbcd.scoring.engine import Request, ScoringEngine
from fastbcd.scoring.program import (
    NotTraceable,
    Program,
    in_bfloat16,
    make_program,
    with_flat_output,
)
from fastbcd.scoring.sequential import Sequential
from fastbcd.scoring.stacked import Stacked, peak_bytes, portions, stacked_multiply_adds

WORTH = 2e10  # multiply-adds below which no form is built: the call takes a moment anyway
SAMPLE, REPEATS = 128, 3  # images that are timed to choose an engine, and how often
_slower: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
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
    if request.precision == "bf16" and request.example.dtype != torch.float32:
        raise ValueError(
            f"precision='bf16' is for nets in float32, and this one is in {request.example.dtype}"
        )
    if request.precision == "bf16" and request.example.device.type == "cpu":
        warn_once("precision='bf16' is meant for GPUs: most CPUs are slower in it than in float32")
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
        if isinstance(plan, str):
            plan = stacked_plan(request, program, plan)
            if engine == "auto" and stacked_is_slower(plan, program):
                return sequential_plan(request, "stacked is slower, as timed on this machine")
            if request.precision == "bf16":
                return replace(plan, engine=Stacked(in_bfloat16(program), request.masks))
        return plan
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
    each = sum(program.multiply_adds.values()) / max(len(program.steps), 1)
    batch, lanes = portions(request, per_image, max(program.bytes_per_image.values()), each)
    saved = 1 - spent / full if full else 0.0
    details = f"prefix      {saved:.1%} of the multiply-adds saved by shared prefixes\n"
    return Plan(engine, why, request, batch, lanes, spent, per_image * batch * (1 + lanes), details)


def stacked_is_slower(plan: Plan, program: Program) -> bool:
    """Is stacked slower than one hypothesis at a time? Timed once for a net, never assumed.

    Timed are nets with grouped convolutions, whose speed multiply-adds do not tell, if the timing
    takes a small part of the call.
    """
    request = plan.request
    grouped = any(getattr(step.run, "groups", 1) > 1 for step in program.steps)
    timed = 2 * REPEATS * SAMPLE * (1 + plan.lanes)  # hypothesis-images
    large = (1 + request.hypotheses) * request.images >= 20 * timed
    if not grouped or not large or not request.removals:
        return False
    if request.net not in _slower:
        one = sequential_plan(request, "timed")
        slower = seconds(plan) > seconds(one, plan.lanes)
        _slower[request.net] = bool(from_first(torch.tensor(int(slower))))  # ranks plan alike
    return _slower[request.net]


def seconds(plan: Plan, lanes: int | None = None) -> float:
    """The least time that a plan takes for SAMPLE images, the base and `lanes` hypotheses."""
    engine, request, found = plan.engine, plan.request, []
    removals = islice(cycle(request.removals), lanes or plan.lanes)
    work = engine.prepare(dict(enumerate(removals)), plan.lanes)
    order = engine.memory_format if request.example.ndim == 4 else torch.contiguous_format
    images = request.example[:1].repeat(SAMPLE, *(1,) * (request.example.ndim - 1))
    with kept_memory():
        for _ in range(REPEATS):
            start = time.perf_counter()
            for x in images.contiguous(memory_format=order).split(plan.batch):
                for _, outputs in engine.logits(x, work, True):
                    tree_leaves(outputs)[0].sum().item()  # wait for a GPU
            found.append(time.perf_counter() - start)
    set_masks(request.net, request.masks)
    return min(found)


def collapsed_plan(request: Request, program: Program, required: bool) -> Plan | str:
    """A plan with the cached form or a new one; or, unless required, why stacked is better."""
    if request.precision == "bf16":
        raise NotAffine("it adds large terms that cancel, for which the 8 bits of bf16 are too few")
    if not isinstance(program.output, fx.Node):
        raise NotAffine("it returns several tensors instead of one")
    shape = program.shapes[program.output][1:]
    program = program if len(shape) == 1 else with_flat_output(program)
    builder = FormBuilder(AffineNet(program), request.masks, request.example, request.memory)
    signature = Signature(program)
    form = cached_form(request.net, signature, request.masks)
    cost = CollapsedCost(request, builder, form)
    of_stacked = stacked_multiply_adds(request, program)
    if not required and (of_stacked < WORTH or cost.trials >= of_stacked):
        return "the least multiply-adds"
    check_linear(request, [*signature.facts, *builder.sources], program)
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
    form.affine.begin(request.example, request.precision, left // 2)
    rows = ROWS.get(request.example.device.type, 1024)
    # A GEMM on a GPU needs all of its rows; a wave has few hypotheses.
    wanted = 128 if rows == ROWS["cpu"] else max(128, rows // max(request.hypotheses, 1))
    # A row holds c, and the output of its GEMM is a part of it.
    affordable = max(1, left // 4 // (max(cost.kinks, 1) * cost.itemsize))
    batch = request.batch_size or min(-(-request.images // world()), wanted, affordable)
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
