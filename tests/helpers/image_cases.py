"""Small ImageData for the tests of fastbcd/data."""

from __future__ import annotations

import torch

from fastbcd.data.images import ImageData


def make(n=10, channels=3, height=6, width=5, classes=4, seed=0, device="cpu", **options):
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, channels, height, width), generator=draw, dtype=torch.uint8)
    labels = torch.randint(0, classes, (n,), generator=draw)
    mean = (0.5, 0.4, 0.3, 0.6)[:channels]
    std = (0.3, 0.2, 0.4, 1.5)[:channels]
    facts = {"mean": mean, "std": std, "classes": classes, **options}
    return ImageData(images, labels, **facts).to(device)
