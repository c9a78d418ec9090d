"""bcd: Block Coordinate Descent, Algorithm 1 of the paper.

Each step draws up to RT hypotheses of DRC kept ReLUs, takes the first whose accuracy on the train
set drops by less than ADT percentage points, or else the one that drops least, and fine-tunes.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fastbcd.data.for_net import data_for
from fastbcd.descent.budget import Budget, limits_of
from fastbcd.descent.goals import Goal
from fastbcd.descent.limits import counts_of
from fastbcd.descent.plan import Plan
from fastbcd.descent.proposals import Proposal, Saliency, check_describe, find_proposal, fitted
from fastbcd.descent.returns import to_return
from fastbcd.descent.schedules import Schedule
from fastbcd.descent.step import Step, timed
from fastbcd.masking.masks import MaskSet, masks, set_masks
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.directory import RunDirectory, check_resume, open_run
from fastbcd.runtime import ranks
from fastbcd.runtime.limits import default_memory
from fastbcd.runtime.module_mode import keep_mode
from fastbcd.runtime.validate import check_choice, check_number, check_whole
from fastbcd.scoring.accuracy import accuracy, check_metric
from fastbcd.scoring.choose import choose
from fastbcd.scoring.collapsed.form import drop_form
from fastbcd.scoring.confidence import check_confidence
from fastbcd.scoring.engine import Engine, as_engine
from fastbcd.scoring.metric import Criterion, Loss, Metric
from fastbcd.scoring.score import check_scorable, score
from fastbcd.training.checks import check_same_classes
from fastbcd.training.finetuner import Finetuner
from fastbcd.training.repeat import seeded
from fastbcd.training.settings import Finetune
from fastbcd.training.teacher import Distillation

PAPER = Finetune()
WHEN = ("every_step", "on_reject")
MARGINS = "confidence/margins"  # in the saved state, beside the tensors of the net
MANY_EPOCHS = 1_000  # a run that means more of them warns


class Run(NamedTuple):
    """What `bcd` returns: the given net at its budget, its masks, and one record per step.

    >>> net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(4), nn.Linear(4, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> run = fastbcd.bcd(net, data, budget=1, drc=2, finetune=None)
    >>> run.model is net, run.masks.count(), len(run.history)
    (True, 1, 2)
    >>> run  # doctest: +ELLIPSIS
    Run(1 of 4 ReLUs kept in 1 sites after 2 steps, train ... %)
    """

    model: nn.Module
    masks: MaskSet
    history: list[Step]

    def __repr__(self) -> str:
        m = self.masks
        text = f"{m.count():,} of {m.total:,} ReLUs kept in {len(m.sites)} sites after "
        text += f"{len(self.history)} steps"
        for last in self.history[-1:]:
            text += f", train {last.chosen_accuracy:.2f}{last.unit}"
            if last.test_accuracy is not None:
                text += f", test {last.test_accuracy:.2f}{last.unit}"
        return f"Run({text})"


def bcd(
    net: nn.Module, data: Any, budget: int | Budget, *,
    drc: int | Callable[[int], int] | Schedule = 100, rt: int = 50, adt: float = 0.3,
    finetune: Finetune | Callable[[nn.Module, Step], Any] | None = PAPER,
    finetune_when: str = "every_step", proposal: str | Proposal | None = None,
    max_sites: int | None = None,
    teacher: nn.Module | None = None, test: Any = None, samples: int | None = None, seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None, resume: str | bool = "auto",
    engine: str | Engine = "auto", metric: Metric | None = None, loss: Loss | None = None,
    confidence: float | None = None, test_every: int = 1, progress: bool = False,
    dry_run: bool = False,
) -> Run:  # fmt: skip
    """Remove ReLUs from the net, in place, until exactly `budget` are kept.

    Args:
        budget: ReLUs to keep, or a `fastbcd.private.Target`: seconds, bytes or rounds of private
            inference. The cost ends at or below the target, as close to it as one ReLU allows: if
            an emptied site takes it below, removed ReLUs of sites in use return, those of largest
            first-order gain first, as far as there are any.
        data: the train set, for scoring and fine-tuning: ImageData, (images, labels), a Dataset
            or a DataLoader. test: the test set, measured after every `test_every` steps and after
            the last one, if given.
        drc: ReLUs that a step removes: a number, a function of the number kept, or a `Schedule`.
            With a target, a step saves the same share of the cost left: drc / ReLUs kept.
        rt, adt: hypotheses that a step tries at most, and the drop in percentage points it accepts.
        finetune: settings, None, or your own f(net, step) that trains in place. It is called with
            torch's generator seeded by (seed, step) and may return {"loss": ...}.
        finetune_when: "every_step", or "on_reject": only after steps where no hypothesis met ADT.
        proposal: "uniform" as in the paper, "saliency", `Saliency(...)`: hypotheses that favour
            ReLUs of small first-order effect, "blocks", `Blocks(...)`: single ReLUs or whole sites
            of small effect per second saved, or a `Proposal` of your own. None: "uniform"; with a
            target or max_sites "blocks".
        max_sites: keep ReLUs in at most so many sites; fewer than `budget` ReLUs only if those
            sites have fewer.
        samples: score on the first n train images; None: on all.
        run_dir: where every finished step is saved. The same call resumes from there, also on
            another device or number of ranks. resume: "auto"; "must" (True) refuses a directory
            without a run, "never" (False) one that is not empty.
        engine: how hypotheses are scored: a name or `Engine(...)`. Only its precision can change
            the outcome, and is recorded in config.json.
        metric: a callable (outputs, targets) -> [B], larger is better, in place of accuracy. With
            an attribute `bounds = (low, high)` accuracies and ADT are in percent of that range,
            without it in the metric's units.
        loss: a callable (outputs, targets) -> [B] or their mean, in place of cross-entropy: for
            ties, saliency and `Finetune`. config.json has the names of metric and loss.
        confidence: None scores exactly. With 0.999 the choice of a step differs from the exact one
            with a probability of 0.1 % at most, and takes fewer images (docs/confidence.md).
        progress: show bars and one line per step.
        dry_run: print the steps, epochs and expected minutes, and return; nothing is removed.

    After any exception the net is as it was at the end of the last finished step.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> run = bcd(net, data, budget=1, drc=2, rt=3, finetune=None)
    >>> run.masks.count(), [step.after for step in run.history]
    (1, [4, 2, 1])
    """
    descent = Descent(**locals())
    plan = descent.plan()
    if (plan.epochs or 0) > MANY_EPOCHS:
        warnings.warn(
            f"{len(plan.sizes):,} steps mean {plan.epochs:,.6g} epochs of fine-tuning: give a "
            f"larger drc or fewer epochs, or use fastbcd.linearize, which spends a given number",
            stacklevel=2,
        )
    if dry_run:
        _print(str(descent.expected()))
        return Run(net, masks(net), [])
    with closing(descent.steps()) as steps_:
        for step in steps_:
            if finetune is not None and (finetune_when == "every_step" or not step.accepted):
                report = descent.train(step)
                if isinstance(report, dict) and report.get("loss") is not None:
                    step.train_loss = float(report["loss"])
    return Run(net, masks(net), descent.history)


def steps(
    net: nn.Module, data: Any, budget: int | Budget, *,
    drc: int | Callable[[int], int] | Schedule = 100, rt: int = 50, adt: float = 0.3,
    proposal: str | Proposal | None = None, max_sites: int | None = None, test: Any = None,
    samples: int | None = None, seed: int = 0, run_dir: str | os.PathLike[str] | None = None,
    resume: str | bool = "auto",
    engine: str | Engine = "auto", metric: Metric | None = None, loss: Loss | None = None,
    confidence: float | None = None, test_every: int = 1, progress: bool = False,
) -> Iterator[Step]:  # fmt: skip
    """The steps of `bcd`, with your own training in the loop's body.

    In the body the step's ReLUs are already removed. After it the test accuracy is measured and
    the step is saved; a step.train_loss that the body sets is recorded. Leaving the loop within
    the body (break, an exception) undoes the step. The body may change the weights, not the masks.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> for step in steps(net, data, budget=2, drc=3, rt=3):
    ...     print(step.number, step.before, step.after)
    1 6 3
    2 3 2
    """
    return Descent(**locals(), body=True).steps()


@dataclass(kw_only=True)
class Descent:
    """One run: its arguments are checked at once, the work is done while `steps` is iterated."""

    net: nn.Module
    data: Any
    budget: int | Budget
    max_sites: int | None
    drc: Any
    rt: int
    adt: float
    finetune: Any = None
    finetune_when: str = WHEN[0]
    body: bool = False  # the training is the loop's body
    proposal: Any
    teacher: nn.Module | None = None
    test: Any
    samples: int | None
    seed: int
    run_dir: str | os.PathLike[str] | None
    resume: str | bool
    engine: Any
    metric: Metric | None
    loss: Loss | None
    confidence: float | None
    test_every: int
    progress: bool
    dry_run: bool = False
    epochs: float = 0  # of training in all, if the caller trains; steps at the budget only train
    recorded: dict[str, Any] = field(default_factory=dict)  # further settings of config.json
    bar: bool = True  # with `progress`, show one

    def __post_init__(self) -> None:
        net, self.data, self.history = self.net, data_for(self.net, self.data), list[Step]()
        self.margins: Tensor | None = None  # with a confidence: of the images, in earlier steps
        self._check_settings()
        self.limits = limits_of(self.budget, net, self.max_sites)
        if self.proposal is None:
            self.proposal = "uniform" if self.limits.bounds[0].name == "relus" else "blocks"
            self.proposal = self.proposal if self.max_sites is None else "blocks"
        self.proposal, self.engine = find_proposal(self.proposal), as_engine(self.engine)
        if isinstance(self.proposal, Saliency) and self.loss is not None:
            self.proposal = replace(self.proposal, loss=self.loss)
        check_resume(self.resume)
        criterion = Criterion(self.metric, self.loss)
        self.unit = "" if criterion.bounds is None else " %"
        check_scorable(net, self.data, criterion)
        if self.test is not None:
            self.test = data_for(net, self.test)
            check_metric(net, self.test, criterion, "the net, asked about the test set,")
        if self.samples is not None and self.samples > len(self.data):
            raise ValueError(f"samples={self.samples}; there are {len(self.data)} train images")
        self.scored = self.data if self.samples is None else self.data.first(self.samples)
        if not self._done():
            self._size(masks(net).count())
        self.tuner: Finetuner | None = None
        if isinstance(self.finetune, Finetune):
            self.tuner = Finetuner(
                net, self.data, self.finetune, self.teacher, seed=self.seed, loss=self.loss
            )
        elif self.teacher is not None:
            check_same_classes(net, self.data, self.teacher)
            warnings.warn("the teacher is not used: only Finetune distills", stacklevel=4)
        if isinstance(self.proposal, Saliency) and self.proposal.distilled:
            if self.teacher is None or self.tuner is None:
                raise ValueError(f"{self.proposal} needs teacher= and finetune=Finetune(...)")
            given = Distillation.of(self.teacher, self.scored, self.finetune)
            self.proposal = replace(self.proposal, given=given)

    def _check_settings(self) -> None:
        check_choice("finetune_when", self.finetune_when, WHEN)
        check_confidence(self.confidence, self.metric)
        for name, least in {"rt": 1, "seed": 0, "test_every": 1}.items():
            check_whole(name, getattr(self, name), least)
        check_whole("samples", self.samples, 1, optional=True)
        if isinstance(self.drc, Schedule):
            check_describe("drc", self.drc)
        elif not callable(self.drc):
            check_whole("drc", self.drc, 1)
        if self.seed >= 2**63:
            raise ValueError(f"seed={self.seed}; it must be at most 2^63 - 1")
        if self.adt not in (math.inf, -math.inf):
            try:
                check_number("adt", self.adt)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{error}, in percentage points") from None
        if not (isinstance(self.finetune, Finetune | None) or callable(self.finetune)):
            name = type(self.finetune).__name__
            way_out = "give fastbcd.Finetune(...), a function f(net, step), or None"
            raise TypeError(f"finetune is a {name}; {way_out}")

    def steps(self) -> Generator[Step, None, None]:
        """Algorithm 1; the loop that iterates over the steps does the fine-tuning."""
        hidden = not (self.progress and self.bar) or ranks.rank() > 0
        bar_of = partial(tqdm, unit="ReLU", desc="bcd", disable=hidden)
        with closing(self._open()) as run, keep_mode(self.net), bar_of() as bar:
            saved = self._resume(run)
            if not isinstance(self.budget, Budget):
                bar.reset(max(masks(self.net).count() - self.budget, 0))
            try:
                while self._unfinished():
                    step = self._rest() if self._done() else self._search()
                    removed = masks(self.net).copy()
                    with timed(step.seconds, "finetune"):
                        yield step
                    _check_unchanged(masks(self.net), removed)
                    saved = self._save(step, run)
                    bar.update(step.before - step.after)
            except BaseException:
                snapshots.restore(self.net, saved)
                raise

    def train(self, step: Step, **how: Any) -> Any:
        """Train the net after a step's removal; may return {"loss": ...}. how: of `Finetuner`."""
        drop_form(self.net)  # of other weights than it will have: its memory is needed now
        if self.tuner is not None:
            report = self.tuner.run(step.number, **{"progress": self.progress, **how})
            step.epochs = report["epochs"]
            return report
        # Seeded, so that a step that is run again after a kill trains in the same way.
        with seeded(self.data.device, int(self.seed) * 1_000_003 + step.number):
            return self.finetune(self.net, step)

    def _done(self) -> bool:
        """Whether the masks are within the budget."""
        return bool(self.limits.met(counts_of(masks(self.net))))

    def _unfinished(self) -> bool:
        return not self._done() or self.left() > 0

    def left(self) -> float:
        """The epochs that are left of those of the whole run."""
        return max(0.0, round(self.epochs - sum(step.epochs or 0 for step in self.history), 9))

    def plan(self) -> Plan:
        """What the run does from here on; with a schedule that adapts, an estimate."""
        counts, first, sizes = counts_of(masks(self.net)), self.limits.bounds[0], list[int]()
        count, value, least = int(counts.sum()), self.limits.value(counts), self.limits.least()
        step: Any = SimpleNamespace(accepted=True, chosen=1)
        rounding = 1e-9 * abs(value)
        while value - first.most > rounding and count:
            most = max(1, math.ceil((value - first.most) / (value - least) * count - 1e-9))
            sizes.append(min(self._size(count, [*self.history, *[step] * len(sizes)]), most))
            value -= sizes[-1] / count * (value - least)
            count -= sizes[-1]
        own = self.body or (self.finetune is not None and self.tuner is None)
        each = 0 if self.tuner is None else self.tuner.settings.epochs
        after = math.ceil(max(0, self.epochs - each * len(sizes)) - 1e-6)
        epochs = None if own else max(self.epochs, each * len(sizes))
        return Plan(sizes + [0] * after, epochs, self.rt)

    def expected(self) -> Plan:
        """The plan, with the seconds it takes, from a short measurement."""
        return self.plan().measured(
            self.net, self.scored, proposal=self.proposal, engine=self.engine, tuner=self.tuner,
            teacher=self.teacher, test=self.test, metric=self.metric, loss=self.loss,
            seed=self.seed,
        )  # fmt: skip

    def _size(self, count: int, history: list[Step] | None = None) -> int:
        """DRC, at most `count`."""
        size = self.drc
        if isinstance(size, Schedule):
            size = size.size(count, self.history if history is None else history)
            check_whole(f"drc.size({count}, …)", size, 1)
        elif callable(size):
            size = size(count)
            check_whole(f"drc({count})", size, 1)
        return min(int(size), count)

    def _search(self) -> Step:
        """Try hypotheses until one is accepted or RT are rejected; remove the chosen ReLUs."""
        seconds, number = {"propose": 0.0, "score": 0.0}, len(self.history) + 1
        current = masks(self.net).copy()
        limits = self.limits.step(counts_of(current), self._size(current.count()), self.begin)
        goal = Goal(current, limits, self.limits)
        toward = getattr(self.proposal, "toward", partial(fitted, self.proposal))
        # Greedy: all hypotheses of a step are the same.
        rt = 1 if getattr(self.proposal, "greedy", False) else self.rt
        with timed(seconds, "score"):
            with timed(seconds, "propose"):
                draw = toward(self.net, self.scored, goal, seed=self.seed, step=number)

            def hypothesis(trial: int) -> Tensor:
                with timed(seconds, "propose"):
                    return draw(trial)

            hypotheses = map(hypothesis, range(rt))
            c = choose(
                self.net, hypotheses, self.scored, adt=self.adt, engine=self.engine,
                metric=self.metric, loss=self.loss, confidence=self.confidence, seed=self.seed,
                step=number, margins=self.margins,
            )  # fmt: skip
            self.margins = c.margins
        seconds["score"] -= seconds["propose"]
        set_masks(self.net, current.without(c.removal))
        back = to_return(self.net, self.scored, self.limits, loss=self.loss)
        set_masks(self.net, left := masks(self.net).including(back))
        step = Step(
            number=number, before=current.count(), after=left.count(), drc=len(c.removal),
            returned=len(back), cost=self._cost(), chosen=c.number, accepted=c.accepted,
            tried=c.number + 1 if c.accepted else rt, drops=dict(sorted(c.drops.items())),
            engine=c.engine, seconds=seconds, base_accuracy=c.base_percent, base_loss=c.base_loss,
            chosen_accuracy=c.percent, chosen_loss=c.loss, sites=list(left.counts().values()),
            images=c.seen, interval=None if c.interval is None else list(c.interval),
        )  # fmt: skip
        step.unit = self.unit
        return step

    def _cost(self) -> float | None:
        """What the net costs now, in the unit of the target; None without a target."""
        if not isinstance(self.budget, Budget):
            return None
        return self.limits.value(counts_of(masks(self.net)))

    def _rest(self) -> Step:
        """A step at the budget, which removes nothing."""
        seconds: dict[str, float] = {}
        kept, nothing = masks(self.net), torch.zeros(1, 0, dtype=torch.int64)
        with timed(seconds, "score"):
            s = score(
                self.net, nothing, self.scored, self.engine, metric=self.metric, loss=self.loss
            )
        found = Criterion(self.metric, self.loss).percent(s.base_value)
        step = Step(
            number=len(self.history) + 1, before=kept.count(), after=kept.count(), drc=0, tried=0,
            chosen=0, accepted=True, drops={}, engine=s.engine, seconds=seconds,
            base_accuracy=found, chosen_accuracy=found, base_loss=s.base_loss,
            chosen_loss=s.base_loss, cost=self._cost(), sites=list(kept.counts().values()),
        )  # fmt: skip
        step.unit = self.unit
        return step

    def _save(self, step: Step, run: RunDirectory) -> dict[str, Tensor]:
        """Measure the test accuracy and make the step the last finished one; its tensors."""
        with timed(step.seconds, "test"):
            last = self._done() and self.left() <= (step.epochs or 0)
            due = last or step.number % self.test_every == 0
            if self.test is not None and due:
                step.test_accuracy = accuracy(self.net, self.test, metric=self.metric)
        tensors, record = snapshots.take(self.net), step.as_json()
        ranks.check_same("the weights and masks", tensors)
        margins = {} if self.margins is None else {MARGINS: self.margins}
        run.save(step.number, tensors | margins, record)
        step.seconds = {**record["seconds"]}
        self.history.append(step)
        if self.progress:
            _print(str(step))
        return tensors

    def _open(self) -> RunDirectory:
        if isinstance(self.drc, Schedule):
            drc = self.drc.describe()
        else:
            drc = _name_of(self.drc) if callable(self.drc) else int(self.drc)
        budget = self.budget.describe() if isinstance(self.budget, Budget) else self.budget
        settings = {
            "drc": drc, "proposal": self.proposal.describe(), "budget": budget, "rt": self.rt,
            "adt": self.adt, "samples": self.samples, "seed": self.seed, **self._training(),
        }  # fmt: skip
        own = {"max_sites": self.max_sites, "confidence": self.confidence}
        settings |= {name: value for name, value in own.items() if value is not None}
        settings |= self.recorded
        judges = {"metric": self.metric, "loss": self.loss}
        settings |= {name: _describe(value) for name, value in judges.items() if value is not None}
        if self.engine.precision != "float32":
            settings["precision"] = self.engine.precision
        return open_run(
            "run", settings, self.net, data=self.data, test=self.test, run_dir=self.run_dir,
            resume=self.resume, engine=self.engine,
        )  # fmt: skip

    def _training(self) -> dict[str, Any]:
        """The settings of the training that can change the outcome."""
        if self.body:
            return {"finetune": "the loop's body"}
        tuned: dict[str, Any] = {"finetune_when": self.finetune_when}
        if isinstance(self.finetune, Finetune):
            tuned |= {"teacher": snapshots.weights_mark(self.teacher)}
            return {**tuned, "finetune": self.finetune.describe()}
        return {**tuned, "finetune": self.finetune and _name_of(self.finetune)}

    def _fix_memory(self, recorded: dict[str, int]) -> None:
        """The engine's memory is one number for the whole run: plans and rounding depend on it.

        recorded: bytes by type of device, from the start of the run; a smaller device takes less.
        """
        device = self.data.device
        if self.engine.memory is None:
            most = default_memory(device, whole=device.type in recorded)
            memory = min(recorded.get(device.type, most), most)
            self.engine = replace(self.engine, memory=max(memory, 1))

    def _resume(self, run: RunDirectory) -> dict[str, Tensor]:
        """Restore the last finished step, or save the start; the tensors of that state."""
        self._fix_memory(run.start.get("memory", {}))  # older runs have none
        if run.state is None:
            tensors = snapshots.take(self.net)
            ranks.check_same("the weights and masks", tensors)
            record: dict[str, Any] = {"memory": {self.data.device.type: self.engine.memory}}
            counts = counts_of(masks(self.net))
            self.begin = self.limits.value(counts), int((counts > 0).sum())
            if self.max_sites is not None or isinstance(self.budget, Budget):
                record["begin"] = self.begin
            if self.test is not None and self.run_dir is not None:
                record["test_accuracy"] = accuracy(self.net, self.test, metric=self.metric)
            run.save(0, tensors, record)
        else:
            tensors = run.state.tensors
            self.margins = tensors.pop(MARGINS, None)
            snapshots.restore(self.net, tensors)
            self.begin = run.start.get("begin", (0.0, 0))
        self.history = [Step.from_json(record) for record in run.history]
        for step in self.history:
            step.unit = self.unit
        count, done = masks(self.net).count(), len(self.history)
        where = "" if self.run_dir is None else f" in {self.run_dir}"
        unfinished = self._unfinished()
        if done and not unfinished:
            _print(f"the run{where} is done: {done} steps, {count:,} ReLUs kept")
        elif not unfinished:
            budget = self.budget if isinstance(self.budget, Budget) else f"{self.budget:,}"
            _print(f"{count:,} ReLUs are kept, the budget is {budget}: nothing to do")
        elif done:
            _print(f"resuming the run{where} after step {done}, {count:,} ReLUs kept")
        return tensors


def _name_of(function: Callable[..., Any]) -> str:
    """The name that config.json has for a function."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"function {getattr(function, '__module__', '?')}.{name}"


def _describe(judge: Any) -> Any:
    """What config.json has for a metric or a loss: its describe(), its name, or its origin."""
    if callable(getattr(judge, "describe", None)):
        check_describe("metric or loss", judge)
        return judge.describe()
    return judge.name if isinstance(getattr(judge, "name", None), str) else _name_of(judge)


def _print(text: str) -> None:
    """On rank 0, above the bars."""
    if ranks.rank() == 0:
        tqdm.write(text)


def _check_unchanged(found: MaskSet, expected: MaskSet) -> None:
    """Refuse masks that were changed between the removal and the end of a step's training."""
    changed = (found.bits != expected.bits).nonzero().flatten()
    if len(changed):
        site, position = found.locate(int(changed[0]))
        raise RuntimeError(
            f"the training changed the masks: {len(changed)} bits, the first at site "
            f"{site.name!r}, position {position}; training may change weights only"
        )
