"""How a call of score will run: which engine, why, in which portions, at what cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
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

WORTH = 0.4  # seconds below which no form is built: the call takes a moment anyway
RESCORED = 0.03  # of the answers, in mixed precision, about
# Time of a multiply-add of impulses, as measured (benchmarks/RESULTS.md).
BUILD_WEIGHT = 1.3
LOOP_BATCH = 128  # images at a time of sequential
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
    estimates: dict[str, float] = field(default_factory=dict)  # seconds by engine

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
            f"estimates   {_listed(self.estimates)} on {self.request.profile.name}\n"
            f"{self.details}"
            f"chunk       {self.batch} images x {self.lanes} hypotheses, "
            f"{self.bytes / 2**20:,.1f} MiB of values at a time"
        )


def make_plan(request: Request, engine: str) -> ScoringPlan:
    """Choose the engine and the portions. The net is traced once, whichever engine is chosen."""
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


def _traced_plan(request: Request, engine: str) -> ScoringPlan:
    """A plan of `stacked` or `collapsed`."""
    dtype = request.example.dtype
    if dtype not in (torch.float32, torch.float64):
        raise NotTraceable(
            f"in {dtype} its logits would depend on the engine by rounding"
        )
    program = make_program(request.net, request.example[:1])
    estimates = {
        "sequential": sequential_seconds(request, program),
        "stacked": stacked_seconds(request, program),
    }
    why_stacked = "asked for"
    if engine != "stacked":
        try:
            planner = CollapsedPlanner(request, program)
            why_stacked = planner.worse_than(estimates["stacked"])
            if engine == "collapsed":
                return planner.plan("asked for", estimates)
            if not why_stacked:
                return planner.plan("the least time", estimates)
        except NotAffine as reason:
            if engine == "collapsed":
                raise
            why_stacked = f"collapsed cannot: {reason}"
    return stacked_plan(request, program, why_stacked, estimates)


def sequential_plan(request: Request, why: str) -> ScoringPlan:
    """One hypothesis at a time."""
    engine = Sequential(request.net, request.masks)
    return ScoringPlan(
        engine, why, request, batch=request.batch_size or LOOP_BATCH, lanes=1
    )


def stacked_plan(
    request: Request, program: Program, why: str, estimates: dict[str, float]
) -> ScoringPlan:
    """All hypotheses together; `NotTraceable` if the program is not the net."""
    engine = Stacked(program, request.masks)
    engine.check(request)
    spent = stacked_multiply_adds(request, program)
    alone = (1 + request.hypotheses) * request.images * program.forward
    per_image = peak_bytes(program)
    batch, lanes = _stacked_portions(request, program)
    return ScoringPlan(
        engine,
        why,
        request,
        batch,
        lanes,
        multiply_adds=spent,
        bytes=per_image * batch * (1 + lanes),
        details=f"prefix      {1 - spent / max(alone, 1):.1%} of the multiply-adds saved by "
        "shared prefixes\n",
        estimates=estimates,
    )


def sequential_seconds(request: Request, program: Program) -> float:
    """What the paper's loop would take."""
    passes = (1 + request.hypotheses) * request.images
    calls = passes / (request.batch_size or LOOP_BATCH) * len(program.steps)
    moved = 2 * passes * sum(program.bytes_per_image.values())
    return _seconds(request, "bf16", passes * program.forward, moved, calls)


def stacked_seconds(request: Request, program: Program) -> float:
    """Of the base and all hypotheses."""
    batch, lanes = _stacked_portions(request, program)
    spent = stacked_multiply_adds(request, program)
    moved = 2 * spent / max(program.forward, 1) * sum(program.bytes_per_image.values())
    calls = _chunks(request, batch, lanes) * len(program.steps)
    return _seconds(request, "bf16", spent, moved, calls)


def _stacked_portions(request: Request, program: Program) -> tuple[int, int]:
    largest = max(program.bytes_per_image.values())
    work = program.forward / max(len(program.steps), 1)
    return portions(request, peak_bytes(program), largest, work)


def _chunks(request: Request, batch: int, lanes: int) -> int:
    """Passes through the net: of the base and of groups of hypotheses, for each batch."""
    groups = 1 + math.ceil(request.hypotheses / lanes)
    return groups * math.ceil(request.images / batch)


def _seconds(
    request: Request, fast: str, multiply_adds: float, moved: float, calls: float
) -> float:
    """In the precision of a request. moved: bytes in float32."""
    seconds = request.profile.seconds
    in_float32 = seconds("float32", multiply_adds, moved, calls)
    if request.precision == "float32":
        return in_float32
    if fast == "bf16":
        moved = moved / 2
    return seconds(fast, multiply_adds, moved, calls) + RESCORED * in_float32


class CollapsedPlanner:
    """What collapsed would cost for a request, and its plan; `NotAffine` if it cannot."""

    def __init__(self, request: Request, program: Program) -> None:
        if not isinstance(program.output, fx.Node):
            raise NotAffine("it returns several tensors instead of one")
        self.request = request
        self.program = program
        self.made = compiled(request.net)
        self.signature = Signature(program)
        self.builder = FormBuilder(program, request)
        self.form = self.made.form_of(self.signature, request.masks)
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
        gain = self.request.images * (self.program.forward - self.builder.image_numbers)
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
        return unknown * self.program.forward

    @cached_property
    def running(self) -> float:
        """Seconds of the base and all hypotheses, whose form exists."""
        batch, lanes = self.portions()
        chunks = _chunks(self.request, batch, lanes)
        calls = 2 * len(self.builder.sites) * chunks
        moved = chunks * self.builder.pairs * self.request.example.element_size()
        return _seconds(self.request, "tf32", self.trials, moved, calls)

    @cached_property
    def seconds(self) -> float:
        """Of the whole call."""
        calls = 0
        if self.form is None:
            for source, steps in self.builder.steps.items():
                if self.with_image or source != IMAGE:
                    calls += len(self.builder.sources[source].batches) * len(steps)
        seconds = self.request.profile.seconds
        build = seconds("float32", BUILD_WEIGHT * self.build, launches=calls)
        return build + seconds("float32", self.affine) + self.running

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

    def worse_than(self, of_stacked: float) -> str:
        """Why stacked, which takes so many seconds, is better; empty if it is not."""
        least = _seconds(self.request, "tf32", self.trials, 0, 0)
        if of_stacked < WORTH or least >= of_stacked:
            return "the least time"
        self.check_linear()
        if self.seconds < of_stacked and self.peak <= self.request.memory:
            return ""
        return f"collapsed would take {self.seconds:.2g} s and {_mib(self.peak)}"

    def check_linear(self) -> None:
        """`NotAffine` unless the linear part of this structure is that of the net."""
        facts = [*self.signature.facts, *self.builder.sources]
        if self.made.checked != facts:
            self.made.not_affine = why_not_affine(self.program, self.request.example)
            self.made.checked = facts
        if self.made.not_affine:
            raise NotAffine(self.made.not_affine)

    def plan(self, why: str, estimates: dict[str, float]) -> ScoringPlan:
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
        batch, lanes = self.portions()
        return ScoringPlan(
            self.engine(),
            why,
            self.request,
            batch,
            lanes,
            multiply_adds=self.build + self.affine + self.trials,
            bytes=(lanes + 2) * batch * self.row_bytes,
            details=details,
            estimates=estimates | {"collapsed": self.seconds},
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
        made.images.begin(request.example, self.left // 2)
        return engine

    @property
    def row_bytes(self) -> int:
        """A row holds c, and the output of its GEMM is a part of it."""
        return max(len(self.builder.ids), 1) * self.request.example.element_size()

    def portions(self) -> tuple[int, int]:
        """(images, hypotheses) at a time."""
        request = self.request
        rows = ROWS["cpu"]
        wanted = 128
        if request.example.device.type != "cpu":
            # A GEMM needs all of its rows, and a wave has few hypotheses.
            rows = ROWS["cuda"]
            wanted = max(wanted, rows // max(request.hypotheses, 1))
        affordable = max(1, self.left // 4 // self.row_bytes)
        of_rank = -(-request.images // world())
        batch = request.batch_size or min(of_rank, wanted, affordable)
        lanes = min(request.hypotheses, rows // batch, affordable // batch)
        return batch, max(1, lanes)


def _listed(estimates: dict[str, float]) -> str:
    parts = [f"{name} {seconds:.2g} s" for name, seconds in estimates.items()]
    return ", ".join(parts) or "none"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _giga(multiply_adds: float) -> str:
    return f"{multiply_adds / 1e9:,.1f} G"
