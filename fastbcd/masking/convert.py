"""convert: a copy of any traceable network with a masked activation at every ReLU call.

The network is traced with torch.fx and run once, every ReLU *call* in the graph becomes a call of
its own `MaskedReLU` or `MaskedPoly`, and the result is run to check that no ReLU was missed.
Weights keep their names; modules that the graph does not use stay where they were.
"""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from fastbcd.masking.activations import MaskedActivation, activation_type
from fastbcd.masking.masks import plain_names
from fastbcd.masking.missed_relus import ConversionReport, Op, run_watched, same_values
from fastbcd.masking.tracing import call_path, replace_call
from fastbcd.masking.train_mode import ModeError, trace_both_modes

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
    entries = (skip,) if isinstance(skip, str | type) else tuple(skip)
    for entry in entries:
        is_module = isinstance(entry, type) and issubclass(entry, nn.Module)
        if not isinstance(entry, str) and not is_module:
            raise TypeError(f"skip has {entry!r}; give names such as 'layer4.*', or module types")
    twin = copy.deepcopy(_unwrap(model))
    modes = {name: module.training for name, module in twin.named_modules()}
    graph, leaves = _trace(twin.eval())
    net = _graph_module(twin, graph)
    try:
        before = run_watched(net, example_input)
    except Exception as error:
        raise ConversionError(
            f"{type(twin).__name__} does not run on an input of shape "
            f"{tuple(example_input.shape)}: {str(error).splitlines()[0]}"
        ) from error
    relus: dict[fx.Node, Op] = {}
    left: dict[str, bool] = {}  # every nonlinear call, and whether skip names it
    for node, ops in before.ops.items():
        place, kind = call_path(node), _module_type(twin, node)
        relu = next((op for op in ops if op.relu), None)
        if any(op.nonlinear for op in ops):
            left[place] = _skips(entries, place, kind, relu)
        if relu and len(ops) == 1 and place not in leaves:
            relus[node] = relu
        elif relu and not left[place]:
            differs = "and something else in training than in evaluation " * (place in leaves)
            raise ConversionError(
                f"a ReLU was not captured: {place!r} ({kind.__name__}) computes {relu.name} "
                f"{differs}inside; {BY_HAND}"
            )
    for entry in entries:
        if isinstance(entry, str) and not any(fnmatchcase(name, entry) for name in left):
            names = list(dict.fromkeys(map(call_path, relus)))
            raise ConversionError(
                f"skip={entry!r} is the name of no ReLU; the ReLUs are "
                f"{', '.join(names[:20])}{', …' * (len(names) > 20)}"
            )
    wanted = {node: op for node, op in relus.items() if not left[call_path(node)]}
    relu6 = [call_path(node) for node, op in wanted.items() if op.relu is nn.ReLU6]
    if relu6:
        raise ConversionError(
            f"{len(relu6)} ReLU6 calls cannot be masked, the first is {relu6[0]!r}: ReLU6 is "
            f"bounded on both sides; train with ReLU, or leave them as they are: skip=[nn.ReLU6]"
        )
    if not wanted:
        given = ", ".join(e if isinstance(e, str) else e.__name__ for e in entries)
        besides = f" besides those skipped ({given})" if given else ""
        raise ConversionError(f"{type(model).__name__} has no ReLU to mask{besides}")
    for order, (node, op) in enumerate(wanted.items()):
        shape, batch = before.shapes[node], len(example_input)
        if len(shape) < 2 or shape[0] != batch:
            raise ConversionError(
                f"the ReLU {call_path(node)!r} sees a tensor of shape {shape} for a batch of "
                f"{batch}: its first dimension is not the batch, so it cannot have one bit per "
                f"neuron; {BY_HAND}"
            )
        masked = activation(shape[1:], device=example_input.device)
        masked.order = order
        source = next(n for n in node.all_input_nodes if n in before.shapes)
        # The first call of an nn.ReLU takes over that module's name, any other call a free one.
        own = _module_type(twin, node) is nn.ReLU
        replace_call(twin, node, masked, source=source, inplace=op.inplace, takes_name=own)
    graph.lint()
    net.recompile()
    if not same_values(run_watched(net, example_input).output, before.output):
        raise ConversionError(
            f"{type(twin).__name__} gives other outputs after conversion: an in-place ReLU changes "
            f"a tensor that is used again through a view; use inplace=False, or {BY_HAND}"
        )
    for name, module in net.named_modules():  # a new module has the mode of its owner
        module.training = modes.setdefault(name, modes[name.rpartition(".")[0]])
    masks = [m.mask for m in net.modules() if isinstance(m, MaskedActivation)]
    nonlinear = before.nonlinear(without=wanted)
    report = ConversionReport(len(masks), sum(m.numel() for m in masks), nonlinear)
    net.conversion_report = report  # type: ignore[assignment]
    net.meta[_USER_PRESERVED_ATTRIBUTES_KEY] = {"conversion_report": report}  # for copy.deepcopy
    stays = [op for op in nonlinear if not left[op.name]]
    if stays:
        more = f" and {len(stays) - 3} more" * (len(stays) > 3)
        count = f"{len(stays)} nonlinear operation{'s stay' if len(stays) > 1 else ' stays'}"
        warnings.warn(
            f"{count}, without masks and outside private.cost: "
            f"{'; '.join(map(str, stays[:3]))}{more}; see net.conversion_report",
            stacklevel=2,
        )
    return net


def _module_type(net: nn.Module, node: fx.Node) -> type:
    """The type of the module that the node calls; NoneType for other calls."""
    return type(net.get_submodule(str(node.target)) if node.op == "call_module" else None)


def _skips(entries: tuple[Skip, ...], name: str, kind: type, relu: Op | None) -> bool:
    """Is the call of this name, by a module of this kind or to this ReLU, among those to skip?"""
    kinds = kind, relu.relu if relu and relu.relu else kind
    return any(
        fnmatchcase(name, entry) if isinstance(entry, str)
        else any(issubclass(k, entry) for k in kinds)
        for entry in entries
    )  # fmt: skip


def _unwrap(model: nn.Module) -> nn.Module:
    """The network inside the wrappers of torch."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in _WRAPPERS:
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _trace(twin: nn.Module) -> tuple[fx.Graph, set[str]]:
    try:
        return trace_both_modes(twin)
    except ModeError as error:
        raise ConversionError(f"{type(twin).__name__} cannot be converted: {error}") from None
    except Exception as error:  # the model's own forward may raise anything on fx proxies
        ours = Path(__file__).parent.parent, Path(torch.__file__).parent
        places = ["unknown place"] + [
            f"{Path(frame.filename).name}:{frame.lineno}"
            for frame in traceback.extract_tb(error.__traceback__)
            if not any(Path(frame.filename).is_relative_to(folder) for folder in ours)
        ]
        raise ConversionError(
            f"{type(twin).__name__} cannot be traced by torch.fx ({places[-1]}: {error}); {BY_HAND}"
        ) from error


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
