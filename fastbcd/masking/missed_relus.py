"""Nonlinear operations that `convert` leaves as they are, including ReLUs that it did not find."""

from __future__ import annotations

import json
import math
from collections import Counter
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

# The operators of a ReLU with their further arguments; maximum(x, 0) is one, too.
_RELUS = {"relu": (), "clamp": (0,), "clamp_min": (0,), "threshold": (0, 0)}
_ZEROS = {torch.zeros, torch.zeros_like, "new_zeros"}  # calls that make a tensor of zeros
# Operators by what they are in the tensors that depend on the input: "linear", "bilinear" (linear
# if one tensor depends on it), "linear in the first" (if the second does not depend on it), "batch
# norm" (linear in eval mode), "constant". Views are linear, all others nonlinear.
_TABLE = json.loads(Path(__file__).with_name("operators.json").read_text())
_COMPARISONS = _TABLE.pop("comparisons")  # of one element, by operator
_RULES = {name: rule for rule, names in _TABLE.items() for name in names}


class Op(NamedTuple):
    """An operator that ran on tensors that depend on the input."""

    name: str
    relu: type[nn.Module] | None  # nn.ReLU or nn.ReLU6 if it is one
    inplace: bool
    nonlinear: int  # the elements of its result per image; 0 if it is linear
    comparisons: int  # per image


class Watch(TorchDispatchMode):
    """What a net computes on an input x: the operators on all tensors that depend on x."""

    output: Any = None
    node: fx.Node | None = None  # the one that runs; None: a masked activation

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.batch = len(x)
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}  # of all nodes that depend on x
        self.ops: dict[fx.Node, list[Op]] = {}  # of all nodes, masked activations aside
        # Tensors that depend on x; True: by a comparison, which is recorded already.
        self.depends = WeakTensorKeyDictionary()
        self.depends[x] = False

    def nonlinear(self, without: Container[fx.Node]) -> tuple[NonlinearOp, ...]:
        """The nonlinear operations of all nodes except some."""
        elements: Counter[tuple[str, str]] = Counter()
        comparisons: Counter[tuple[str, str]] = Counter()
        for node, ops in self.ops.items():
            for op in ops:
                if op.nonlinear and node not in without:
                    elements[call_path(node), op.name] += op.nonlinear
                    comparisons[call_path(node), op.name] += op.comparisons
        return tuple(NonlinearOp(*key, n, comparisons[key]) for key, n in elements.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        marks = [self.depends[t] for t in _tensors((args, kwargs)) if t in self.depends]
        if not marks or _rule(func) == "constant":
            return result
        values = marks.count(False)  # how many inputs depend on x, other than by a comparison
        results = _tensors(result)
        if self.node is not None and results:
            op = self._op(func, args, results[0], values)
            self.ops.setdefault(self.node, []).append(op)
        for t in results:
            self.depends[t] = not (values and _is_number(t))
            if t._base is not None and t is args[0]:  # written through a view
                self.depends[t._base] = False
        return result

    def _op(self, func: Any, args: Any, result: Tensor, values: int) -> Op:
        space, name = _name(func)
        elements = 0
        comparisons = 0
        if not self._is_linear(_rule(func), args, result, values):
            elements = -(-result.numel() // self.batch)
            comparisons = -(-_comparisons(name, args, result) // self.batch)
        kind = f"{space}::{name}"
        if space == "aten":
            kind = name.lstrip("_").removesuffix("_with_indices").removesuffix("_kernel")
        return Op(kind, self._relu(name, args), func._schema.is_mutable, elements, comparisons)

    def _is_linear(self, rule: str | None, args: Any, result: Tensor, values: int) -> bool:
        if values == 0:  # logic on comparisons, or a choice by them
            return rule is not None or result.dtype is torch.bool
        if not _is_number(result):
            return False  # compared or rounded
        if rule == "batch norm":
            return args[5] is False  # in eval mode
        if rule == "linear in the first":
            return not (isinstance(args[1], Tensor) and args[1] in self.depends)
        return rule == "linear" or (rule == "bilinear" and values == 1)

    def _relu(self, name: str, args: Any) -> type[nn.Module] | None:
        """nn.ReLU or nn.ReLU6 if the operator computes one."""
        if name == "maximum":
            return nn.ReLU if self._is_maximum_with_zeros(*args) else None
        if not all(isinstance(a, int | float) for a in args[1:]):
            return None
        if name == "hardtanh" and args[1] == 0:
            return nn.ReLU6
        return nn.ReLU if _RELUS.get(name) == args[1:] else None

    def _is_maximum_with_zeros(self, x: Tensor, zero: Tensor) -> bool:
        if x not in self.depends:
            x, zero = zero, x
        if zero in self.depends or zero.any() or not self._is_made_by_forward():
            return False
        shape = torch.broadcast_shapes(x.shape, zero.shape)
        return shape == x.shape and torch.result_type(x, zero) == x.dtype

    def _is_made_by_forward(self) -> bool:
        """Do only tensors that forward makes meet x? A buffer of zeros may change."""
        if self.node is None or self.node.op == "call_module":
            return False
        return all(
            n in self.shapes or n.target in _ZEROS or "_tensor_constant" in str(n.target)
            for n in self.node.all_input_nodes
        )


def _comparisons(name: str, args: Any, result: Tensor) -> int:
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


def _name(func: Any) -> tuple[str, str]:
    """The namespace of an operator, and its name without the mark of an operator in place."""
    space, name = func._schema.name.split("::")
    return space, name if name.startswith("__") else name.rstrip("_")


def _rule(func: Any) -> str | None:
    """What the operator is in the tensors that depend on the input; None: nonlinear."""
    if func.is_view:
        return "linear"
    space, name = _name(func)
    return _RULES.get(name) if space == "aten" else None


class WatchedRun(fx.Interpreter):
    """Runs a net node by node and tells a watch which node runs."""

    def __init__(self, net: fx.GraphModule, watch: Watch) -> None:
        super().__init__(net)
        self.watch = watch

    def run_node(self, n: fx.Node) -> Any:
        module = self.module.get_submodule(str(n.target)) if n.op == "call_module" else None
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
