"""choose: the hypothesis that a step takes, scoring no more than the decision needs.

The rule (Algorithm 1): the lowest-numbered hypothesis whose accuracy drops by less than ADT
percentage points; if none does, the one that drops least, ties by smaller loss, then by number.
Losses count as equal within 1e-5, the rounding that engines and batch sizes may differ by.

What is certain is not computed. A hypothesis with c correct answers and n images ahead ends with c
to c + n. If c is enough, it is certain to pass, and later numbers do not matter. If c + n is not,
it is certain to fail: it is set aside, and continued only if no hypothesis passes and it can still
be the best. These are facts about counts, so the choice is that of the one-by-one loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch import Tensor, nn

from fastbcd.data.images import ImageData
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
    net: nn.Module, hypotheses: Iterable[Tensor], data: Any, *, adt: float,
    engine: str | Engine = "auto", early: bool = True,
) -> Choice:  # fmt: skip
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
    source = ((k, check_removals(current, [h], k)[0]) for k, h in enumerate(hypotheses))
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


def beats(one: tuple[int, float], other: tuple[int, float]) -> bool:
    """Is (correct, loss) better than that of a lower-numbered hypothesis?

    >>> beats((9, 1.0), (8, 0.5)), beats((9, 1.0), (9, 1.1)), beats((9, 1.0), (9, 1.0 + 1e-9))
    (True, True, False)
    """
    if one[0] != other[0]:
        return one[0] > other[0]
    return one[1] < other[1] - ROUNDING * max(1.0, other[1])


class _Search:
    """One step's search: the base's counts, and the counts of each hypothesis so far."""

    def __init__(self, plan: Plan, data: ImageData, adt: float, early: bool) -> None:
        self.plan, self.data, self.adt, self.early = plan, data, adt, early
        self.removals: dict[int, Tensor] = {}
        self.tallies: dict[int, Tally] = {}
        self.base_correct, self.base_loss = run_pass(plan, data, {}).mean(-1)

    def drop(self, correct: int) -> float:
        return 100.0 * (self.base_correct - correct) / len(self.data)

    def passes(self, correct: int) -> bool:
        return self.drop(correct) < self.adt

    def wave(self, removals: dict[int, Tensor]) -> int | None:
        """Score some hypotheses; the number of the one to accept, or None."""
        self.removals.update(removals)
        alive, accepted = set(removals), None

        def decide(tally: Tally) -> set[int]:
            nonlocal alive, accepted
            self.tallies.update({k: tally.part([k]) for k in alive})
            ahead = len(self.data) - tally.seen
            if ahead and not self.early:
                return alive
            sure = [k for k in alive if self.passes(tally.sums[k][0])]
            lost = {k for k in alive if not self.passes(tally.sums[k][0] + ahead)}
            if sure and lost >= {k for k in alive if k < min(sure)}:
                # It is decided; only its own numbers are still needed.
                accepted = min(sure)
                alive = {accepted}
            else:
                alive = {k for k in alive - lost if not sure or k <= min(sure)}
            return alive if ahead else set()

        run_pass(self.plan, self.data, removals, decide, base=False)
        return accepted

    def best(self) -> int:
        """The fallback: most correct answers, then smaller loss, then lower number.

        Those that were set aside are scored to the end, except those that cannot be the best.
        """
        samples = len(self.data)
        while True:
            # One hypothesis is certain to end with at least this many correct answers.
            floor = max(t.sums[k][0] for k, t in self.tallies.items())
            left = {k: t for k, t in self.tallies.items()
                    if t.seen < samples and t.sums[k][0] + samples - t.seen >= floor}  # fmt: skip
            if not left:
                break
            # Those that stopped after the same image are continued together.
            begun = min(left.values(), key=lambda t: t.seen)
            group = [k for k, t in left.items() if t.seen == begun.seen]
            begun = replace(begun, sums={k: left[k].sums[k] for k in group})
            removals = {k: self.removals[k] for k in group}
            tally = run_pass(self.plan, self.data, removals, base=False, begun=begun)
            self.tallies.update({k: tally.part([k]) for k in group})
        best, *rest = sorted(k for k, t in self.tallies.items() if t.seen == samples)
        for k in rest:
            best = k if beats(self.tallies[k].mean(k), self.tallies[best].mean(best)) else best
        return best

    def choice(self, number: int, accepted: bool) -> Choice:
        samples, tallies = len(self.data), self.tallies
        drops = {k: self.drop(t.sums[k][0]) for k, t in tallies.items() if t.seen == samples}
        return Choice(
            number, self.removals[number], accepted, len(self.removals), drops,
            sum(t.seen for t in tallies.values()), *tallies[number].mean(number),
            self.base_correct, self.base_loss, samples, self.plan.engine.name,
        )  # fmt: skip
