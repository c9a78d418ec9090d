"""A whole BCD run on real data: fastbcd against a reimplementation of the authors' loop.

    FASTBCD_DATA=folder python benchmarks/end_to_end.py [--relus 4000] [--steps 10] ...

The folder holds `cifar10-12k.npz` and `resnet20-cifar10.safetensors`. ResNet-20 is brought to
`--relus` ReLUs first (at random, with fine-tuning; not timed, both runs begin there). Then both
remove DRC ReLUs per step and fine-tune only where no hypothesis met ADT.

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
import os
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from test_finetuning import AuthorsStep
from torch import Tensor, nn

import fastbcd
from fastbcd.masking.masks import MaskSet
from fastbcd.scoring.accuracy import accuracy
from fastbcd.scoring.choose import fewer
from fastbcd.training.settings import Finetune
from fastbcd.training.trainer import Finetuner
from table import machine

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def start(folder: Path, relus: int, train: fastbcd.ImageData) -> tuple[nn.Module, nn.Module]:
    """The net at `relus` ReLUs, and its dense teacher."""
    net = fastbcd.models.resnet20(num_classes=10, image_size=32)
    net.load_state_dict(load_file(folder / "resnet20-cifar10.safetensors"), strict=False)
    teacher = copy.deepcopy(net).eval()
    tuner = Finetuner(net, train, Finetune(epochs=1, lr=0.02), teacher)
    masks = fastbcd.masks(net)
    for step, count in enumerate((100_000, 50_000, 20_000, relus)):
        gone = masks.sample(masks.count() - count, seed=0, step=step, trial=0)
        fastbcd.set_masks(net, masks.without(gone))
        tuner.run(step)
    return net.eval(), teacher


class Authors:
    """Their loop, with its seconds by phase."""

    def __init__(self, net, teacher, train, score_on, test, options) -> None:
        self.net, self.teacher, self.train, self.options = net, teacher, train, options
        self.score_on, self.test = score_on, test
        self.seconds: dict[str, float] = defaultdict(float)
        self.step = AuthorsStep(net, teacher, last=False, compiled=False)
        self.sites = [self.step.net.get_submodule(s.name) for s in fastbcd.masks(net).sites]

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
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.step.optimizer, o.epochs)
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
            percent = 100.0 * self.evaluate(self.test)[0] / len(self.test) if due else math.nan
            self.seconds["test"] += time.perf_counter() - clock
            history.append((trial, accepted, percent))
            print(f"  authors step {number}: hypothesis {trial}, {percent:.2f} %", flush=True)
        return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--relus", type=int, default=4_000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--drc", type=int, default=100)
    parser.add_argument("--rt", type=int, default=10)
    parser.add_argument("--adt", type=float, default=0.1)
    parser.add_argument("--samples", type=int, default=1_000, help="images to score on")
    parser.add_argument("--train", type=int, default=3_000, help="images to fine-tune on")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--confidence", type=float, help="of fastbcd's decisions (exact)")
    parser.add_argument("--test-every", type=int, default=1, help="steps, in both runs")
    o = parser.parse_args()
    folder = Path(os.environ["FASTBCD_DATA"])
    train, test = (fastbcd.ImageData.from_npz(folder / "cifar10-12k.npz", s, mean=MEAN, std=STD)
                   for s in ("train", "test"))  # fmt: skip
    net, teacher = start(folder, o.relus, train)
    train = train.first(o.train)
    print(machine())
    print(
        f"ResNet-20 at {o.relus:,} ReLUs, {accuracy(net, test):.2f} % on {len(test):,} test images"
    )
    print(f"{vars(o)}, {len(train):,} train images")
    twin = copy.deepcopy(net)
    begun = time.perf_counter()
    run = fastbcd.bcd(
        net, train, o.relus - o.steps * o.drc, drc=o.drc, rt=o.rt, adt=o.adt, samples=o.samples,
        finetune=Finetune(epochs=o.epochs, lr=o.lr), finetune_when="on_reject", teacher=teacher,
        test=test, seed=o.seed, confidence=o.confidence, test_every=o.test_every, progress=True,
    )  # fmt: skip
    ours = time.perf_counter() - begun
    loop = Authors(twin, teacher, train, train.first(o.samples), test, o)
    begun = time.perf_counter()
    history = loop.run()
    theirs = time.perf_counter() - begun
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
    print(f"{'all':<12} {ours:>8.1f} {theirs:>9.1f}   {theirs / ours:.1f}x")
    if o.confidence is not None:
        seen = sum(sum(step.images.values()) for step in run.history) / len(run.history)
        print(f"images per step of fastbcd, with the base: {seen:,.0f} of {o.samples:,} each")
    last, error = (run.history[-1].test_accuracy, history[-1][2]), 50 / len(test) ** 0.5
    print(f"test accuracy at the end: {last[0]:.2f} %, authors {last[1]:.2f} % (standard error of "
          f"each on {len(test):,} images: {error:.1f} at most)")  # fmt: skip
    tuned = [i for i, step in enumerate(run.history) if not step.accepted]
    first = tuned[0] if tuned else len(history)
    agree = sum(s.chosen == t for s, (t, _, _) in zip(run.history, history, strict=True))
    before = min(first + 1, len(history))
    same = all(run.history[i].chosen == history[i][0] for i in range(before))
    verdict = "equal" if same else "NOT equal"
    print(f"choices until the first fine-tune: {verdict} ({before} steps); "
          f"equal in {agree} of {len(history)} steps")  # fmt: skip


if __name__ == "__main__":
    main()
