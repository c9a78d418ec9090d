"""The torch.fx graph of a network, without in-place operations, without emptied sites."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import linecache
import operator
import threading
from collections.abc import Container
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx import graph_module

from fastbcd.masking.activations import MaskedActivation, MaskedReLU

LOCK = threading.RLock()
_MAKERS = (torch.arange, torch.as_tensor, torch.empty, torch.eye, torch.full, torch.linspace,
           torch.ones, torch.rand, torch.randn, torch.tensor, torch.zeros)  # fmt: skip


class FunctionalBatchNorm(nn.Module):
    """F.batch_norm with `training` from train() and eval(). The caller holds all tensors.

    They are passed by keyword: hooks of FlopCounterMode fail on positional ones.
    """

    def __init__(self, momentum: float, eps: float) -> None:
        super().__init__()
        self.options: Any = {"momentum": momentum, "eps": eps}

    def forward(self, x: Tensor, **tensors: Any) -> Tensor:
        """x [B, C, ...] -> [B, C, ...]."""
        return F.batch_norm(x, training=self.training, **self.options, **tensors)


class Tracer(fx.Tracer):
    """torch.fx's tracer with masked activations as leaf calls.

    torch.fx patches nn.Module for the whole process while it traces. So one thread traces at a
    time, and modules that other threads call meanwhile run as usual.
    """

    def __init__(self) -> None:
        super().__init__(
            autowrap_functions=_MAKERS
        )  # torch.zeros(x.shape[0], device=x.device)
        self._autowrap_search.append(torch)
        self.thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(self, root_fn: Any, *_: Any) -> tuple[Any, list[Any]]:
        """The first argument of forward alone: the others have their defaults."""
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        name = next((p.name for p in parameters if p.kind is not p.VAR_POSITIONAL), "x")
        return root_fn, [self.root, self.create_proxy("placeholder", name, (), {})]

    def create_arg(self, a: Any) -> Any:
        if dataclasses.is_dataclass(a) and isinstance(a, dict):  # of transformers
            parts = {name: self.create_arg(part) for name, part in a.items()}
            return self.create_node("call_function", type(a), (), parts)
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        ours = isinstance(m, MaskedActivation | FunctionalBatchNorm)
        return ours or super().is_leaf_module(m, module_qualified_name)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with LOCK:
            graph = super().trace(root, concrete_args)
        for node in graph.nodes:
            if node.target in _MAKERS:  # torch.fx would wrap the function for good
                node.meta.pop("is_wrapped", None)
            if node.op == "call_module":
                self.split_addition(node)
        return graph

    def split_addition(self, node: fx.Node) -> None:
        """act(x, residual) -> act(x + residual): readers of a graph expect one argument."""
        terms = [*node.args, *node.kwargs.values()]
        if len(terms) < 2 or not isinstance(_module(self.root, node), MaskedActivation):
            return
        total: Any = terms[0]
        if terms[1] is not None:
            with node.graph.inserting_before(node):
                total = node.graph.call_function(operator.add, tuple(terms))
        node.args = (total,)
        node.kwargs = {}


def trace(net: nn.Module) -> fx.Graph:
    """The graph of a net in its present mode, masked activations as call_module nodes.

    It returns what `logits_of` gives of the net's output.
    """
    graph = getattr(net, "graph", None)
    if not isinstance(graph, fx.Graph):
        graph = Tracer().trace(net)
    result: Any = graph.output_node().args[0]
    made = isinstance(result, fx.Node) and dataclasses.is_dataclass(result.target)
    if not made or "logits" not in result.kwargs:
        return graph
    graph = copy.deepcopy(graph)
    output = graph.output_node()
    result = output.args[0]
    output.args = (result.kwargs["logits"],)
    graph.erase_node(result)
    return graph


def logits_of(outputs: Any) -> Any:
    """The logits of an output of transformers, a dataclass; any other as it is."""
    if dataclasses.is_dataclass(outputs):
        return getattr(outputs, "logits", outputs)
    return outputs


_PURE: dict[Any, Any] = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}  # fmt: skip


def without_inplace(net: nn.Module, original: fx.Graph) -> fx.Graph:
    """A copy of the graph in which no operation overwrites its input.

    Nodes that read a value after it was overwritten read the result of the operation instead;
    y = x[:, :4]; y += 1 is refused if x is read later, since it is changed too. Modules with an
    `inplace` attribute are left to the caller.
    """
    graph = copy.deepcopy(original)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in order:
        if not overwrites(net, node):
            if node.op == "call_method" and node.target == "view":
                node.target = "reshape"  # channels_last allows it
            continue
        if node.kwargs.get("inplace"):
            node.update_kwarg("inplace", False)
        if node.op == "call_method":
            node.target = str(node.target).removesuffix("_")
        node.target = _PURE.get(node.target, node.target)
        changed = next(iter([*node.args, *node.kwargs.values()]))
        if isinstance(changed, fx.Node):
            _read_result(net, order, changed, node)
    return graph


def _read_result(
    net: nn.Module, order: dict[fx.Node, int], changed: fx.Node, node: fx.Node
) -> None:
    """After `node`, which overwrites `changed`, its result is read in place of that value."""

    def is_later(user: fx.Node) -> bool:
        return order[user] > order[node]

    changed.replace_all_uses_with(node, delete_user_cb=is_later)
    memory = _memory_of(net, changed)
    for other in order:
        if other is node:
            return
        later = other is not changed and any(map(is_later, other.users))
        if later and _memory_of(net, other) is memory:
            raise ValueError(
                f"node {node.name!r} writes into memory that is read later as {other.name!r}"
            )


def overwrites(net: nn.Module, node: fx.Node) -> bool:
    """Does a node write into its first argument?"""
    if node.op == "call_module":
        return bool(getattr(_module(net, node), "inplace", False))
    name = getattr(node.target, "__name__", str(node.target))
    by_name = name.endswith("_") and not name.endswith("__")
    return node.target in _PURE or by_name or bool(node.kwargs.get("inplace"))


def drop_emptied(net: nn.Module, graph: fx.Graph) -> None:
    """Erase the sites that keep no ReLU and are the identity: their readers read their input."""
    acts = [module for module in net.modules() if type(module) is MaskedReLU]
    if not acts:
        return
    device = acts[0].mask.device
    used = torch.stack([act.mask.any().to(device) for act in acts]).tolist()
    erase_calls(
        net, graph, {act for act, kept in zip(acts, used, strict=True) if not kept}
    )


def erase_calls(net: nn.Module, graph: fx.Graph, modules: Container[nn.Module]) -> None:
    """Erase the calls of modules that return their input."""
    for node in graph.find_nodes(op="call_module"):
        inputs = (*node.args, *node.kwargs.values())
        if _module(net, node) in modules and len(inputs) == 1:
            node.replace_all_uses_with(inputs[0])
            graph.erase_node(node)


def pure_module(module: nn.Module) -> nn.Module:
    """The module, with inplace=False if it has that switch."""
    if not getattr(module, "inplace", False):
        return module
    twin = copy.copy(module)
    twin.inplace = False  # type: ignore[assignment]
    return twin


def _module(net: nn.Module, node: fx.Node) -> nn.Module:
    return net.get_submodule(str(node.target))


# Methods, functions and modules that may return a view.
_VIEWS = {
    *(
        "getitem",
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "transpose",
        "permute",
        "movedim",
    ),
    *(
        "chunk",
        "split",
        "unbind",
        "squeeze",
        "unsqueeze",
        "narrow",
        "select",
        "expand",
        "t",
    ),
    *("contiguous", "detach", "dropout"),
    *("Identity", "Flatten", "Unflatten", "Dropout", "Dropout2d"),
}


def _memory_of(net: nn.Module, node: fx.Node) -> fx.Node:
    """The node whose memory a view shows; a node that is no view is its own."""
    kinds: Any = [node.target]
    if node.op == "call_module":
        kinds = type(_module(net, node)).__mro__
    is_view = not _VIEWS.isdisjoint(getattr(kind, "__name__", kind) for kind in kinds)
    source = next(iter(node.args), None)
    if is_view and isinstance(source, fx.Node):
        return _memory_of(net, source)
    return node


def forget_source(model: fx.GraphModule) -> None:
    """Drop the source of a GraphModule, which torch.fx keeps for tracebacks: one for each step."""
    key = type(model).forward.__code__.co_filename
    graph_module._loader.eval_cache.pop(key, None)
    linecache.cache.pop(key, None)
