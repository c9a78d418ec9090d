"""How often forward calls the masked activations that were placed by hand: once, as `convert` does.

One mask has one bit per neuron. For two calls ReLUs, bytes and rounds would be counted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fastbcd.graph.trace import trace
from fastbcd.masking.activations import MaskedActivation


@contextmanager
def calls_checked(net: nn.Module) -> Iterator[None]:
    """Refuse, after one forward pass of the net, an activation that was called twice."""
    called: list[nn.Module] = []

    def note(act: nn.Module, args: Any) -> None:
        called.append(act)

    acts = [module for module in net.modules() if isinstance(module, MaskedActivation)]
    hooks = [act.register_forward_pre_hook(note) for act in acts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    _check(net, called)


def check_calls(net: nn.Module) -> None:
    """Refuse a net whose forward calls an activation twice, if torch.fx can trace it."""
    try:
        calls = trace(net).find_nodes(op="call_module")
    except Exception:  # whatever the net's own forward raises on fx proxies
        return
    _check(net, [net.get_submodule(node.target) for node in calls])


def _check(net: nn.Module, called: Iterable[nn.Module]) -> None:
    counts = Counter(called)
    for name, module in net.named_modules():
        if isinstance(module, MaskedActivation) and counts[module] > 1:
            raise ValueError(
                f"forward calls {name!r} {counts[module]} times, but a mask is that of one call: "
                f"give each call its own {type(module).__name__}, or let fastbcd.convert do it"
            )
