"""The graph that `convert` rewrites: traced in both modes, with the names and changes of its calls.

torch.fx traces self.training as a constant. So a network is traced in train mode, too, and the
graphs are compared. Functional batch norm and dropout become modules, which follow train() and
eval(); any other module that differs (DropPath) is called as a whole. Branches of training that
only add outputs are left out.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import operator
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from fastbcd.graph.trace import LOCK, FunctionalBatchNorm, Tracer, overwrites
from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.example_tracer import ExampleTracer

_DROPOUTS: dict[Any, type[nn.Module]] = {
    F.dropout: nn.Dropout,
    F.dropout1d: nn.Dropout1d,
    F.dropout2d: nn.Dropout2d,
    F.dropout3d: nn.Dropout3d,
    F.alpha_dropout: nn.AlphaDropout,
    F.feature_alpha_dropout: nn.FeatureAlphaDropout,
}
_SWITCHED = {F.batch_norm, *_DROPOUTS}  # functions with an argument `training`

Match = dict[
    fx.Node, fx.Node
]  # node in training -> the node in evaluation that computes the same


class ConversionError(ValueError):
    """The network cannot be converted; the message says where and what to do instead.

    >>> fastbcd.convert(nn.Linear(4, 3), torch.zeros(1, 4))
    Traceback (most recent call last):
    fastbcd.masking.tracing.ConversionError: Linear has no ReLU to mask; ReLUs are relu, \
clamp(min=0) without max and threshold(0, 0)
    """


BY_HAND = "place fastbcd.MaskedReLU(shape) by hand, or name the ReLU in skip= to leave it as it is"


def require(condition: bool, message: str) -> None:
    """Raise a ConversionError with this message unless the condition is true."""
    if not condition:
        raise ConversionError(message)


def trace_both_modes(net: nn.Module, example: Tensor) -> tuple[fx.Graph, set[str]]:
    """The graph of the net, which is in eval mode, and the modules that it calls as a whole."""
    leaves: set[str] = set()
    while True:
        trained = copy.deepcopy(net).train()
        graph = _traced(net, example, leaves)
        train_graph = _traced(trained, example, leaves)
        match = _matched(net, graph, trained, train_graph)
        differing = _differing(graph, trained, train_graph, match)
        if not differing:
            _follow_mode(net, match)
            graph._tracer_cls = Tracer  # which unpickling makes without arguments
            return graph, leaves
        owners = {owner_of(node) for node in differing} - {"", *leaves}
        kind = type(net).__name__
        require(
            bool(owners),
            f"{kind} cannot be converted: {owner_of(differing[0]) or kind!r} computes something "
            f"else in training than in evaluation (at {differing[0].name!r}); use modules such as "
            f"nn.BatchNorm2d and nn.Dropout, or move it into a module without ReLUs",
        )
        leaves |= owners


def _traced(net: nn.Module, example: Tensor, leaves: set[str]) -> fx.Graph:
    try:
        with LOCK:  # one thread at a time changes Function.apply
            return ExampleTracer(example, leaves).trace(net)
    except (
        Exception
    ) as error:  # the model's own forward may raise anything on fx proxies
        where = f"{_innermost_frame(error)}: {str(error) or type(error).__name__}"
        raise ConversionError(
            f"{type(net).__name__} cannot be traced by torch.fx ({where}); {BY_HAND}"
        ) from error


def _innermost_frame(error: Exception) -> str:
    """file:line in the user's own code where tracing failed."""
    where = "unknown place"
    ours = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(ours):
            where = f"{Path(frame.filename).name}:{frame.lineno}"
    return where


def _matched(
    net: nn.Module, graph: fx.Graph, trained: nn.Module, train_graph: fx.Graph
) -> Match:
    """The nodes that do the same, up to the argument `training`, with inputs that are the same."""
    waiting: dict[str, list[fx.Node]] = defaultdict(list)
    for node in reversed(graph.nodes):
        waiting[_key(net, node, {})].append(node)
    match: Match = {}
    for node in train_graph.nodes:
        if match.keys() >= set(node.all_input_nodes):
            same = waiting[_key(trained, node, match)]
            if same:
                match[node] = same.pop()
    return match


def _key(net: nn.Module, node: fx.Node, match: Match) -> str:
    """What a node computes from which nodes of evaluation."""
    target: Any = node.target
    inputs: Any = (node.args, node.kwargs)
    if target in _SWITCHED:
        inputs = {**bound_arguments(node), "training": None}
    elif "_tensor_constant" in str(target):
        target = operator.attrgetter(target)(net).tolist()
    inputs = fx.node.map_arg(inputs, lambda n: match.get(n, n))
    return str((node.op, target, owner_of(node), inputs))


def _label(node: fx.Node) -> tuple[Any, ...]:
    return node.op, node.target, owner_of(node)


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of the call of a function by name."""
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    bound.apply_defaults()
    return bound.arguments


def _differing(
    graph: fx.Graph, trained: nn.Module, train_graph: fx.Graph, match: Match
) -> list[fx.Node]:
    """The nodes that make training differ from evaluation; none if it only adds outputs."""
    same = set(match.values())
    lost = [n for n in graph.nodes if n not in same]
    added = [n for n in train_graph.nodes if n not in match]
    writing = [n for n in added if _writes(n, trained, match)]
    if [n.op for n in lost] == ["output"] and _outputs(train_graph, match) >= _outputs(
        graph, {}
    ):
        lost = []
    if not lost:
        return writing
    ours = Counter(map(_label, graph.nodes))
    theirs = Counter(map(_label, train_graph.nodes))
    alone = (ours - theirs) | (
        theirs - ours
    )  # any other node differs by its inputs alone
    return [n for n in (*lost, *added) if _label(n) in alone] or lost[:1]


def _outputs(graph: fx.Graph, match: Match) -> set[fx.Node]:
    """The nodes of evaluation that the output has, also inside a named tuple."""
    nodes = graph.output_node().all_input_nodes
    for node in nodes:
        if isinstance(node.target, type):
            nodes += node.all_input_nodes
    return {match.get(node, node) for node in nodes}


def _writes(node: fx.Node, trained: nn.Module, match: Match) -> bool:
    """Does a node of training alone write into a buffer, or into what evaluation reads?"""
    if not (overwrites(trained, node) or node.target is operator.setitem):
        return False
    return any(n in match or n.op == "get_attr" for n in node.all_input_nodes[:1])


def _follow_mode(net: nn.Module, match: Match) -> None:
    """Call modules, which follow train(), instead of functions whose argument `training` does."""
    for theirs, node in match.items():
        if node.target not in _SWITCHED:
            continue
        arguments = bound_arguments(node)
        if arguments["training"] == bound_arguments(theirs)["training"]:
            continue
        tensors: dict[str, Any] = {}
        if node.target in _DROPOUTS:
            module: nn.Module = _DROPOUTS[node.target](arguments["p"])
        else:
            module = FunctionalBatchNorm(arguments["momentum"], arguments["eps"])
            tensors = {
                k: arguments[k]
                for k in ("running_mean", "running_var", "weight", "bias")
            }
        inplace = arguments.get("inplace", False)
        source = arguments["input"]
        replace_call(
            net, node, module.eval(), source=source, inplace=inplace, tensors=tensors
        )


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
    target = (
        node.target
        if isinstance(node.target, str)
        else getattr(node.target, "__name__", "?")
    )
    return ".".join(filter(None, [owner_of(node), target.strip("_")]))


def replace_call(
    net: nn.Module,
    node: fx.Node,
    module: nn.Module,
    *,
    source: fx.Node,
    inplace: bool,
    tensors: dict[str, Any] | None = None,
) -> fx.Node:
    """Call module(source, **tensors) instead of the node.

    It takes the name of the module that was called, at the first call of that. For any other call
    it is registered as call_path(node), or with _2, _3, ... if that is taken.
    """
    owner, _, name = call_path(node).rpartition(".")
    parent = net.get_submodule(owner)
    masked = isinstance(getattr(parent, name, None), MaskedActivation)
    if node.op != "call_module" or masked:
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        names = itertools.chain([name], numbered)
        name = next(free for free in names if not hasattr(parent, free))
    parent.register_module(name, module)
    with node.graph.inserting_after(node):
        path = ".".join(filter(None, [owner, name]))
        new = node.graph.call_module(path, (source,), tensors)
    new.meta = dict(node.meta)
    if inplace:
        # The new module does not change its input: later readers of the input read its output.
        later = {user for user in source.users if user > node and user is not new}
        source.replace_all_uses_with(new, delete_user_cb=later.__contains__)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new


def same_values(a: Any, b: Any) -> bool:
    """Equal tensors bit for bit, NaN equal to NaN, inside any nesting."""
    ours = list(_leaves(a))
    theirs = list(_leaves(b))
    return len(ours) == len(theirs) and all(map(_same, ours, theirs))


def _leaves(value: Any) -> Iterator[Any]:
    for leaf in tree_leaves(value, is_leaf=dataclasses.is_dataclass):
        if dataclasses.is_dataclass(leaf):
            yield from _leaves(
                [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
            )
        else:
            yield leaf


def _same(p: Any, q: Any) -> bool:
    if isinstance(p, Tensor) and isinstance(q, Tensor):
        return torch.equal(p.nan_to_num(), q.nan_to_num())
    return p is q or bool(p == q)
