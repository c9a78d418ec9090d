"""A whole BCD run on real data: fastbcd against a reimplementation of the authors' loop.

    FASTBCD_DATA=folder python benchmarks/end_to_end.py [--relus 4000] [--steps 10] ...

The folder holds `cifar10-12k.npz` and `resnet20-cifar10.safetensors`. ResNet-20 is brought to
`--relus` ReLUs first (least salient first, with fine-tuning; not timed, kept in --out, both runs
begin there). Then both remove DRC ReLUs per step and fine-tune only where no hypothesis met ADT.
Beside the seconds of the clock stand those of the processor, which other work on the machine
changes less; with OMP_NUM_THREADS=1 no thread spends them waiting for another.

The authors' way: one hypothesis after the other through the eager NCHW net with SNL's activation,
and a training step that runs the teacher on every batch. Where their code departs from the paper
(scores on augmented images, a stale baseline, an untrimmed last step) the paper is followed, so
that both runs decide by the same rule: they take the same hypotheses until rounding in
fine-tuning makes the weights differ. Hypotheses, views and seeds are the same.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from test_finetuning import AuthorsStep
from torch import Tensor

import fastbcd
from arms import cifar10, reduced
from fastbcd.masking.masks import MaskSet
from fastbcd.scoring.accuracy import accuracy
from fastbcd.scoring.decision import fewer
from fastbcd.training.settings import Finetune
from table import machine


class Authors:
    """Their loop, with its seconds by phase."""

    def __init__(self, net, teacher, train, score_on, test, options) -> None:
        self.net, self.teacher, self.train, self.options = net, teacher, train, options
        self.score_on, self.test = score_on, test
        self.seconds: dict[str, float] = defaultdict(float)
        self.step = AuthorsStep(net, teacher, last=False, compiled=False)
        self.sites = [
            self.step.net.get_submodule(s.name) for s in fastbcd.masks(net).sites
        ]

    def write(self, masks: MaskSet) -> None:
        for site, bits in zip(self.sites, masks.split(), strict=True):
            site.alphas.copy_(bits.float().unsqueeze(0))

    def evaluate(self, data: fastbcd.ImageData) -> tuple[int, float]:
        self.step.net.eval()
        correct, loss = 0, 0.0
        with torch.no_grad():
            for x, labels in data.batches(128):
                logits = self.step.net(x)
                correct += int((logits.argmax(1) == labels).sum())
                loss += float(F.cross_entropy(logits.double(), labels, reduction="sum"))
        return correct, loss / len(data)

    def search(self, masks: MaskSet, number: int) -> tuple[int, Tensor, bool]:
        """One hypothesis at a time, until one meets ADT."""
        o, samples = self.options, len(self.score_on)
        self.write(masks)
        base, _ = self.evaluate(self.score_on)
        best: tuple[int, Tensor, tuple[int, float]] | None = None
        for trial in range(o.rt):
            ids = masks.sample(o.drc, seed=o.seed, step=number, trial=trial)
            self.write(masks.without(ids))
            found = self.evaluate(self.score_on)
            if 100.0 * (base - found[0]) / samples < o.adt:
                return trial, ids, True
            better = best is None or found[0] > best[2][0]
            if better or (found[0] == best[2][0] and fewer(found[1], best[2][1])):
                best = trial, ids, found
        assert best is not None
        return best[0], best[1], False

    def finetune(self, number: int) -> None:
        """A new SGD and a new cosine over the epochs."""
        o = self.options
        self.step.net.train()
        self.step.optimizer = torch.optim.SGD(
            self.step.net.parameters(), o.lr, momentum=0.9, weight_decay=5e-4
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.step.optimizer, o.epochs
        )
        for epoch in range(o.epochs):
            for x, labels, _, _ in self.train.train_batches(
                128, seed=o.seed, step=number, epoch=epoch
            ):
                self.step(x, labels)
            schedule.step()

    def run(self) -> list[tuple[int, bool, float]]:
        masks = MaskSet(fastbcd.masks(self.net).sites, fastbcd.masks(self.net).bits)
        history = []
        for number in range(1, self.options.steps + 1):
            clock = time.perf_counter()
            trial, ids, accepted = self.search(masks, number)
            masks = masks.without(ids)
            self.write(masks)
            self.seconds["score"] += time.perf_counter() - clock
            clock = time.perf_counter()
            if not accepted:
                self.finetune(number)
            self.seconds["finetune"] += time.perf_counter() - clock
            clock = time.perf_counter()
            due = number % self.options.test_every == 0 or number == self.options.steps
            percent = (
                100.0 * self.evaluate(self.test)[0] / len(self.test)
                if due
                else math.nan
            )
            self.seconds["test"] += time.perf_counter() - clock
            history.append((trial, accepted, percent))
            print(
                f"  authors step {number}: hypothesis {trial}, {percent:.2f} %",
                flush=True,
            )
        return history


def clocks() -> tuple[float, float]:
    """Seconds of the clock and of the processor, all threads."""
    return time.perf_counter(), time.process_time()


def since(begun: tuple[float, float]) -> list[float]:
    return [now - then for now, then in zip(clocks(), begun, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--relus", type=int, default=4_000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--drc", type=int, default=100)
    parser.add_argument("--rt", type=int, default=10)
    parser.add_argument("--adt", type=float, default=0.1)
    parser.add_argument("--samples", type=int, default=1_000, help="images to score on")
    parser.add_argument(
        "--train", type=int, default=3_000, help="images to fine-tune on"
    )
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--confidence", type=float, help="of fastbcd's decisions (exact)"
    )
    parser.add_argument("--test-every", type=int, default=1, help="steps, in both runs")
    parser.add_argument(
        "--keep", type=float, default=0.5, help="of the ReLUs per epoch, before"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/end_to_end"))
    o = parser.parse_args()
    o.out.mkdir(parents=True, exist_ok=True)
    problem = cifar10(10_000)
    tuning = Finetune(epochs=1, lr=0.02)
    net = reduced(problem, o.relus, keep=o.keep, tuning=tuning, out=o.out)
    teacher, test, train = problem.dense, problem.test, problem.train.first(o.train)
    print(machine())
    print(
        f"ResNet-20 at {o.relus:,} ReLUs, {accuracy(net, test):.2f} % on {len(test):,} test images"
    )
    print(f"{vars(o)}, {len(train):,} train images")
    twin = copy.deepcopy(net)
    begun = clocks()
    run = fastbcd.bcd(
        net, train, o.relus - o.steps * o.drc, drc=o.drc, rt=o.rt, adt=o.adt, samples=o.samples,
        finetune=Finetune(epochs=o.epochs, lr=o.lr), finetune_when="on_reject", teacher=teacher,
        test=test, seed=o.seed, confidence=o.confidence, test_every=o.test_every, progress=True,
    )  # fmt: skip
    ours = since(begun)
    loop = Authors(twin, teacher, train, train.first(o.samples), test, o)
    begun = clocks()
    history = loop.run()
    theirs = since(begun)
    seconds: dict[str, float] = defaultdict(float)
    for step in run.history:
        for phase, value in step.seconds.items():
            seconds[phase] += value
    print("\nstep   fastbcd: hypothesis, test %    authors: hypothesis, test %")
    for step, (trial, accepted, percent) in zip(run.history, history, strict=True):
        words = ["accepted" if a else "fine-tuned" for a in (step.accepted, accepted)]
        mine = math.nan if step.test_accuracy is None else step.test_accuracy
        print(f"{step.number:>4}   {step.chosen:>10} {words[0]:>10} {mine:>6.2f}"
              f"   {trial:>10} {words[1]:>10} {percent:>6.2f}")  # fmt: skip
    print("\nseconds       fastbcd   authors")
    for phase in ("propose", "score", "finetune", "test"):
        print(f"{phase:<12} {seconds[phase]:>8.1f} {loop.seconds[phase]:>9.1f}")
    for what, one, other in zip(("all", "processor"), ours, theirs, strict=True):
        print(f"{what:<12} {one:>8.1f} {other:>9.1f}   {other / one:.1f}x")
    if o.confidence is not None:
        seen = sum(sum(step.images.values()) for step in run.history) / len(run.history)
        print(
            f"images per step of fastbcd, with the base: {seen:,.0f} of {o.samples:,} each"
        )
    last, error = (run.history[-1].test_accuracy, history[-1][2]), 50 / len(test) ** 0.5
    print(f"test accuracy at the end: {last[0]:.2f} %, authors {last[1]:.2f} % (standard error of "
          f"each on {len(test):,} images: {error:.1f} at most)")  # fmt: skip
    tuned = [i for i, step in enumerate(run.history) if not step.accepted]
    first = tuned[0] if tuned else len(history)
    agree = sum(
        s.chosen == t for s, (t, _, _) in zip(run.history, history, strict=True)
    )
    before = min(first + 1, len(history))
    same = all(run.history[i].chosen == history[i][0] for i in range(before))
    verdict = "equal" if same else "NOT equal"
    print(f"choices until the first fine-tune: {verdict} ({before} steps); "
          f"equal in {agree} of {len(history)} steps")  # fmt: skip


if __name__ == "__main__":
    main()
