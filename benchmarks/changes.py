"""Changes to `fastbcd.linearize` that it has no argument for, as patches: see settings.py.

Each function returns a context manager. benchmarks/RESULTS.md has what came of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import fastbcd
from fastbcd.descent import saliency
from fastbcd.descent.bcd import Descent
from fastbcd.descent.proposals import Saliency, ranking
from fastbcd.descent.step import Step
from fastbcd.runs.fingerprint import restore, take
from fastbcd.scoring.choose import Choice, choose
from fastbcd.training import optimizers
from fastbcd.training.rates import cosine

Change = AbstractContextManager[Any]
Rule = Callable[[Descent, Step, float], float]  # the step's learning rate instead of the given one
DAMAGED = 0.2  # share of the ReLUs below which the rate is the whole one: 40,000 of ResNet-20
SWAPPED = 0.3  # ReLUs that a step exchanges, as a share of those it removes


def one_optimizer() -> Change:
    """The optimizer keeps its momentum from step to step."""
    make = optimizers.make_optimizer
    made: dict[nn.Module, torch.optim.Optimizer] = {}

    def kept(net: nn.Module, *how: Any) -> torch.optim.Optimizer:
        if net not in made:
            made[net] = make(net, *how)
        return made[net]

    return patch.object(optimizers, "make_optimizer", kept)


def rates(rule: Rule) -> Change:
    """Other learning rates."""
    train = Descent.train

    def other(self: Descent, step: Step, *, rates: list[float], **how: Any) -> Any:
        return train(self, step, rates=[rule(self, step, rate) for rate in rates], **how)

    return patch.object(Descent, "train", other)


def one_cosine() -> Change:
    """The learning rate falls on one cosine from the first step on."""
    return rates(
        lambda run, step, rate: cosine(run.finetune.lr, run.epochs - run.left(), run.epochs)
    )


def by_damage() -> Change:
    """A tenth of the learning rate until few ReLUs are left."""

    def rule(run: Descent, step: Step, rate: float) -> float:
        return rate if step.after <= DAMAGED * fastbcd.masks(run.net).total else 0.1 * rate

    return rates(rule)


def cross_entropy() -> Change:
    """Saliency of the cross-entropy alone, without the teacher."""
    return patch("fastbcd.descent.linearize.Saliency", lambda distilled: Saliency())


def per_site() -> Change:
    """Saliency in units of its mean over the kept ReLUs of a site."""
    measure = Saliency.saliency

    def other(self: Saliency, net: nn.Module, data: Any) -> Tensor:
        found = measure(self, net, data)
        for part in found.split([site.numel for site in fastbcd.masks(net).sites]):
            if (kept := part.isfinite()).any():
                part /= part[kept].mean().clamp(min=1e-30)
        return found

    return patch.object(Saliency, "saliency", other)


@contextmanager
def swaps() -> Iterator[None]:
    """A step also removes some more ReLUs, and those of largest first-order gain return."""
    search = Descent._search

    def other(self: Descent) -> Step:
        step, net = search(self), self.net
        kept, count = fastbcd.masks(net).copy(), int(SWAPPED * step.drc)
        least = ranking(self.proposal.saliency(net, self.scored), kept.bits)[:count]
        fastbcd.set_masks(net, less := kept.without(least))
        gains = saliency._mean(net, self.scored, False, None, None, self.proposal.given)
        back = ranking(-gains, ~less.bits)[:count]
        fastbcd.set_masks(net, now := less.including(back))
        step.sites = list(now.counts().values())
        return step

    with patch.object(Descent, "_search", other):
        yield


@contextmanager
def new_statistics() -> Iterator[None]:
    """Statistics of batch norm are estimated before proposals, and for each hypothesis."""
    search = Descent._search

    def other(self: Descent) -> Step:
        estimate(self.net, self.scored)
        return search(self)

    with ExitStack() as stack:
        stack.enter_context(patch.object(Descent, "_search", other))
        stack.enter_context(patch("fastbcd.descent.bcd.choose", choose_estimated))
        yield


def choose_estimated(
    net: nn.Module, hypotheses: Iterable[Tensor], data: Any, *, adt: float, **how: Any
) -> Choice:
    """`choose`, with the statistics of each hypothesis in its scores."""
    state, kept, drops = take(net), fastbcd.masks(net).copy(), dict[int, float]()
    base, removals = fastbcd.accuracy(net, data), list[Tensor]()
    for number, removal in enumerate(hypotheses):
        fastbcd.set_masks(net, kept.without(removal))
        estimate(net, data)
        removals.append(removal)
        drops[number] = base - fastbcd.accuracy(net, data)
        restore(net, state)
        if drops[number] < adt:
            break
    accepted = drops[number] < adt
    best = number if accepted else min(drops, key=drops.__getitem__)
    choice = choose(net, [removals[best]], data, adt=adt, **how)
    return replace(choice, number=best, accepted=accepted, drops=drops)


@torch.no_grad()
def estimate(net: nn.Module, data: fastbcd.ImageData) -> None:
    """Set the statistics of batch norm to those of the images."""
    norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    net.train()
    for x, _ in data.batches(100):
        net(x)
    net.eval()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
