"""Networks whose forward reads self.training, which torch.fx traces as a constant.

The network is traced in both modes and the graphs are compared. Functional batch norm and dropout
become modules, which follow train() and eval(); any other module that differs (DropPath) is called
as a whole. Branches of training that only add outputs are left out.
"""

from __future__ import annotations

import copy
import inspect
import operator
from difflib import SequenceMatcher
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from fastbcd.masking.missed_relus import same_values
from fastbcd.masking.tracing import LeafTracer, owner_of, replace_call

_DROPOUTS: dict[Any, type[nn.Module]] = {
    F.dropout: nn.Dropout, F.dropout1d: nn.Dropout1d, F.dropout2d: nn.Dropout2d,
    F.dropout3d: nn.Dropout3d, F.alpha_dropout: nn.AlphaDropout,
    F.feature_alpha_dropout: nn.FeatureAlphaDropout,
}  # fmt: skip
_SWITCHED = {F.batch_norm, *_DROPOUTS}  # functions with an argument `training`
_WRITES = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem}


class FunctionalBatchNorm(nn.Module):
    """F.batch_norm with `training` from train() and eval(). The caller holds all tensors."""

    is_traced_as_leaf = True

    def __init__(self, momentum: float, eps: float) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps

    def forward(
        self, x: Tensor, *, num_batches_tracked: Tensor | None = None, **tensors: Any
    ) -> Tensor:
        """x [B, C, ...] -> [B, C, ...].

        Weights are passed by keyword: hooks of FlopCounterMode fail on positional ones.
        """
        if self.training and num_batches_tracked is not None:
            num_batches_tracked.add_(1)
        return F.batch_norm(
            x, training=self.training, momentum=self.momentum, eps=self.eps, **tensors
        )


class ModeError(Exception):
    """The network does something in training that a converted one would not."""


def trace_both_modes(net: nn.Module) -> tuple[fx.Graph, set[str]]:
    """The graph of the net, which is in eval mode, and the modules that it calls as a whole."""
    leaves: set[str] = set()
    while True:
        trained = copy.deepcopy(net).train()
        graph, train_graph = (LeafTracer(leaves).trace(m) for m in (net, trained))
        switched, others = _compare(net, trained, list(graph.nodes), list(train_graph.nodes))
        if not others:
            _follow_mode(net, trained, switched)
            return graph, leaves
        new = {owner_of(node) for node in others} - {"", *leaves}
        if not new:
            name = type(net.get_submodule(owner := owner_of(others[0]))).__name__
            raise ModeError(
                f"{name}{f' {owner!r}' * bool(owner)} computes something else in training than in "
                f"evaluation (at {others[0].name!r}), and a converted net has one graph; use "
                f"modules such as nn.BatchNorm2d and nn.Dropout, or move it into a module without "
                f"ReLUs"
            )
        leaves |= new


def _arguments(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _compare(
    net: nn.Module, trained: nn.Module, ours: list[fx.Node], theirs: list[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Calls that differ in `training` alone, and all nodes that differ in another way."""
    mine, other = ([(n.op, n.target, owner_of(n)) for n in nodes] for nodes in (ours, theirs))
    match: dict[fx.Node, fx.Node] = {}  # node in training -> node in evaluation
    for a, b, size in SequenceMatcher(None, mine, other, autojunk=False).get_matching_blocks():
        match.update(zip(theirs[b : b + size], ours[a : a + size], strict=True))
    matched = set(match.values())
    switched, others = [], [n for n in ours if n not in matched]
    for their, our in match.items():
        given = fx.node.map_arg((their.args, their.kwargs), lambda n: match.get(n, n))
        extra = [n for n in their.all_input_nodes if n not in match]
        if their.op == "output":
            values = list(their.all_input_nodes)
            for node in values:  # of a named tuple, too
                values += node.all_input_nodes if isinstance(node.target, type) else []
            if not {match.get(n) for n in values}.issuperset(our.all_input_nodes):
                others += [n for n in values if n not in match] or [their]
        elif their.op == "get_attr":
            read = operator.attrgetter(str(our.target))
            if "_tensor_constant" in str(our.target) and not same_values(read(net), read(trained)):
                others.append(our)
        elif given == (our.args, our.kwargs):
            continue
        elif not extra and our.target in _SWITCHED and _arguments(our.target, *given) == {
            **_arguments(our.target, our.args, our.kwargs), "training": True
        }:  # fmt: skip
            switched.append(our)
        else:
            others += extra or [our]
    # What only training computes may not write into what evaluation reads.
    others += [n for n in theirs if n not in match and _writes(n, trained)
               and any(source in match for source in n.all_input_nodes[:1])]  # fmt: skip
    return switched, others


def _writes(node: fx.Node, net: nn.Module) -> bool:
    if node.op == "call_module":
        return bool(getattr(net.get_submodule(str(node.target)), "inplace", False))
    name = getattr(node.target, "__name__", str(node.target))
    method_or_function = name.endswith("_") and not name.endswith("__")
    return node.target in _WRITES or method_or_function or bool(node.kwargs.get("inplace"))


def _follow_mode(net: nn.Module, trained: nn.Module, nodes: list[fx.Node]) -> None:
    """Call modules, which follow train(), instead of these functions."""
    # Buffers that the forward in training changed while it was traced.
    theirs = dict(trained.named_buffers())
    changed = {k for k, v in net.named_buffers() if not v.is_meta and not same_values(v, theirs[k])}
    counters = {n: f"{owner_of(n)}.num_batches_tracked".lstrip(".")
                for n in nodes if n.target is F.batch_norm}  # fmt: skip
    if unknown := changed - set(counters.values()):
        raise ModeError(
            f"its forward changes the buffer {min(unknown)!r} in training, which torch.fx does not "
            f"trace"
        )
    for node in nodes:
        given, tensors = _arguments(node.target, node.args, node.kwargs), {}
        if node.target is F.batch_norm:
            module: nn.Module = FunctionalBatchNorm(given["momentum"], given["eps"])
            tensors = {k: given[k] for k in ("running_mean", "running_var", "weight", "bias")}
            if counters[node] in changed:
                with node.graph.inserting_before(node):
                    tensors["num_batches_tracked"] = node.graph.get_attr(counters[node])
        else:
            module = _DROPOUTS[node.target](given["p"])
        replace_call(
            net, node, module.eval(), source=given["input"], inplace=given.get("inplace", False),
            tensors=tensors,
        )  # fmt: skip
