"""HostData: images that stay in the host's memory beside a GPU that cannot hold them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastbcd.data import pixels
from fastbcd.data.images import ImageData, TrainBatches
from fastbcd.runtime.validate import check_whole


class HostData(ImageData):
    """ImageData with labels on a GPU and images on the host, copied batch by batch.

    It gives the same batches. A batch is gathered into pinned memory and copied while the GPU
    works on the ones before it. `images` is empty, of the right shape.

    >>> data = ImageData.from_arrays(torch.randn(6, 3, 8, 8), range(6))
    >>> HostData(data, "cuda")  # doctest: +SKIP
    HostData(6 × 3×8×8 float32, 6 classes, cuda:0)
    """

    where = "images in the host's memory"
    whole: ImageData  # on the host
    rows: Tensor  # int64 [N], of `whole`

    def __init__(self, data: ImageData, device: torch.device | str) -> None:
        labels, ids = data.labels.to(device), data.ids.to(device)
        vars(self).update(
            vars(data.first(0).to(device)), labels=labels, ids=ids, whole=data,
            rows=torch.arange(len(data), device=device),
        )  # fmt: skip

    def to(self, device: torch.device | str) -> ImageData:
        """The same data on another device; on the CPU, as ImageData."""
        if self.labels.to(device).device == self.device:
            return self
        part = self.whole.subset(self.rows)
        return part if torch.device(device).type == "cpu" else HostData(part, device)

    def identity(self, samples: int) -> dict[str, Tensor]:
        """As for ImageData, so that a run continues wherever the images are."""
        some = self.rows[:: max(1, len(self) // samples)].cpu()
        return {"images": self.whole.images[some], "labels": self.labels, "ids": self.ids}

    def _changed(self, change: Callable[[Tensor], Tensor]) -> HostData:
        new = copy.copy(self)
        vars(new).update({name: change(getattr(self, name)) for name in ("labels", "ids", "rows")})
        return new

    def _copies(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        """The images of some rows on the device; parts: on the host."""
        for rows in parts:
            yield self.whole.images[rows].pin_memory().to(self.device, non_blocking=True)

    def batches(self, batch_size: int, **options: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """(normalised images, labels) in order; options: memory_format, dtype of `normalise`."""
        check_whole("batch_size", batch_size, 1)
        parts = zip(
            self._copies(self.rows.cpu().split(batch_size)), self.labels.split(batch_size),
            strict=True,
        )  # fmt: skip
        return ((self.normalise(x, **options), y) for x, y in parts if len(y))

    def _take(self, indices: Tensor) -> Tensor:
        return next(self._copies([self.rows[indices].cpu()]))

    def _in_views(
        self, parts: list[Tensor], views: Tensor, padding: int, **options: Any
    ) -> TrainBatches:
        rows = self.rows[torch.cat([*parts, self.ids[:0]])].cpu().split([len(p) for p in parts])
        for part, x in zip(parts, self._copies(rows), strict=True):
            x = pixels.crop(x, views[part], padding) if x.ndim == 4 else x
            yield self.normalise(x, **options), self.labels[part], part, views[part]
