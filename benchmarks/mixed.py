"""Mixed precision against float32: are counts and choices the same, and how much runs again?

    FASTBCD_DATA=folder python benchmarks/mixed.py [--images 500] [--nets demo resnet20]

A CPU emulates bf16 by autocast, so that this says nothing about speed. Each net is brought to some
numbers of ReLUs, least salient first, with each replacement and an epoch of training. Hypotheses of
100 ReLUs are scored in float32, in mixed precision, and in bf16 without the guard (a bound of 0);
`choose` decides at several ADT, exactly and with a confidence.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from unittest import mock

from torch import Tensor, nn

import fastbcd
from arms import Problem, cifar10
from fastbcd import Engine, choose, score
from fastbcd.cli.demo import trained_resnet
from fastbcd.scoring import mixed
from table import machine

FULL = Engine("stacked", precision="float32")
MIXED = Engine("stacked", precision="mixed")
ADTS = (-100.0, 0.0, 0.3, 1.0)
SHARES = (0.9, 0.5, 0.15)


def demo(images: int) -> Problem:
    """The net of the demo on the embedded images."""
    train, test = (
        fastbcd.load("fashion-mnist-mini", split) for split in ("train", "test")
    )
    return Problem(trained_resnet(), train.first(images), test)


def thinned(problem: Problem, replacement: str, share: float) -> nn.Module:
    """The net with this share of its ReLUs."""
    net = copy.deepcopy(problem.dense)
    if replacement == "line":
        net = fastbcd.to_line(net, problem.train)
    if replacement == "poly":
        net = fastbcd.to_poly(net, problem.train)
    effect = fastbcd.saliency(net, problem.train)
    masks = fastbcd.masks(net)
    gone = effect.argsort()[: round((1 - share) * masks.count())]
    fastbcd.set_masks(net, masks.without(gone))
    tune = fastbcd.Finetune(epochs=1, lr=0.003, padding=2)
    fastbcd.Finetuner(net, problem.train, tune).run(1)
    return net.eval()


def compare(net: nn.Module, data: fastbcd.ImageData, hypotheses: int) -> list[str]:
    """Of one net: what differs in counts and in choices, and the share that ran again."""
    masks = fastbcd.masks(net)
    removals = [masks.sample(100, seed=1, step=0, trial=t) for t in range(hypotheses)]
    full = score(net, removals, data, FULL)
    fast = score(net, removals, data, MIXED)
    with mock.patch.object(mixed, "SAFETY", 0.0):
        bare = score(net, removals, data, MIXED)
    choices = list(itertools.product(ADTS, (None, 0.99)))
    same = 0
    shares = []
    for adt, confidence in choices:
        options = {"adt": adt, "confidence": confidence}
        one, other = (
            choose(net, removals, data, engine=e, **options) for e in (FULL, MIXED)
        )
        same += (one.number, one.accepted) == (other.number, other.accepted)
        shares.append(other.rescored or 0.0)
    return [
        f"{wrong(fast, full)}",
        f"{wrong(bare, full)}",
        f"{len(choices) - same} of {len(choices)}",
        f"{sum(shares) / len(shares):.1%}",
    ]


def wrong(scores: fastbcd.Scores, truth: fastbcd.Scores) -> int:
    """Counts, of the base and the hypotheses, that are not those of float32."""
    assert isinstance(scores.correct, Tensor)
    counts = int((scores.correct != truth.correct).sum())
    return counts + int(scores.base_correct != truth.base_correct)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--hypotheses", type=int, default=7)
    parser.add_argument("--nets", nargs="+", default=["demo", "resnet20"])
    options = parser.parse_args()
    print(machine())
    print(
        f"{options.images} images, {options.hypotheses} hypotheses and the base\n"
        "net       replacement    ReLUs   other counts: mixed, bf16   other choices   again"
    )
    for name in options.nets:
        make = {"demo": demo, "resnet20": cifar10}[name]
        problem = make(options.images)
        for replacement, share in itertools.product(
            ("identity", "line", "poly"), SHARES
        ):
            net = thinned(problem, replacement, share)
            count = fastbcd.masks(net).count()
            counts, bare, choices, again = compare(
                net, problem.train, options.hypotheses
            )
            print(
                f"{name:<10}{replacement:<12}{count:>8,}   {counts:>19} {bare:>6}"
                f"   {choices:>13}   {again:>5}",
                flush=True,
            )


if __name__ == "__main__":
    main()
