"""The items of a torch Dataset, as the bytes they were made from."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import data as torch_data

from fastbcd.data.image_arrays import Stats, channels_last

# Samplers that stand for all of their dataset, in whatever order.
WHOLE = (torch_data.SequentialSampler, torch_data.RandomSampler, torch_data.DistributedSampler)


def read_dataset(dataset: Any, mean: Stats, std: Stats) -> tuple[np.ndarray, np.ndarray]:
    """All images and labels of a Dataset: uint8 [N,C,H,W] and int64 [N]."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"{type(dataset).__name__} has no length or items; give a Dataset that has")
    if len(dataset) == 0:
        raise ValueError("the dataset has no items, so its images have no shape")
    try:
        return _read_items(dataset, None, None)
    except _NotBytes:
        if mean is None or std is None:
            raise
        return _read_items(dataset, mean, std)


def sampled(loader: torch_data.DataLoader) -> list[int] | None:
    """The positions in its dataset that a DataLoader draws from, in order; None for all."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, torch_data.SubsetRandomSampler):
        return sorted(sampler.indices)
    if not isinstance(sampler, WHOLE):
        raise TypeError(
            f"the loader's {type(sampler).__name__} may leave samples out or repeat them; "
            f"give the Dataset itself, or a torch.utils.data.Subset of it"
        )
    return None


class _NotBytes(ValueError):
    """A float image that does not come from uint8, or not in the way that was tried."""


def _read_items(dataset: Any, mean: Stats, std: Stats) -> tuple[np.ndarray, np.ndarray]:
    """All items of a Dataset: uint8 [N,C,H,W] and int64 [N].

    Floats are k/255, or with mean and std (k/255 - mean)/std: one of the two for all items, as a
    single normalised image may happen to look like the other.
    """
    images = np.empty((0,), np.uint8)
    labels = np.empty(len(dataset), np.int64)
    for i in range(len(dataset)):
        image, labels[i] = _read_item(dataset, i, mean, std)
        if i == 0:
            images = np.empty((len(dataset), *image.shape), np.uint8)
        if image.shape != images.shape[1:]:
            raise ValueError(
                f"item {i} of the dataset has shape {image.shape}, item 0 {images.shape[1:]}; "
                f"resize all to one size"
            )
        images[i] = image
        if i < 8 and not np.array_equal(_read_item(dataset, i, mean, std)[0], image):
            raise ValueError(
                f"item {i} of the dataset is another image each time it is read; give the "
                f"dataset without its random transforms: fastbcd makes crops and flips itself"
            )
    return images, labels


def _read_item(dataset: Any, i: int, mean: Stats, std: Stats) -> tuple[np.ndarray, int]:
    """Item i of a Dataset: uint8 [C,H,W] and its label."""
    item = dataset[i]
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise TypeError(f"item {i} of the dataset is a {type(item).__name__}, not (image, label)")
    image, label = item[:2]
    where = f"the image of item {i} of the dataset"
    try:
        label = operator.index(label)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the label of item {i} of the dataset is {label!r}, not an int") from error
    mode = getattr(image, "mode", None)  # of a PIL image; a tensor has a method of that name
    if isinstance(mode, str) and mode not in ("L", "RGB"):
        raise TypeError(f"{where} has mode {mode!r}; convert it: image.convert('RGB')")
    array = image.numpy(force=True) if isinstance(image, Tensor) else np.asarray(image)
    if array.ndim not in (2, 3) or array.size == 0 or array.dtype.kind not in "fu":
        raise TypeError(
            f"{where} is a {type(image).__name__}: {array.dtype} {list(array.shape)}; it must be a "
            f"PIL image, or uint8 or float [C,H,W]"
        )
    array = array[None] if array.ndim == 2 else array
    if not isinstance(image, Tensor) and channels_last(array.shape[0], array.shape[2]):
        array = array.transpose(2, 0, 1)
    return (array if array.dtype == np.uint8 else _to_bytes(array, mean, std, where)), label


def _to_bytes(image: np.ndarray, mean: Stats, std: Stats, where: str) -> np.ndarray:
    """The k of floats k/255, or with mean and std of (k/255 - mean)/std."""
    level, fault = image.astype(np.float64), "looks normalised"
    if mean is not None and std is not None:
        level = level * np.reshape(std, (-1, 1, 1)) + np.reshape(mean, (-1, 1, 1))
        fault = "is not undone by the mean and std given"
    near = np.rint(level * 255)
    if not np.abs(level * 255 - near).max() < 1e-2 or near.min() < 0 or near.max() > 255:
        raise _NotBytes(
            f"{where} has floats from {image.min():.4g} to {image.max():.4g}, not all k/255: it "
            f"{fault}; give the mean and std of its Normalize, or the dataset without Normalize"
        )
    return near.astype(np.uint8)
