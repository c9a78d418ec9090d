"""Forward and backward of a training step as two CUDA graphs, in place of hundreds of launches.

torch.cuda.make_graphed_callables captures them. Loss, clipping and optimizer stay calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.graph.trace import logits_of
from fastbcd.runtime.warn_once import warn_once
from fastbcd.training import precision

EAGER = 8  # batches before the capture: kernels are compiled, and compared with the reference


class Forward(nn.Module):
    """The model's logits, in mixed precision."""

    def __init__(self, model: nn.Module, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast

    def forward(self, images: Tensor) -> Any:
        """[B, ...] -> the logits, or what else the model returns."""
        with precision.mixed(self.autocast, images.device):
            return logits_of(self.model(images))


class Replayed:
    """A model's outputs, from the batch after `EAGER` of one shape on by a CUDA graph.

    Batches of another shape, and a model that cannot be captured, run as they are. The tensors of
    the model must stay where they are, and change in place.

    Args:
        model, autocast: as in `Forward`.
        capture: False: nothing is captured.
    """

    def __init__(
        self, model: nn.Module, autocast: torch.dtype | None, *, capture: bool
    ) -> None:
        self.eager = Forward(model, autocast)
        self.graph: Any = None
        self.shape: torch.Size | None = None
        self.count = 0
        self.capture = capture

    def __call__(self, images: Tensor) -> Any:
        """[B, ...] -> the outputs; a graph's are overwritten by its next call."""
        if self.capture and self.graph is None:
            self._look_at(images)
        if self.graph is not None and images.shape == self.shape:
            return self.graph(images)
        return self.eager(images)

    def _look_at(self, images: Tensor) -> None:
        """Count batches of one shape; capture when there were enough."""
        if images.shape != self.shape:
            self.shape = images.shape
            self.count = 0
        self.count += 1
        if self.count <= EAGER:
            return
        self.capture = False  # one attempt
        model = self.eager.model
        try:
            self.graph = captured(Forward(model, self.eager.autocast), images)
        except Exception as error:  # whatever the net's own forward does
            warn_once(
                f"{type(model).__name__} is trained without CUDA graphs, by one call after the "
                f"other: it cannot be captured ({type(error).__name__}: {error})"
            )


def captured(forward: Forward, images: Tensor) -> Any:
    """The graphs of a forward and its backward. The buffers of the model do not change."""
    buffers = list(forward.buffers())
    before = [buffer.clone() for buffer in buffers]
    try:
        return torch.cuda.make_graphed_callables(
            forward, (images.clone(),), allow_unused_input=True
        )
    finally:  # its calls update running statistics
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
