"""StreamData: a Dataset that is read batch by batch, for data larger than memory.

    data = fastbcd.StreamData(dataset, workers=8)           # nothing is held
    fastbcd.bcd(net, data, budget=100_000, samples=20_000)  # a step scores the first 20,000

It has the interface of ImageData and gives the same batches, to the last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fastbcd.data import arrays, pixels
from fastbcd.data.arrays import Item, Stats, are_indices, read_item, target_tensor
from fastbcd.data.images import ImageData, TrainBatches, batch_sizes, check_range
from fastbcd.runtime.validate import check_whole


class StreamData(ImageData):
    """Data that is read when it is needed; `images` and `labels` are empty, of the right shapes.

    Args:
        dataset: (image, label) items as for `ImageData.from_dataset`, the same in every reading;
            or a DataLoader, whose dataset and workers are taken.
        train: a DataLoader with your own augmentation of the same inputs, which fine-tuning
            iterates over as it is; settings of crops, flips and batch size then have no effect. By
            default fine-tuning shuffles, crops and flips as for ImageData.
        workers: processes that read; by default those of the DataLoader, else none.
        mean, std: for (x - mean)/std, as for `ImageData.from_arrays`.
        classes: the number of classes; by default len(dataset.classes), or not known.

    >>> from torch.utils.data import TensorDataset
    >>> data = StreamData(TensorDataset(torch.randn(6, 3, 8, 8), torch.arange(6)), classes=6)
    >>> data
    StreamData(6 × 3×8×8 float32, 6 classes, cpu)
    >>> [tuple(x.shape) for x, labels in data.batches(4)]
    [(4, 3, 8, 8), (2, 3, 8, 8)]
    """

    streamed = True
    items: _Items
    train: DataLoader | None
    loading: dict[str, Any]  # options of the DataLoader that reads
    bound: dict[str, Any]  # what `check_labels` was told, shared by all parts

    def __init__(
        self, dataset: Any, *, train: DataLoader | None = None, workers: int | None = None,
        mean: Stats = None, std: Stats = None, classes: int | None = None,
    ) -> None:  # fmt: skip
        positions, loading = None, {"num_workers": workers or 0}
        if isinstance(dataset, DataLoader):
            names = ("num_workers", "worker_init_fn", "multiprocessing_context", "timeout")
            if dataset.num_workers and workers is None:
                loading = {name: getattr(dataset, name) for name in names}
            positions, dataset = arrays.sampled(dataset), dataset.dataset
        check_whole("workers", loading["num_workers"], 0)
        arrays.check_dataset(dataset)
        first = read_item(dataset, 0)
        for _ in range(8):
            arrays.check_repeatable(dataset, 0, first[0])
        one = ImageData.from_arrays(first[0][None], first[1][None], mean, std, classes, "NC...")
        if classes is None and are_indices(one.labels) and hasattr(dataset, "classes"):
            classes = len(dataset.classes)
        where = f"streamed from {type(dataset).__name__} with {loading['num_workers']} workers"
        ids = torch.arange(len(dataset)) if positions is None else torch.tensor(positions)
        vars(self).update(
            vars(one.first(0)), ids=ids, classes=classes, train=train, loading=loading,
            items=_Items(dataset, first), bound={}, where=where,
        )  # fmt: skip

    def need_classes(self, what: str) -> int:
        """The number of classes, 0 if it is not known; an error without class indices."""
        return self.classes or 0 if are_indices(self.labels) else super().need_classes(what)

    def check_labels(self, classes: int, who: str) -> None:
        """From now on refuse labels outside 0 .. classes-1 when they are read."""
        self.bound.update({"classes": classes, "who": who})

    def identity(self, samples: int) -> dict[str, Tensor]:
        """What a run's digest is made of: the class, the first and last two items, all ids."""
        ends = torch.arange(len(self))[[0, min(1, len(self) - 1), -2 % len(self), -1]]
        x, y = next(self._read([ends], here=True))
        name = torch.tensor(list(type(self.items.dataset).__name__.encode()))
        return {"images": x, "labels": y, "ids": self.ids, "dataset": name}

    def to(self, device: torch.device | str) -> StreamData:
        """The same data, with batches on another device."""
        return self._with(**{k: getattr(self, k).to(device) for k in ("images", "labels", "ids")})

    def _changed(self, change: Callable[[Tensor], Tensor]) -> StreamData:
        return self._with(ids=change(self.ids))

    def _with(self, **changed: Any) -> StreamData:
        new = copy.copy(self)
        vars(new).update(changed)
        return new

    # ------------------------------------------------------------------ reading

    def _read(self, parts: Iterable[Any], here: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels of the samples at these positions, one batch for each part.

        here: without workers, which read ahead.
        """
        # A generator of its own: reading does not change torch's random numbers.
        loader: DataLoader[Any] = DataLoader(
            self.items, batch_sampler=(self.ids[part].tolist() for part in parts),
            collate_fn=_collate, generator=torch.Generator(), **({} if here else self.loading),
        )  # fmt: skip
        for numbers, x, y in loader:
            if self.bound:
                check_range(y, numbers, **self.bound)
            yield x.to(self.device), y.to(self.device)

    def batches(self, batch_size: int, **options: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """(normalised images, labels) in order; options: memory_format, dtype of `normalise`."""
        check_whole("batch_size", batch_size, 1)
        parts = (slice(i, i + batch_size) for i in range(0, len(self), batch_size))
        found = self._read(parts, here=batch_size <= 2)  # such small batches are examples
        return ((self.normalise(x, **options), y) for x, y in found)

    def _take(self, indices: Tensor) -> Tensor:
        return next(self._read([indices], here=True))[0]

    # ------------------------------------------------------------------ training

    def check_views(self, padding: int, flip: bool) -> None:
        """As for ImageData; a DataLoader for training has its own augmentation."""
        if self.train is None:
            super().check_views(padding, flip)

    def sizes(self, batch_size: int, smallest: int = 1) -> list[int]:
        """The sizes of an epoch's batches."""
        if self.train is None:
            return super().sizes(batch_size, smallest)
        sampler: Any = self.train.sampler
        count, size = len(self.train), self.train.batch_size
        return [1] * count if size is None else batch_sizes(len(sampler), size)[:count]

    def train_batches(self, batch_size: int, **options: Any) -> TrainBatches:
        """One epoch: as for ImageData, or the batches of your own DataLoader."""
        if self.train is None:
            return super().train_batches(batch_size, **options)
        if options.get("world", 1) > 1:
            raise ValueError("train= is for one rank; with several, give the dataset alone")
        kept = {key: options[key] for key in ("memory_format", "dtype") if key in options}
        return self._own_batches(self.train, **kept)

    def _own_batches(self, loader: DataLoader, **options: Any) -> TrainBatches:
        for x, y, *_ in loader:
            if x.shape[1:] != self.images.shape[1:] or x.dtype != self.images.dtype:
                found, other = (f"{t.dtype} {list(t.shape[1:])}" for t in (x, self.images))
                raise ValueError(f"train= gives {found}, the dataset {other}; both must be alike")
            inputs = self.normalise(x.to(self.device), **options)
            yield inputs, target_tensor(y).to(self.device), self.ids[:0], self.ids[:0]

    def _in_views(
        self, parts: list[Tensor], views: Tensor, padding: int, **options: Any
    ) -> TrainBatches:
        for part, (x, y) in zip(parts, self._read(parts, here=False), strict=True):
            x = pixels.crop(x, views[part], padding) if x.ndim == 4 else x
            yield self.normalise(x, **options), y, part, views[part]


class _Items(Dataset):
    """The items of a Dataset as arrays like the first, with their numbers; workers read it."""

    def __init__(self, dataset: Any, first: Item) -> None:
        self.dataset, self.first = dataset, first

    def __getitem__(self, i: int) -> tuple[int, np.ndarray, np.ndarray]:
        return i, *read_item(self.dataset, i, self.first)


def _collate(items: list[tuple[int, np.ndarray, np.ndarray]]) -> tuple[Tensor, Tensor, Tensor]:
    numbers, images, labels = zip(*items, strict=True)
    inputs = torch.from_numpy(np.stack(images))
    return torch.tensor(numbers), inputs, target_tensor(np.stack(labels))
