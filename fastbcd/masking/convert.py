"""convert: a copy of any traceable network with a masked activation at every ReLU call.

The network is traced with torch.fx, every ReLU *call* in the graph becomes a call of its own
`MaskedReLU` or `MaskedPoly`, and the result runs once beside the original to see that nothing
was missed. Weights keep their names, modules that the graph does not use stay where they were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from fastbcd.graph.trace import Tracer
from fastbcd.masking.activations import MaskedActivation, activation_type
from fastbcd.masking.masks import plain_names
from fastbcd.masking.missed_relus import run_watched, same_outputs

_RELU_FUNCTIONS = {F.relu, F.relu_, torch.relu, torch.relu_}
_RELU_METHODS = {"relu", "relu_"}
_RELU6_FUNCTIONS = {F.relu6}


class ConversionError(ValueError):
    """The network cannot be converted; the message says where and what to do instead.

    >>> fastbcd.convert(nn.Linear(4, 3), torch.zeros(1, 4))
    Traceback (most recent call last):
    fastbcd.masking.convert.ConversionError: Linear has no ReLU to mask
    """


BY_HAND = (
    "place fastbcd.MaskedReLU(shape) by hand where the ReLU stands, "
    "or name it in skip= to leave it alone"
)


def convert(
    model: nn.Module,
    example_input: Tensor,
    replacement: str = "identity",
    *,
    skip: Iterable[str | type[nn.Module]] = (),
) -> fx.GraphModule:
    """A new network in which every ReLU has one bit per neuron, all of them set.

    Args:
        model: left as it is. Wrappers (DataParallel, torch.compile) are taken off.
        example_input: a batch like those that the network will see, [B, ...].
        replacement: what a cleared bit gives: "identity", or "poly" for a learned quadratic.
        skip: sites to leave alone, by name ("layer4.*") or by type (nn.ReLU6).

    The network's inference graph is taken: train() and eval() switch batch norm and dropout
    as before, but branches that the model takes in training only are gone.

    >>> net = convert(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.zeros(1, 4))
    >>> fastbcd.masks(net)
    MaskSet: 3 of 3 ReLUs kept (100.0%), 1 sites
      1                 3          3 of         3  100.0%
    """
    activation = activation_type(replacement)
    if not isinstance(example_input, Tensor) or example_input.ndim < 2:
        raise ValueError("example_input must be a batch, a tensor of at least two dimensions")
    skipped = tuple(skip)
    twin = copy.deepcopy(_unwrap(model))
    modes = {name: module.training for name, module in twin.named_modules()}
    twin.eval()
    net = _graph_module(twin, _trace(twin))
    graph = net.graph
    for node in list(graph.nodes):
        _dropout_as_module(graph, node, twin)
    expected = _propagate_shapes(net, example_input)
    calls = [n for n in graph.nodes if _is_relu(n, twin) and not _is_skipped(n, twin, skipped)]
    _refuse_relu6(graph, twin, skipped)
    if not calls:
        raise ConversionError(
            f"{type(model).__name__} has no ReLU to mask"
            + (f" besides those skipped ({', '.join(map(_skip_name, skipped))})" if skipped else "")
        )
    places = [_place(n, twin, example_input) for n in calls]
    for order, (node, place) in enumerate(zip(calls, places, strict=True)):
        masked = activation(place.shape, device=example_input.device)
        masked.order = order
        _mask_call(graph, node, twin, place, masked)
    graph.lint()
    net.recompile()
    output, uncaptured = run_watched(net, example_input, _call_name)
    _refuse_uncaptured(net, uncaptured, skipped)
    if not same_outputs(output, expected):
        raise ConversionError(
            f"{type(twin).__name__} gives other outputs after conversion: an in-place ReLU changes "
            f"a tensor that is used again through a view; use inplace=False, or {BY_HAND}"
        )
    for name, module in net.named_modules():
        module.training = modes.get(name, modes[""])
    return net


# ---------------------------------------------------------------------------------- tracing


def _unwrap(model: nn.Module) -> nn.Module:
    """The network inside DataParallel, DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DataParallel", "DistributedDataParallel"):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _trace(twin: nn.Module) -> fx.Graph:
    try:
        graph = Tracer().trace(twin)
    except Exception as error:  # whatever the model's own forward raises on fx proxies
        place = _innermost_frame(error)
        raise ConversionError(
            f"{type(twin).__name__} cannot be traced by torch.fx ({place}: {error}); {BY_HAND}"
        ) from error
    return graph


def _innermost_frame(error: BaseException) -> str:
    """file:line in the user's own code, where tracing broke."""
    traceback, place = error.__traceback__, "unknown place"
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file != __file__ and not Path(file).is_relative_to(Path(torch.__file__).parent):
            place = f"{Path(file).name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def _dropout_as_module(graph: fx.Graph, node: fx.Node, twin: nn.Module) -> None:
    """F.dropout(x, training=self.training) was traced as a constant: make it follow train()."""
    kinds: dict[Callable, type[nn.Module]] = {
        F.dropout: nn.Dropout, F.dropout2d: nn.Dropout2d, F.alpha_dropout: nn.AlphaDropout,
    }  # fmt: skip
    if node.op != "call_function" or node.target not in kinds:
        return
    p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    name = _free_name(twin, _owner(node), "dropout")
    module = kinds[node.target](p).eval()
    twin.get_submodule(_owner(node)).add_module(name.rpartition(".")[2], module)
    with graph.inserting_after(node):
        new = graph.call_module(name, (node.args[0] if node.args else node.kwargs["input"],))
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _propagate_shapes(net: fx.GraphModule, example_input: Tensor) -> Any:
    """Note the shape of every node; return the network's output."""
    try:
        with torch.no_grad():
            return ShapeProp(net).propagate(example_input.clone())
    except Exception as error:
        cause = error.__cause__ or error
        raise ConversionError(
            f"{type(net).__name__} does not run on an input of shape "
            f"{tuple(example_input.shape)}: {str(cause).splitlines()[0]}"
        ) from error


# ------------------------------------------------------------------------- finding ReLU calls


def _module(node: fx.Node, twin: nn.Module) -> nn.Module | None:
    return twin.get_submodule(str(node.target)) if node.op == "call_module" else None


def _is_relu(node: fx.Node, twin: nn.Module) -> bool:
    return (
        type(_module(node, twin)) is nn.ReLU
        or (node.op == "call_function" and node.target in _RELU_FUNCTIONS)
        or (node.op == "call_method" and node.target in _RELU_METHODS)
    )


def _owner(node: fx.Node) -> str:
    """The path of the module whose forward makes this call."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0] if stack else ""


def _call_name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
    return ".".join(filter(None, [_owner(node), target.rstrip("_")]))


def _is_skipped(node: fx.Node, twin: nn.Module, skipped: tuple) -> bool:
    return _skips(_call_name(node), _module(node, twin), skipped)


def _skips(name: str, module: nn.Module | None, skipped: tuple) -> bool:
    return any(
        fnmatchcase(name, s) if isinstance(s, str) else isinstance(module, s) for s in skipped
    )


def _skip_name(entry: str | type) -> str:
    return entry if isinstance(entry, str) else entry.__name__


def _refuse_relu6(graph: fx.Graph, twin: nn.Module, skipped: tuple) -> None:
    found = [
        _call_name(n)
        for n in graph.nodes
        if (isinstance(_module(n, twin), nn.ReLU6) or n.target in _RELU6_FUNCTIONS)
        and not _is_skipped(n, twin, skipped)
    ]
    if found:
        raise ConversionError(
            f"{len(found)} ReLU6 calls cannot be masked, the first is {found[0]!r}: ReLU6 is "
            f"bounded on both sides; train with ReLU instead, or leave them: skip=[nn.ReLU6]"
        )


def _refuse_uncaptured(net: nn.Module, found: list[tuple[str, str]], skipped: tuple) -> None:
    modules = dict(net.named_modules())
    for place, op in found:
        if not _skips(place, modules.get(place), skipped):
            raise ConversionError(
                f"a ReLU was not captured: {place!r} ({type(modules.get(place)).__name__}) "
                f"computes {op} inside; {BY_HAND}"
            )


class _Place(NamedTuple):
    """What is known of a ReLU call before it is replaced."""

    name: str
    shape: tuple[int, ...]
    inplace: bool


def _place(node: fx.Node, twin: nn.Module, example_input: Tensor) -> _Place:
    shape = tuple(node.meta["tensor_meta"].shape)
    name = _call_name(node)
    if len(shape) < 2 or shape[0] != example_input.shape[0]:
        raise ConversionError(
            f"the ReLU {name!r} sees a tensor of shape {shape} for a batch of "
            f"{example_input.shape[0]}: its first dimension is not the batch, so it has not one "
            f"bit a neuron; {BY_HAND}"
        )
    module = _module(node, twin)
    if isinstance(module, nn.ReLU):
        inplace = module.inplace
    elif node.target is F.relu:
        inplace = bool(node.args[1] if len(node.args) > 1 else node.kwargs.get("inplace", False))
    else:
        inplace = node.target in (F.relu_, torch.relu_, "relu_")
    return _Place(name, shape[1:], inplace)


def _free_name(twin: nn.Module, owner: str, wanted: str) -> str:
    """owner.wanted, or owner.wanted_2, ... if that is taken."""
    parent = twin.get_submodule(owner)
    number, leaf = 1, wanted
    while hasattr(parent, leaf):
        number += 1
        leaf = f"{wanted}_{number}"
    return ".".join(filter(None, [owner, leaf]))


def _mask_call(
    graph: fx.Graph, node: fx.Node, twin: nn.Module, place: _Place, activation: MaskedActivation
) -> None:
    """Replace one ReLU call by a call of its own activation.

    The first call of an nn.ReLU takes over that module's name; a further call of the same
    module, or a functional call, gets a free name beside it.
    """
    name = place.name
    owner, _, leaf = name.rpartition(".")
    if type(_module(node, twin)) is not nn.ReLU:
        name = _free_name(twin, owner, leaf)
    twin.get_submodule(name.rpartition(".")[0]).register_module(name.rpartition(".")[2], activation)
    source = node.args[0] if node.args else node.kwargs["input"]
    assert isinstance(source, fx.Node)
    with graph.inserting_after(node):
        new = graph.call_module(name, (source,))
    new.meta = dict(node.meta)
    if place.inplace:
        # The masked activation leaves its input alone, so what read the changed input later
        # now reads the output.
        later = {user for user in source.users if user > node}
        source.replace_all_uses_with(new, delete_user_cb=lambda user: user in later - {new})
    node.replace_all_uses_with(new)
    graph.erase_node(node)


# ------------------------------------------------------------------------------- the result


def _graph_module(twin: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule on twin's own module tree: every name, order and unused weight is kept."""
    net = fx.GraphModule(twin, graph, type(twin).__name__)
    net._modules, net._parameters, net._buffers = twin._modules, twin._parameters, twin._buffers
    net._non_persistent_buffers_set = twin._non_persistent_buffers_set
    net.register_load_state_dict_pre_hook(_strip_prefixes)
    return net


def _strip_prefixes(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load a checkpoint of a wrapped model: prefixes that all its names have are removed."""
    if prefix == "" and not state_dict.keys() & module.state_dict().keys():
        for key, plain in plain_names(state_dict).items():
            state_dict[plain] = state_dict.pop(key)
