"""What `convert` exchanges before it masks: max-pools for average pools, activations for ReLUs.

An average pool compares nothing. A ReLU can be masked, which ReLU6, SiLU and GELU cannot. Either
changes what the network computes: it has to be fine-tuned.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fastbcd.masking.find_relus import Skip, is_skipped
from fastbcd.masking.missed_relus import SMOOTH, Watch
from fastbcd.masking.tracing import call_path, replace_call, require
from fastbcd.runtime.validate import check_choice

AVERAGES: dict[Any, type[nn.Module]] = {
    maximum: getattr(nn, f"AvgPool{dims}d")
    for dims in (1, 2, 3)
    for maximum in (
        getattr(nn, f"MaxPool{dims}d"),
        getattr(F, f"max_pool{dims}d"),
        getattr(torch, f"max_pool{dims}d"),
    )
}
ADAPTIVE: dict[Any, type[nn.Module]] = {
    maximum: getattr(nn, f"AdaptiveAvgPool{dims}d")
    for dims in (1, 2, 3)
    for maximum in (
        getattr(nn, f"AdaptiveMaxPool{dims}d"),
        getattr(F, f"adaptive_max_pool{dims}d"),
    )
}
ARGUMENTS = (
    "input",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "ceil_mode",
    "return_indices",
)


def check_swaps(maxpool: str, relu6: str, smooth: str) -> tuple[type[nn.Module], ...]:
    """The activations to exchange for ReLUs, after a check of the three arguments."""
    check_choice("maxpool", maxpool, ("keep", "average"))
    check_choice("relu6", relu6, ("keep", "relu"))
    check_choice("smooth", smooth, ("keep", "relu"))
    kinds: tuple[type[nn.Module], ...] = ()
    if relu6 == "relu":
        kinds += (nn.ReLU6,)
    if smooth == "relu":
        kinds += tuple(SMOOTH.values())
    return kinds


def rectified(
    net: nn.Module,
    watch: Watch,
    kinds: tuple[type[nn.Module], ...],
    skips: tuple[Skip, ...],
) -> Iterator[str]:
    """Call a ReLU instead of each activation of these kinds; yields the names of the calls."""
    for node, ops in watch.ops.items():
        op = ops[0]
        if len(ops) > 1 or op.activation not in kinds:
            continue
        if is_skipped(net, node, ops, skips):
            continue
        yield call_path(node)
        source = next(n for n in node.all_input_nodes if n in watch.shapes)
        new = replace_call(net, node, nn.ReLU(), source=source, inplace=op.inplace)
        watch.shapes[new] = watch.shapes[node]


def averaged(net: nn.Module, graph: fx.Graph) -> Iterator[str]:
    """Call an average pool instead of each max-pool; yields the names of the calls.

    The average is that of the values inside the image, as the maximum is.
    """
    for node in list(graph.nodes):
        kind = node.target
        options = {**dict(zip(ARGUMENTS, node.args, strict=False)), **node.kwargs}
        source: Any = options.get("input")
        if node.op == "call_module":
            pool: Any = net.get_submodule(node.target)
            kind = type(pool)
            options = vars(pool)
            source = node.all_input_nodes[0]
        if kind not in AVERAGES and kind not in ADAPTIVE:
            continue
        require(
            options.get("dilation", 1) in (1, (1,), (1, 1), (1, 1, 1))
            and not options.get("return_indices"),
            f"the max-pool {call_path(node)!r} has a dilation or returns indices, which an average "
            f"pool does not; use another one, or leave out maxpool='average'",
        )
        yield call_path(node)
        replace_call(net, node, _average(kind, options), source=source, inplace=False)


def _average(kind: Any, options: dict[str, Any]) -> nn.Module:
    """The average pool for a max-pool of this kind with these arguments."""
    make: Any = ADAPTIVE.get(kind)
    if make is not None:
        return make(options.get("output_size", options.get("kernel_size")))
    make = AVERAGES[kind]
    return make(
        options["kernel_size"],
        options.get("stride"),
        options.get("padding", 0),
        options.get("ceil_mode", False),
        count_include_pad=False,
    )
