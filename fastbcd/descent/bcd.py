"""bcd: Block Coordinate Descent, Algorithm 1 of the paper.

    run = fastbcd.bcd(net, data, budget=15_000, teacher=dense, test=test, run_dir="runs/15k")

    for step in fastbcd.steps(net, data, budget=15_000):      # with training of your own
        train_my_way(net)

Each step draws up to RT hypotheses of DRC kept ReLUs, takes the first whose accuracy on the train
set drops by less than ADT percentage points, or else the one that drops least, and fine-tunes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, NamedTuple

from torch import Tensor, nn
from tqdm import tqdm

from fastbcd.data.images import ImageData
from fastbcd.data.sources import as_data
from fastbcd.descent.proposals import Proposal, drawn, find_proposal
from fastbcd.descent.schedules import Schedule
from fastbcd.descent.settings import Search
from fastbcd.descent.step import Clock, Step
from fastbcd.descent.trainers import describe, trainer
from fastbcd.masking.masks import MaskSet, masks, set_masks
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.directory import RunDirectory, check_resume, open_run
from fastbcd.runtime import ranks
from fastbcd.runtime.module_mode import keep_mode
from fastbcd.scoring.accuracy import accuracy, check_classes
from fastbcd.scoring.choose import choose
from fastbcd.scoring.engine import Engine, as_engine
from fastbcd.scoring.score import check_scorable
from fastbcd.training.settings import Finetune

PAPER = Finetune()
WHEN = ("every_step", "on_reject")


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
        if self.history:
            last = self.history[-1]
            text += f", train {last.chosen_accuracy:.2f} %"
            text += "" if last.test_accuracy is None else f", test {last.test_accuracy:.2f} %"
        return f"Run({text})"


def bcd(
    net: nn.Module,
    data: Any,
    budget: int,
    *,
    drc: int | Callable[[int], int] | Schedule = 100,
    rt: int = 50,
    adt: float = 0.3,
    finetune: Finetune | Callable[[nn.Module, Step], Any] | None = PAPER,
    finetune_when: str = "every_step",
    proposal: str | Proposal = "uniform",
    teacher: nn.Module | None = None,
    test: Any = None,
    samples: int | None = None,
    seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | bool = "auto",
    engine: str | Engine = "auto",
    progress: bool = False,
) -> Run:
    """Remove ReLUs from the net, in place, until exactly `budget` are kept.

    Args:
        data: the train set, for scoring and fine-tuning: ImageData, (images, labels), a Dataset
            or a DataLoader. test: the test set, measured after every step if given.
        drc: ReLUs that a step removes: a number, a function of the number kept, or a `Schedule`
            (`Fraction`, `Adaptive`).
        rt, adt: hypotheses that a step tries at most, and the drop in percentage points that it
            accepts.
        finetune: settings, None, or your own f(net, step) that trains in place. It is called with
            torch's generator seeded by (seed, step) and may return {"loss": ...}.
        finetune_when: "every_step", or "on_reject": only after steps where no hypothesis met ADT.
        proposal: "uniform" as in the paper, "saliency", `Saliency(...)`: hypotheses that favour
            ReLUs of small first-order effect, or a `Proposal` of your own.
        samples: score on the first n train images; None: on all.
        run_dir: where every finished step is saved. The same call resumes from there, also on
            another device or number of ranks.
        resume: "auto"; "must" (True): refuse a directory without a run; "never" (False): refuse
            one that is not empty.
        engine: how hypotheses are scored: a name or `Engine(...)`. It never changes the outcome.
        progress: show bars and one line per step.

    After any exception the net is as it was at the end of the last finished step.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> run = bcd(net, data, budget=1, drc=2, rt=3, finetune=None)
    >>> run.masks.count(), [step.after for step in run.history]
    (1, [4, 2, 1])
    """
    images = as_data(data)
    if finetune_when not in WHEN:
        raise ValueError(f"finetune_when={finetune_when!r}; choose from {', '.join(WHEN)}")
    search = Search(
        budget=budget, drc=drc, rt=rt, adt=adt, proposal=find_proposal(proposal), samples=samples,
        seed=seed, engine=as_engine(engine),
    )  # fmt: skip
    descent = Descent(
        net, images, search, test=test, run_dir=run_dir, resume=resume, progress=progress
    )
    train = trainer(finetune, net, images, teacher=teacher, seed=seed, progress=progress)
    descent.training = describe(finetune, finetune_when, teacher)
    with closing(descent.steps()) as steps_:
        for step in steps_:
            if train and (finetune_when == "every_step" or not step.accepted):
                report = train(step)
                if isinstance(report, dict) and report.get("loss") is not None:
                    step.train_loss = float(report["loss"])
    return Run(net, masks(net), descent.history)


def steps(
    net: nn.Module,
    data: Any,
    budget: int,
    *,
    drc: int | Callable[[int], int] | Schedule = 100,
    rt: int = 50,
    adt: float = 0.3,
    proposal: str | Proposal = "uniform",
    test: Any = None,
    samples: int | None = None,
    seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | bool = "auto",
    engine: str | Engine = "auto",
    progress: bool = False,
) -> Iterator[Step]:
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
    search = Search(
        budget=budget, drc=drc, rt=rt, adt=adt, proposal=find_proposal(proposal), samples=samples,
        seed=seed, engine=as_engine(engine),
    )  # fmt: skip
    return Descent(
        net, as_data(data), search, test=test, run_dir=run_dir, resume=resume, progress=progress
    ).steps()


class Descent:
    """One run: its arguments are checked at once, the work is done while `steps` is iterated."""

    training: dict[str, Any] = {"finetune": "the loop's body"}  # noqa: RUF012  # never changed

    def __init__(
        self,
        net: nn.Module,
        data: ImageData,
        search: Search,
        *,
        test: Any,
        run_dir: str | os.PathLike[str] | None,
        resume: str | bool,
        progress: bool,
    ) -> None:
        self.net, self.data, self.search = net, data, search
        self.run_dir, self.resume, self.progress = run_dir, resume, progress
        check_resume(resume)
        check_scorable(net, data)
        self.test = None if test is None else as_data(test)
        if self.test is not None:
            check_classes(net, self.test, "the net, asked about the test set,")
        if search.samples is not None and search.samples > len(data):
            raise ValueError(f"samples={search.samples}; there are {len(data)} train images")
        self.scored = data if search.samples is None else data.first(search.samples)
        if (count := masks(net).count()) > search.budget:
            search.size(count, [])
        self.history: list[Step] = []

    def steps(self) -> Generator[Step, None, None]:
        """Algorithm 1; the loop that iterates over the steps does the fine-tuning."""
        with closing(self._open()) as run, keep_mode(self.net), self._bar() as bar:
            saved = self._resume(run, bar)
            try:
                while masks(self.net).count() > self.search.budget:
                    step = self._search()
                    removed = masks(self.net).copy()
                    with Clock(step.seconds, "finetune"):
                        yield step
                    _check_unchanged(masks(self.net), removed)
                    saved = self._save(step, run)
                    bar.update(step.drc)
            except BaseException:
                snapshots.restore(self.net, saved)
                raise

    def _search(self) -> Step:
        """Try hypotheses until one is accepted or RT are rejected; remove the chosen ReLUs."""
        s, seconds, number = self.search, {"propose": 0.0, "score": 0.0}, len(self.history) + 1
        current = masks(self.net).copy()
        size, rt = s.size(current.count(), self.history), s.hypotheses()
        with Clock(seconds, "score"):
            with Clock(seconds, "propose"):
                draw = s.proposal(self.net, self.scored, size, seed=s.seed, step=number)

            def hypothesis(trial: int) -> Tensor:
                with Clock(seconds, "propose"):
                    return drawn(s.proposal, draw, trial, size=size)

            hypotheses = map(hypothesis, range(rt))
            choice = choose(self.net, hypotheses, self.scored, adt=s.adt, engine=s.engine)
        seconds["score"] -= seconds["propose"]
        set_masks(self.net, current.without(choice.removal))
        step = Step.begin(number, before=current.count(), rt=rt, choice=choice)
        step.seconds = seconds
        return step

    def _save(self, step: Step, run: RunDirectory) -> dict[str, Tensor]:
        """Measure the test accuracy and make the step the last finished one; its tensors."""
        with Clock(step.seconds, "test"):
            if self.test is not None:
                step.test_accuracy = accuracy(self.net, self.test)
        tensors, record = snapshots.take(self.net), step.as_json()
        ranks.check_same("the weights and masks", tensors)
        run.save(step.number, tensors, record)
        step.seconds = {**record["seconds"]}
        self.history.append(step)
        if self.progress:
            self._print(str(step))
        return tensors

    def _open(self) -> RunDirectory:
        return open_run(
            "run", {**self.search.describe(), **self.training}, self.net, data=self.data,
            test=self.test, run_dir=self.run_dir, resume=self.resume, engine=self.search.engine,
        )  # fmt: skip

    def _resume(self, run: RunDirectory, bar: Any) -> dict[str, Tensor]:
        """Restore the last finished step, or save the start; the tensors of that state."""
        if run.state is None:
            tensors = snapshots.take(self.net)
            ranks.check_same("the weights and masks", tensors)
            tested = self.test is not None and self.run_dir is not None
            run.save(0, tensors, {"test_accuracy": accuracy(self.net, self.test)} if tested else {})
        else:
            tensors = run.state.tensors
            snapshots.restore(self.net, tensors)
        self.history = [Step.from_json(record) for record in run.history]
        count, budget, done = masks(self.net).count(), self.search.budget, len(self.history)
        bar.reset(max(count - budget, 0))
        where = "" if self.run_dir is None else f" in {self.run_dir}"
        if count <= budget and done:
            self._print(f"the run{where} is done: {done} steps, {count:,} ReLUs kept")
        elif count <= budget:
            self._print(f"{count:,} ReLUs are kept, the budget is {budget:,}: nothing to do")
        elif done:
            self._print(f"resuming the run{where} after step {done}, {count:,} ReLUs kept")
        return tensors

    def _bar(self) -> Any:
        return tqdm(unit="ReLU", desc="bcd", disable=not self.progress or ranks.rank() > 0)

    def _print(self, text: str) -> None:
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
