"""The graph that `convert` rewrites: traced in both modes, with the names and changes of its calls.

torch.fx traces self.training as a constant. So a network is traced in train mode, too, and the
graphs are compared. Functional batch norm and dropout become modules, which follow train() and
eval(); any other module that differs (DropPath) is called as a whole. Branches of training that
only add outputs are left out.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
import traceback
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from fastbcd.graph.trace import LOCK, FunctionalBatchNorm, Tracer, overwrites
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


class ConversionError(ValueError):
    """The network cannot be converted; the message says where and what to do instead.

    >>> fastbcd.convert(nn.Linear(4, 3), torch.zeros(1, 4))
    Traceback (most recent call last):
    fastbcd.masking.tracing.ConversionError: Linear has no ReLU to mask
    """


BY_HAND = "place fastbcd.MaskedReLU(shape) by hand, or name the ReLU in skip= to leave it as it is"


def trace_both_modes(net: nn.Module, example: Tensor) -> tuple[fx.Graph, set[str]]:
    """The graph of the net, which is in eval mode, and the modules that it calls as a whole."""
    leaves: set[str] = set()
    while True:
        trained = copy.deepcopy(net).train()
        graph = _traced(net, example, leaves)
        difference = _compare(net, trained, graph, _traced(trained, example, leaves))
        if not difference.others:
            _follow_mode(net, trained, difference.switched)
            graph._tracer_cls = Tracer  # which unpickling makes without arguments
            return graph, leaves
        owners = {owner_of(node) for node in difference.others} - {"", *leaves}
        if not owners:
            first = difference.others[0]
            kind = type(net).__name__
            raise ConversionError(
                f"{kind} cannot be converted: {owner_of(first) or kind!r} computes something "
                f"else in training than in evaluation (at {first.name!r}); use modules such as "
                f"nn.BatchNorm2d and nn.Dropout, or move it into a module without ReLUs"
            )
        leaves |= owners


def _traced(net: nn.Module, example: Tensor, leaves: set[str]) -> fx.Graph:
    try:
        with LOCK:  # one thread at a time changes Function.apply
            return ExampleTracer(example, leaves).trace(net)
    except Exception as error:  # the model's own forward may raise anything on fx proxies
        where = f"{_innermost_frame(error)}: {str(error) or type(error).__name__}"
        raise ConversionError(
            f"{type(net).__name__} cannot be traced by torch.fx ({where}); {BY_HAND}"
        ) from error


def _innermost_frame(error: Exception) -> str:
    """file:line in the user's own code where tracing failed."""
    ours = str(Path(__file__).parent.parent), str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(ours)]
    if not theirs:
        return "unknown place"
    return f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}"


class Difference(NamedTuple):
    """How the graph in training differs from the one in evaluation."""

    switched: list[fx.Node]  # calls that differ in the argument `training` alone
    others: list[fx.Node]  # all nodes that differ in another way


def _compare(
    net: nn.Module, trained: nn.Module, graph: fx.Graph, train_graph: fx.Graph
) -> Difference:
    match = _matched(list(graph.nodes), list(train_graph.nodes))
    matched = set(match.values())
    switched: list[fx.Node] = []
    others = [node for node in graph.nodes if node not in matched]
    for theirs, ours in match.items():
        if theirs.op == "output":
            others += _lost_outputs(theirs, ours, match)
        elif theirs.op == "get_attr":
            if _is_another_constant(str(ours.target), net, trained):
                others.append(ours)
        elif _renamed(theirs, match) == (ours.args, ours.kwargs):
            continue
        elif _is_switched(theirs, ours, match):
            switched.append(ours)
        else:
            others += _extra_inputs(theirs, match) or [ours]
    others += [n for n in train_graph.nodes if n not in match and _writes(n, trained, match)]
    return Difference(switched, others)


def _matched(ours: list[fx.Node], theirs: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """node in training -> the same node in evaluation."""
    before = [(n.op, n.target, owner_of(n)) for n in ours]
    after = [(n.op, n.target, owner_of(n)) for n in theirs]
    match: dict[fx.Node, fx.Node] = {}
    for a, b, size in SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks():
        match.update(zip(theirs[b : b + size], ours[a : a + size], strict=True))
    return match


def _renamed(node: fx.Node, match: dict[fx.Node, fx.Node]) -> Any:
    """The arguments of a node in training, with the nodes of evaluation."""
    return fx.node.map_arg((node.args, node.kwargs), lambda n: match.get(n, n))


def _extra_inputs(node: fx.Node, match: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """The inputs that only training has."""
    return [n for n in node.all_input_nodes if n not in match]


def _is_switched(theirs: fx.Node, ours: fx.Node, match: dict[fx.Node, fx.Node]) -> bool:
    """Do two calls differ in nothing except training=True in training?"""
    if ours.target not in _SWITCHED or _extra_inputs(theirs, match):
        return False
    in_training = {**_bound(ours.target, ours.args, ours.kwargs), "training": True}
    return _bound(ours.target, *_renamed(theirs, match)) == in_training


def _bound(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments of a call by name."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _lost_outputs(theirs: fx.Node, ours: fx.Node, match: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """What differs in the outputs; none if training only adds some."""
    values = list(theirs.all_input_nodes)
    for node in values:  # of a named tuple, too
        if isinstance(node.target, type):
            values += node.all_input_nodes
    if {match.get(n) for n in values}.issuperset(ours.all_input_nodes):
        return []
    return [n for n in values if n not in match] or [theirs]


def _is_another_constant(target: str, net: nn.Module, trained: nn.Module) -> bool:
    if "_tensor_constant" not in target:
        return False
    read = operator.attrgetter(target)
    return not same_values(read(net), read(trained))


def _writes(node: fx.Node, trained: nn.Module, match: dict[fx.Node, fx.Node]) -> bool:
    """Does a node of training alone write into a buffer, or into what evaluation reads?"""
    if not (overwrites(trained, node) or node.target is operator.setitem):
        return False
    return any(n in match or n.op == "get_attr" for n in node.all_input_nodes[:1])


def _follow_mode(net: nn.Module, trained: nn.Module, nodes: list[fx.Node]) -> None:
    """Call modules, which follow train(), instead of these functions."""
    norms = [node for node in nodes if node.target is F.batch_norm]
    counters = {node: f"{owner_of(node)}.num_batches_tracked".lstrip(".") for node in norms}
    counting = _changed_buffers(net, trained)
    unknown = counting - set(counters.values())
    if unknown:
        raise ConversionError(
            f"{type(net).__name__} cannot be converted: its forward changes the buffer "
            f"{min(unknown)!r} in training, which torch.fx does not trace"
        )
    for node in nodes:
        arguments = _bound(node.target, node.args, node.kwargs)
        tensors: dict[str, Any] = {}
        if node in counters:
            module: nn.Module = FunctionalBatchNorm(arguments["momentum"], arguments["eps"])
            tensors = {k: arguments[k] for k in ("running_mean", "running_var", "weight", "bias")}
            if counters[node] in counting:
                with node.graph.inserting_before(node):
                    tensors["num_batches_tracked"] = node.graph.get_attr(counters[node])
        else:
            module = _DROPOUTS[node.target](arguments["p"])
        inplace = arguments.get("inplace", False)
        source = arguments["input"]
        replace_call(net, node, module.eval(), source=source, inplace=inplace, tensors=tensors)


def _changed_buffers(net: nn.Module, trained: nn.Module) -> set[str]:
    """The buffers that the forward in training changed while it was traced."""
    after = dict(trained.named_buffers())
    return {
        name
        for name, buffer in net.named_buffers()
        if not buffer.is_meta and not same_values(buffer, after[name])
    }


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

    The first call of an nn.ReLU gives its name to the module; for any other call the module is
    registered as call_path(node), or with _2, _3, ... if that is taken.
    """
    owner, _, name = call_path(node).rpartition(".")
    parent = net.get_submodule(owner)
    replaced = parent.get_submodule(name) if node.op == "call_module" else None
    if replaced is not None:
        _copy_hooks(replaced, module)
    if type(replaced) is not nn.ReLU:
        name = _free_name(parent, name)
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


def _free_name(parent: nn.Module, name: str) -> str:
    if not hasattr(parent, name):
        return name
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return next(other for other in numbered if not hasattr(parent, other))


def _copy_hooks(replaced: nn.Module, module: nn.Module) -> None:
    for key, hooks in vars(replaced).items():
        if key.startswith(("_forward_", "_backward_", "_is_full_backward")):
            vars(module)[key] = copy.copy(hooks)


def same_values(a: Any, b: Any) -> bool:
    """Equal tensors bit for bit, NaN equal to NaN, inside any nesting."""
    ours = tree_leaves(a)
    theirs = tree_leaves(b)
    return len(ours) == len(theirs) and all(map(_same, ours, theirs))


def _same(p: Any, q: Any) -> bool:
    if isinstance(p, Tensor) and isinstance(q, Tensor):
        return torch.equal(p.nan_to_num(), q.nan_to_num())
    return p is q or bool(p == q)
