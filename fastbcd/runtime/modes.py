"""Modes: a net in eval mode for a while, and every module as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def keeping_modes(net: nn.Module) -> Iterator[None]:
    """Afterwards every module is in the mode it was in."""
    modes = {module: module.training for module in net.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """The net in eval mode; afterwards every module is in the mode it was in.

    >>> net = nn.Dropout()
    >>> with evaluating(net):
    ...     net.training
    False
    >>> net.training
    True
    """
    with keeping_modes(net):
        net.eval()
        yield
