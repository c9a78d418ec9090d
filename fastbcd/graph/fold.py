"""Batch norm folded into the convolution before it: a net for inference with fewer operations."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from fastbcd.graph.trace import trace
from fastbcd.runtime.module_mode import eval_mode

PAIRS = (
    (nn.Conv2d, nn.BatchNorm2d),
    (nn.Conv1d, nn.BatchNorm1d),
    (nn.Conv3d, nn.BatchNorm3d),
)


def folded(net: nn.Module) -> nn.Module:
    """The net in eval mode, norm(conv(x)) as one convolution. It shares what is not folded.

    A net that torch.fx cannot trace is returned as it is.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), fastbcd.MaskedReLU((4, 6, 6)))
    >>> [type(module).__name__ for module in folded(net.eval()).children()]
    ['Conv2d', 'MaskedReLU']
    """
    try:
        with eval_mode(net):
            model = fx.GraphModule(net, copy.deepcopy(trace(net)))
    except Exception:  # whatever the net's own forward raises; `fused` warns
        return net
    calls = Counter(node.target for node in model.graph.nodes)
    for node in model.graph.find_nodes(op="call_module"):
        before: Any = next(iter(node.args), None)
        if not isinstance(before, fx.Node) or before.op != "call_module":
            continue
        conv: Any = model.get_submodule(str(before.target))
        norm: Any = model.get_submodule(str(node.target))
        once = calls[before.target] == calls[node.target] == len(before.users) == 1
        if once and (type(conv), type(norm)) in PAIRS and norm.running_mean is not None:
            model.set_submodule(str(before.target), fuse_conv_bn_eval(conv, norm))
            node.replace_all_uses_with(before)
            model.graph.erase_node(node)
    model.delete_all_unused_submodules()
    model.recompile()
    return model.eval()
