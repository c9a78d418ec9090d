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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from fastbcd.graph.trace import LOCK, FunctionalBatchNorm, Tracer, overwrites
from fastbcd.masking.example_tracer import ExampleTracer

_DROPOUTS: dict[Any, type[nn.Module]] = {
    F.dropout: nn.Dropout, F.dropout1d: nn.Dropout1d, F.dropout2d: nn.Dropout2d,
    F.dropout3d: nn.Dropout3d, F.alpha_dropout: nn.AlphaDropout,
    F.feature_alpha_dropout: nn.FeatureAlphaDropout,
}  # fmt: skip
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
        trained, kind = copy.deepcopy(net).train(), type(net).__name__
        try:
            with LOCK:  # one thread at a time changes Function.apply
                graph, train_graph = (
                    ExampleTracer(example, leaves).trace(m) for m in (net, trained)
                )
        except Exception as error:  # the model's own forward may raise anything on fx proxies
            where = f"{_innermost_frame(error)}: {str(error) or type(error).__name__}"
            raise ConversionError(
                f"{kind} cannot be traced by torch.fx ({where}); {BY_HAND}"
            ) from error
        switched, others = _compare(net, trained, list(graph.nodes), list(train_graph.nodes))
        if not others:
            _follow_mode(net, trained, switched)
            graph._tracer_cls = Tracer  # which unpickling makes without arguments
            return graph, leaves
        new = {owner_of(node) for node in others} - {"", *leaves}
        if not new:
            raise ConversionError(
                f"{kind} cannot be converted: {owner_of(others[0]) or kind!r} computes something "
                f"else in training than in evaluation (at {others[0].name!r}); use modules such as "
                f"nn.BatchNorm2d and nn.Dropout, or move it into a module without ReLUs"
            )
        leaves |= new


def _innermost_frame(error: Exception) -> str:
    """file:line in the user's own code where tracing failed."""
    ours = str(Path(__file__).parent.parent), str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(ours)]
    return f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else "unknown place"


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
    # What only training computes may not write into a buffer or what evaluation reads.
    others += [
        n for n in theirs
        if n not in match and (overwrites(trained, n) or n.target is operator.setitem)
        and any(s in match or s.op == "get_attr" for s in n.all_input_nodes[:1])
    ]  # fmt: skip
    return switched, others


def _follow_mode(net: nn.Module, trained: nn.Module, nodes: list[fx.Node]) -> None:
    """Call modules, which follow train(), instead of these functions."""
    # Buffers that the forward in training changed while it was traced.
    theirs = dict(trained.named_buffers())
    changed = {k for k, v in net.named_buffers() if not v.is_meta and not same_values(v, theirs[k])}
    counters = {n: f"{owner_of(n)}.num_batches_tracked".lstrip(".")
                for n in nodes if n.target is F.batch_norm}  # fmt: skip
    if unknown := changed - set(counters.values()):
        raise ConversionError(
            f"{type(net).__name__} cannot be converted: its forward changes the buffer "
            f"{min(unknown)!r} in training, which torch.fx does not trace"
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
    net: nn.Module, node: fx.Node, module: nn.Module, *, source: fx.Node, inplace: bool,
    tensors: dict[str, Any] | None = None,
) -> fx.Node:  # fmt: skip
    """Call module(source, **tensors) instead of the node.

    The first call of an nn.ReLU gives its name to the module; for any other call the module is
    registered as call_path(node), or with _2, _3, ... if that is taken.
    """
    path, graph = call_path(node), node.graph
    owner, _, leaf = path.rpartition(".")
    parent, name, numbers = net.get_submodule(owner), leaf, itertools.count(2)
    called: Any = parent.get_submodule(leaf) if node.op == "call_module" else None
    is_relu = type(called) is nn.ReLU
    for key in vars(called) if called else ():  # hooks of the module that is replaced
        if key.startswith(("_forward_", "_backward_", "_is_full_backward")):
            vars(module)[key] = copy.copy(vars(called)[key])
    while not is_relu and hasattr(parent, name):
        name = f"{leaf}_{next(numbers)}"
    parent.register_module(name, module)
    with graph.inserting_after(node):
        new = graph.call_module(".".join(filter(None, [owner, name])), (source,), tensors)
    new.meta = dict(node.meta)
    if inplace:
        # The new module does not change its input: later readers of the input read its output.
        later = {user for user in source.users if user > node}
        source.replace_all_uses_with(new, delete_user_cb=lambda user: user in later - {new})
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def same_values(a: Any, b: Any) -> bool:
    """Equal tensors bit for bit, NaN equal to NaN, inside any nesting."""
    mine, theirs = tree_leaves(a), tree_leaves(b)
    return len(mine) == len(theirs) and all(
        torch.equal(p.nan_to_num(), q.nan_to_num()) if isinstance(p, Tensor) else p == q
        for p, q in zip(mine, theirs, strict=True)
    )
