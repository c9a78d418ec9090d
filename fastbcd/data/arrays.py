"""Images and labels from what a user has: arrays, tensors, a Dataset or a DataLoader."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

Stats = Sequence[float] | None
Item = tuple[np.ndarray, np.ndarray]
DTYPES = (torch.uint8, torch.float32, torch.float64)
LAYOUTS = {"NCHW": 4, "NHWC": 4, "NHW": 3, "NC...": None}  # and their number of dimensions
# Samplers that draw all of their dataset, in any order.
WHOLE = (torch_data.SequentialSampler, torch_data.RandomSampler, torch_data.DistributedSampler)


def input_tensor(images: Any, layout: str | None) -> Tensor:
    """uint8 or float inputs [N,C,...] from what the user has; `layout` as in from_arrays."""
    if not isinstance(images, Tensor):
        images = torch.from_numpy(np.require(images, requirements=("C", "W")))
    check_values("images", images)
    if not images.ndim:
        raise ValueError(f"images are one value, {images.item()!r}; expected [N,C,...]")
    if images.dtype in (torch.float16, torch.bfloat16):
        images = images.float()
    if images.dtype not in DTYPES:
        raise TypeError(f"images are {images.dtype}; give uint8 (0 to 255), or normalised floats")
    if layout is None:
        dims = images.ndim if images.dtype == torch.uint8 else 0
        last = dims == 4 and _channels_last(*images.shape[1:])
        layout = "NHW" if dims == 3 else "NHWC" if last else "NC..."
    if (
        not isinstance(layout, str)
        or layout not in LAYOUTS
        or LAYOUTS[layout] not in (None, images.ndim)
    ):
        raise ValueError(
            f"layout is {layout!r} for images {list(images.shape)}; give 'NCHW', 'NHWC' (4 "
            f"dimensions), 'NHW' (3) or 'NC...' (inputs of any shape, taken as they are)"
        )
    images = images.unsqueeze(1) if layout == "NHW" else images
    return (images.permute(0, 3, 1, 2) if layout == "NHWC" else images).contiguous()


def target_tensor(targets: Any, name: str = "labels") -> Tensor:
    """Targets [N,...]: whole numbers become int64, floats and bools stay as they are."""
    if not isinstance(targets, Tensor):
        array = np.asarray(targets)
        if array.size and array.dtype.kind not in "iufb":
            raise TypeError(f"{name} are {array.dtype}; they must be numbers")
        whole = array.dtype.kind in "iu" or array.size == 0
        targets = torch.from_numpy(array.astype(np.int64 if whole else array.dtype))
    check_values(name, targets)
    if targets.is_complex():
        raise TypeError(f"{name} are {targets.dtype}; they must be real numbers")
    return targets if targets.is_floating_point() or targets.dtype == torch.bool else targets.long()


def are_indices(targets: Tensor) -> bool:
    """Are these class indices: whole numbers, one per sample?"""
    return targets.dtype == torch.int64 and targets.ndim == 1


def check_values(name: str, tensor: Tensor) -> None:
    """Refuse tensors without values in memory: meta, sparse, quantised ones."""
    if tensor.is_meta:
        raise TypeError(f"{name} are on the meta device and have no values; give real ones")
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantised" if tensor.is_quantized else str(tensor.layout)
        raise TypeError(f"{name} are {kind}; give {name}.to_dense() or {name}.dequantize()")


def check_labels(labels: Tensor, classes: int, where: str) -> None:
    """Refuse labels that are not class indices 0 .. classes-1, naming the first."""
    if not are_indices(labels):
        found = f"{where} are {labels.dtype} {list(labels.shape)}"
        raise ValueError(f"{found}, not class indices, int64 [N]; classes={classes} must be None")
    bad = ((labels < 0) | (labels >= classes)).nonzero().flatten()
    if len(bad):
        raise ValueError(
            f"{where}[{bad[0]}] is {labels[bad[0]]}; with {classes} classes labels are "
            f"0 to {classes - 1} ({len(bad)} of {len(labels)} are not)"
        )


def _channels_last(first: int, _: int, last: int) -> bool:
    """Does an image with these dimensions have its channels last?"""
    return last in (1, 3) and first not in (1, 3)


# --------------------------------------------------------------------- datasets and loaders


def read_dataset(dataset: Any, mean: Stats, std: Stats) -> Item:
    """All inputs and targets of a Dataset: uint8 or float [N,C,...], and numbers [N,...]."""
    check_dataset(dataset)
    first = read_item(dataset, 0)
    images, targets = (np.empty((len(dataset), *a.shape), a.dtype) for a in first)
    for i in range(len(dataset)):
        images[i], targets[i] = read_item(dataset, i, first)
        if i < 8:
            check_repeatable(dataset, i, images[i])
    if images.dtype != np.uint8 and mean is not None and std is not None:
        images = _to_bytes(images, mean, std)
    return images, targets


def check_dataset(dataset: Any) -> None:
    """Refuse a Dataset without a length or items."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"{type(dataset).__name__} has no length or items; give a Dataset that has")
    if len(dataset) == 0:
        raise ValueError("the dataset has no items, so its images have no shape")


def check_repeatable(dataset: Any, i: int, image: np.ndarray) -> None:
    """Refuse a Dataset whose item i is not this image when it is read again."""
    again = read_item(dataset, i)[0]
    if not np.array_equal(again, image, equal_nan=again.dtype.kind == "f"):
        raise ValueError(
            f"item {i} of the dataset is another image each time it is read; give the "
            f"dataset without its random transforms: fastbcd makes crops and flips itself"
        )


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


def read_item(dataset: Any, i: int, first: Item | None = None) -> Item:
    """Item i of a Dataset: its input, uint8 or float [C,...], and its target, like the first."""
    item = dataset[i]
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise TypeError(f"item {i} of the dataset is a {type(item).__name__}, not (image, label)")
    image, label = item[:2]
    where = f"the label of item {i} of the dataset"
    try:
        target = np.asarray(operator.index(label), np.int64)
    except (TypeError, ValueError):
        target = _array(label, where)
    if target.dtype.kind not in "iufb":
        raise TypeError(f"{where} is {label!r}, not an int, nor an array of numbers")
    where = f"the image of item {i} of the dataset"
    mode = getattr(image, "mode", None)  # of a PIL image; a tensor has a method of that name
    if isinstance(mode, str) and mode not in ("L", "RGB"):
        raise TypeError(f"{where} has mode {mode!r}; convert it: image.convert('RGB')")
    array = _array(image, where)
    if array.ndim == 0 or array.size == 0 or (array.dtype != np.uint8 and array.dtype.kind != "f"):
        raise TypeError(
            f"{where} is a {type(image).__name__}: {array.dtype} {list(array.shape)}; it must be a "
            f"PIL image, or uint8 or float [C,H,W] or [C,...]"
        )
    if array.dtype == np.uint8 and array.ndim == 2:
        array = array[None]
    if not isinstance(image, Tensor) and array.ndim == 3 and _channels_last(*array.shape):
        array = array.transpose(2, 0, 1)
    for what, now, old in zip(("image", "target"), (array, target), first or (), strict=False):
        if now.shape != old.shape or now.dtype != old.dtype:
            raise ValueError(
                f"the {what} of item {i} of the dataset is {now.dtype} {now.shape}, that of item 0 "
                f"{old.dtype} {old.shape}; bring all to one size and dtype"
            )
    return array, target


def _array(value: Any, where: str) -> np.ndarray:
    if not isinstance(value, Tensor):
        return np.asarray(value)
    check_values(where, value)
    small = value.dtype in (torch.float16, torch.bfloat16)
    return (value.float() if small else value).numpy(force=True)


def _to_bytes(images: np.ndarray, mean: Any, std: Any) -> np.ndarray:
    """The bytes k that floats were made from: all k/255, or all (k/255 - mean)/std.

    It is the same for all, as a single normalised image may look like k/255.
    """
    column = (-1, *[1] * (images.ndim - 2))
    found = np.empty(images.shape, np.uint8)
    for shift, scale in ((0.0, 1.0), (np.reshape(mean, column), np.reshape(std, column))):
        for i, image in enumerate(images):
            level = (image.astype(np.float64) * scale + shift) * 255
            near = np.rint(level)
            if not np.abs(level - near).max() < 1e-2 or near.min() < 0 or near.max() > 255:
                break
            found[i] = near
        else:
            return found
    raise ValueError(
        f"the image of item {i} of the dataset has floats from {image.min():.4g} to "
        f"{image.max():.4g}: neither k/255 nor undone by the mean and std given; leave both out to "
        f"use the floats as they are"
    )
