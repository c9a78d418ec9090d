"""U x + u of images of the data, by their numbers, while memory allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Known(NamedTuple):
    """An image, and its values in one form."""

    image: Tensor
    values: Tensor  # [R + classes]


class AffineCache:
    """The values of single images: a step with a confidence has batches of its own."""

    def __init__(self) -> None:
        self.limit = 0  # bytes
        self.example: Tensor | None = None  # the first images of the data, on the CPU
        self.precision = ""  # of the values
        self.known: dict[int, Known] = {}
        self.bytes = 0
        self.compared: set[int] = (
            set()
        )  # numbers of images that are known to be of this call

    def clear(self) -> None:
        """Forget all images."""
        self.known.clear()
        self.compared.clear()
        self.bytes = 0

    def begin(self, example: Tensor, precision: str, limit: int) -> None:
        """Store at most `limit` bytes, only of the data that begins with this example."""
        example = example.cpu()
        same_data = self.example is not None and torch.equal(self.example, example)
        if not same_data or precision != self.precision or self.bytes > limit:
            self.clear()
        self.example = example.clone()
        self.precision = precision
        self.limit = limit
        self.compared.clear()

    def values(
        self, numbers: Tensor, x: Tensor, compute: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """[R + classes, B] of images x: what is known of them, and what `compute` returns."""
        wanted = numbers.tolist()
        known = [i for i, number in enumerate(wanted) if number in self.known]
        if not self.compared.issuperset(
            wanted[i] for i in known
        ):  # comparing waits for a GPU
            images = torch.stack([self.known[wanted[i]].image for i in known])
            if not torch.equal(images, select(x, known)):
                self.clear()
                return self.values(numbers, x, compute)
            self.compared.update(wanted[i] for i in known)
        columns = {wanted[i]: self.known[wanted[i]].values for i in known}
        unknown = [i for i, number in enumerate(wanted) if number not in self.known]
        if unknown:
            images = select(x, unknown).clone()
            values = compute(images).T.contiguous()
            names = [wanted[i] for i in unknown]
            columns.update(zip(names, values, strict=True))
            size = images.nbytes + values.nbytes
            if self.bytes + size <= self.limit:
                self.known.update(zip(names, map(Known, images, values), strict=True))
                self.bytes += size
                self.compared.update(names)
        return torch.stack([columns[number] for number in wanted]).T.contiguous()

    def keep_rows(self, rows: Tensor) -> None:
        """Drop the values of kinks that were removed."""
        for number, (image, values) in self.known.items():
            self.known[number] = Known(image, values.index_select(0, rows))
        self.bytes = sum(
            image.nbytes + values.nbytes for image, values in self.known.values()
        )


def select(x: Tensor, indices: list[int]) -> Tensor:
    """Some images, in x's order of memory; x itself if these are all."""
    if len(indices) == len(x):
        return x
    images = x.index_select(0, torch.tensor(indices, device=x.device))
    if x.ndim == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    return images
