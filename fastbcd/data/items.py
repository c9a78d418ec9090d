"""The items of a torch Dataset or DataLoader as arrays of one shape, read one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from fastbcd.data.arrays import HALVES, channels_last, check_values, target_tensor

Item = tuple[np.ndarray, np.ndarray]  # an input [C,...] and its target
# Of an input and a target in a dict.
NAMES = (("pixel_values", "image"), ("labels", "label"))
READ_TWICE = 8  # items that show whether a dataset gives the same images again
# Samplers that draw all of their dataset, in any order.
WHOLE = (
    torch_data.SequentialSampler,
    torch_data.RandomSampler,
    torch_data.DistributedSampler,
)


class Items:
    """The items of a Dataset, or of the dataset behind a DataLoader, read by its workers.

    They come in the order of the dataset, however the loader shuffles.
    """

    def __init__(self, source: Any) -> None:
        self.dataset = source
        self.loading: dict[str, Any] = {}
        if isinstance(source, torch_data.DataLoader):
            self.dataset = source.dataset
            names = ("num_workers", "worker_init_fn", "multiprocessing_context")
            self.loading = {name: getattr(source, name) for name in names}
        self.count: int | None = None  # None: unknown
        if isinstance(self.dataset, torch_data.IterableDataset):
            return
        self.count = len(self.dataset)
        if self.count == 0:
            raise ValueError("the dataset has no items, so its images have no shape")
        if self.loading:
            sampler: Any = getattr(source.batch_sampler, "sampler", source.sampler)
            if not isinstance(sampler, WHOLE):
                raise TypeError(
                    f"the loader's {type(sampler).__name__} may leave samples out or repeat them; "
                    f"give the Dataset itself, or a torch.utils.data.Subset of it"
                )

    def item(self, number: int) -> Item:
        """One item, read in this process."""
        return read_item(self.dataset[number], number)

    def check_repeatable(self) -> None:
        """Refuse a Dataset whose first items change from reading to reading."""
        for number in range(min(READ_TWICE, self.count or 0)):
            image, _ = self.item(number)
            again, _ = self.item(number)
            if not np.array_equal(image, again, equal_nan=image.dtype.kind == "f"):
                raise ValueError(
                    f"item {number} of the dataset is another image each time it is read; give "
                    f"the dataset without its random transforms: fastbcd makes crops and flips "
                    f"itself"
                )

    def __iter__(self) -> Iterator[Item]:
        loader: torch_data.DataLoader[Any] = torch_data.DataLoader(
            self.dataset,
            batch_size=None,
            collate_fn=_unchanged,
            generator=torch.Generator(),  # reading does not change torch's random numbers
            **self.loading,
        )
        kinds: list[Any] = []
        for number, raw in enumerate(loader):
            item = read_item(raw, number)
            kinds = [*kinds[:1], [f"{array.dtype} {array.shape}" for array in item]]
            if kinds[0] != kinds[-1]:
                raise ValueError(
                    f"image and target of item {number} of the dataset are {kinds[1]}, those of "
                    f"item 0 {kinds[0]}; bring all to one size and dtype"
                )
            yield item


def _unchanged(item: Any) -> Any:
    return item


def read_item(item: Any, number: int) -> Item:
    """The input, uint8 or float [C,...], and the target of an item of a Dataset."""
    kind = type(item).__name__
    if isinstance(item, Mapping):  # as those of Hugging Face
        item = [item[name] for names in NAMES for name in names if name in item]
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise TypeError(
            f"item {number} of the dataset is a {kind}, not (image, label), nor a dict of "
            f"{' or '.join(NAMES[0])} and {' or '.join(NAMES[1])}"
        )
    image = _read_image(item[0], f"the image of item {number} of the dataset")
    who = f"the label of item {number} of the dataset"
    return image, target_tensor(_array(item[1], who), who).numpy()


def _read_image(image: Any, who: str) -> np.ndarray:
    mode = getattr(image, "mode", None)  # text of a PIL image, a method of a tensor
    if isinstance(mode, str) and mode not in ("L", "RGB"):
        raise TypeError(f"{who} has mode {mode!r}; convert it: image.convert('RGB')")
    array = _array(image, who)
    is_image = array.dtype == np.uint8 or array.dtype.kind == "f"
    if not is_image or array.size == 0 or array.ndim == 0:
        raise TypeError(
            f"{who} is a {type(image).__name__}: {array.dtype} {list(array.shape)}; it must be a "
            f"PIL image, or uint8 or float [C,H,W] or [C,...]"
        )
    if array.dtype == np.uint8 and array.ndim == 2:
        return array[None]
    if not isinstance(image, Tensor) and array.ndim == 3 and channels_last(array.shape):
        return array.transpose(2, 0, 1)
    return array


def _array(value: Any, who: str) -> np.ndarray:
    if not isinstance(value, Tensor):
        return np.asarray(value)
    check_values(who, value)
    if value.dtype in HALVES:
        value = value.float()
    return value.numpy(force=True)
