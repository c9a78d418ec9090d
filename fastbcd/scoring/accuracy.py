"""The accuracy of a network, and the checks that its logits fit the labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.data.images import ImageData
from fastbcd.data.sources import as_data
from fastbcd.graph.fuse import fused
from fastbcd.runtime import ranks
from fastbcd.runtime.module_mode import eval_mode


def accuracy(net: nn.Module, data: Any, batch_size: int = 500) -> float:
    """The percentage of images whose largest logit is that of their label, in eval mode.

    With several ranks each counts its part of the data, and all return the same accuracy.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> 0.0 <= accuracy(net, (torch.randn(8, 1, 2, 2), torch.arange(8) % 3)) <= 100.0
    True
    """
    images = as_data(data)
    if not len(images):
        raise ValueError("there are no images to measure the accuracy on")
    mine = images.shard(ranks.rank(), ranks.world())
    correct = torch.zeros((), dtype=torch.int64, device=images.device)
    with torch.autocast(images.device.type, enabled=False):
        check_classes(net, images, "the net")
        model, layout = fused(net, train=False)
        with eval_mode(net), torch.inference_mode():
            for x, labels in mine.batches(batch_size, dtype=dtype_of(net), memory_format=layout):
                correct += (model.eval()(x).argmax(1) == labels).sum()
    return 100.0 * int(ranks.all_sum(correct)) / len(images)


def check_classes(net: nn.Module, data: ImageData, who: str) -> int:
    """The number of logits of `who` for one image; refuses labels that are out of range."""
    check_device(net, data, who)
    data.need_classes(f"the accuracy of {who}")
    try:
        with eval_mode(net), torch.inference_mode():
            logits = net(next(data.batches(1, dtype=dtype_of(net)))[0])
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        grey = data.images.ndim == 3
        hint = "; for grey images [N,H,W] give images.unsqueeze(1)" if grey else ""
        raise ValueError(
            f"{who} does not run on images of shape {list(data.images.shape[1:])}: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}{hint}"
        ) from error
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != 1:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"{who} must return logits [B, classes]; for one image it returns {found}")
    classes = logits.shape[1]
    outside = ((data.labels < 0) | (data.labels >= classes)).nonzero().flatten().tolist()
    for i in outside[:1]:
        raise ValueError(
            f"label {int(data.labels[i])} of image {i} is out of range: {who} has {classes} classes"
        )
    return classes


def check_device(net: nn.Module, data: ImageData, who: str) -> None:
    """Refuse data and a net that are on different devices."""
    for tensor in (*net.parameters(), *net.buffers())[:1]:
        if tensor.device != data.device:
            raise ValueError(
                f"the data is on {data.device} and {who} on {tensor.device}; move one of them "
                f"with .to(device)"
            )


def dtype_of(net: nn.Module) -> torch.dtype:
    """The dtype of the net's first floating-point parameter; float32 if there is none."""
    return next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)
