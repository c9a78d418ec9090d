"""ReLUs that `convert` did not find: written in another way, or inside a module of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The operators that a ReLU ends in: always, or if their lower bound is 0.
_ATEN_RELU = {"relu", "relu6"}
_ATEN_BOUNDED = {"clamp", "clamp_min", "threshold", "hardtanh"}


class _Watch(TorchDispatchMode):
    """Records every ReLU that is computed by another operator than a masked one."""

    def __init__(self) -> None:
        super().__init__()
        self.place = ""
        self.found: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1].rstrip("_")
        low, high = (*args[1:3], None, None)[:2]
        low = kwargs.get("min", low)
        # clamp(0, 1) is no ReLU, but hardtanh(0, 6) is a ReLU6.
        one_sided = name != "clamp" or kwargs.get("max", high) is None
        bounded = name in _ATEN_BOUNDED and isinstance(low, (int, float)) and low == 0
        if name in _ATEN_RELU or (bounded and one_sided):
            self.found.append((self.place, name))
        return func(*args, **kwargs)


class Watched(NamedTuple):
    """What a net computes on an input."""

    output: Any
    shapes: dict[fx.Node, tuple[int, ...]]  # of every tensor in its graph
    relus: list[tuple[str, str]]  # place and operator of every ReLU besides the masked ones


def run_watched(net: fx.GraphModule, x: Tensor, name_of: Callable[[fx.Node], str]) -> Watched:
    """Run the net node by node on a copy of x, with the same random numbers every time."""
    watch, shapes = _Watch(), {}

    class Run(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            watch.place = name_of(n)
            result = super().run_node(n)
            if isinstance(result, Tensor):
                shapes[n] = tuple(result.shape)
            return result

    # The fused path of transformer layers computes their ReLU inside one kernel.
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        devices = [x.device] if x.is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices), watch:
            torch.manual_seed(0)
            return Watched(Run(net).run(x.clone()), shapes, watch.found)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def same_outputs(a: Any, b: Any) -> bool:
    """Equal outputs: tensors bit for bit, NaN equal to NaN, inside any nesting."""
    mine, theirs = tree_leaves(a), tree_leaves(b)
    return len(mine) == len(theirs) and all(
        torch.equal(p.nan_to_num(), q.nan_to_num()) if isinstance(p, Tensor) else p == q
        for p, q in zip(mine, theirs, strict=True)
    )
