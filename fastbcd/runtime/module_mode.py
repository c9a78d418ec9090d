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
    """
    with keep_mode(net):
        net.eval()
        yield


@contextmanager
def train_mode(net: nn.Module, *others: nn.Module) -> Iterator[None]:
    """Set the net to train mode; on exit, restore the mode of every module.

    A module in eval mode inside a net in train mode is frozen and stays in eval mode; a net in
    eval mode is set to train mode as a whole. others: rewritten copies of the net with the same
    module names, set to the same modes.

    >>> net = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with train_mode(net):
    ...     [module.training for module in net]
    [True, False]
    """
    frozen = {n for n, m in _named(net) if net.training and not m.training}
    with keep_mode(net):
        for one in (*others, net):
            one.train()
            for name, module in _named(one):
                module.training = name not in frozen
        yield


def _named(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return net.named_modules(remove_duplicate=False)
