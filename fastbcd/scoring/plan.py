"""How a call of score will run: which engine, why, in which portions, at what cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fastbcd.graph.trace import logits_of
from fastbcd.runtime.ranks import world
from fastbcd.runtime.warn_once import warn_once
from fastbcd.scoring.collapsed.affine_net import AffineNet, why_not_affine
from fastbcd.scoring.collapsed.build import CollapsedCost, FormBuilder
from fastbcd.scoring.collapsed.engine import Collapsed
from fastbcd.scoring.collapsed.form import Form
from fastbcd.scoring.collapsed.linear import NotAffine
from fastbcd.scoring.compiled import Signature, compiled
from fastbcd.scoring.engine import Request, ScoringEngine
from fastbcd.scoring.program import NotTraceable, Program, in_bfloat16, make_program
from fastbcd.scoring.sequential import Sequential
from fastbcd.scoring.stacked import Stacked, peak_bytes, portions, stacked_multiply_adds

WORTH = (
    2e10  # multiply-adds below which no form is built: the call takes a moment anyway
)
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
            return planner.plan(
                f"stacked would cost {of_stacked / 1e9:,.0f} G multiply-adds"
            )
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
    if request.precision == "bf16":
        engine = Stacked(in_bfloat16(program), request.masks)
    forward = sum(program.multiply_adds.values())
    spent = stacked_multiply_adds(request, program)
    saved = 1 - spent / max(forward * (1 + request.hypotheses) * request.images, 1)
    per_image = peak_bytes(program)
    largest = max(program.bytes_per_image.values())
    batch, lanes = portions(
        request, per_image, largest, forward / max(len(program.steps), 1)
    )
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
        self.net = AffineNet(program)
        self.builder = FormBuilder(
            self.net, request.masks, request.example, request.memory
        )
        self.form = self.made.form_of(self.signature, request.masks)
        self.cost = CollapsedCost(request, self.builder, self.form)

    @property
    def peak(self) -> int:
        """Bytes, while the form is built."""
        return self.cost.peak_bytes

    @property
    def fits(self) -> bool:
        return self.peak <= self.request.memory

    def worse_than(self, of_stacked: int) -> str:
        """Why stacked, with so many multiply-adds, is better; empty if it is not."""
        if of_stacked < WORTH or self.cost.trials >= of_stacked:
            return "the least multiply-adds"
        self.check_linear()
        ours = self.cost.weighted()
        if ours < of_stacked and self.fits:
            return ""
        return f"collapsed would cost {ours / 1e9:,.0f} G multiply-adds and {_mib(self.peak)}"

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
        cost = self.cost
        if not self.fits:
            raise ValueError(
                f"the collapsed form of {cost.kinks:,} ReLUs takes {_mib(cost.form_bytes)}, "
                f"{_mib(self.peak)} while it is built, and {_mib(self.request.memory)} may be "
                f"used; allow more with Engine(memory=...) or use engine='stacked'"
            )
        made = "cached" if self.form else "built"
        details = (
            f"form        {cost.kinks:,} kinks, {_mib(cost.form_bytes)}, {made}\n"
            f"spent on    form {_giga(cost.build)}, affine part {_giga(cost.affine)}, "
            f"hypotheses {_giga(cost.trials)}\n"
        )
        engine = self.engine()
        batch, lanes = self.portions()
        held = (lanes + 2) * batch * cost.kinks * cost.itemsize
        spent = cost.build + cost.affine + cost.trials
        return ScoringPlan(
            engine, why, self.request, batch, lanes, spent, held, details
        )

    def engine(self) -> Collapsed:
        """The engine, compared with the net unless that gives the answer that it gave before."""
        made = self.made
        request = self.request
        form = self.form or self.built_form()
        engine = Collapsed(form, self.net, made.images)
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

    def built_form(self) -> Form:
        """A new form, which is kept."""
        form = self.builder.build(self.cost.with_image)
        self.made.keep_form(self.signature, form)
        return form

    @property
    def left(self) -> int:
        """Bytes beside the form."""
        return self.request.memory - self.cost.form_bytes

    def portions(self) -> tuple[int, int]:
        """(images, hypotheses) at a time."""
        request = self.request
        rows = ROWS.get(request.example.device.type, ROWS["cpu"])
        wanted = 128
        if (
            rows > ROWS["cpu"]
        ):  # a GEMM needs all of its rows, and a wave has few hypotheses
            wanted = max(wanted, rows // max(request.hypotheses, 1))
        # A row holds c, and the output of its GEMM is a part of it.
        row_bytes = max(self.cost.kinks, 1) * self.cost.itemsize
        affordable = max(1, self.left // 4 // row_bytes)
        of_rank = -(-request.images // world())
        batch = request.batch_size or min(of_rank, wanted, affordable)
        lanes = min(request.hypotheses, rows // batch, affordable // batch)
        return batch, max(1, lanes)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _giga(multiply_adds: int) -> str:
    return f"{multiply_adds / 1e9:,.1f} G"
