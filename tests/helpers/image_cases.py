"""Small ImageData for the tests of fastbcd/data."""

from __future__ import annotations

import numpy as np

from fastbcd.data.images import ImageData


def make(n=10, channels=3, height=6, width=5, classes=4, seed=0, device="cpu", **options):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, channels, height, width), dtype=np.uint8)
    labels = rng.integers(0, classes, n)
    options = {"mean": (0.5, 0.4, 0.3, 0.6)[:channels], "std": (0.3, 0.2, 0.4, 1.5)[:channels]} | (
        options
    )
    data = ImageData.from_arrays(images, labels, classes=classes, layout="NCHW", **options)
    return data.to(device)
