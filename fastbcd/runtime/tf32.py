"""TF32 on or off while hypotheses are scored.

A GPU may round the factors of a float32 product to 10 bits (TF32); convolutions do so by default.
Engines would then differ in the third digit, and with them decisions: scoring turns it off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def products(tf32: bool) -> Iterator[None]:
    """Matrix products and convolutions in float32, or in TF32; afterwards as it was.

    >>> with products(tf32=False):
    ...     torch.backends.cudnn.conv.fp32_precision
    'ieee'
    """
    cudnn: Any = torch.backends.cudnn
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv)
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value
