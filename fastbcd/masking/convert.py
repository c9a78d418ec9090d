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
from fastbcd.masking.conversion_report import ConversionReport
from fastbcd.masking.converted_net import ConvertedNet
from fastbcd.masking.find_relus import Skip, checked_skips, find_relus
from fastbcd.masking.missed_relus import Op, Watch, repeatable, run_watched
from fastbcd.masking.swaps import averaged, check_swaps, rectified
from fastbcd.masking.tracing import (
    BY_HAND,
    ConversionError,
    call_path,
    replace_call,
    require,
    same_values,
    trace_both_modes,
)
from fastbcd.runtime.dtypes import device_of, dtype_of


def convert(
    model: nn.Module,
    example_input: Tensor,
    replacement: str = "identity",
    *,
    skip: Skip | Iterable[Skip] = (),
    maxpool: str = "keep",
    relu6: str = "keep",
    smooth: str = "keep",
) -> ConvertedNet:
    """A new network in which every ReLU has one bit per neuron, all of them set.

    Args:
        model: not changed. Wrappers (DataParallel, torch.compile, AveragedModel) are removed.
        example_input: a batch like those that the network will see, [B, ...], on any device. It is
            the only argument of the result: others of the model's forward have their defaults.
        replacement: what a cleared bit gives: "identity"; "line" or "poly", a learned line or
            quadratic that starts as the identity. `to_line` and `to_poly` fit them.
        skip: ReLUs to leave as they are, by name ("layer4.*") or by type (nn.ReLU6).
        maxpool: "average" calls average pools in place of max-pools, whose comparisons cost like
            ReLUs in private inference. Masks do not change them.
        relu6: "relu" makes ReLUs of ReLU6, as in MobileNetV2.
        smooth: "relu" makes ReLUs of SiLU, GELU, Hardswish and Mish. After maxpool=, relu6= or
            smooth= the net must be fine-tuned; skip= leaves any of them as it is.

    train() and eval() switch batch norm, dropout and DropPath as before. Outputs that the model has
    in training only (auxiliary heads) are left out; any other difference in training is refused.
    clamp(min=0) and threshold(0, 0) count as ReLUs. Other nonlinear operations (max-pool, GELU)
    stay, listed in `net.conversion_report`; a warning names the first that `skip` does not.

    >>> net = convert(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.zeros(1, 4))
    >>> fastbcd.masks(net)
    MaskSet: 3 of 3 ReLUs kept, 1 sites
      1             3          3 of         3
    """
    activation = activation_type(replacement)
    skips = checked_skips(skip)
    kinds = check_swaps(maxpool, relu6, smooth)
    original = copy.deepcopy(unwrap(model))
    example = _example_for(original, example_input)
    modes = {name: module.training for name, module in original.named_modules()}
    expected = _outputs(original, example)
    graph, leaves = trace_both_modes(original.eval(), example)
    net = ConvertedNet.of(original, graph)
    watch = _watched(net, example, expected)
    exchanged = [*rectified(original, watch, kinds, skips)]
    if maxpool == "average":
        exchanged += averaged(original, net.graph)
    if exchanged:
        net.recompile()
        watch = run_watched(net, example)
    relus, skipped = find_relus(original, watch, leaves, skips)
    _mask(original, relus, watch, activation, example)
    net.recompile()
    _watched(net, example, watch.output)
    nonlinear = watch.nonlinear(without=relus)
    for name, module in net.named_modules():  # a new module has the mode of its owner
        module.training = modes.setdefault(name, modes[name.rpartition(".")[0]])
    sites = [m.mask.numel() for m in net.modules() if isinstance(m, MaskedActivation)]
    report = ConversionReport(len(sites), sum(sites), nonlinear, tuple(exchanged))
    net.keep("example_shape", tuple(example.shape[1:]))
    net.keep("conversion_report", report)
    stays = [op for op in nonlinear if op.name not in skipped]
    if stays:
        warnings.warn(
            f"nonlinear operations stay, without masks and outside private.cost: {len(stays)}, the "
            f"first is {stays[0]}; see net.conversion_report",
            stacklevel=2,
        )
    return net


def _watched(net: ConvertedNet, example: Tensor, expected: Any) -> Watch:
    """What the net computes on the example; refuses outputs that are not the expected ones."""
    watch = run_watched(net, example)
    require(
        same_values(watch.output, expected),
        f"{net.__class__.__name__} gives other outputs after conversion: its forward may test "
        f"types (isinstance) or use data outside of tensors, or an in-place ReLU changes a tensor "
        f"that is used again through a view (use inplace=False); {BY_HAND}",
    )
    return watch


def _example_for(net: nn.Module, example: Any) -> Tensor:
    """The example input on the device of the net; refuses what cannot be run."""
    if (
        not isinstance(example, Tensor)
        or example.ndim < 2
        or not len(example)
        or example.is_meta
    ):
        raise ValueError(
            "example_input must be a batch of at least one sample, a tensor of at least two "
            "dimensions with values"
        )
    return example.to(device_of(net) or example.device)


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
    dtype = dtype_of(net)
    for node, op in relus.items():
        batch, *shape = watch.shapes[node]
        require(
            batch == len(example) and bool(shape),
            f"the ReLU {call_path(node)!r} sees a tensor of shape {(batch, *shape)} for a batch of "
            f"{len(example)}: its first dimension is not the batch, so it has no bit per neuron; "
            f"{BY_HAND}",
        )
        masked = activation(tuple(shape), device=example.device).to(dtype)
        source = next(n for n in node.all_input_nodes if n in watch.shapes)
        new = replace_call(net, node, masked, source=source, inplace=op.inplace)
        watch.shapes[new] = watch.shapes[node]
    graph = new.graph
    for order, node in enumerate(graph.find_nodes(op="call_module")):
        module: Any = net.get_submodule(node.target)
        if isinstance(module, MaskedActivation):
            module.order = order
    graph.lint()


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside the wrappers of torch."""
    wrappers = ("DataParallel", "DistributedDataParallel", "AveragedModel")
    attribute = "module" if type(model).__name__ in wrappers else "_orig_mod"
    inner = getattr(model, attribute, None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model
