"""Images and labels as tensors: made from what the user has, measured and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Stats = Sequence[float] | None
FLOATS = (torch.float32, torch.float64)


def image_tensor(images: Any, layout: str | None) -> Tensor:
    """uint8 or float images [N,C,H,W] from what the user has."""
    if not isinstance(images, Tensor):
        array = np.ascontiguousarray(images)
        images = torch.from_numpy(array if array.flags.writeable else array.copy())
    if images.dtype in (torch.float16, torch.bfloat16):
        images = images.float()
    if images.dtype != torch.uint8 and images.dtype not in FLOATS:
        raise TypeError(f"images are {images.dtype}; give uint8 (0 to 255), or normalised floats")
    if images.ndim == 3:
        images, layout = images.unsqueeze(1), "NCHW"
    if images.ndim != 4:
        raise ValueError(f"images are {list(images.shape)}, not [N,C,H,W], [N,H,W,C] or [N,H,W]")
    if layout is None:
        last = images.dtype == torch.uint8 and channels_last(images.shape[1], images.shape[3])
        layout = "NHWC" if last else "NCHW"
    if layout not in ("NCHW", "NHWC"):
        raise ValueError(f"layout is {layout!r}; it is 'NCHW' or 'NHWC'")
    return (images.permute(0, 3, 1, 2) if layout == "NHWC" else images).contiguous()


def channels_last(first: int, last: int) -> bool:
    """Does an image with these first and last dimensions have its channels last?"""
    return last in (1, 3) and first not in (1, 3)


def label_tensor(labels: Any, name: str = "labels") -> Tensor:
    """int64 [N] from whole numbers of any kind."""
    if not isinstance(labels, Tensor):
        array = np.asarray(labels)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"{name} are {array.dtype}; they must be whole numbers")
        labels = torch.from_numpy(array.astype(np.int64))
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"{name} are {labels.dtype}; they must be whole numbers")
    if labels.ndim != 1:
        raise ValueError(f"{name} are {list(labels.shape)}, not [N]; if one-hot: labels.argmax(1)")
    return labels.long()


def statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of each channel in units of 0..1, exact for uint8; 0 and 1 for floats."""
    channels = images.shape[1]
    if images.is_floating_point() or images.numel() == 0:
        return (0.0,) * channels, (1.0,) * channels
    level = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for c in range(channels):
        share = torch.bincount(images[:, c].flatten(), minlength=256).cpu().double()
        share /= share.sum()
        mean.append(float((share * level).sum()))
        std.append(float((share * (level - mean[-1]) ** 2).sum().sqrt()) or 1.0)  # constant: 1
    return tuple(mean), tuple(std)


def check_data(
    images: Tensor, labels: Tensor, ids: Tensor, mean: Sequence[float], std: Sequence[float],
    classes: int,
) -> None:  # fmt: skip
    """Refuse the parts of an ImageData that would fail or mislead later."""
    if images.dtype != torch.uint8 and images.dtype not in FLOATS:
        raise TypeError(f"images are {images.dtype}; they must be uint8, float32 or float64")
    if images.ndim != 4:
        raise ValueError(f"images have shape {list(images.shape)}, not [N,C,H,W]")
    for name, tensor in (("labels", labels), ("ids", ids)):
        if tensor.dtype != torch.int64 or tensor.shape != images.shape[:1]:
            raise ValueError(
                f"{name} are {tensor.dtype} {list(tensor.shape)} beside {len(images)} images; "
                f"they must be int64 [{len(images)}]"
            )
        if tensor.device != images.device:
            raise ValueError(f"{name} are on {tensor.device}, the images on {images.device}")
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != images.shape[1]:
            raise ValueError(f"{name} has {len(values)} values for {images.shape[1]} channels")
        if not np.isfinite(values).all() or (name == "std" and min(values, default=1.0) <= 0):
            raise ValueError(f"{name} is {tuple(values)}; it must be finite, and std above 0")
    check_labels(labels.cpu().numpy(), classes, "labels")


def check_labels(labels: np.ndarray, classes: int, where: str) -> None:
    """Refuse labels outside 0 .. classes-1, naming the first."""
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if bad.size:
        raise ValueError(
            f"{where}[{bad[0]}] is {labels[bad[0]]}; with {classes} classes labels are "
            f"0 to {classes - 1} ({bad.size} of {labels.size} are not)"
        )
