"""Images and labels from what a user has: arrays, tensors, a Dataset or a DataLoader."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

Stats = Sequence[float] | None
FLOATS = (torch.float32, torch.float64)
# Samplers that draw all of their dataset, in any order.
WHOLE = (torch_data.SequentialSampler, torch_data.RandomSampler, torch_data.DistributedSampler)


# ------------------------------------------------------------------------- arrays and tensors


def image_tensor(images: Any, layout: str | None) -> Tensor:
    """uint8 or float images [N,C,H,W] from what the user has."""
    if not isinstance(images, Tensor):
        array = np.ascontiguousarray(images)
        images = torch.from_numpy(array if array.flags.writeable else array.copy())
    check_values("images", images)
    if images.dtype in (torch.float16, torch.bfloat16):
        images = images.float()
    if images.dtype != torch.uint8 and images.dtype not in FLOATS:
        raise TypeError(f"images are {images.dtype}; give uint8 (0 to 255), or normalised floats")
    if images.ndim == 3:
        images, layout = images.unsqueeze(1), "NCHW"
    if images.ndim != 4:
        raise ValueError(f"images are {list(images.shape)}, not [N,C,H,W], [N,H,W,C] or [N,H,W]")
    if layout is None:
        last = images.dtype == torch.uint8 and _channels_last(images.shape[1], images.shape[3])
        layout = "NHWC" if last else "NCHW"
    if layout not in ("NCHW", "NHWC"):
        raise ValueError(f"layout is {layout!r}; it is 'NCHW' or 'NHWC'")
    return (images.permute(0, 3, 1, 2) if layout == "NHWC" else images).contiguous()


def label_tensor(labels: Any, name: str = "labels") -> Tensor:
    """int64 [N] from whole numbers of any kind."""
    if not isinstance(labels, Tensor):
        array = np.asarray(labels)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"{name} are {array.dtype}; they must be whole numbers")
        labels = torch.from_numpy(array.astype(np.int64))
    check_values(name, labels)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"{name} are {labels.dtype}; they must be whole numbers")
    if labels.ndim != 1:
        raise ValueError(f"{name} are {list(labels.shape)}, not [N]; if one-hot: labels.argmax(1)")
    return labels.long()


def check_values(name: str, tensor: Tensor) -> None:
    """Refuse tensors without values in memory: meta, sparse, quantised ones."""
    if tensor.is_meta:
        raise TypeError(f"{name} are on the meta device and have no values; give real ones")
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantised" if tensor.is_quantized else str(tensor.layout)
        raise TypeError(f"{name} are {kind}; give {name}.to_dense() or {name}.dequantize()")


def check_labels(labels: np.ndarray, classes: int, where: str) -> None:
    """Refuse labels outside 0 .. classes-1, naming the first."""
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if bad.size:
        raise ValueError(
            f"{where}[{bad[0]}] is {labels[bad[0]]}; with {classes} classes labels are "
            f"0 to {classes - 1} ({bad.size} of {labels.size} are not)"
        )


def _channels_last(first: int, last: int) -> bool:
    """Does an image with these first and last dimensions have its channels last?"""
    return last in (1, 3) and first not in (1, 3)


# --------------------------------------------------------------------- datasets and loaders


def read_dataset(dataset: Any, mean: Stats, std: Stats) -> tuple[np.ndarray, np.ndarray]:
    """All images and labels of a Dataset: uint8 or float [N,C,H,W], and int64 [N].

    Floats stay as they are without mean and std. With both, they are turned back into the bytes
    they were made from: k of k/255, or of (k/255 - mean)/std. It is the same for all items, as a
    single normalised image may look like k/255.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"{type(dataset).__name__} has no length or items; give a Dataset that has")
    if len(dataset) == 0:
        raise ValueError("the dataset has no items, so its images have no shape")
    if mean is None or std is None:
        return _read_items(dataset, lambda image, where: image)
    try:
        return _read_items(dataset, lambda image, where: _to_bytes(image, 0.0, 1.0, where))
    except _NotBytes:
        columns = np.reshape(mean, (-1, 1, 1)), np.reshape(std, (-1, 1, 1))
        return _read_items(dataset, lambda image, where: _to_bytes(image, *columns, where))


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
    """A float image that was not made from bytes, or not in the way that was tried."""


Decode = Callable[[np.ndarray, str], np.ndarray]


def _read_items(dataset: Any, decode: Decode) -> tuple[np.ndarray, np.ndarray]:
    first, _ = _read_item(dataset, 0, decode)
    images = np.empty((len(dataset), *first.shape), first.dtype)
    labels = np.empty(len(dataset), np.int64)
    for i in range(len(dataset)):
        image, labels[i] = _read_item(dataset, i, decode)
        if image.shape != first.shape or image.dtype != first.dtype:
            raise ValueError(
                f"item {i} of the dataset is {image.dtype} {image.shape}, item 0 {first.dtype} "
                f"{first.shape}; bring all to one size and dtype"
            )
        images[i] = image
        if i < 8 and not np.array_equal(_read_item(dataset, i, decode)[0], image, equal_nan=True):
            raise ValueError(
                f"item {i} of the dataset is another image each time it is read; give the "
                f"dataset without its random transforms: fastbcd makes crops and flips itself"
            )
    return images, labels


def _read_item(dataset: Any, i: int, decode: Decode) -> tuple[np.ndarray, int]:
    """Item i of a Dataset: uint8 or float [C,H,W] and its label."""
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
    if isinstance(image, Tensor):
        check_values(where, image)
        small = image.dtype in (torch.float16, torch.bfloat16)
        array = (image.float() if small else image).numpy(force=True)
    else:
        array = np.asarray(image)
    if array.ndim not in (2, 3) or array.size == 0 or array.dtype.kind not in "fu":
        raise TypeError(
            f"{where} is a {type(image).__name__}: {array.dtype} {list(array.shape)}; it must be a "
            f"PIL image, or uint8 or float [C,H,W]"
        )
    array = array[None] if array.ndim == 2 else array
    if not isinstance(image, Tensor) and _channels_last(array.shape[0], array.shape[2]):
        array = array.transpose(2, 0, 1)
    return (array if array.dtype == np.uint8 else decode(array, where)), label


def _to_bytes(image: np.ndarray, mean: Any, std: Any, where: str) -> np.ndarray:
    """The k of floats (k/255 - mean)/std."""
    level = (image.astype(np.float64) * std + mean) * 255
    near = np.rint(level)
    if not np.abs(level - near).max() < 1e-2 or near.min() < 0 or near.max() > 255:
        raise _NotBytes(
            f"{where} has floats from {image.min():.4g} to {image.max():.4g}: neither k/255 nor "
            f"undone by the mean and std given; leave both out to use the floats as they are"
        )
    return near.astype(np.uint8)
