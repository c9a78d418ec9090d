"""choose: the hypothesis that a step takes, scoring no more than the decision needs.

The rule (Algorithm 1): the lowest-numbered hypothesis whose accuracy drops by less than ADT
percentage points; if none does, the one that drops least, ties by smaller loss, then by number.
Losses count as equal within 1e-5, the rounding that engines and batch sizes may differ by, so
that hypotheses which change no answer at all are ranked by their numbers and not by rounding.

What is certain is not computed. If r images are left, of which the base net gets w wrong, a
hypothesis with d fewer correct answers than the base so far ends with a difference between d - w
and d + (r - w). So

    it is certain to pass   if d + (r - w) is below the tolerance: later numbers do not matter;
    it is certain to fail   if d - w is not below the tolerance: it is set aside, and continued
                            only if no hypothesis passes and it can still be the best.

Both are facts about counts, not estimates: the choice is that of the one-by-one loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor, nn

from fastbcd.data.images import ImageData
from fastbcd.masking.masks import MaskSet
from fastbcd.scoring.engine import Engine, as_engine
from fastbcd.scoring.plan import Plan
from fastbcd.scoring.score import Tally, check_removals, prepared, read, run_pass

ROUNDING = 1e-5  # losses closer than this are equal


@dataclass(frozen=True)
class Choice:
    """The hypothesis to take, and what the decision cost.

    >>> net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(4), nn.Linear(4, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> choice = fastbcd.choose(net, [torch.tensor([2, 3])], data, adt=100.0)
    >>> choice.removal, choice.accepted, choice.tried
    (tensor([2, 3]), True, 1)
    """

    number: int
    removal: Tensor  # LongTensor[D]
    accepted: bool  # its drop is below ADT; otherwise the best of all
    tried: int  # hypotheses drawn from the source
    drops: dict[int, float]  # by number, of those that were scored on all images
    images: int  # hypothesis-images that were run, at most tried * samples
    correct: int  # of the chosen hypothesis, on all images
    loss: float
    base_correct: int
    base_loss: float
    samples: int
    engine: str


def choose(
    net: nn.Module,
    hypotheses: Iterable[Tensor],
    data: Any,
    *,
    adt: float,
    engine: str | Engine = "auto",
    early: bool = True,
) -> Choice:
    """Take the first hypothesis with a drop below `adt` percentage points, else the best.

    Args:
        hypotheses: removals, LongTensor[D] each. They are drawn in waves of 1, 2, 4, ...
            `Engine.wave`, and none after one is accepted: if that is the first, it is the only
            one scored.
        early: stop scoring a hypothesis when its outcome is certain. Never changes the choice.
        engine: as in `score`. It never changes the choice.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> choose(net, [torch.tensor([0]), torch.tensor([1])], data, adt=100.0).number
    0
    """
    engine = as_engine(engine)
    images, current = read(net, data)
    source = _numbered(current, hypotheses)
    removals = dict(islice(source, 1))
    if not removals:
        raise ValueError("there is no hypothesis to choose from")
    with prepared(net, current, [*removals.values()], images, engine, engine.wave) as plan:
        search = _Search(plan, images, adt, early)
        size = 1
        while removals:
            accepted = search.wave(removals)
            if accepted is not None:
                return search.choice(accepted, True)
            size = min(2 * size, engine.wave)
            removals = dict(islice(source, size))
        return search.choice(search.best(), False)


def _numbered(current: MaskSet, hypotheses: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    for number, ids in enumerate(hypotheses):
        yield number, check_removals(current, [ids], first=number)[0]


def beats(one: tuple[int, float], other: tuple[int, float]) -> bool:
    """Is (correct, loss) better than that of a lower-numbered hypothesis?

    >>> beats((9, 1.0), (8, 0.5)), beats((9, 1.0), (9, 1.1)), beats((9, 1.0), (9, 1.0 + 1e-9))
    (True, True, False)
    """
    if one[0] != other[0]:
        return one[0] > other[0]
    return one[1] < other[1] - ROUNDING * max(1.0, other[1])


class _Search:
    """One step's search: what the base gets right, and what is known of each hypothesis."""

    def __init__(self, plan: Plan, data: ImageData, adt: float, early: bool) -> None:
        self.plan, self.data, self.adt, self.early = plan, data, adt, early
        self.samples = len(data)
        self.removals: dict[int, Tensor] = {}
        self.done: dict[int, tuple[int, float]] = {}  # scored on all images: correct, loss
        self.waiting: dict[int, Tally] = {}  # certain to fail: their counts so far
        self.images = 0
        # After how many images the base has how many right.
        self.base_after = {0: 0}

        def note(tally: Tally) -> set[int]:
            self.base_after[tally.seen] = tally.correct[-1]
            return {-1}  # go on to the end

        self.base_loss = run_pass(plan, data, {}, note).mean_loss(-1)
        self.base_correct = self.base_after[self.samples]

    def passes(self, difference: int) -> bool:
        """Is a drop by this many correct answers below ADT?"""
        return 100.0 * difference / self.samples < self.adt

    def wave(self, removals: dict[int, Tensor]) -> int | None:
        """Score some hypotheses; the number of the one to accept, or None."""
        self.removals.update(removals)
        alive, accepted, before = set(removals), None, 0

        def decide(tally: Tally) -> set[int]:
            nonlocal alive, accepted, before
            self.images += len(alive) * (tally.seen - before)
            before = tally.seen
            ahead = self.samples - tally.seen
            if not ahead:
                self.done.update({k: (tally.correct[k], tally.mean_loss(k)) for k in alive})
            elif not self.early:
                return alive
            base = self.base_after[tally.seen]
            wrong = ahead - (self.base_correct - base)  # images ahead that the base gets wrong
            behind = {k: base - tally.correct[k] for k in alive}
            sure = [k for k in alive if self.passes(behind[k] + ahead - wrong)]
            lost = {k for k in alive if not self.passes(behind[k] - wrong)}
            if sure and lost >= {k for k in alive if k < min(sure)}:
                # It is decided; only its own numbers are still needed.
                accepted = min(sure)
                alive = {accepted}
                return alive if ahead else set()
            if not ahead:
                return set()
            self.waiting.update({k: tally.alone(k) for k in lost})
            alive -= lost
            alive -= {k for k in alive if sure and k > min(sure)}
            return alive

        run_pass(self.plan, self.data, removals, decide, base=False)
        return accepted

    def finish(self) -> None:
        """Score those that were set aside to the end, except those that cannot be the best."""
        while self.waiting:
            # One hypothesis is certain to end with at least this many correct answers.
            floor = max([t.correct[k] for k, t in self.waiting.items()]
                        + [c for c, _ in self.done.values()])  # fmt: skip
            k, begun = min(self.waiting.items(), key=lambda item: item[1].seen)
            if begun.correct[k] + self.samples - begun.seen < floor:
                del self.waiting[k]
                continue
            # Those that stopped after the same image are continued together.
            group = [j for j, t in self.waiting.items() if t.seen == begun.seen]
            tally = Tally.together({j: self.waiting.pop(j) for j in group})
            self.images += len(group) * (self.samples - tally.seen)
            removals = {j: self.removals[j] for j in group}
            tally = run_pass(self.plan, self.data, removals, base=False, begun=tally)
            self.done.update({j: (tally.correct[j], tally.mean_loss(j)) for j in group})

    def best(self) -> int:
        """The fallback: most correct answers, then smaller loss, then lower number."""
        self.finish()
        numbers = iter(sorted(self.done))
        best = next(numbers)
        for k in numbers:
            if beats(self.done[k], self.done[best]):
                best = k
        return best

    def choice(self, number: int, accepted: bool) -> Choice:
        drops = {
            k: 100.0 * (self.base_correct - c) / self.samples for k, (c, _) in self.done.items()
        }
        return Choice(
            number, self.removals[number], accepted, len(self.removals), drops, self.images,
            *self.done[number], self.base_correct, self.base_loss, self.samples,
            self.plan.engine.name,
        )  # fmt: skip
