"""Compare the engines on a trained network and real images.

    FASTBCD_DATA=folder python benchmarks/agreement.py

The folder holds `cifar10-12k.npz` and `resnet20-cifar10.safetensors`. At several numbers of ReLUs,
each reached by removing those of least saliency and a short fine-tune, the same hypotheses are
scored by every engine. Printed are the differences from `sequential` in correct answers and in
loss, the largest difference in a logit relative to the largest logit, and how many images have two
best logits so close (1e-4) that rounding could decide between them. At the end a run of 10 steps
without fine-tuning is made with each engine, and their choices compared.
"""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import fastbcd
from fastbcd.data.for_net import data_for
from fastbcd.data.npz import load_npz
from fastbcd.scoring.accuracy import accuracy
from fastbcd.scoring.answers import prepared
from fastbcd.training.finetuner import Finetuner
from fastbcd.training.settings import Finetune
from table import machine

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RELUS = (188_416, 60_000, 20_000, 5_000)


def all_logits(
    net: nn.Module, removals: list[torch.Tensor], data, engine: str
) -> torch.Tensor:
    """Logits [K, N, classes] of the hypotheses."""
    images = data_for(net, data)
    numbered = dict(enumerate(removals))
    with prepared(net, numbered, images, fastbcd.Engine(engine)) as answers:
        plan = answers.plan
        work = plan.engine.prepare(numbered, plan.lanes)
        parts = []
        with torch.inference_mode():
            for x, _ in images.batches(
                plan.batch, memory_format=plan.engine.memory_format
            ):
                found = {}
                for numbers, logits in plan.engine.logits(x, work, False):
                    found.update(zip(numbers, logits, strict=True))
                parts.append(torch.stack([found[k] for k in sorted(found)]))
        return torch.cat(parts, 1)


def compare(
    net: nn.Module, data: fastbcd.ImageData, hypotheses: int = 8, drc: int = 100
) -> None:
    masks = fastbcd.masks(net)
    removals = [masks.sample(drc, seed=1, step=0, trial=t) for t in range(hypotheses)]
    truth = fastbcd.score(net, removals, data, engine="sequential")
    exact = all_logits(net, removals, data, "sequential")
    close = int((exact.topk(2, 2).values.diff(dim=2).abs() < 1e-4).sum())
    for engine in ("stacked", "collapsed"):
        if engine == "collapsed" and masks.count() > 20_000:
            continue
        start = time.perf_counter()
        found = fastbcd.score(net, removals, data, engine=engine)
        seconds = time.perf_counter() - start
        logits = all_logits(net, removals, data, engine)
        error = ((logits - exact).abs().amax((1, 2)) / exact.abs().amax((1, 2))).max()
        print(
            f"{masks.count():>9,} {engine:>10} {truth.base_correct:>5}"
            f" {(found.correct - truth.correct).tolist()!s:>26}"
            f" {(found.loss - truth.loss).abs().max().item():>9.1e} {error:>9.1e} {close:>6}"
            f" {seconds:>8.1f}",
            flush=True,
        )


def main(images: int = 1000) -> None:
    folder = Path(os.environ["FASTBCD_DATA"])
    net = fastbcd.models.resnet20(num_classes=10, image_size=32)
    net.load_state_dict(
        load_file(folder / "resnet20-cifar10.safetensors"), strict=False
    )
    teacher = copy.deepcopy(net).eval()
    sets = [load_npz(folder / "cifar10-12k.npz", s, mean=MEAN, std=STD)
            for s in ("train", "test")]  # fmt: skip
    data = sets[0].first(images)
    print(machine())
    print(
        "    ReLUs     engine  base     differences in correct   in loss  in logit  close  seconds"
    )
    tuner = Finetuner(net, sets[0].first(4000), Finetune(epochs=1, lr=0.01), teacher)
    for step, relus in enumerate(RELUS):
        masks = fastbcd.masks(net)
        if step:
            effect = fastbcd.saliency(net, data)
            fastbcd.set_masks(
                net, masks.without(effect.argsort()[: masks.count() - relus])
            )
            tuner.run(step)
        compare(net.eval(), data)
    print(
        f"\n10 steps of 100 ReLUs from {RELUS[-1]:,} (test accuracy {accuracy(net, sets[1]):.2f} %)"
    )
    start, chosen = fastbcd.masks(net).without([]), {}
    for engine in ("sequential", "stacked", "collapsed"):
        fastbcd.set_masks(net, start)
        begun = time.perf_counter()
        run = fastbcd.bcd(
            net, data, RELUS[-1] - 1000, rt=10, finetune=None, engine=engine
        )
        seconds = time.perf_counter() - begun
        chosen[engine] = [s.chosen for s in run.history], run.masks.bits.clone()
        print(
            f"{engine:>12} {seconds:>8.1f} s  hypotheses taken: {chosen[engine][0]}",
            flush=True,
        )
    same = all(
        torch.equal(bits, chosen["sequential"][1]) for _, bits in chosen.values()
    )
    print(f"the masks are {'equal' if same else 'NOT equal'}")


if __name__ == "__main__":
    main()
