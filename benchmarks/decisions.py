"""How many images a decision of BCD takes: one by one, exact, and with a confidence.

    FASTBCD_DATA=folder python benchmarks/decisions.py [--relus 100000 15000 4000] [--quick] ...
    python benchmarks/decisions.py --data fashion-mnist --relus 3528 --drc 23 ...

ResNet-20 on CIFAR-10, or the net of the demo on the embedded images, is brought to each number of
ReLUs (least salient first, with fine-tuning). There, the answers of the net and of --hypotheses
uniform hypotheses to all images are recorded for some consecutive steps; the best hypothesis is the
base of the next. Decisions are then made from the records, with other random orders, for each ADT,
by the code that `choose` runs. Everything is kept in --out: the same command continues where it
stopped.

Counted are images run through a net, for the base and all hypotheses of a step. `loop` is the
paper's: all images for each. `exact` stops as `choose` does without a confidence. For 50,000
images those of the records are drawn with replacement. "First passes" are the decisions in which
the first hypothesis is clearly accepted: its drop is below half of ADT.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fastbcd
from arms import Problem, cifar10, fashion_mnist, reduced
from fastbcd.cli.demo import trained_resnet
from fastbcd.data.for_net import data_for
from fastbcd.scoring.answers import prepared
from fastbcd.scoring.confident import Confident, visiting_order
from fastbcd.scoring.decision import Selection
from fastbcd.scoring.engine import Engine
from table import machine

CONFIDENCES = (0.99, 0.999)


def record(
    net: nn.Module, data: fastbcd.ImageData, removals: dict[int, Tensor]
) -> np.ndarray:
    """Margins and losses of the base and the hypotheses, [1 + H, 2, N]."""
    images = data_for(net, data)
    with prepared(net, removals, images, Engine()) as answers:
        found = answers([-1, *removals], 0, len(images))
    return torch.stack([*found.values()]).numpy()


def records(net: nn.Module, data: fastbcd.ImageData, count: int, o: argparse.Namespace):
    """The answers of each step, recorded or read again."""
    for step in range(o.steps):
        current = fastbcd.masks(net).copy()
        removals = {
            k: current.sample(o.drc, seed=o.seed, step=step, trial=k)
            for k in range(o.hypotheses)
        }
        path = o.out / f"answers-{count}-{step}-{o.drc}.npy"
        if not path.exists():
            with open(path.with_suffix(".tmp"), "wb") as file:
                np.save(file, record(net, data, removals))
            path.with_suffix(".tmp").rename(path)
            print(f"recorded {path.name}", flush=True)
        found = np.load(path)
        best = int((found[1:, 0] > 0).sum(1).argmax())
        fastbcd.set_masks(net, current.without(removals[best]))
        yield found


def exact(right: np.ndarray, adt: float) -> tuple[int, bool, int]:
    """The choice, whether it passes, and the images that a certain decision takes; [1 + H, N]."""
    base, total = right[0].sum(), right.shape[1]
    passes = 100.0 * (base - right.sum(1)) / total < adt
    sums, ahead = right.cumsum(1), total - np.arange(1, total + 1)
    used = total
    for k, row in enumerate(sums[1:]):
        sure = 100.0 * (base - row) / total < adt
        lost = 100.0 * (base - row - ahead) / total >= adt
        if passes[k + 1]:
            return k, True, used + int(sure.argmax()) + 1
        used += int(lost.argmax()) + 1
    best = int(right[1:].sum(1).argmax())
    # The fallback continues those that can still be the best: at least the best one itself.
    return best, False, used + total - int((100.0 * (base - sums[best + 1] - ahead) / total
                                            >= adt).argmax()) - 1  # fmt: skip


def sampled(
    rows: np.ndarray,
    adt: float,
    confidence: float,
    margins,
    total: int,
    seed: int,
    step: int,
):
    """(choice, passes, images, margins) from the records of one step."""
    visits = visiting_order(
        total, margins, adt=adt, confidence=confidence, seed=seed, step=step
    )
    place = visits.order.numpy()

    def visit(numbers, begin, end):
        return {k: torch.from_numpy(rows[k + 1][:, place[begin:end]]) for k in numbers}

    decision = Confident(visits, adt=adt, confidence=confidence)
    search = Selection(visit, decision)
    if margins is None:
        search.complete(-1)
    begins, waves = [0, 1, 3, *range(7, len(rows), 8)], []
    for first, last in pairwise([*begins, len(rows)]):
        waves.append([*range(first, min(last, len(rows) - 1))])
    choice, passes = search.choose(wave for wave in waves if wave)
    images = sum(map(decision.seen, decision.answers))
    return choice, passes, images, decision.record(choice)["margins"]


def compare(
    steps: list[np.ndarray], adt: float, total: int, seeds: int
) -> dict[str, dict]:
    """Mean images per decision, by kind of decision; and how many decisions differ."""
    used: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    differ: dict[str, int] = defaultdict(int)
    for seed in range(seeds):
        places = np.arange(steps[0].shape[2])
        if total != len(places):
            places = np.random.default_rng(seed).integers(0, len(places), total)
        margins: dict[float, Tensor | None] = dict.fromkeys(CONFIDENCES)
        for number, step in enumerate(steps):
            rows = step[:, :, places]
            right = rows[:, 0] > 0
            choice, passes, images = exact(right, adt)
            drop = 100.0 * (right[0].sum() - right[1].sum()) / total
            kinds = ["all", "first passes" if drop < adt / 2 else "others"]
            tried = choice + 1 if passes else len(rows) - 1
            counts: dict[str, int] = {"loop": (1 + tried) * total, "exact": images}
            for p in CONFIDENCES:
                mine, passed, counts[str(p)], margins[p] = sampled(
                    rows, adt, p, margins[p], total, seed, number
                )
                values = right[1:].sum(1)
                same = passed == passes and (mine == choice or (
                    not passes and values[mine] == values[choice]))  # fmt: skip
                differ[str(p)] += not same
            for kind in (
                kinds if number else kinds[:0]
            ):  # the first step knows no margins
                for way, value in counts.items():
                    used[kind][way].append(value)
    return {"used": used, "differ": differ}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--quick",
        action="store_true",
        help="a smoke test: tiny, on the embedded images",
    )
    add(
        "--data",
        choices=("cifar10", "fashion-mnist"),
        default="cifar10",
        help="(%(default)s)",
    )
    add("--out", type=Path, help="what is recorded (runs/decisions)")
    add(
        "--relus",
        type=int,
        nargs="+",
        default=[100_000, 15_000, 4_000],
        help="(%(default)s)",
    )
    add("--adts", type=float, nargs="+", default=[0.3, 1.0], help="(%(default)s)")
    add("--images", type=int, default=10_000, help="(%(default)s)")
    add("--more", type=int, default=50_000, help="drawn from them (%(default)s)")
    add("--steps", type=int, default=5, help="at each number of ReLUs (%(default)s)")
    add("--hypotheses", type=int, default=8, help="in a step: RT (%(default)s)")
    add("--drc", type=int, default=100, help="(%(default)s)")
    add("--seeds", type=int, default=7, help="random orders (%(default)s)")
    add(
        "--keep",
        type=float,
        default=0.7,
        help="of the ReLUs, per epoch on the way (%(default)s)",
    )
    add("--epochs", type=int, default=1, help="(%(default)s)")
    add("--lr", type=float, default=0.02, help="(%(default)s)")
    add("--batch", type=int, default=128, help="(%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    o = parser.parse_args()
    o.out = o.out or Path("runs/decisions-quick" if o.quick else "runs/decisions")
    o.out.mkdir(parents=True, exist_ok=True)
    if o.quick:
        o.relus, o.drc, o.images, o.more, o.keep = [1_000], 5, 800, 3_000, 0.1
        o.steps, o.hypotheses, o.seeds = 2, 3, 1
        problem = fashion_mnist(o.images, width=4, epochs=1, out=o.out)
    elif o.data == "fashion-mnist":
        images = (
            fastbcd.load("fashion-mnist-mini", split) for split in ("train", "test")
        )
        problem = Problem(trained_resnet(), *images)
        o.images = len(problem.train)
    else:
        problem = cifar10(o.images)
    print(machine(), flush=True)
    decisions, differ = 0, defaultdict(int)
    print(f"{'':<34}{'loop':>10}{'exact':>10}" + "".join(f"{p:>10}" for p in CONFIDENCES)
          + "   exact : " + ", ".join(map(str, CONFIDENCES)))  # fmt: skip
    tuning = fastbcd.Finetune(
        epochs=o.epochs,
        lr=o.lr,
        batch_size=o.batch,
        padding=2 if "mnist" in o.data else 4,
    )
    for count in o.relus:
        net = reduced(problem, count, keep=o.keep, tuning=tuning, out=o.out)
        steps = list(records(net, problem.train, count, o))
        flips = np.mean([(s[1:, 0] > 0) != (s[:1, 0] > 0) for s in steps])
        right = np.mean([s[0, 0] > 0 for s in steps])
        print(
            f"{count:,} ReLUs: {right:.1%} correct, {flips:.2%} of the answers change",
            flush=True,
        )
        for total in (o.images, o.more):
            for adt in o.adts:
                found = compare(steps, adt, total, o.seeds)
                decisions += len(steps) * o.seeds
                for p, number in found["differ"].items():
                    differ[p] += number
                for kind, ways in sorted(found["used"].items()):
                    mean = {way: np.mean(values) for way, values in ways.items()}
                    label = f"{total:>7,} images, ADT {adt}, {kind}"
                    ratios = ", ".join(
                        f"{mean['exact'] / mean[str(p)]:.1f}x" for p in CONFIDENCES
                    )
                    print(f"{label:<34}" + "".join(f"{v:>10,.0f}" for v in mean.values())
                          + f"   {ratios} ({len(ways['loop'])})", flush=True)  # fmt: skip
    for p in CONFIDENCES:
        print(f"confidence {p}: {differ[str(p)]} of {decisions} decisions differ from the exact "
              f"ones; the promise is {(1 - p) * decisions:.1f} at most on average")  # fmt: skip


if __name__ == "__main__":
    main()
