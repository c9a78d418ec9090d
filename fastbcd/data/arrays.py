"""Inputs and targets as tensors, and what is refused of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Stats = Sequence[float] | np.ndarray | None
DTYPES = (torch.uint8, torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)


def input_tensor(images: Any) -> Tensor:
    """Inputs [N,C,...] from what the user has; the layout of bytes is guessed by their shape."""
    if not isinstance(images, Tensor):
        images = torch.from_numpy(np.require(images, requirements=("C", "W")))
    check_values("images", images)
    if images.dtype in HALVES:
        images = images.float()
    if images.dtype == torch.uint8 and images.ndim == 3:
        images = images.unsqueeze(1)
    if (
        images.dtype == torch.uint8
        and images.ndim == 4
        and channels_last(images.shape[1:])
    ):
        images = images.permute(0, 3, 1, 2)
    return images.contiguous()


def channels_last(shape: Sequence[int]) -> bool:
    """Whether an image of this shape has its channels last."""
    return shape[-1] in (1, 3) and shape[0] not in (1, 3)


def target_tensor(targets: Any, name: str = "labels") -> Tensor:
    """Targets [N,...]: whole numbers become int64, floats and bools stay as they are."""
    if not isinstance(targets, Tensor):
        array = np.asarray(targets)
        if array.size == 0 or array.dtype.kind in "iu":
            array = array.astype(np.int64)
        if array.dtype.kind not in "ifb":
            raise TypeError(f"{name} are {array.dtype}; they must be real numbers")
        targets = torch.from_numpy(np.require(array, requirements=("C", "W")))
    check_values(name, targets)
    if targets.is_complex():
        raise TypeError(f"{name} are {targets.dtype}; they must be real numbers")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        return targets
    return targets.long()


def are_indices(targets: Tensor) -> bool:
    """Whether these are class indices: whole numbers, one per sample."""
    return targets.dtype == torch.int64 and targets.ndim == 1


def count_classes(*labels: Tensor) -> int:
    """The largest class index + 1; 0 without labels."""
    return 1 + max(
        (int(indices.max()) for indices in labels if len(indices)), default=-1
    )


def check_values(name: str, tensor: Tensor) -> None:
    """Refuse tensors without values in memory: meta, sparse, quantised ones."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(
            f"{name} are {tensor.dtype}, {tensor.layout}, on the device {tensor.device}; give "
            f"values in memory, as of {name}.to_dense() or {name}.dequantize()"
        )


def check_labels(labels: Tensor, classes: int, who: str) -> None:
    """Refuse labels that are not class indices 0 .. classes-1 of `who`, naming the first."""
    if not are_indices(labels):
        raise ValueError(
            f"labels are {labels.dtype} {list(labels.shape)}, not class indices, int64 [N]; "
            f"classes={classes} must be None"
        )
    for number in ((labels < 0) | (labels >= classes)).nonzero().flatten().tolist()[:1]:
        raise ValueError(
            f"label {int(labels[number])} of image {number} is out of range: {who} has {classes} "
            f"classes"
        )
