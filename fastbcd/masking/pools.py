"""Max-pools replaced by average pools, which compare nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fastbcd.masking.tracing import call_path, replace_call, require

AVERAGES: dict[Any, type[nn.Module]] = {
    **dict.fromkeys((nn.MaxPool1d, F.max_pool1d, torch.max_pool1d), nn.AvgPool1d),
    **dict.fromkeys((nn.MaxPool2d, F.max_pool2d, torch.max_pool2d), nn.AvgPool2d),
    **dict.fromkeys((nn.MaxPool3d, F.max_pool3d, torch.max_pool3d), nn.AvgPool3d),
}
ADAPTIVE: dict[Any, type[nn.Module]] = {
    **dict.fromkeys(
        (nn.AdaptiveMaxPool1d, F.adaptive_max_pool1d), nn.AdaptiveAvgPool1d
    ),
    **dict.fromkeys(
        (nn.AdaptiveMaxPool2d, F.adaptive_max_pool2d), nn.AdaptiveAvgPool2d
    ),
    **dict.fromkeys(
        (nn.AdaptiveMaxPool3d, F.adaptive_max_pool3d), nn.AdaptiveAvgPool3d
    ),
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


def average_pools(net: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """Call an average pool instead of each max-pool; returns the calls that there were.

    The average is that of the values inside the image, as the maximum is.
    """
    replaced = set()
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
        if kind in ADAPTIVE:
            size = options.get("output_size", options.get("kernel_size"))
            average: Any = ADAPTIVE[kind](size)
        else:
            average = AVERAGES[kind](
                options["kernel_size"],
                options.get("stride"),
                options.get("padding", 0),
                options.get("ceil_mode", False),
                count_include_pad=False,
            )
        replaced.add(node)
        replace_call(net, node, average, source=source, inplace=False)
    return replaced
