"""A network rewritten for speed: what comes right before an activation becomes part of its call.

    act(a + b)        ->  masked_relu(a, mask, residual=b)
    act(norm(a) + b)  ->  the same with the batch norm inside (normalisation.py), ReLU on a CPU

The result shares every parameter, buffer and mask with the net, and does not mind tensors in
channels_last order. Follow it up with train() or eval(), whichever it was made for.
"""

from __future__ import annotations

import copy
import operator
import warnings
from typing import Any

import torch
from torch import Tensor, fx, nn

from fastbcd import ops
from fastbcd.graph import cpu_conv as convolution
from fastbcd.graph import fuse_norm as normalisation
from fastbcd.graph.trace import trace, without_inplace
from fastbcd.masking.activations import MaskedActivation, MaskedPoly, MaskedReLU
from fastbcd.runtime.module_mode import eval_mode, train_mode

_ADDITIONS = {operator.add, torch.add, "add"}
_said: set[str] = set()


class ResidualActivation(nn.Module):
    """act(x + residual) in one pass; the activation stays the net's own."""

    def __init__(self, act: MaskedActivation) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Any, residual: Any) -> Tensor:
        """x, residual [B, *shape] -> [B, *shape]."""
        if not _alike(x, residual):
            return self.act(x + residual)
        own: Any = getattr(self.act, "with_residual", None)
        if own is not None:
            return own(x, residual)
        if isinstance(self.act, MaskedPoly):
            return ops.masked_poly(x, self.act.mask, self.act.coef, residual=residual, trials=False)
        return ops.masked_relu(x, self.act.mask, residual=residual, trials=False)


def _takes_residual(module: Any) -> bool:
    """The activations whose kernel adds a residual, those of starts/gates.py among them."""
    return type(module) in (MaskedReLU, MaskedPoly) or hasattr(module, "with_residual")


def _alike(x: Any, residual: Any) -> bool:
    """Can the two be added without broadcasting or promotion?"""
    return (
        isinstance(x, Tensor)
        and isinstance(residual, Tensor)
        and x.shape == residual.shape
        and x.dtype == residual.dtype
    )


def fused(net: nn.Module, train: bool = True) -> tuple[nn.Module, torch.memory_format]:
    """The net with its additions fused into activations, and the memory format to feed it in.

    The net is traced in train mode (see `train_mode`) or in eval mode. One that cannot be traced
    is returned as it is, in the contiguous format: it may hold a `view` that channels_last does
    not allow.

    >>> net = nn.Sequential(nn.Linear(4, 3), fastbcd.MaskedReLU((3,)))
    >>> model, memory_format = fused(net)
    >>> model.get_submodule("0").weight is net[0].weight, memory_format
    (True, torch.channels_last)
    """
    try:
        with train_mode(net) if train else eval_mode(net):
            return _rewrite(net, without_inplace(net, trace(net))), torch.channels_last
    except Exception as error:  # whatever the net's own forward raises on fx proxies
        _say_once(
            f"{type(net).__name__} runs as it is, slower than it could: torch.fx cannot trace it "
            f"({error})"
        )
        return net, torch.contiguous_format


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def _rewrite(net: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    model = fx.GraphModule(net, graph, type(net).__name__)
    for node in list(graph.nodes):
        if node.op != "call_module":
            continue
        module: Any = model.get_submodule(node.target)
        if getattr(module, "inplace", False):
            # The graph no longer relies on it, and a fused call may read its input later.
            twin = copy.copy(module)
            twin.inplace = False
            model.set_submodule(node.target, twin)
        elif _takes_residual(module) and len(node.args) == 1:
            _fuse_into(model, node, module)
        elif (better := convolution.for_training(module)) is not module:
            model.set_submodule(node.target, better)
    graph.lint()
    model.recompile()
    return model


def _fuse_into(model: fx.GraphModule, node: fx.Node, act: MaskedActivation) -> None:
    """Take what comes before an activation, and is read by nothing else, into its call."""
    before: Any = node.args[0]
    absorbed = [node]
    terms = [before]
    if _is_addition(before):
        absorbed.append(before)
        terms = list(before.args)
    fused: nn.Module | None = None
    for i, term in enumerate(terms):
        norm = model.get_submodule(term.target) if _is_only_call(model, term) else None
        if normalisation.fits(norm, act):
            fused = normalisation.NormActivation(norm, act)  # type: ignore[arg-type]
            absorbed.append(term)
            terms = [term.args[0], *terms[:i], *terms[i + 1 :]]
            break
    if fused is None:
        if len(terms) == 1:
            return
        fused = ResidualActivation(act)
    name = f"fused_{node.name}"
    model.add_submodule(name, fused)
    with model.graph.inserting_after(before):
        new = model.graph.call_module(name, tuple(terms))
    node.replace_all_uses_with(new)
    for gone in absorbed:
        model.graph.erase_node(gone)


def _is_addition(node: Any) -> bool:
    """A sum of two that nobody else reads."""
    return (
        isinstance(node, fx.Node)
        and node.target in _ADDITIONS
        and len(node.users) == 1
        and len(node.args) == 2
        and not node.kwargs
    )


def _is_only_call(model: fx.GraphModule, node: Any) -> bool:
    """A call of a module that is called nowhere else, with a result that is read once."""
    return (
        isinstance(node, fx.Node)
        and node.op == "call_module"
        and len(node.users) == 1
        and len(node.args) == 1
        and sum(other.target == node.target for other in model.graph.nodes) == 1
    )
