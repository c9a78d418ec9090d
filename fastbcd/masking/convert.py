"""convert: a copy of any traceable network with a masked activation at every ReLU call.

The network is traced with torch.fx, every ReLU *call* in the graph becomes a call of its own
`MaskedReLU` or `MaskedPoly`, and the result runs once beside the original to check that no ReLU
was missed. Weights keep their names; modules that the graph does not use stay where they were.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from fastbcd.masking.activations import MaskedActivation, activation_type
from fastbcd.masking.masks import plain_names
from fastbcd.masking.missed_relus import ConversionReport, NonlinearOp, run_watched, same_outputs
from fastbcd.masking.train_mode import ModeError, Switch, call_path, owner_of, trace_both_modes

# Calls that compute a ReLU or a ReLU6: functions, and methods of tensors.
_KINDS: dict[Any, type[nn.Module]] = {
    F.relu: nn.ReLU, F.relu_: nn.ReLU, torch.relu: nn.ReLU, torch.relu_: nn.ReLU,
    "relu": nn.ReLU, "relu_": nn.ReLU, F.relu6: nn.ReLU6,
}  # fmt: skip
_CLAMPS = {torch.clamp, torch.clamp_, torch.clip, torch.clip_, "clamp", "clamp_", "clip", "clip_"}
_CLAMP_MINS = {torch.clamp_min, torch.clamp_min_, "clamp_min", "clamp_min_"}
_THRESHOLDS = {F.threshold, F.threshold_, torch.threshold}  # type: ignore[attr-defined]
_ZEROS = {torch.zeros, torch.zeros_like, "new_zeros"}
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "AveragedModel")
Skip = str | type[nn.Module]


class ConversionError(ValueError):
    """The network cannot be converted; the message says where and what to do instead.

    >>> fastbcd.convert(nn.Linear(4, 3), torch.zeros(1, 4))
    Traceback (most recent call last):
    fastbcd.masking.convert.ConversionError: Linear has no ReLU to mask
    """


BY_HAND = (
    "place fastbcd.MaskedReLU(shape) by hand in place of the ReLU, "
    "or name it in skip= to leave it as it is"
)


def convert(
    model: nn.Module,
    example_input: Tensor,
    replacement: str = "identity",
    *,
    skip: Skip | Iterable[Skip] = (),
) -> fx.GraphModule:
    """A new network in which every ReLU has one bit per neuron, all of them set.

    Args:
        model: not changed. Wrappers (DataParallel, torch.compile, AveragedModel) are removed.
        example_input: a batch like those that the network will see, [B, ...].
        replacement: what a cleared bit gives: "identity", or "poly" for a learned quadratic.
        skip: ReLUs to leave as they are, by name ("layer4.*") or by type (nn.ReLU6).

    The result has the network's inference graph: train() and eval() switch batch norm, dropout and
    DropPath as before. Outputs that the model has in training only (auxiliary heads) are not in it;
    a model that computes anything else in training is refused.

    clamp(min=0), threshold(0, 0) and maximum(x, zeros) count as ReLUs. Other nonlinear operations
    (max-pool, GELU, sigmoid) stay: they are listed in `net.conversion_report`, and a warning names
    those that `skip` does not.

    >>> net = convert(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.zeros(1, 4))
    >>> fastbcd.masks(net)
    MaskSet: 3 of 3 ReLUs kept (100.0%), 1 sites
      1                 3          3 of         3  100.0%
    """
    activation = activation_type(replacement)
    if not isinstance(example_input, Tensor) or example_input.ndim < 2:
        raise ValueError("example_input must be a batch, a tensor of at least two dimensions")
    entries = _entries(skip)
    twin = copy.deepcopy(_unwrap(model))
    modes = {name: module.training for name, module in twin.named_modules()}
    twin.eval()
    graph, switches = _trace(twin)
    net = _graph_module(twin, graph)
    for switch in switches:
        _follow_mode(graph, twin, switch)
    try:
        before = run_watched(net, example_input, call_path)
    except Exception as error:
        raise ConversionError(
            f"{type(twin).__name__} does not run on an input of shape "
            f"{tuple(example_input.shape)}: {str(error).splitlines()[0]}"
        ) from error
    relus = [
        (node, call_path(node), kind)
        for node in graph.nodes
        if (kind := _kind(node, twin))
        and before.shapes.get(node) is not None
        and before.shapes[node] == before.shapes.get(_source(node, twin))
    ]
    wanted = [(node, name, kind) for node, name, kind in relus if not _skips(entries, name, kind)]
    relu6 = [name for _, name, kind in wanted if issubclass(kind, nn.ReLU6)]
    if relu6:
        raise ConversionError(
            f"{len(relu6)} ReLU6 calls cannot be masked, the first is {relu6[0]!r}: ReLU6 is "
            f"bounded on both sides; train with ReLU, or leave them as they are: skip=[nn.ReLU6]"
        )
    calls = [(node, name, _is_inplace(node, twin)) for node, name, _ in wanted]
    if not calls:
        given = ", ".join(e if isinstance(e, str) else e.__name__ for e in entries)
        besides = f" besides those skipped ({given})" if given else ""
        raise ConversionError(f"{type(model).__name__} has no ReLU to mask{besides}")
    for order, (node, name, inplace) in enumerate(calls):
        shape = _neuron_shape(name, before.shapes[node], len(example_input))
        masked = activation(shape, device=example_input.device)
        masked.order = order
        owner, _, leaf = name.rpartition(".")
        # The first call of an nn.ReLU takes over that module's name, any other call a free one.
        if node.op != "call_module" or type(twin.get_submodule(name)) is not nn.ReLU:
            name = _free_name(twin, owner, leaf)
        source = _source(node, twin)
        _replace_call(graph, node, twin, name=name, module=masked, source=source, inplace=inplace)
    graph.lint()
    net.recompile()
    after = run_watched(net, example_input, call_path)
    modules = dict(net.named_modules())
    left = {name for _, name, kind in relus if _skips(entries, name, kind)}
    for place, op in after.relus:
        module = modules.get(place)
        if place not in left and not _skips(entries, place, type(module)):
            raise ConversionError(
                f"a ReLU was not captured: {place!r} ({type(module).__name__}) computes {op} "
                f"inside; {BY_HAND}"
            )
    left |= {place for place, _ in after.relus}
    others = {op.name for op in after.nonlinear}
    skipped = left | {n for n in others if _skips(entries, n, type(modules.get(n)))}
    for entry in entries:
        if isinstance(entry, str) and not any(fnmatchcase(name, entry) for name in left | others):
            shown = [name for _, name, _ in relus]
            raise ConversionError(
                f"skip={entry!r} is the name of no ReLU; the ReLUs are "
                f"{', '.join(shown[:20])}{', …' * (len(shown) > 20)}"
            )
    if not same_outputs(after.output, before.output):
        raise ConversionError(
            f"{type(twin).__name__} gives other outputs after conversion: an in-place ReLU changes "
            f"a tensor that is used again through a view; use inplace=False, or {BY_HAND}"
        )
    _report(net, after.nonlinear, skipped)
    for name, module in net.named_modules():  # a new module has the mode of its owner
        module.training = modes.setdefault(name, modes[name.rpartition(".")[0]])
    return net


def _report(net: fx.GraphModule, nonlinear: tuple[NonlinearOp, ...], skipped: set[str]) -> None:
    """Attach net.conversion_report; warn of the operations that skip= does not name."""
    masks = [m.mask for m in net.modules() if isinstance(m, MaskedActivation)]
    report = ConversionReport(len(masks), sum(m.numel() for m in masks), nonlinear)
    net.conversion_report = report  # type: ignore[assignment]
    net.meta[_USER_PRESERVED_ATTRIBUTES_KEY] = {"conversion_report": report}  # for copy.deepcopy
    stays = [op for op in nonlinear if op.name not in skipped]
    if stays:
        more = f" and {len(stays) - 3} more" * (len(stays) > 3)
        count = f"{len(stays)} nonlinear operation{'s stay' if len(stays) > 1 else ' stays'}"
        warnings.warn(
            f"{count}, without masks and outside private.cost: "
            f"{'; '.join(map(str, stays[:3]))}{more}; see net.conversion_report",
            stacklevel=3,
        )


def _entries(skip: Skip | Iterable[Skip]) -> tuple[Skip, ...]:
    entries = (skip,) if isinstance(skip, str | type) else tuple(skip)
    for entry in entries:
        if not isinstance(entry, str) and not (
            isinstance(entry, type) and issubclass(entry, nn.Module)
        ):
            raise TypeError(f"skip has {entry!r}; give names such as 'layer4.*', or module types")
    return entries


def _skips(entries: tuple[Skip, ...], name: str, kind: type) -> bool:
    """Is the call of this name, of this kind of module, among those to skip?"""
    return any(
        fnmatchcase(name, entry) if isinstance(entry, str) else issubclass(kind, entry)
        for entry in entries
    )


# ---------------------------------------------------------------------------------- tracing


def _unwrap(model: nn.Module) -> nn.Module:
    """The network inside the wrappers of torch."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in _WRAPPERS:
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _trace(twin: nn.Module) -> tuple[fx.Graph, list[Switch]]:
    try:
        return trace_both_modes(twin, lambda node: _kind(node, twin) is not None)
    except ModeError as error:
        raise ConversionError(f"{type(twin).__name__} cannot be converted: {error}") from None
    except Exception as error:  # the model's own forward may raise anything on fx proxies
        raise ConversionError(
            f"{type(twin).__name__} cannot be traced by torch.fx ({_innermost_frame(error)}: "
            f"{error}); {BY_HAND}"
        ) from error


def _innermost_frame(error: BaseException) -> str:
    """file:line in the user's own code where tracing failed."""
    traceback, place = error.__traceback__, "unknown place"
    ours = Path(__file__).parent.parent, Path(torch.__file__).parent
    while traceback is not None:
        file = Path(traceback.tb_frame.f_code.co_filename)
        if not any(file.is_relative_to(folder) for folder in ours):
            place = f"{file.name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def _follow_mode(graph: fx.Graph, twin: nn.Module, switch: Switch) -> None:
    """Call the module of the switch, which follows train(), instead of its node."""
    node, tensors = switch.node, switch.tensors
    name = _free_name(twin, owner_of(node), call_path(node).rpartition(".")[2])
    if switch.counter is not None:
        with graph.inserting_before(node):
            tensors = {**tensors, "num_batches_tracked": graph.get_attr(switch.counter)}
    _replace_call(
        graph, node, twin, name=name, module=switch.module, source=switch.source,
        inplace=switch.inplace, tensors=tensors,
    )  # fmt: skip


# ------------------------------------------------------------------------------- ReLU calls


def _kind(node: fx.Node, twin: nn.Module) -> type[nn.Module] | None:
    """nn.ReLU or nn.ReLU6 if the node calls one, as a module, a function or a method."""
    if node.op == "call_module":
        module = twin.get_submodule(str(node.target))
        if type(module) is nn.Threshold and module.threshold == module.value == 0:
            return nn.ReLU
        return type(module) if type(module) is nn.ReLU or isinstance(module, nn.ReLU6) else None
    if node.op not in ("call_function", "call_method"):
        return None
    return nn.ReLU if _is_relu_like(node, twin) else _KINDS.get(node.target)


def _is_relu_like(node: fx.Node, twin: nn.Module) -> bool:
    """Is this clamp(x, min=0), threshold(x, 0, 0) or maximum(x, zeros)?"""
    target = node.target
    if target in (torch.maximum, "maximum"):
        return len(node.args) == 2 and sum(_is_zero(a, twin) for a in node.args) == 1
    names = ("min", "max") if target in _CLAMPS | _CLAMP_MINS else ("threshold", "value")
    first, second = (
        node.args[i] if len(node.args) > i else node.kwargs.get(name)
        for i, name in enumerate(names, 1)
    )
    zero = isinstance(first, int | float) and first == 0
    if target in _THRESHOLDS:
        return zero and isinstance(second, int | float) and second == 0
    return zero and second is None and target in _CLAMPS | _CLAMP_MINS


def _is_zero(value: Any, twin: nn.Module) -> bool:
    """A tensor of zeros that forward makes; a buffer of zeros may change."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return isinstance(value, fx.Node) and value.target in _ZEROS and _is_plain(value)
    name = str(value.target)
    return name.startswith("_tensor_constant") and not getattr(twin, name).any()


def _is_plain(node: fx.Node) -> bool:
    """No operation writes into this tensor."""
    return all(user.target in (torch.maximum, "maximum") for user in node.users)


def _source(node: fx.Node, twin: nn.Module) -> fx.Node:
    """The input of a ReLU."""
    given = [*node.args, *node.kwargs.values()]
    return next(a for a in given if isinstance(a, fx.Node) and not _is_zero(a, twin))


def _is_inplace(node: fx.Node, twin: nn.Module) -> bool:
    if node.op == "call_module":
        return bool(getattr(twin.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    place = 3 if node.target in _THRESHOLDS else 1 if node.target in (F.relu, F.relu6) else 9
    given = node.args[place] if len(node.args) > place else node.kwargs.get("inplace", False)
    return name.endswith("_") or bool(given)


def _neuron_shape(name: str, shape: tuple[int, ...], batch: int) -> tuple[int, ...]:
    if len(shape) < 2 or shape[0] != batch:
        raise ConversionError(
            f"the ReLU {name!r} sees a tensor of shape {shape} for a batch of {batch}: its first "
            f"dimension is not the batch, so it cannot have one bit per neuron; {BY_HAND}"
        )
    return shape[1:]


def _free_name(twin: nn.Module, owner: str, wanted: str) -> str:
    """owner.wanted, or owner.wanted_2, ... if that is taken."""
    parent = twin.get_submodule(owner)
    number, leaf = 1, wanted
    while hasattr(parent, leaf):
        number += 1
        leaf = f"{wanted}_{number}"
    return ".".join(filter(None, [owner, leaf]))


def _replace_call(
    graph: fx.Graph,
    node: fx.Node,
    twin: nn.Module,
    *,
    name: str,
    module: nn.Module,
    source: fx.Node,
    inplace: bool,
    tensors: dict[str, Any] | None = None,
) -> None:
    """Call module(source, **tensors), registered as `name`, instead of the node."""
    owner, _, leaf = name.rpartition(".")
    twin.get_submodule(owner).register_module(leaf, module)
    with graph.inserting_after(node):
        new = graph.call_module(name, (source,), tensors)
    new.meta = dict(node.meta)
    if inplace:
        # The new module does not change its input: later readers of the input read its output.
        later = {user for user in source.users if user > node}
        source.replace_all_uses_with(new, delete_user_cb=lambda user: user in later - {new})
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _graph_module(twin: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule on twin's own module tree: every name, order and unused weight is kept."""
    for node in graph.nodes:  # a tensor that forward makes is no state of the network
        if node.op == "get_attr" and isinstance(value := vars(twin).get(node.target), Tensor):
            delattr(twin, node.target)
            twin.register_buffer(node.target, value, persistent=False)
    net = fx.GraphModule(twin, graph, type(twin).__name__)
    net._modules, net._parameters, net._buffers = twin._modules, twin._parameters, twin._buffers
    net._non_persistent_buffers_set = twin._non_persistent_buffers_set
    net.register_load_state_dict_pre_hook(_strip_prefixes)
    return net


def _strip_prefixes(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load a checkpoint of a wrapped model: prefixes that all its names have are removed."""
    if prefix == "" and not state_dict.keys() & module.state_dict().keys():
        own = {plain: key for key, plain in plain_names(module.state_dict()).items()}
        for key, plain in plain_names(state_dict).items():
            state_dict[own.get(plain, plain)] = state_dict.pop(key)
