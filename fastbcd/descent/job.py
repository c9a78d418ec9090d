"""Job: what a run is. It is checked once, when it is made, and does not change afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from fastbcd.descent.blocks import PROPOSALS
from fastbcd.descent.budget import Budget, Count, Limits, counts_of, limits_of
from fastbcd.descent.problem import Problem
from fastbcd.descent.proposals import Proposal
from fastbcd.descent.schedules import Schedule, size_of
from fastbcd.descent.tuning import Callback, Function, Training, training_of
from fastbcd.masking.masks import MaskSet, masks
from fastbcd.runs.config import Config
from fastbcd.runs.journal import Journal, journal
from fastbcd.runs.read import saved_run
from fastbcd.runs.step import Epoch, Start, Step
from fastbcd.runtime import ranks
from fastbcd.runtime.limits import default_memory
from fastbcd.runtime.settings import Settings, setting
from fastbcd.scoring.confident import check_confidence
from fastbcd.scoring.engine import ENGINES, Engine, as_engine
from fastbcd.scoring.metric import Criterion, Loss, Metric
from fastbcd.training.settings import Finetune


@dataclass(frozen=True, kw_only=True)
class Search(Settings):
    """What decides a step."""

    drc: int | Schedule | Callable[[int], int] = setting(
        100,
        "ReLUs that a step removes: a number, a function of the number kept, or a Schedule. With a "
        "cost as the budget, a step saves the same share of the cost left: drc / ReLUs kept",
        least=1,
    )
    rt: int = setting(50, "hypotheses that a step tries at most", least=1)
    adt: float = setting(
        0.3, "drop of accuracy that a step accepts, in percentage points", finite=False
    )
    proposal: str | Proposal | None = setting(
        None,
        'how hypotheses are drawn: "uniform", as in the paper; "saliency", ReLUs of small '
        'first-order effect; "blocks", ReLUs or whole sites of small effect per second saved; or a '
        'Proposal. None: "uniform", and "blocks" with a cost or max_sites',
        choices=PROPOSALS,
    )
    finetune_when: str = setting(
        "every_step",
        'which steps are trained: "every_step", or "on_reject": those where no hypothesis met ADT',
        choices=("every_step", "on_reject"),
    )
    max_sites: int | None = setting(
        None,
        "sites that keep any ReLU, at most; the end has fewer ReLUs than the budget only if those "
        "sites have fewer",
        least=0,
    )
    samples: int | None = setting(
        None, "score on the first n train images; None: on all", least=1
    )
    confidence: float | None = setting(
        None,
        "None scores exactly. With 0.999 the choice of a step differs from the exact one with a "
        "probability of 0.1 % at most, and takes fewer images (docs/confidence.md)",
    )
    metric: Metric | None = setting(
        None,
        "a callable (outputs, targets) -> [B], larger is better, in place of accuracy. With an "
        "attribute `bounds = (low, high)` accuracies and adt are in percent of that range, without "
        "it in the metric's units",
    )
    loss: Loss | None = setting(
        None,
        "a callable (outputs, targets) -> [B] or their mean, in place of cross-entropy: for ties, "
        "saliency and fine-tuning",
    )
    seed: int = setting(0, "of all random numbers", least=0, most=2**63 - 1)
    engine: str | Engine = setting(
        "auto",
        "how hypotheses are scored: a name or `Engine(...)`. Only its precision can change the "
        "outcome",
        choices=ENGINES,
        recorded=False,
    )
    test_every: int = setting(
        1,
        "measure the test accuracy after every n steps, and after the last one",
        least=1,
        recorded=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_confidence(self.confidence, self.metric)
        _check_recorded("drc", self.drc, Schedule)
        _check_recorded("proposal", self.proposal, Proposal)
        as_engine(self.engine)

    def describe(self) -> dict[str, Any]:
        """What config.json records."""
        return super().describe() | {
            "precision": as_engine(self.engine).precision or "float32"
        }

    @property
    def criterion(self) -> Criterion:
        """What hypotheses are judged by."""
        return Criterion(self.metric, self.loss)


class Job(NamedTuple):
    """A run: what is searched, within which limits, and how it is trained."""

    problem: Problem
    budget: Budget
    limits: Limits
    search: Search
    proposal: Proposal
    engine: Engine
    training: Training
    epochs: float  # of training in all, at least; steps at the budget only train
    report: Callback  # of finished steps and of epochs

    @classmethod
    def of(
        cls,
        net: nn.Module,
        data: Any,
        budget: int | Budget,
        search: Search,
        *,
        test: Any = None,
        finetune: Finetune | Function | Training | None = None,
        teacher: nn.Module | None = None,
        progress: bool = False,
        callbacks: Sequence[Callback] = (),
        epochs: float = 0.0,
    ) -> Job:
        """A job, checked; nothing is changed yet. Arguments are those of `bcd`."""
        problem = Problem(net, data, test, search.criterion, search.samples)
        report = _reporting(callbacks)
        training = training_of(
            problem,
            finetune,
            teacher,
            seed=search.seed,
            progress=progress,
            report=report,
        )
        wanted = Budget.of(budget)
        limits = limits_of(wanted, net, search.max_sites)
        kept = masks(net)
        if not limits.met(counts_of(kept)):
            size_of(search.drc, kept.count(), [])
        proposal = search.proposal
        if proposal is None:
            by_count = isinstance(wanted, Count) and search.max_sites is None
            proposal = "uniform" if by_count else "blocks"
        if isinstance(proposal, str):
            proposal = PROPOSALS[proposal]
        proposal = proposal.informed(problem, training)
        return cls(
            problem=problem,
            budget=wanted,
            limits=limits,
            search=search,
            proposal=proposal,
            engine=as_engine(search.engine),
            training=training,
            epochs=epochs,
            report=report,
        )

    @property
    def counts(self) -> np.ndarray:
        """The ReLUs that each site of the net keeps now, [sites]."""
        return counts_of(masks(self.problem.net))

    @property
    def trials(self) -> int:
        """Hypotheses of a step; all those of a greedy proposal are the same."""
        return 1 if self.proposal.greedy else self.search.rt

    def at(self, start: Start) -> Job:
        """The job with the memory that the run began with: plans and rounding depend on it."""
        if self.engine.memory is not None:
            return self
        device = self.problem.train.device
        memory = default_memory(device, whole=device.type in start.memory)
        memory = min(memory, start.memory.get(device.type, memory))
        return self._replace(engine=replace(self.engine, memory=max(memory, 1)))

    def facts(self) -> Start:
        """The facts about the net's masks as they are."""
        sites = int((self.counts > 0).sum())
        return Start(value=self.limits.value(self.counts), sites=sites)

    def begin(self) -> Start:
        """The facts about the net before the first step."""
        device = self.problem.train.device
        start = self.facts()
        start.memory = {device.type: self.engine.memory or default_memory(device)}
        start.test_accuracy = self.problem.accuracy()
        return start

    def met(self) -> bool:
        """Whether the net's masks are within the budget."""
        return bool(self.limits.met(self.counts))

    def epochs_left(self, history: Sequence[Step]) -> float:
        """The epochs that are left of those of the whole run."""
        spent = sum(step.epochs or 0.0 for step in history)
        return max(0.0, round(self.epochs - spent, 9))

    def over(self, history: Sequence[Step]) -> bool:
        """Whether no step is left after these."""
        return self.met() and self.epochs_left(history) == 0

    def cost(self) -> float | None:
        """What the net costs now, in the unit of the budget; None if that is a number of ReLUs."""
        if isinstance(self.budget, Count):
            return None
        return self.limits.value(self.counts)

    def config(self) -> Config:
        """What config.json says."""
        settings: dict[str, Any] = {"budget": self.budget.describe()}
        if self.epochs:
            settings["epochs"] = self.epochs
        settings |= self.search.describe() | self.training.describe()
        settings["proposal"] = self.proposal.describe()
        # Last, because `linearize` makes them of the others: a change is refused by its own name.
        for name in ("drc", "proposal"):
            settings[name] = settings.pop(name)
        if self.epochs:
            tuned = settings["finetune"]
            tuned["epochs"] = tuned.pop("epochs")
        problem = self.problem
        return Config.of(
            "bcd", settings, problem.net, data=problem.train, test=problem.test
        )

    def journal(
        self, run_dir: str | os.PathLike[str] | None, resume: str | bool
    ) -> AbstractContextManager[Journal[Step]]:
        """The journal of this job's run, begun or resumed."""
        return journal(
            self.config(),
            self.problem.net,
            Step,
            begin=self.begin,
            over=self.over,
            run_dir=run_dir,
            resume=resume,
            same={name: repr(value) for name, value in vars(self.search).items()},
        )

    def peek(
        self, run_dir: str | os.PathLike[str] | None
    ) -> tuple[list[Step], MaskSet]:
        """The finished steps of the run in a directory, and its masks; the net's without a run."""
        saved = None if run_dir is None else saved_run(Path(run_dir))
        if saved is None or saved.masks is None:
            return [], masks(self.problem.net)
        self.config().check_same(saved.config, saved.path)
        return saved.history, saved.masks


def _reporting(callbacks: Sequence[Callback]) -> Callback:
    """A function that passes a record to all callbacks, on rank 0."""
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise TypeError(
            f"callbacks={callbacks!r}; give a list of functions f(record), which are called with "
            f"each finished Step, and with the Epochs of a longer fine-tune"
        )

    def call_all(record: Step | Epoch) -> None:
        for callback in callbacks:
            callback(record)

    return lambda record: ranks.on_first(lambda: call_all(record))


def _check_recorded(name: str, value: Any, kind: type) -> None:
    """Refuse a proposal or a schedule whose describe() cannot be written into config.json."""
    if not isinstance(value, kind):
        return
    try:
        json.dumps(value.describe())  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} {type(value).__qualname__}: describe() must return JSON-able values: {error}"
        ) from None
