"""A second network on the parameters of a net, with other activations at its sites."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from fastbcd.masking.activations import MaskedActivation


def twin(net: nn.Module, make: Callable[[Any], MaskedActivation]) -> nn.Module:
    """A network on the net's own parameters and buffers, with make(activation) at every site."""
    shared: dict[int, Any] = {id(t): t for t in (*net.parameters(), *net.buffers())}
    result, made = copy.deepcopy(net, shared), dict[int, MaskedActivation]()
    for name, act in list(result.named_modules(remove_duplicate=False)):
        if isinstance(act, MaskedActivation):
            if id(act) not in made:
                made[id(act)] = new = make(act)
                new.order = act.order
            if not name:
                return made[id(act)]
            result.set_submodule(name, made[id(act)])
    return result
