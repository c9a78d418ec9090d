"""How a call of score will run: which engine, why, in which portions, at what cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from fastbcd.graph.trace import logits_of
from fastbcd.runtime.ranks import world
from fastbcd.runtime.warn_once import warn_once
from fastbcd.scoring.collapsed.affine_net import IMAGE, why_not_affine
from fastbcd.scoring.collapsed.build import FormBuilder
from fastbcd.scoring.collapsed.engine import Collapsed
from fastbcd.scoring.collapsed.linear import NotAffine
from fastbcd.scoring.compiled import Signature, compiled
from fastbcd.scoring.engine import Request, ScoringEngine
from fastbcd.scoring.program import NotTraceable, Program, make_program
from fastbcd.scoring.sequential import Sequential
from fastbcd.scoring.stacked import Stacked, peak_bytes, portions, stacked_multiply_adds

# Multiply-adds below which no form is built: the call takes a moment anyway.
WORTH = 2e10
# Time of a multiply-add of impulses, as measured (benchmarks/RESULTS.md).
BUILD_WEIGHT = 1.3
ROWS = {"cpu": 1024, "cuda": 8192}  # hypotheses × images in a GEMM of collapsed


@dataclass
class ScoringPlan:
    """What `explain=True` prints."""

    engine: ScoringEngine
    why: str
    request: Request
    batch: int  # images at a time
    lanes: int  # hypotheses at a time
    multiply_adds: int = 0  # of the whole call; 0 if unknown
    bytes: int = 0  # largest amount of memory that values take at a time
    details: str = ""

    @property
    def together(self) -> int:
        """Images that all ranks run at a time."""
        return self.batch * world()

    def use_fewer_lanes(self, alive: int, error: torch.OutOfMemoryError) -> None:
        """After an out-of-memory error: half as many hypotheses at a time."""
        before = self.lanes
        self.lanes = min(before, alive) // 2
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
        images = f"{self.request.images:,} images"
        cost = "?"
        if self.multiply_adds:
            cost = f"{_giga(self.multiply_adds)} multiply-adds"
        return (
            f"engine      {self.engine.name}: {self.why}\n"
            f"work        {self.request.hypotheses} hypotheses + base, {images}, {cost}\n"
            f"{self.details}"
            f"chunk       {self.batch} images x {self.lanes} hypotheses, "
            f"{self.bytes / 2**20:,.1f} MiB of values at a time"
        )


def make_plan(request: Request, engine: str) -> ScoringPlan:
    """Choose the engine and the portions. The net is traced once, whichever engine is chosen."""
    _check_precision(request)
    if engine == "sequential":
        return sequential_plan(request, "asked for")
    try:
        return _traced_plan(request, engine)
    except (NotTraceable, NotAffine) as reason:
        name = type(request.net).__name__
        if engine == "auto":
            warn_once(f"fastbcd scores {name} one hypothesis at a time: {reason}")
            return sequential_plan(request, f"stacked cannot: {reason}")
        other = "stacked" if isinstance(reason, NotAffine) else "sequential"
        raise ValueError(
            f"engine={engine!r} cannot score {name}: {reason}; use engine={other!r}"
        ) from None


def _check_precision(request: Request) -> None:
    if request.precision != "bf16":
        return
    dtype = request.example.dtype
    if dtype != torch.float32:
        raise ValueError(
            f"precision='bf16' is for nets in float32, and this one is in {dtype}"
        )
    if request.example.device.type == "cpu":
        warn_once(
            "precision='bf16' is meant for GPUs: most CPUs are slower in it than in float32"
        )


def _traced_plan(request: Request, engine: str) -> ScoringPlan:
    """A plan of `stacked` or `collapsed`."""
    dtype = request.example.dtype
    if dtype not in (torch.float32, torch.float64):
        raise NotTraceable(
            f"in {dtype} its logits would depend on the engine by rounding"
        )
    program = make_program(request.net, request.example[:1])
    if engine == "stacked":
        return stacked_plan(request, program, "asked for")
    if engine == "collapsed":
        return CollapsedPlanner(request, program).plan("asked for")
    of_stacked = stacked_multiply_adds(request, program)
    try:
        planner = CollapsedPlanner(request, program)
        why_not = planner.worse_than(of_stacked)
        if not why_not:
            return planner.plan(f"stacked would cost {_giga(of_stacked)} multiply-adds")
    except NotAffine as reason:
        why_not = f"collapsed cannot: {reason}"
    return stacked_plan(request, program, why_not)


def sequential_plan(request: Request, why: str) -> ScoringPlan:
    """One hypothesis at a time."""
    engine = Sequential(request.net, request.masks)
    return ScoringPlan(engine, why, request, batch=request.batch_size or 128, lanes=1)


def stacked_plan(request: Request, program: Program, why: str) -> ScoringPlan:
    """All hypotheses together; `NotTraceable` if the program is not the net."""
    engine = Stacked(program, request.masks)
    engine.check(request)
    forward = sum(program.multiply_adds.values())
    spent = stacked_multiply_adds(request, program)
    saved = 1 - spent / max(forward * (1 + request.hypotheses) * request.images, 1)
    per_image = peak_bytes(program)
    largest = max(program.bytes_per_image.values())
    work = forward / max(len(program.steps), 1)
    batch, lanes = portions(request, per_image, largest, work)
    return ScoringPlan(
        engine,
        why,
        request,
        batch,
        lanes,
        multiply_adds=spent,
        bytes=per_image * batch * (1 + lanes),
        details=f"prefix      {saved:.1%} of the multiply-adds saved by shared prefixes\n",
    )


class CollapsedPlanner:
    """What collapsed would cost for a request, and its plan; `NotAffine` if it cannot."""

    def __init__(self, request: Request, program: Program) -> None:
        if request.precision == "bf16":
            raise NotAffine(
                "it adds large terms that cancel, for which the 8 bits of bf16 are too few"
            )
        if not isinstance(program.output, fx.Node):
            raise NotAffine("it returns several tensors instead of one")
        self.request = request
        self.program = program
        self.made = compiled(request.net)
        self.signature = Signature(program)
        self.builder = FormBuilder(program, request)
        self.form = self.made.form_of(self.signature, request.masks)
        self.forward = sum(program.multiply_adds.values())  # of an image
        self.trials = (1 + request.hypotheses) * request.images * self.builder.pairs

    def impulses(self, source: int) -> int:
        """Multiply-adds of all impulses of a source, from those of one in the middle."""
        positions = self.builder.sources[source]
        if not positions.count:
            return 0
        known = self.made.impulse_costs  # which hardly depend on the masks
        key = (source, positions.tile)
        if key not in known:
            known[key] = self.builder.cost_of_one(source)
        return positions.count * known[key]

    @cached_property
    def with_image(self) -> bool:
        """Is U worth its impulses, or is running the affine net on each image less?"""
        if self.form is not None:
            return self.form.image is not None
        gain = self.request.images * (self.forward - self.builder.image_numbers)
        return gain > 0 and self.impulses(IMAGE) * BUILD_WEIGHT < gain

    @cached_property
    def build(self) -> int:
        """Multiply-adds of the impulses."""
        if self.form is not None:
            return 0
        sources = self.builder.sources
        return sum(self.impulses(s) for s in sources if self.with_image or s != IMAGE)

    @cached_property
    def affine(self) -> int:
        """Multiply-adds of U x."""
        unknown = max(0, self.request.images - len(self.made.images.known))
        if self.with_image:
            return unknown * self.builder.image_numbers
        return unknown * self.forward

    @cached_property
    def weighted(self) -> float:
        """Multiply-adds that are comparable with those of stacked."""
        return BUILD_WEIGHT * self.build + self.trials + self.affine

    @property
    def form_bytes(self) -> int:
        """Of H and U."""
        numbers = self.builder.pairs
        if self.with_image:
            numbers += self.builder.image_numbers
        return numbers * self.request.example.element_size()

    @property
    def peak(self) -> int:
        """Bytes of the form and, while it is built, of a batch of impulses."""
        if self.form is not None:
            return self.form_bytes
        return self.form_bytes + self.builder.batch_bytes

    @property
    def left(self) -> int:
        """Bytes beside the form."""
        return self.request.memory - self.form_bytes

    def worse_than(self, of_stacked: int) -> str:
        """Why stacked, with so many multiply-adds, is better; empty if it is not."""
        if of_stacked < WORTH or self.trials >= of_stacked:
            return "the least multiply-adds"
        self.check_linear()
        if self.weighted < of_stacked and self.peak <= self.request.memory:
            return ""
        return f"collapsed would cost {_giga(self.weighted)} multiply-adds and {_mib(self.peak)}"

    def check_linear(self) -> None:
        """`NotAffine` unless the linear part of this structure is that of the net."""
        facts = [*self.signature.facts, *self.builder.sources]
        if self.made.checked != facts:
            self.made.not_affine = why_not_affine(self.program, self.request.example)
            self.made.checked = facts
        if self.made.not_affine:
            raise NotAffine(self.made.not_affine)

    def plan(self, why: str) -> ScoringPlan:
        """The plan, with the form that was kept or a new one."""
        self.check_linear()
        kinks = len(self.builder.ids)
        if self.peak > self.request.memory:
            raise ValueError(
                f"the collapsed form of {kinks:,} ReLUs takes {_mib(self.form_bytes)}, "
                f"{_mib(self.peak)} while it is built, and {_mib(self.request.memory)} may be "
                f"used; allow more with Engine(memory=...) or use engine='stacked'"
            )
        made = "cached" if self.form else "built"
        details = (
            f"form        {kinks:,} kinks, {_mib(self.form_bytes)}, {made}\n"
            f"spent on    form {_giga(self.build)}, affine part {_giga(self.affine)}, "
            f"hypotheses {_giga(self.trials)}\n"
        )
        # A row holds c, and the output of its GEMM is a part of it.
        row_bytes = max(kinks, 1) * self.request.example.element_size()
        batch, lanes = self.portions(row_bytes)
        return ScoringPlan(
            self.engine(),
            why,
            self.request,
            batch,
            lanes,
            multiply_adds=self.build + self.affine + self.trials,
            bytes=(lanes + 2) * batch * row_bytes,
            details=details,
        )

    def engine(self) -> Collapsed:
        """The engine, compared with the net unless that gives the answer that it gave before."""
        made = self.made
        request = self.request
        form = self.form
        if form is None:
            form = self.builder.build(self.with_image)
            made.keep_form(self.signature, form)
        engine = Collapsed(form, self.builder.net, made.images)
        example = request.example[:1].clone()  # the net may write into its input
        answer = logits_of(request.net(example))
        if made.answer is None or not torch.equal(answer, made.answer):
            try:
                engine.check(request)
            except NotAffine:
                made.drop()
                raise
            made.answer = answer
        made.images.begin(request.example, request.precision, self.left // 2)
        return engine

    def portions(self, row_bytes: int) -> tuple[int, int]:
        """(images, hypotheses) at a time."""
        request = self.request
        rows = ROWS["cpu"]
        wanted = 128
        if request.example.device.type != "cpu":
            # A GEMM needs all of its rows, and a wave has few hypotheses.
            rows = ROWS["cuda"]
            wanted = max(wanted, rows // max(request.hypotheses, 1))
        affordable = max(1, self.left // 4 // row_bytes)
        of_rank = -(-request.images // world())
        batch = request.batch_size or min(of_rank, wanted, affordable)
        lanes = min(request.hypotheses, rows // batch, affordable // batch)
        return batch, max(1, lanes)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _giga(multiply_adds: float) -> str:
    return f"{multiply_adds / 1e9:,.1f} G"
