"""Nonlinear operations that `convert` leaves as they are, including ReLUs that it did not find."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.conversion_report import NonlinearOp
from fastbcd.masking.tracing import call_path

# The operators of a ReLU with their further arguments.
_RELUS = {"relu": (), "clamp": (0,), "clamp_min": (0,), "threshold": (0, 0)}
# The operators of activations that convert(smooth="relu") exchanges.
SMOOTH: dict[str, type[nn.Module]] = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "hardswish": nn.Hardswish,
    "mish": nn.Mish,
}
# Operators by what they are in the tensors that depend on the input: "linear", "bilinear" (linear
# if one tensor depends on it), "linear in the first" (if the second does not depend on it), "batch
# norm" (linear in eval mode), "constant". Views are linear, all others nonlinear.
_TABLE = json.loads(Path(__file__).with_name("operators.json").read_text())
_COMPARISONS = _TABLE.pop("comparisons")  # of one element, by operator
_RULES = {name: rule for rule, names in _TABLE.items() for name in names}


class Op(NamedTuple):
    """An operator that ran on tensors that depend on the input."""

    kind: str
    activation: type[nn.Module] | None  # nn.ReLU, nn.ReLU6, nn.SiLU, ... if it is one
    inplace: bool
    elements: int  # of its result per image; 0 if it is linear
    comparisons: int  # per image


class Watch(TorchDispatchMode):
    """What a net computes on an input x: the operators on all tensors that depend on x.

    A comparison is an operator itself, so its result counts as a constant.
    """

    output: Any = None
    node: fx.Node | None = None  # the one that runs; None: a masked activation

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.batch = len(x)
        # Of all nodes that depend on x.
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}
        self.ops: dict[fx.Node, list[Op]] = {}  # of all nodes, masked activations aside
        # Its keys are the tensors that depend on x.
        self.depends = WeakTensorKeyDictionary()
        self.depends[x] = None

    def nonlinear(self, without: Container[fx.Node] = ()) -> tuple[NonlinearOp, ...]:
        """The nonlinear operations of all nodes except some."""
        return tuple(
            NonlinearOp(call_path(node), op.kind, op.elements, op.comparisons)
            for node, ops in self.ops.items()
            for op in ops
            if op.elements and node not in without
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [t for t in _tensors((args, kwargs)) if t in self.depends]
        results = _tensors(result)
        if not inputs or not results or _rule(func) == "constant":
            return result
        if self.node is not None:
            op = self._op(func, args, results[0], len(inputs))
            self.ops.setdefault(self.node, []).append(op)
        for t in filter(_is_number, results):
            self.depends[t] = None
            if t is args[0] and t._base is not None:  # written through a view
                self.depends[t._base] = None
        return result

    def _op(self, func: Any, args: Any, result: Tensor, inputs: int) -> Op:
        name = _name(func)
        elements = 0
        compared = 0
        if not self._is_linear(_rule(func), args, result, inputs):
            elements = math.ceil(result.numel() / self.batch)
            compared = math.ceil(comparisons(name, args, result) / self.batch)
        kind = f"{func.namespace}::{name}"
        if func.namespace == "aten":
            kind = (
                name.lstrip("_").removesuffix("_with_indices").removesuffix("_kernel")
            )
        activation = _activation(name, args[1:])
        return Op(kind, activation, func._schema.is_mutable, elements, compared)

    def _is_linear(
        self, rule: str | None, args: Any, result: Tensor, inputs: int
    ) -> bool:
        if not _is_number(result):
            return False  # compared or rounded
        if rule == "batch norm":
            return args[5] is False  # in eval mode
        if rule == "linear in the first":
            return args[1] not in self.depends
        return rule == "linear" or (rule == "bilinear" and inputs == 1)


def _activation(name: str, arguments: tuple[Any, ...]) -> type[nn.Module] | None:
    """The activation that an operator with these further arguments computes."""
    if any(isinstance(a, Tensor) for a in arguments):
        return None
    if name == "hardtanh" and arguments[0] == 0:
        return nn.ReLU6
    if _RELUS.get(name) == arguments:
        return nn.ReLU
    return SMOOTH.get(name)


def comparisons(name: str, args: Any, result: Tensor) -> int:
    """How many numbers the operator compares with another one to compute its result."""
    if name.startswith(("max_pool", "fractional_max_pool")):
        return result.numel() * (math.prod(args[1]) - 1)
    if name in ("max", "min", "amax", "amin", "argmax", "argmin") or "max_pool" in name:
        return args[0].numel() - result.numel()
    if name == "clamp":
        return result.numel() * sum(bound is not None for bound in args[1:])
    return result.numel() * _COMPARISONS.get(name, 0)


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def _is_number(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _name(func: Any) -> str:
    """The name of an operator, without the mark of an operator in place."""
    name = func.overloadpacket.__name__
    return name if name.startswith("__") else name.rstrip("_")


def _rule(func: Any) -> str | None:
    """What the operator is in the tensors that depend on the input; None: nonlinear."""
    if func.is_view:
        return "linear"
    return _RULES.get(_name(func)) if func.namespace == "aten" else None


class WatchedRun(fx.Interpreter):
    """Runs a net node by node and tells a watch which node runs."""

    def __init__(self, net: fx.GraphModule, watch: Watch) -> None:
        super().__init__(net)
        self.watch = watch

    def run_node(self, n: fx.Node) -> Any:
        module = (
            self.module.get_submodule(str(n.target)) if n.op == "call_module" else None
        )
        self.watch.node = None if isinstance(module, MaskedActivation) else n
        result = super().run_node(n)
        depends = isinstance(result, Tensor) and result in self.watch.depends
        if depends and result.is_floating_point():
            self.watch.shapes[n] = tuple(result.shape)
        return result


def run_watched(net: fx.GraphModule, x: Tensor) -> Watch:
    """Run the net node by node on a copy of x."""
    x = x.clone()
    watch = Watch(x)
    with repeatable(x), watch:
        watch.output = WatchedRun(net, watch).run(x)
    return watch


@contextmanager
def repeatable(x: Tensor) -> Iterator[None]:
    """Forward passes with the same random numbers, and with the ReLU of transformers visible."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one kernel, with the ReLU inside
    try:
        with torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
            torch.manual_seed(0)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
