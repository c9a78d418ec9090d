"""Do the engines agree on a trained network and real images?

    FASTBCD_DATA=folder python benchmarks/agreement.py

The folder holds `cifar10-12k.npz` and `resnet20-cifar10.safetensors`. Hypotheses are scored by
`sequential` and by `stacked`; printed are the counts of each, the largest difference in loss, and
how many images have two best logits so close (1e-4) that rounding could decide between them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from table import machine

import fastbcd
from nets import build

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def close_calls(net: torch.nn.Module, data: fastbcd.ImageData) -> int:
    with torch.inference_mode():
        margins = [net(x).topk(2, 1).values.diff(dim=1).abs() for x, _ in data.batches(250)]
    return int((torch.cat(margins) < 1e-4).sum())


def main(images: int = 2000, hypotheses: int = 8, drc: int = 100) -> None:
    folder = Path(os.environ["FASTBCD_DATA"])
    model = build("resnet20")
    model.load_state_dict(load_file(folder / "resnet20-cifar10.safetensors"))
    train = fastbcd.ImageData.from_npz(folder / "cifar10-12k.npz", "train", mean=MEAN, std=STD)
    data = train.first(images)
    net = fastbcd.convert(model, next(data.batches(2))[0])
    masks = fastbcd.masks(net)
    print(machine())
    print(
        "    ReLUs  base   differences in correct   in loss  close calls   sequential s  stacked s"
    )
    for relus in (masks.total, 160_000, 120_000):
        gone = masks.sample(masks.count() - relus, seed=0, step=0, trial=0)
        fastbcd.set_masks(net, masks.without(gone))
        removals = [masks.sample(drc, seed=1, step=0, trial=t) for t in range(hypotheses)]
        results, seconds = {}, {}
        for engine in ("sequential", "stacked"):
            start = time.perf_counter()
            results[engine] = fastbcd.score(net, removals, data, engine=engine)
            seconds[engine] = time.perf_counter() - start
        one, other = results["sequential"], results["stacked"]
        differences = (one.correct - other.correct).tolist()
        print(
            f"{relus:>9,} {one.base_correct:>5} {differences!s:>24}"
            f" {(one.loss - other.loss).abs().max().item():>9.1e} {close_calls(net, data):>12}"
            f" {seconds['sequential']:>13.1f} {seconds['stacked']:>10.1f}"
        )


if __name__ == "__main__":
    main()
