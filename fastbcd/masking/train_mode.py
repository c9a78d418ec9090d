"""Networks whose forward reads self.training, which torch.fx traces as a constant.

The network is traced in both modes and the graphs are compared. Functional batch norm and dropout
become modules, which follow train() and eval(); a module without ReLUs (DropPath) is called as a
whole; any other difference is refused. Branches of training that only add outputs are left out.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Collection
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fastbcd.graph.trace import Tracer

_DROPOUTS: dict[Any, type[nn.Module]] = {
    F.dropout: nn.Dropout, F.dropout1d: nn.Dropout1d, F.dropout2d: nn.Dropout2d,
    F.dropout3d: nn.Dropout3d, F.alpha_dropout: nn.AlphaDropout,
    F.feature_alpha_dropout: nn.FeatureAlphaDropout,
}  # fmt: skip
_SWITCHED = {F.batch_norm, *_DROPOUTS}  # functions with an argument `training`
_WRITES = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem}


class FunctionalBatchNorm(nn.Module):
    """F.batch_norm with `training` from train() and eval(). The caller holds all tensors."""

    def __init__(self, momentum: float, eps: float) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps

    def forward(
        self,
        x: Tensor,
        *,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        num_batches_tracked: Tensor | None = None,
    ) -> Tensor:
        """x [B, C, ...] -> [B, C, ...].

        Weights are passed by keyword: hooks of FlopCounterMode fail on positional ones.
        """
        if self.training and num_batches_tracked is not None:
            num_batches_tracked.add_(1)
        return F.batch_norm(
            x, running_mean, running_var, weight, bias, self.training, self.momentum, self.eps
        )


class Switch(NamedTuple):
    """A call of the graph that module(source, **tensors) replaces."""

    node: fx.Node
    module: nn.Module
    source: fx.Node
    tensors: dict[str, Any]
    counter: str | None  # the buffer to pass as well, which counts batches
    inplace: bool


class ModeError(Exception):
    """The network does something in training that a converted one would not."""


class _LeafTracer(Tracer):
    """Calls the modules of the given paths as a whole."""

    def __init__(self, leaves: Collection[str] = ()) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        own = isinstance(m, FunctionalBatchNorm) or module_qualified_name in self.leaves
        return own or super().is_leaf_module(m, module_qualified_name)


def trace_both_modes(
    net: nn.Module, is_relu: Callable[[fx.Node], bool]
) -> tuple[fx.Graph, list[Switch]]:
    """The graph of the net, which is in eval mode, and the calls that depend on the mode."""
    leaves: set[str] = set()
    while True:
        trained = copy.deepcopy(net).train()
        graph, train_graph = (_LeafTracer(leaves).trace(m) for m in (net, trained))
        switched, others = _compare(net, graph, trained, train_graph)
        if not others:
            return graph, _switches(net, trained, switched)
        relus = [call_path(node) for node in graph.nodes if is_relu(node)]
        for owner in dict.fromkeys(map(owner_of, others)):
            inside = owner + "."
            if owner == "" or owner in leaves or any(p.startswith(inside) for p in relus):
                node = next(n for n in others if owner_of(n) == owner)
                module = net.get_submodule(owner)
                raise ModeError(
                    f"{type(module).__name__}{f' {owner!r}' * bool(owner)} computes something else "
                    f"in training than in evaluation (at {node.name!r}), and a converted net "
                    f"has one graph; use modules such as nn.BatchNorm2d and nn.Dropout there, "
                    f"or move the ReLUs out of it"
                )
            leaves.add(owner)


def owner_of(node: fx.Node) -> str:
    """The path of the module whose forward makes this call."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if node.op == "call_module" and stack and stack[-1][0] == node.target:
        stack.pop()
    return stack[-1][0] if stack else ""


def call_path(node: fx.Node) -> str:
    """The path of the module that is called, or of the function called by its owner."""
    if node.op == "call_module":
        return str(node.target)
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
    return ".".join(filter(None, [owner_of(node), target.strip("_")]))


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of a Python function, by name, with defaults."""
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    bound.apply_defaults()
    return dict(bound.arguments)


def _compare(
    net: nn.Module, graph: fx.Graph, trained: nn.Module, train_graph: fx.Graph
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Calls that differ in `training` alone, and all nodes that differ in another way."""
    ours, theirs = list(graph.nodes), list(train_graph.nodes)
    mine, other = ([(n.op, n.target, owner_of(n)) for n in nodes] for nodes in (ours, theirs))
    match: dict[fx.Node, fx.Node] = {}  # node in training -> node in evaluation
    for a, b, size in SequenceMatcher(None, mine, other, autojunk=False).get_matching_blocks():
        match.update(zip(theirs[b : b + size], ours[a : a + size], strict=True))
    missing = set(ours) - set(match.values())
    switched, others = [], [n for n in ours if n in missing]
    for their, our in match.items():
        if their.op == "output":
            values = list(their.all_input_nodes)
            for node in values:  # of a named tuple, too
                values += node.all_input_nodes if isinstance(node.target, type) else []
            if not {match.get(n) for n in values}.issuperset(our.all_input_nodes):
                others += [n for n in values if n not in match] or [their]
        elif their.op == "get_attr":
            read = operator.attrgetter(str(our.target))
            if "_tensor_constant" in str(our.target) and not _equal(read(net), read(trained)):
                others.append(our)
        elif (given := _mapped(their, match)) != (our.args, our.kwargs):
            extra = [n for n in their.all_input_nodes if n not in match]
            if not extra and our.target in _SWITCHED and _differs_in_training(our, their, given):
                switched.append(our)
            else:
                others += extra or [our]
    # What only training computes may not write into what evaluation reads.
    others += [n for n in theirs if n not in match and _writes(n, trained)
               and any(source in match for source in n.all_input_nodes[:1])]  # fmt: skip
    return switched, others


def _mapped(their: fx.Node, match: dict[fx.Node, fx.Node]) -> tuple[Any, Any]:
    return fx.node.map_arg((their.args, their.kwargs), lambda n: match.get(n, n))


def _differs_in_training(our: fx.Node, their: fx.Node, given: tuple[Any, Any]) -> bool:
    signature = inspect.signature(our.target)  # type: ignore[arg-type]
    theirs = signature.bind(*given[0], **given[1])
    theirs.apply_defaults()
    mine, other = arguments(our), dict(theirs.arguments)
    modes = mine.pop("training"), other.pop("training")
    return mine == other and modes == (False, True)


def _writes(node: fx.Node, net: nn.Module) -> bool:
    if node.op == "call_module":
        return bool(getattr(net.get_submodule(str(node.target)), "inplace", False))
    name = getattr(node.target, "__name__", str(node.target))
    method_or_function = name.endswith("_") and not name.endswith("__")
    return node.target in _WRITES or method_or_function or bool(node.kwargs.get("inplace"))


def _switches(net: nn.Module, trained: nn.Module, nodes: list[fx.Node]) -> list[Switch]:
    # Buffers that the forward in training changed while it was traced.
    theirs = dict(trained.named_buffers())
    changed = {k for k, v in net.named_buffers() if not v.is_meta and not _equal(v, theirs[k])}
    counters, found = set(), []
    for node in nodes:
        given = arguments(node)
        if node.target is F.batch_norm:
            names = ("running_mean", "running_var", "weight", "bias")
            tensors = {name: given[name] for name in names}
            norm = FunctionalBatchNorm(given["momentum"], given["eps"]).eval()
            counter: str | None = f"{owner_of(node)}.num_batches_tracked".lstrip(".")
            counters.add(counter)
            counter = counter if counter in changed else None
            found.append(Switch(node, norm, given["input"], tensors, counter, False))
        else:
            dropout = _DROPOUTS[node.target](given["p"]).eval()
            found.append(Switch(node, dropout, given["input"], {}, None, given["inplace"]))
    if changed - counters:
        raise ModeError(
            f"its forward changes the buffer {min(changed - counters)!r} in training, which "
            f"torch.fx does not trace"
        )
    return found


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
