"""The torch.fx graph of a network, and that graph without in-place operations."""

from __future__ import annotations

import copy
import linecache
import operator
import threading
from typing import Any

from torch import fx, nn
from torch.fx import graph_module

from fastbcd.masking.activations import MaskedActivation

_LOCK = threading.RLock()


class Tracer(fx.Tracer):
    """torch.fx's tracer with masked activations as leaf calls.

    torch.fx patches nn.Module for the whole process while it traces. So one thread traces at a
    time, and modules that other threads call meanwhile run as usual.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, MaskedActivation) or super().is_leaf_module(m, module_qualified_name)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with _LOCK:
            graph = super().trace(root, concrete_args)
        for node in graph.nodes:
            has_residual = node.op == "call_module" and len(node.args) + len(node.kwargs) > 1
            if has_residual and isinstance(self.root.get_submodule(node.target), MaskedActivation):
                _separate_residual(node)
        return graph


def _separate_residual(node: fx.Node) -> None:
    """act(x, residual) -> act(x + residual): readers of a graph expect one argument."""
    given: dict[str, Any] = {**dict(zip(("x", "residual"), node.args, strict=False)), **node.kwargs}
    total = given["x"]
    if given["residual"] is not None:
        with node.graph.inserting_before(node):
            total = node.graph.call_function(operator.add, (total, given["residual"]))
    node.args, node.kwargs = (total,), {}


def trace(net: nn.Module) -> fx.Graph:
    """The graph of a net in its present mode, masked activations as call_module nodes."""
    return net.graph if isinstance(net, fx.GraphModule) else Tracer().trace(net)


def without_inplace(net: nn.Module, original: fx.Graph) -> fx.Graph:
    """A copy of the graph in which no operation overwrites its input.

    Nodes that read a value after it was overwritten read the result of the operation instead.
    Modules with an `inplace` attribute are left to the caller.
    """
    graph = copy.deepcopy(original)
    pure = {operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
            operator.itruediv: operator.truediv}  # fmt: skip
    order = {n: i for i, n in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.target in pure:
            node.target = pure[node.target]
        elif node.op == "call_method" and node.target == "view":
            node.target = "reshape"  # values may lie in channels_last order
            continue
        elif node.op == "call_method" and str(node.target).endswith("_"):
            node.target = str(node.target)[:-1]
        elif node.kwargs.get("inplace"):
            node.update_kwarg("inplace", False)
        elif node.op != "call_module" or not _is_inplace(net.get_submodule(node.target)):
            continue  # a module is replaced by the caller
        changed = node.args[0] if node.args else next(iter(node.kwargs.values()))
        if isinstance(changed, fx.Node):
            _check_not_read_later(net, node, changed, order)
            later = {user for user in changed.users if order[user] > order[node]}
            changed.replace_all_uses_with(node, delete_user_cb=later.__contains__)
    return graph


def pure_module(module: nn.Module) -> nn.Module:
    """The module, with inplace=False if it has that switch."""
    if not _is_inplace(module):
        return module
    twin = copy.copy(module)
    twin.inplace = False  # type: ignore[assignment]
    return twin


def _is_inplace(module: nn.Module) -> bool:
    return bool(getattr(module, "inplace", False))


_VIEWS = {"getitem", "view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim",
          "chunk", "split", "unbind", "squeeze", "unsqueeze", "narrow", "select", "expand", "t",
          "contiguous", "detach", "dropout", "Identity", "Flatten", "Unflatten", "Dropout",
          "Dropout2d"}  # fmt: skip


def _memory_of(net: nn.Module, node: fx.Node) -> fx.Node:
    """The node whose memory a view shows; a node that is no view is its own."""
    while node.args and isinstance(node.args[0], fx.Node):
        kinds: Any = [node.target]
        if node.op == "call_module":
            kinds = type(net.get_submodule(str(node.target))).__mro__
        if not any(getattr(kind, "__name__", kind) in _VIEWS for kind in kinds):
            break
        node = node.args[0]
    return node


def _check_not_read_later(
    net: nn.Module, node: fx.Node, changed: fx.Node, order: dict[fx.Node, int]
) -> None:
    """Refuse y = x[:, :4]; y += 1 if x is read later: it is changed too."""
    memory = _memory_of(net, changed)
    for other in order:
        if other is changed or order[other] >= order[node] or _memory_of(net, other) is not memory:
            continue
        if any(order[user] > order[node] for user in other.users):
            raise ValueError(
                f"node {node.name!r} writes into memory that is read later as {other.name!r}"
            )


def forget_source(model: fx.GraphModule) -> None:
    """Drop the generated source of a GraphModule, which torch.fx keeps for the whole process.

    It serves tracebacks only, and a run would collect one for each step.
    """
    key = type(model).forward.__code__.co_filename
    graph_module._loader.eval_cache.pop(key, None)
    linecache.cache.pop(key, None)
