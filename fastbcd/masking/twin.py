"""A second network on the parameters of a net, with other activations at its sites."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from fastbcd.masking.activations import MaskedActivation


def twin(net: nn.Module, make: Callable[[Any], MaskedActivation]) -> nn.Module:
    """A network on the net's own parameters and buffers, with make(activation) at every site."""
    tensors = (*net.parameters(), *net.buffers())
    result = copy.deepcopy(net, {id(t): t for t in tensors})
    made: dict[nn.Module, MaskedActivation] = {}
    for name, module in list(result.named_modules(remove_duplicate=False)):
        if not isinstance(module, MaskedActivation):
            continue
        if module not in made:
            made[module] = make(module)
            made[module].order = module.order
        if not name:
            return made[module]
        result.set_submodule(name, made[module])
    return result
