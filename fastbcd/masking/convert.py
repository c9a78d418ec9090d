"""convert: a copy of any traceable network with a masked activation at every ReLU call.

The network is traced with torch.fx and run once, every ReLU *call* in the graph becomes a call of
its own `MaskedReLU`, `MaskedLine` or `MaskedPoly`, and the result is run to check that no ReLU was
missed. Weights keep their names; modules that the graph does not use stay where they were.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx, nn

from fastbcd.masking.activations import MaskedActivation, activation_type
from fastbcd.masking.conversion_report import ConversionReport, NonlinearOp
from fastbcd.masking.converted_net import ConvertedNet
from fastbcd.masking.find_relus import Skip, checked_skips, find_relus, require
from fastbcd.masking.missed_relus import Op, Watch, repeatable, run_watched
from fastbcd.masking.tracing import BY_HAND, ConversionError, call_path, replace_call, same_values
from fastbcd.masking.tracing import trace_both_modes as trace


def convert(
    model: nn.Module,
    example_input: Tensor,
    replacement: str = "identity",
    *,
    skip: Skip | Iterable[Skip] = (),
) -> ConvertedNet:
    """A new network in which every ReLU has one bit per neuron, all of them set.

    Args:
        model: not changed. Wrappers (DataParallel, torch.compile, AveragedModel) are removed.
        example_input: a batch like those that the network will see, [B, ...], on any device. It is
            the only argument of the result: others of the model's forward have their defaults.
        replacement: what a cleared bit gives: "identity"; "line" or "poly", a learned line or
            quadratic that starts as the identity. `to_line` and `to_poly` fit them.
        skip: ReLUs to leave as they are, by name ("layer4.*") or by type (nn.ReLU6).

    train() and eval() switch batch norm, dropout and DropPath as before. Outputs that the model has
    in training only (auxiliary heads) are left out; any other difference in training is refused.
    clamp(min=0), threshold(0, 0) and maximum(x, zeros) count as ReLUs. Other nonlinear operations
    (max-pool, GELU) stay, listed in `net.conversion_report`; a warning names those not in `skip`.

    >>> net = convert(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.zeros(1, 4))
    >>> fastbcd.masks(net)
    MaskSet: 3 of 3 ReLUs kept (100.0%), 1 sites
      1                 3          3 of         3  100.0%
    """
    activation = activation_type(replacement)
    skips = checked_skips(skip)
    original = copy.deepcopy(unwrap(model))
    title = type(original).__name__
    example = _example_for(original, example_input)
    training = {name: module.training for name, module in original.named_modules()}
    expected = _outputs(original, example)
    graph, leaves = trace(original.eval(), example)
    net = ConvertedNet.of(original, graph)
    watch = run_watched(net, example)
    require(
        same_values(watch.output, expected),
        f"{title} as traced by torch.fx gives other outputs than its forward: that may test types "
        f"(isinstance) or use data outside of tensors; {BY_HAND}",
    )
    relus, skipped = find_relus(original, watch, leaves, skips)
    _mask(original, relus, watch, activation, example)
    net.recompile()
    require(
        same_values(run_watched(net, example).output, expected),
        f"{title} gives other outputs after conversion: an in-place ReLU changes a tensor that is "
        f"used again through a view; use inplace=False, or {BY_HAND}",
    )
    _restore_modes(net, training)
    nonlinear = watch.nonlinear(without=relus)
    sites = [m.mask.numel() for m in net.modules() if isinstance(m, MaskedActivation)]
    net.keep("conversion_report", ConversionReport(len(sites), sum(sites), nonlinear))
    _warn_of([op for op in nonlinear if op.name not in skipped])
    return net


def _example_for(net: nn.Module, example: Any) -> Tensor:
    """The example input on the device of the net; refuses what cannot be run."""
    if not isinstance(example, Tensor) or example.ndim < 2 or not len(example):
        raise ValueError(
            "example_input must be a batch of at least one sample, a tensor of at least two "
            "dimensions"
        )
    tensors = (*net.parameters(), *net.buffers())
    require(
        not any(t.is_meta for t in (example, *tensors)),
        f"{type(net).__name__} or its example input is on the meta device, where tensors have no "
        f"values: build both on a real device, or use to_empty(device='cpu') and load the weights",
    )
    return example.to(tensors[0].device) if tensors else example


def _outputs(net: nn.Module, example: Tensor) -> Any:
    """What the net returns for the example in eval mode."""
    try:
        with repeatable(example):
            return copy.deepcopy(net).eval()(example.clone())
    except Exception as error:
        raise ConversionError(
            f"{type(net).__name__} does not run on an input of shape {tuple(example.shape)}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _mask(
    net: nn.Module,
    relus: dict[fx.Node, Op],
    watch: Watch,
    activation: type[MaskedActivation],
    example: Tensor,
) -> None:
    """Call a masked activation in place of each ReLU, numbered in the order of execution."""
    batch = len(example)
    for node, op in relus.items():
        shape = watch.shapes[node]
        require(
            len(shape) > 1 and shape[0] == batch,
            f"the ReLU {call_path(node)!r} sees a tensor of shape {shape} for a batch of {batch}: "
            f"its first dimension is not the batch, so it has no bit per neuron; {BY_HAND}",
        )
        masked: nn.Module = activation(shape[1:], device=example.device)
        source = next(n for n in node.all_input_nodes if n in watch.shapes)
        new = replace_call(net, node, masked, source=source, inplace=op.inplace)
        watch.shapes[new] = shape
    graph = new.graph
    for order, node in enumerate(graph.find_nodes(op="call_module")):
        module = net.get_submodule(node.target)
        if isinstance(module, MaskedActivation):
            module.order = order
    graph.lint()


def _restore_modes(net: nn.Module, training: dict[str, bool]) -> None:
    """Set the modes that the modules had; a new module has the mode of its owner."""
    for name, module in net.named_modules():
        if name not in training:
            training[name] = training[name.rpartition(".")[0]]
        module.training = training[name]


def _warn_of(stays: list[NonlinearOp]) -> None:
    if not stays:
        return
    count = "1 nonlinear operation stays"
    if len(stays) > 1:
        count = f"{len(stays)} nonlinear operations stay"
    names = "; ".join(map(str, stays[:3]))
    if len(stays) > 3:
        names += f" and {len(stays) - 3} more"
    warnings.warn(
        f"{count}, without masks and outside private.cost: {names}; see net.conversion_report",
        stacklevel=3,
    )


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside the wrappers of torch."""
    wrappers = ("DataParallel", "DistributedDataParallel", "AveragedModel")
    attribute = "module" if type(model).__name__ in wrappers else "_orig_mod"
    inner = getattr(model, attribute, None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model
