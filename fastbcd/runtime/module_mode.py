"""Context managers for the train and eval mode of a net's modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def keep_mode(net: nn.Module) -> Iterator[None]:
    """On exit, set every module back to the mode it had on entry."""
    before = {module: module.training for module in net.modules()}
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


@contextmanager
def eval_mode(net: nn.Module) -> Iterator[None]:
    """Set the net to eval mode; on exit, restore the mode of every module.

    >>> net = nn.Dropout()
    >>> with eval_mode(net):
    ...     net.training
    False
    >>> net.training
    True
    """
    with keep_mode(net):
        net.eval()
        yield
