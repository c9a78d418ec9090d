"""`fastbcd demo`: convert a small network, count its ReLUs, remove some."""

from __future__ import annotations

import argparse

import torch
from torch import nn

import fastbcd


def small_net() -> nn.Module:
    """Two convolutions and a classifier for 28×28 images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Print the masks of a converted network before and after a removal."""
    parser = argparse.ArgumentParser(prog="fastbcd demo", description=__doc__)
    parser.parse_args(arguments)
    torch.manual_seed(0)
    model, images = small_net().eval(), torch.randn(8, 1, 28, 28)
    net = fastbcd.convert(model, images)
    masks = fastbcd.masks(net)
    print(f"converted: logits equal to the original's: {torch.equal(net(images), model(images))}")
    print(masks)
    removed = masks.sample(masks.count() // 2, seed=0, step=0, trial=0)
    fastbcd.set_masks(net, masks.without(removed))
    print(f"\nafter removing {len(removed):,} of them, drawn uniformly:")
    print(masks)
    return 0
