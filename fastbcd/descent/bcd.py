"""bcd: Block Coordinate Descent, Algorithm 1 of the paper.

    run = fastbcd.bcd(net, data, budget=15_000, teacher=dense, test=test, run_dir="runs/15k")

    for step in fastbcd.steps(net, data, budget=15_000):      # the same, open in the middle
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
from fastbcd.descent import proposals
from fastbcd.descent.settings import Schedule, Search
from fastbcd.descent.step import Clock, Step
from fastbcd.descent.trainers import describe, trainer
from fastbcd.masking.masks import MaskSet, masks, set_masks
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.directory import RunDirectory, Unsaved, check_resume
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
    """What `bcd` gives back: the net it was given, at its budget, and how it got there.

    >>> net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(4), nn.Linear(4, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> run = fastbcd.bcd(net, data, budget=1, drc=2, finetune=None)
    >>> run.model is net, run.masks.count(), len(run.history)
    (True, 1, 2)
    """

    model: nn.Module
    masks: MaskSet
    history: list[Step]


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
    proposal: str | proposals.Saliency = "uniform",
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
        drc: ReLUs to remove a step, a function of how many are kept, or a schedule: `Fraction`,
            `Adaptive`.
        rt, adt: hypotheses at most a step, and the drop in percentage points that is accepted.
        finetune: settings, None, or your own f(net, step) that trains in place. It is called with
            torch's generator seeded by (seed, step); what it returns may be {"loss": ...}.
        finetune_when: "every_step", or "on_reject": only where no hypothesis met ADT.
        proposal: "uniform" as the paper, "saliency", or `Saliency(...)`: hypotheses that favour
            ReLUs which matter little to first order.
        samples: score on the first n train images; None: on all.
        run_dir: where every finished step is saved. The same call again goes on from there.
        resume: "auto"; "must" (True): there has to be a run; "never" (False): there must be none.
        engine: how hypotheses are scored: a name or `Engine(...)`. It never changes the outcome.
        progress: bars, and a line a step.

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
    search = Search(budget, drc, rt, adt, proposal, samples, seed, as_engine(engine))
    descent = Descent(net, images, search, test, run_dir, resume, progress)
    train = trainer(finetune, net, images, teacher=teacher, seed=seed, progress=progress)
    descent.training = describe(finetune, finetune_when, teacher)
    with closing(descent.steps()) as steps_:
        for step in steps_:
            if train and (finetune_when == "every_step" or not step.accepted):
                report = train(step)
                step.train_loss = report.get("loss") if isinstance(report, dict) else None
    return Run(net, masks(net), descent.history)


def steps(
    net: nn.Module,
    data: Any,
    budget: int,
    *,
    drc: int | Callable[[int], int] | Schedule = 100,
    rt: int = 50,
    adt: float = 0.3,
    proposal: str | proposals.Saliency = "uniform",
    test: Any = None,
    samples: int | None = None,
    seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | bool = "auto",
    engine: str | Engine = "auto",
    progress: bool = False,
) -> Iterator[Step]:
    """The steps of `bcd`, with your own training in the loop's body.

    In the body the step's ReLUs are already removed. When it comes to its end the test accuracy
    is measured, the step is saved and the next one begins; set step.train_loss to have it in the
    record. Leaving the loop within the body (break, an exception) undoes the step. The weights
    are yours to change, the masks are not.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> for step in steps(net, data, budget=2, drc=3, rt=3):
    ...     print(step.number, step.before, step.after)
    1 6 3
    2 3 2
    """
    search = Search(budget, drc, rt, adt, proposal, samples, seed, as_engine(engine))
    return Descent(net, as_data(data), search, test, run_dir, resume, progress).steps()


class Descent:
    """One run: checked when it is made, at work while its `steps` are gone through."""

    training: dict[str, Any] = {"finetune": "the loop's body"}  # noqa: RUF012  # never changed

    def __init__(
        self,
        net: nn.Module,
        data: ImageData,
        search: Search,
        test: Any,
        run_dir: str | os.PathLike[str] | None,
        resume: str | bool,
        progress: bool,
    ) -> None:
        self.net, self.search, self.run_dir, self.resume = net, search, run_dir, resume
        self.progress = progress
        check_resume(resume)
        check_scorable(net, data)
        self.test = None if test is None else as_data(test)
        if self.test is not None:
            check_classes(net, self.test, "the net, asked about the test set,")
        if search.samples is not None and search.samples > len(data):
            raise ValueError(f"samples={search.samples}; there are {len(data)} train images")
        self.data = data if search.samples is None else data.first(search.samples)
        self.whole_data = data
        if (count := masks(net).count()) > search.budget:
            search.size(count, [])
        self.history: list[Step] = []

    def steps(self) -> Generator[Step, None, None]:
        """Algorithm 1, with the fine-tuning left to whoever goes through the steps."""
        with closing(self._open()) as run, keep_mode(self.net), self._bar() as bar:
            good = self._begin(run, bar)
            try:
                while masks(self.net).count() > self.search.budget:
                    step = self._search(len(self.history) + 1)
                    removed = masks(self.net).bits
                    with Clock(step.seconds, "finetune"):
                        yield step
                    _check_masks(masks(self.net), removed)
                    good = self._finish(step, run, bar)
            except BaseException:
                snapshots.restore(self.net, good)
                raise

    def _search(self, number: int) -> Step:
        """Try hypotheses until one is accepted or RT is exhausted; remove what was chosen."""
        s, current, seconds = self.search, masks(self.net), {"propose": 0.0, "score": 0.0}
        count, rt = current.count(), s.hypotheses()
        size = s.size(count, self.history)
        with Clock(seconds, "score"):
            with Clock(seconds, "propose"):
                draw = proposals.find(s.proposal)(self.net, self.data, size, s.seed, number)

            def hypothesis(trial: int) -> Tensor:
                with Clock(seconds, "propose"):
                    return draw(trial)

            choice = choose(
                self.net, map(hypothesis, range(rt)), self.data, adt=s.adt, engine=s.engine
            )
        seconds["score"] -= seconds["propose"]
        set_masks(self.net, current.without(choice.removal))
        step = Step.begun(number, count, rt, choice)
        step.seconds = seconds
        return step

    def _open(self) -> RunDirectory | Unsaved:
        if self.run_dir is None:
            return Unsaved()
        settings = {**self.search.outcome(), **self.training}
        config = snapshots.run_config(
            "run", settings, self.net, data=self.whole_data, test=self.test
        )
        return RunDirectory(self.run_dir, config, self.resume)

    def _begin(self, run: RunDirectory | Unsaved, bar: Any) -> dict[str, Tensor]:
        """Begin the run, or go on with it; the state that counts as good."""
        if run.state is None:
            good = snapshots.take(self.net)
            run.save(0, good, {})
        else:
            good = run.state.tensors
            snapshots.restore(self.net, good)
        self.history = [Step.from_json(record) for record in run.history]
        ranks.check_same("the weights and masks", good)
        ranks.check_same("the labels", {"labels": self.whole_data.labels})
        count, budget, done = masks(self.net).count(), self.search.budget, len(self.history)
        bar.reset(max(count - budget, 0))
        where = "" if self.run_dir is None else f" in {self.run_dir}"
        if count <= budget and done:
            self._say(f"the run{where} is done: {done} steps, {count:,} ReLUs kept")
        elif count <= budget:
            self._say(f"{count:,} ReLUs are kept, the budget is {budget:,}: nothing to do")
        elif done:
            self._say(f"going on{where} after step {done}, {count:,} ReLUs kept")
        return good

    def _finish(self, step: Step, run: RunDirectory | Unsaved, bar: Any) -> dict[str, Tensor]:
        """Measure and save; the state that now counts as good."""
        with Clock(step.seconds, "test"):
            if self.test is not None:
                step.test_accuracy = accuracy(self.net, self.test)
        good = snapshots.take(self.net)
        ranks.check_same("the weights and masks", good)
        record = step.as_json()
        run.save(step.number, good, record)
        step.seconds = {**record["seconds"]}
        self.history.append(step)
        bar.update(step.drc)
        if self.progress:
            self._say(str(step))
        return good

    def _bar(self) -> Any:
        return tqdm(unit="ReLU", desc="bcd", disable=not self.progress or ranks.rank() > 0)

    def _say(self, text: str) -> None:
        """Once, above the bars."""
        if ranks.rank() == 0:
            tqdm.write(text)


def _check_masks(found: MaskSet, expected: Tensor) -> None:
    """Refuse masks that were changed between removal and the end of a step's training."""
    changed = (found.bits != expected).nonzero().flatten()
    if len(changed):
        site, position = found.locate(int(changed[0]))
        raise RuntimeError(
            f"the training changed the masks: {len(changed)} bits, the first at site "
            f"{site.name!r}, position {position}; training may change weights only"
        )
