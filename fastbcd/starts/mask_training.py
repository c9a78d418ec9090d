"""What starting points have in common: train masks, decide on the bits, fine-tune, save.

A `Method` defines how an epoch trains and which ReLUs are kept; `MaskTraining.run` does the rest.
With a run directory every epoch is saved with the optimizer's state, and the same call resumes
from there: the result is the same as without the interruption.
"""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from fastbcd.data.for_net import data_for
from fastbcd.descent.budget import limits_of
from fastbcd.descent.goals import Goal, shuffled
from fastbcd.descent.limits import counts_of
from fastbcd.descent.returns import to_return
from fastbcd.masking.activations import MaskedActivation, MaskedReLU
from fastbcd.masking.masks import MaskSet, mask_modules, masks, set_masks
from fastbcd.masking.twin import twin
from fastbcd.private.target import Target
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.config import Config
from fastbcd.runs.journal import check_resume, journal
from fastbcd.runs.step import Epoch, Start
from fastbcd.runtime import ranks
from fastbcd.runtime.validate import check_whole
from fastbcd.scoring.accuracy import accuracy, check_classes
from fastbcd.training.checks import check_same_sites, check_trainable
from fastbcd.training.loop import NET, Session, Trainer, with_prefix
from fastbcd.training.rates import cosine
from fastbcd.training.repeat import repeatable
from fastbcd.training.settings import Finetune
from fastbcd.training.teacher import TeacherLogits

MOST, PAIRS, BITS = 64, 200, "bits."  # masks that `Overlaps` stores, pairs, prefix of their names
DECIDED, TUNED, FINAL = "decided", "finetune", "final"  # phases; an epoch of masks has none
History = list[dict[str, Any]]
Tensors = dict[str, Tensor]


@dataclass
class StartingPoint:
    """A net at its budget, and how it got there.

    history: one record per epoch, with what the paper plots: count, decrease, lambda, iou, ….
    accuracy: percent on `measured_on` of the net with trained masks ("trained"), right after they
    are cut to bits ("thresholded"), and after the fine-tune ("final").
    overlaps: [count, count, IoU] of random pairs of the epochs' masks.
    finetune: one record per epoch of the fine-tune.

    >>> masks = fastbcd.MaskSet.full({"relu": (8,)})
    >>> StartingPoint(nn.Identity(), masks, [], {"final": 78.45}, "test")
    StartingPoint(8 ReLUs after 0 epochs; on the test set: final 78.45 %)
    """

    model: nn.Module
    masks: MaskSet
    history: History
    accuracy: dict[str, float]
    measured_on: str
    overlaps: list[list[float]] = field(default_factory=list)
    finetune: History = field(default_factory=list)

    def __repr__(self) -> str:
        steps = ", ".join(f"{name} {value:.2f} %" for name, value in self.accuracy.items())
        kept = f"{self.masks.count():,} ReLUs after {len(self.history)} epochs"
        return f"StartingPoint({kept}; on the {self.measured_on} set: {steps})"


class Method:
    """How masks are trained.

    s: the settings, seed and data. start: the masks at the start. model: the net's own weights with
    trainable activations `acts`, which `activation` makes of the net's; without it, the net itself.
    A subclass has epoch(session, epoch, bar), which returns the epoch's record with "count" and
    "loss". optimizer: changes to the fine-tune's settings for these epochs. matched: it needs
    session.trainer.teacher, with the net's sites.
    """

    name: ClassVar[str]  # of its function
    optimizer: ClassVar[dict[str, Any]] = {"optimizer": "adam", "weight_decay": 0.0}
    matched = False

    def __init__(
        self, net: nn.Module, s: SimpleNamespace,
        activation: Callable[[Any], MaskedActivation] | None = None,
    ) -> None:  # fmt: skip
        self.s, self.start = s, masks(net).copy()
        self.model = net if activation is None else twin(net, activation)
        self.acts: list[Any] = list(mask_modules(self.model).values())

    @staticmethod
    def prepare(net: nn.Module) -> nn.Module:
        """The net whose masks are trained; refuses one that the method cannot take."""
        return net

    def begin(self, history: History) -> None:
        """Continue after these epochs; the model's own tensors are already restored."""

    def done(self, history: History) -> bool:
        """Whether the masks are trained."""
        return len(history) >= self.s.epochs

    def bits(self) -> Tensor:
        """The current mask, bool [total], on the CPU."""
        return self.gather("mask")

    def decide(self, history: History) -> MaskSet:
        """The masks that are kept."""
        return MaskSet(self.start.sites, self.bits())

    def gather(self, name: str) -> Tensor:
        """A tensor that every activation has, [*shape], by the units' flat ids, on the CPU."""
        return torch.cat([getattr(act, name).detach().flatten() for act in self.acts]).cpu()

    def largest(self, values: Tensor, count: int | None = None) -> MaskSet:
        """The units kept at the start with the largest values, ties by id; count: the budget."""
        kept = self.start.bits.nonzero().flatten()
        order = kept[torch.sort(values[kept], descending=True, stable=True).indices]
        if count is not None:
            return self.start.without(order[count:])
        goal = Goal(self.start, self.s.limits, self.s.limits)
        return self.start.without(goal.fit(order.flip(0), lambda: order[:0]))

    def warn_above(self, history: History, found: str, then: str) -> None:
        """Warn that the training ended above the budget."""
        above = f"{found}, more than the budget of {self.s.budget:,}; {then}"
        warnings.warn(f"after {len(history)} epochs {above}", RuntimeWarning, stacklevel=8)


def train_masks(method: type[Any], given: dict[str, Any]) -> StartingPoint:
    """Train masks by a method; given: all arguments of its function, by name."""
    common = {f.name: given.pop(f.name) for f in dataclasses.fields(MaskTraining)[2:]}
    return MaskTraining(method, given, **common).run()


@dataclass
class MaskTraining:
    """One run of a method: the net, the data and the settings."""

    method: type[Any]  # of a `Method`, called with the net and the settings
    settings: dict[str, Any]  # of the method: what decides the outcome, for config.json
    net: nn.Module
    data: Any
    test: Any
    teacher: nn.Module | None
    finetune: Finetune | None
    batch_size: int
    seed: int
    run_dir: str | os.PathLike[str] | None
    resume: str | bool
    progress: bool

    def run(self) -> StartingPoint:
        """Train the masks, cut them to bits, fine-tune. After an exception the net is as before."""
        if not isinstance(self.net, nn.Module):
            raise TypeError(f"net is a {type(self.net).__name__}; expected a torch.nn.Module")
        check_whole("batch_size", self.batch_size, 1)
        check_whole("seed", self.seed, 0)
        check_resume(self.resume)
        if not isinstance(self.finetune, Finetune | None):
            kind = type(self.finetune).__name__
            raise TypeError(f"finetune is a {kind}; give a fastbcd.Finetune, or None for none")
        self.net, budget = self.method.prepare(self.net), self.settings["budget"]
        self.limits, counts = limits_of(budget, self.net), counts_of(masks(self.net))
        if isinstance(budget, Target) and self.limits.met(counts):
            raise ValueError(f"the net as it is costs {budget.cost(self.net):g}: {budget} is met")
        if not isinstance(budget, Target) and budget > counts.sum():
            most = f"the net keeps {counts.sum():,} ReLUs: at most that many"
            raise ValueError(f"budget={budget:,}; {most}")
        self.data = data_for(self.net, self.data)
        self.tuning = Finetune(epochs=0) if self.finetune is None else self.finetune
        check_whole("finetune.epochs", self.tuning.epochs, 0)
        check_trainable(self.net, self.data, self.tuning, self.teacher)
        self.matched = self.method.matched or self.tuning.mismatch > 0
        if self.teacher is not None and self.matched:
            check_same_sites(self.net, self.data, self.teacher)
        self.measured = self.data  # what accuracies are measured on
        if self.test is not None:
            self.measured = self.test = data_for(self.net, self.test)
            check_classes(self.net, self.test, "the net, asked about the test set,")
        self.progress = self.progress and ranks.rank() == 0
        given = snapshots.take(self.net)
        tuning = self.tuning.describe()
        common = {"batch_size": self.batch_size, "seed": self.seed, "finetune": tuning}
        recorded = budget.describe() if isinstance(budget, Target) else budget
        mark = None if self.teacher is None else snapshots.weights_mark(self.teacher)
        opened = journal(
            Config.of(
                self.method.name,
                {**self.settings, "budget": recorded, **common, "teacher": mark},
                self.net, data=self.data, test=self.test,
            ),
            self.net, Epoch, begin=Start,
            over=lambda history: bool(history) and history[-1].phase == FINAL,
            run_dir=self.run_dir, resume=self.resume,
        )  # fmt: skip
        try:
            with opened as self.journal:
                self.history = [_as_dict(epoch) for epoch in self.journal.history]
                return self._train(given)
        except BaseException:
            snapshots.restore(self.net, given)
            raise

    def _train(self, given: Tensors) -> StartingPoint:
        if self.history and not self._phase(FINAL):
            # From the net's tensors at the start of the run, on every rank.
            snapshots.restore(self.net, self.journal.start_tensors())
        if not self._phase(FINAL):
            teacher = self.net if self.teacher is None else self.teacher  # it is copied
            logits = None
            if self.tuning.distill or self.matched:
                logits = TeacherLogits(teacher, self.data, self.tuning, matched=self.matched)
            self.trainer = partial(Trainer, teacher=logits, seed=self.seed, fused_optimizer=False)
            if not self._phase(DECIDED):
                self._train_masks()
            self._fine_tune()
        final = self.history[-1]
        return StartingPoint(
            self.net, masks(self.net), self._phase(None), final["accuracy"],
            measured_on="train" if self.test is None else "test", overlaps=final["overlaps"],
            finetune=self._phase(TUNED),
        )  # fmt: skip

    def _train_masks(self) -> None:
        """Train the masks to the end and write the bits into the net."""
        # The number of ReLUs that the training aims at, and what the kept ones must meet.
        aim = {"budget": self.limits.room(counts_of(masks(self.net))), "limits": self.limits}
        known = SimpleNamespace(**self.settings | aim, seed=self.seed, data=self.data)
        method = self.method(self.net, known)
        settings = dataclasses.replace(self.tuning, **method.optimizer, batch_size=self.batch_size)
        trainer = self.trainer(method.model, self.data, settings)
        history, state, seen = self.history, self.journal.extra, Overlaps(masks(self.net).total)

        def train(epoch: int, bar: Any) -> dict[str, Any]:
            before = history[-1]["count"] if history else method.start.count()
            record = method.epoch(session, epoch, bar)
            record["decrease"] = before - record["count"]
            return {**record, "iou": seen.add(epoch, method.bits())}

        with trainer.session() as session:
            if history:
                session.load(state)
                seen.load(state, len(history))
            method.begin(history)
            while not method.done(history):
                self._epoch(session, {"epoch": len(history)}, train, seen.state)
            found = {"trained": accuracy(trainer.model, self.measured)}
        chosen = method.decide(history)
        targeted = isinstance(self.settings["budget"], Target)
        if targeted and not self.limits.met(counts_of(chosen)):
            # A method that knows numbers of ReLUs only: some more go, at random.
            kept = shuffled(chosen.bits.nonzero().flatten(), seed=self.seed, step=0, trial=0)
            goal = Goal(chosen, self.limits, self.limits)
            chosen = chosen.without(goal.fit(kept, lambda: kept[:0]))
        set_masks(self.net, chosen)
        if targeted and self.settings.get("exact", True):  # or some return, by their gain
            back = to_return(self.net, self.data, self.limits, among=method.start.bits)
            set_masks(self.net, chosen := chosen.including(back))
        found["thresholded"] = accuracy(self.net, self.measured)
        decided = {"phase": DECIDED, "count": chosen.count(), "accuracy": found}
        decided["overlaps"] = seen.pairs(self.seed)
        self._save(decided, lambda: with_prefix(snapshots.take(self.net), NET))

    def _fine_tune(self) -> None:
        """What `Finetuner.run` does, with a record and a saved state per epoch."""
        s, state = self.tuning, self.journal.extra
        trainer = self.trainer(self.net, self.data, s)

        def train(epoch: int, bar: Any) -> dict[str, Any]:
            lr = cosine(s.lr, epoch, s.epochs)
            return {"lr": lr, "loss": session.epoch(epoch, lr, step=1, bar=bar)}

        with trainer.session() as session:
            if state:
                session.load(state)
            for epoch in range(len(self._phase(TUNED)), int(s.epochs)):
                self._epoch(session, {"phase": TUNED, "epoch": epoch}, train, dict)
        (decided,) = self._phase(DECIDED)
        found = {**decided["accuracy"], "final": accuracy(self.net, self.measured)}
        final = {**decided, "phase": FINAL, "accuracy": found}
        self._save(final, dict)

    def _epoch(
        self, session: Session, record: dict[str, Any],
        train: Callable[[int, Any], dict[str, Any]], more: Callable[[], Tensors],
    ) -> None:  # fmt: skip
        """Train for an epoch, seeded by its number; complete its record, print it, save it."""
        trainer = session.trainer
        begin, what = time.perf_counter(), record.get("phase", self.method.name)
        bar = tqdm(total=len(trainer.sizes), disable=not self.progress, desc=what)
        with bar, repeatable(self.data.device, self.seed, record["epoch"], trainer.settings.fast):
            record |= train(record["epoch"], bar)
        if self.test is not None:
            record["test_accuracy"] = accuracy(trainer.model, self.test)
        record["seconds"] = {"epoch": time.perf_counter() - begin}
        if self.progress:
            what = f"lr {record.get('lr', 0):.3g}"
            if "count" in record:
                what = f"λ {record['lambda']:.4g}" if "lambda" in record else what
                what = f"{record['count']:,} ReLUs ({-record['decrease']:+,}), {what}"
                what = f"{record['training']}, {what}" if "training" in record else what
            tqdm.write(epoch_line(f"epoch {record['epoch']}: {what}", record))
        self._save(record, lambda: {**session.state(), **more()})

    def _save(self, record: dict[str, Any], tensors: Callable[[], Tensors]) -> None:
        """Add a record to the history; tensors are only copied if they are written or compared."""
        number = len(self.history) + 1
        state = tensors()
        record = {**record, "number": number}
        self.journal.finish(_as_epoch(record), state)
        self.history.append(record)

    def _phase(self, phase: str | None) -> History:
        return [record for record in self.history if record.get("phase") == phase]


def _as_epoch(record: dict[str, Any]) -> Epoch:
    """A record as it is saved."""
    names = {field.name for field in dataclasses.fields(Epoch)}
    known = {name: value for name, value in record.items() if name in names}
    notes = {name: value for name, value in record.items() if name not in names}
    return Epoch(**{"phase": "masks", **known}, notes=notes)


def _as_dict(epoch: Epoch) -> dict[str, Any]:
    """What `_as_epoch` was made of."""
    known = {name: value for name, value in vars(epoch).items() if name != "notes"}
    record = {name: value for name, value in known.items() if value is not None}
    if record["phase"] == "masks":
        del record["phase"]
    return {**record, **epoch.notes}


def epoch_line(title: str, record: dict[str, Any]) -> str:
    """An epoch's record in one line: title, loss 1.5000, test 40.00 %, 3.2 s."""
    parts = [title, f"loss {record['loss']:.4f}"]
    if record.get("test_accuracy") is not None:
        parts.append(f"test {record['test_accuracy']:.2f} %")
    parts.append(f"{record['seconds']['epoch']:.1f} s")
    return ", ".join(parts)


class Overlaps:
    """Masks [total] by epoch, one bit per unit: how much they have in common (the paper's IoU).

    Up to 64 are stored, evenly spread: when there are more, every second one is dropped, and from
    then on only every second one is added.

    >>> seen = Overlaps(4)
    >>> seen.add(0, torch.tensor([True, True, True, False]))
    >>> seen.add(1, torch.tensor([True, False, False, True]))
    0.5
    >>> seen.pairs(seed=0)
    [[3, 2, 0.5]]
    """

    def __init__(self, total: int) -> None:
        self.total, self.stride = total, 1
        self.packed: dict[int, np.ndarray] = {}
        self.last: np.ndarray | None = None

    def add(self, epoch: int, bits: Tensor) -> float | None:
        """Add an epoch's mask; returns its IoU with the one before, None if either is empty."""
        found = None if self.last is None else _iou(self._unpacked(self.last), bits.numpy())
        self.last = np.packbits(bits.numpy())
        if epoch % self.stride == 0:
            self.packed[epoch] = self.last
        if len(self.packed) > MOST:
            self.stride *= 2
            self.packed = {e: p for e, p in self.packed.items() if e % self.stride == 0}
        return found

    def pairs(self, seed: int) -> list[list[float]]:
        """[count, count, IoU] for up to 200 random pairs of the stored masks."""
        stored = [self._unpacked(self.packed[epoch]) for epoch in sorted(self.packed)]
        every = [(a, b) for i, a in enumerate(stored) for b in stored[i + 1 :]]
        generator = np.random.Generator(np.random.Philox(seed))
        chosen = [every[i] for i in sorted(generator.permutation(len(every))[:PAIRS])]
        found = [(int(a.sum()), int(b.sum()), _iou(a, b)) for a, b in chosen]
        return [[a, b, iou] for a, b, iou in found if iou is not None]

    def state(self) -> dict[str, Tensor]:
        """The stored masks as tensors by name, and the last one."""
        stored: dict[Any, Any] = {**self.packed, "last": self.last}
        return {f"{BITS}{e}": torch.tensor(p) for e, p in stored.items() if p is not None}

    def load(self, tensors: dict[str, Tensor], epochs: int) -> None:
        """Restore what `state` returned after so many epochs."""
        found = {n.removeprefix(BITS): t for n, t in tensors.items() if n.startswith(BITS)}
        self.last = found.pop("last").numpy()
        self.packed = {int(epoch): t.numpy() for epoch, t in found.items()}
        while -(-epochs // self.stride) > MOST:
            self.stride *= 2

    def _unpacked(self, packed: np.ndarray) -> np.ndarray:
        return np.unpackbits(packed, count=self.total).astype(bool)


def _iou(a: np.ndarray, b: np.ndarray) -> float | None:
    smaller = min(int(a.sum()), int(b.sum()))
    return int((a & b).sum()) / smaller if smaller else None


def only_identity(net: nn.Module) -> nn.Module:
    """The net; refuses polynomial sites, naming the first."""
    for name, act in mask_modules(net).items():
        if type(act) is not MaskedReLU:
            raise ValueError(f"site {name!r} is a {type(act).__name__}; use fastbcd.autorep for it")
    return net


def channels_last(t: Tensor) -> Tensor:
    """A copy of [C, *spatial] with C innermost in memory, as activations lie in training."""
    return t.movedim(0, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 0)
