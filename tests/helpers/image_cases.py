"""Small ImageData for the tests of fastbcd/data."""

from __future__ import annotations

import numpy as np

from fastbcd.data.images import ImageData


def make(n=10, channels=3, height=6, width=5, classes=4, seed=0, device="cpu", **options):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, channels, height, width), dtype=np.uint8)
    labels = rng.integers(0, classes, n)
    return ImageData.from_arrays(images, labels, classes=classes, layout="NCHW", **options).to(
        device
    )
