"""convert: a copy of any traceable network with a masked activation at every ReLU call.

The network is traced with torch.fx and run once, every ReLU *call* in the graph becomes a call of
its own `MaskedReLU`, `MaskedLine` or `MaskedPoly`, and the result is run to check that no ReLU was
missed. Weights keep their names; modules that the graph does not use stay where they were.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import Tensor, fx, nn

from fastbcd.masking.activations import MaskedActivation, activation_type
from fastbcd.masking.converted_net import ConvertedNet
from fastbcd.masking.missed_relus import ConversionReport, Op, Watch, repeatable, run_watched
from fastbcd.masking.tracing import BY_HAND, ConversionError, call_path, replace_call, same_values
from fastbcd.masking.tracing import trace_both_modes as trace

Skip = str | type[nn.Module]


def convert(
    model: nn.Module, example_input: Tensor, replacement: str = "identity", *,
    skip: Skip | Iterable[Skip] = (),
) -> ConvertedNet:  # fmt: skip
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
    if not isinstance(example_input, Tensor) or example_input.ndim < 2 or not len(example_input):
        raise ValueError(
            "example_input must be a batch of at least one sample, a tensor of at least two "
            "dimensions"
        )
    entries = (skip,) if isinstance(skip, str | type) else tuple(skip)
    for entry in entries:
        is_module = isinstance(entry, type) and issubclass(entry, nn.Module)
        if not isinstance(entry, str) and not is_module:
            raise TypeError(f"skip has {entry!r}; give names such as 'layer4.*', or module types")
    twin = copy.deepcopy(unwrap(model))
    title, batch = type(twin).__name__, len(example_input)
    is_meta = any(t.is_meta for t in (example_input, *twin.parameters(), *twin.buffers()))
    _require(
        not is_meta,
        f"{title} or its example input is on the meta device, where tensors have no values: build "
        f"both on a real device, or use to_empty(device='cpu') and load the weights",
    )
    for tensor in (*twin.parameters(), *twin.buffers())[:1]:
        example_input = example_input.to(tensor.device)
    modes = {name: module.training for name, module in twin.named_modules()}
    try:
        with repeatable(example_input):
            expected = copy.deepcopy(twin).eval()(example_input.clone())
    except Exception as error:
        raise ConversionError(
            f"{title} does not run on an input of shape {tuple(example_input.shape)}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    graph, leaves = trace(twin.eval(), example_input)
    net = ConvertedNet.of(twin, graph)
    before = run_watched(net, example_input)
    _require(
        same_values(before.output, expected),
        f"{title} as traced by torch.fx gives other outputs than its forward: that may test types "
        f"(isinstance) or use data outside of tensors; {BY_HAND}",
    )
    relus, skipped = _find_relus(twin, before, leaves, entries)
    for node, op in relus.items():
        shape = before.shapes[node]
        _require(
            len(shape) > 1 and shape[0] == batch,
            f"the ReLU {call_path(node)!r} sees a tensor of shape {shape} for a batch of {batch}: "
            f"its first dimension is not the batch, so it has no bit per neuron; {BY_HAND}",
        )
        masked: nn.Module = activation(shape[1:], device=example_input.device)
        source = next(n for n in node.all_input_nodes if n in before.shapes)
        new = replace_call(twin, node, masked, source=source, inplace=op.inplace)
        before.shapes[new] = shape
    for order, node in enumerate(graph.find_nodes(op="call_module")):
        if isinstance(masked := twin.get_submodule(node.target), MaskedActivation):
            masked.order = order
    graph.lint()
    net.recompile()
    _require(
        same_values(run_watched(net, example_input).output, expected),
        f"{title} gives other outputs after conversion: an in-place ReLU changes a tensor that is "
        f"used again through a view; use inplace=False, or {BY_HAND}",
    )
    for name, module in net.named_modules():  # a new module has the mode of its owner
        module.training = modes.setdefault(name, modes[name.rpartition(".")[0]])
    masks = [m.mask for m in net.modules() if isinstance(m, MaskedActivation)]
    nonlinear = before.nonlinear(without=relus)
    net.keep(
        conversion_report=ConversionReport(len(masks), sum(m.numel() for m in masks), nonlinear)
    )
    stays = [op for op in nonlinear if op.name not in skipped]
    if stays:
        more = f" and {len(stays) - 3} more" * (len(stays) > 3)
        count = f"{len(stays)} nonlinear operation{'s stay' if len(stays) > 1 else ' stays'}"
        warnings.warn(
            f"{count}, without masks and outside private.cost: "
            f"{'; '.join(map(str, stays[:3]))}{more}; see net.conversion_report",
            stacklevel=2,
        )
    return net


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConversionError(message)


def _find_relus(
    net: nn.Module, watch: Watch, leaves: set[str], entries: tuple[Skip, ...]
) -> tuple[dict[fx.Node, Op], set[str]]:
    """The ReLU calls to replace, and the names of the nonlinear calls that skip= names."""
    relus: dict[fx.Node, Op] = {}
    names: dict[str, bool] = {}  # of nonlinear calls, and whether they are skipped
    for node, ops in watch.ops.items():
        name = call_path(node)
        kind = type(net.get_submodule(name) if node.op == "call_module" else node.target)
        relu = next((op for op in ops if op.relu), None)
        kinds = {*kind.__mro__, *(relu.relu.__mro__ if relu and relu.relu else ())}
        if any(op.nonlinear for op in ops):
            names[name] = names.get(name, False) or any(
                fnmatchcase(name, entry) if isinstance(entry, str) else entry in kinds
                for entry in entries
            )
        own = name in leaves or hasattr(node.target, "gradient")
        if relu and (kind is nn.ReLU or (len(ops) == 1 and not own)):  # hooks are kept
            relus[node] = relu
        elif relu:
            differs = "and something else in training than in evaluation " * (name in leaves)
            _require(
                names[name],
                f"a ReLU was not captured: {name!r} ({kind.__name__}) computes {relu.name} "
                f"{differs}inside; {BY_HAND}",
            )
    known = list(dict.fromkeys(map(call_path, relus)))
    for entry in entries:
        _require(
            not isinstance(entry, str) or any(fnmatchcase(name, entry) for name in names),
            f"skip={entry!r} is the name of no ReLU; the ReLUs are "
            f"{', '.join(known[:20])}{', …' * (len(known) > 20)}",
        )
    wanted = {node: op for node, op in relus.items() if not names[call_path(node)]}
    relu6 = [call_path(node) for node, op in wanted.items() if op.relu is nn.ReLU6]
    _require(
        not relu6,
        f"{len(relu6)} ReLU6 calls cannot be masked, the first is {min(relu6[:1], default='')!r}: "
        f"ReLU6 is bounded on both sides; train with ReLU, or leave them: skip=[nn.ReLU6]",
    )
    besides = ", ".join(e if isinstance(e, str) else e.__name__ for e in entries)
    others = watch.nonlinear(without=relus)
    clamps = all(op.kind.startswith("clamp") for op in others)
    found = (
        f"; its {'ReLUs are clamps' if clamps else 'nonlinear operations are'} "
        f"{'; '.join(map(str, others[:3]))}; captured are relu, clamp(min=0) without max, "
        f"threshold(0, 0) and maximum(x, zeros)"
    )
    _require(
        bool(wanted),
        f"{type(net).__name__} has no ReLU to mask"
        f"{f' besides those skipped ({besides})' * bool(besides)}{found * bool(others)}",
    )
    return wanted, {name for name, skipped in names.items() if skipped}


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside the wrappers of torch."""
    wraps = ("DataParallel", "DistributedDataParallel", "AveragedModel")
    inner = getattr(model, "module" if type(model).__name__ in wraps else "_orig_mod", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model
