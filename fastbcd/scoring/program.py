"""A network as a list of steps: its graph, with batch norm and residual fused into activations.

    act(bn(x) + r)  ->  masked_relu(x, mask, scale, shift, residual=r)
    bn(conv(x))     ->  conv'(x), where no activation follows directly

The weights are read when the program is made, so a program is good for one call of `score`.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from fastbcd import ops
from fastbcd.graph.trace import trace, without_inplace
from fastbcd.masking.activations import MaskedActivation, MaskedPoly
from fastbcd.scoring.folding import folded, scale_and_shift

_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_SIZES = {"size", "shape", "numel", "dim", "ndim"}
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class NotTraceable(Exception):
    """The network cannot be run as a program; the message is the reason."""


class Activation(NamedTuple):
    """One site: y = act(x * scale + shift + residual)."""

    node: fx.Node
    site: int
    module: MaskedActivation
    x: fx.Node
    scale: Tensor | None
    shift: Tensor | None
    residual: fx.Node | None

    @property
    def inputs(self) -> list[fx.Node]:
        return [self.x] if self.residual is None else [self.x, self.residual]

    def run(self, x: Tensor, mask: Tensor, residual: Tensor | None, out: Tensor | None) -> Tensor:
        """x, residual [T, B, ...] or [B, ...], mask [T, ...] -> [T, B, ...]."""
        small = {"scale": self.scale, "shift": self.shift, "residual": residual, "out": out}
        if isinstance(self.module, MaskedPoly):
            coef = self.module.coef.detach()
            return ops.masked_poly(x, mask, coef, trials=True, **small)
        return ops.masked_relu(x, mask, trials=True, **small)


class Call(NamedTuple):
    """Any other step: run(*args, **kwargs) on tensors whose first dimension is the batch."""

    node: fx.Node
    run: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]

    @property
    def inputs(self) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        fx.node.map_arg((self.args, self.kwargs), lambda n: found.setdefault(n))
        return list(found)


class Program(NamedTuple):
    """The steps in order of execution, and what is known of their values for one image."""

    steps: list[Activation | Call]
    placeholder: fx.Node
    output: fx.Node
    constants: dict[fx.Node, Any]  # parameters that the graph reads itself
    uses: dict[fx.Node, int]  # how many steps read a value
    fresh: set[fx.Node]  # values in memory of their own, which an activation may overwrite
    uniform: bool  # sizes travel through the graph, so that all values need equal batches
    shapes: dict[fx.Node, tuple[int, ...]]  # of the tensors, for a batch of one
    bytes_per_image: dict[fx.Node, int]
    multiply_adds: dict[fx.Node, int]


def make_program(net: nn.Module, modules: dict[str, MaskedActivation], image: Tensor) -> Program:
    """Trace the net (in eval mode) and fuse what belongs to an activation.

    modules: the masked activations in the order of the sites. image: a batch of one.
    """
    try:
        graph = without_inplace(net, trace(net))
    except Exception as error:  # whatever the net's own forward raises on fx proxies
        raise NotTraceable(f"torch.fx cannot trace it ({error})") from error
    named = dict(net.named_modules())
    nodes = list(graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    output = next(n for n in nodes if n.op == "output").args[0]
    if len(inputs) != 1:
        raise NotTraceable(f"it takes {len(inputs)} inputs instead of one batch of images")
    if not isinstance(output, fx.Node):
        raise NotTraceable("it returns something else than one tensor of logits")
    survey = _Survey(net, graph, {m: name for name, m in modules.items()})
    survey.run(image)
    builder = _Builder(named, survey.shapes, list(modules.values()))
    steps = builder.steps(nodes)
    if sorted(s.site for s in steps if isinstance(s, Activation)) != list(range(len(modules))):
        raise NotTraceable("a masked activation is called more than once, or not at all")
    uses: dict[fx.Node, int] = {output: 1}
    for step in steps:
        for node in step.inputs:
            uses[node] = uses.get(node, 0) + 1
    for conv, norm in builder.absorbed_by.items():
        survey.multiply_adds[norm] += survey.multiply_adds.pop(conv)
    constants = {n: _attribute(net, str(n.target)) for n in nodes if n.op == "get_attr"}
    fresh = {s.node for s in steps if uses.get(s.node) == 1 and builder.is_fresh(s.node)}
    return Program(
        steps, inputs[0], output, constants, uses, fresh, _sizes_travel(nodes),
        survey.shapes, survey.bytes, survey.multiply_adds,
    )  # fmt: skip


class _Survey(fx.Interpreter):
    """Run one image through the graph; note shapes, bytes and multiply-adds of each node."""

    def __init__(self, net: nn.Module, graph: fx.Graph, names: dict[MaskedActivation, str]) -> None:
        super().__init__(fx.GraphModule(net, graph))
        self.names = names
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}
        self.bytes: dict[fx.Node, int] = {}
        self.multiply_adds: dict[fx.Node, int] = {}
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(n)
        self.multiply_adds[n] = counter.get_total_flops() // 2
        if isinstance(value, Tensor):
            self.shapes[n] = tuple(value.shape)
            self.bytes[n] = value.numel() * value.element_size()
        return value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        if module in self.names and tuple(args[0].shape[1:]) != tuple(module.mask.shape):
            raise ValueError(
                f"the images do not fit the masks: site {self.names[module]!r} has a mask of "
                f"shape {tuple(module.mask.shape)} and meets {tuple(args[0].shape[1:])}"
            )
        return super().call_module(target, args, kwargs)


class _Builder:
    """Turns nodes into steps, folding batch norms and additions into what follows them."""

    def __init__(
        self,
        named: dict[str, nn.Module],
        shapes: dict[fx.Node, tuple[int, ...]],
        modules: list[MaskedActivation],
    ) -> None:
        self.named, self.shapes = named, shapes
        self.site_of = {module: i for i, module in enumerate(modules)}
        self.absorbed: set[fx.Node] = set()
        self.absorbed_by: dict[fx.Node, fx.Node] = {}  # convolution -> the batch norm it runs in

    def steps(self, nodes: list[fx.Node]) -> list[Activation | Call]:
        """Last node first, so that an activation absorbs its inputs before they become steps."""
        found: list[Activation | Call] = []
        for node in reversed(nodes):
            if not node.op.startswith("call_") or node in self.absorbed:
                continue
            module = self.module(node)
            if module in self.site_of:
                found.append(self.activation(node, module))
            else:
                found.append(self.call(node))
        return found[::-1]

    def module(self, node: Any) -> Any:
        is_module = isinstance(node, fx.Node) and node.op == "call_module"
        return self.named[str(node.target)] if is_module else None

    def activation(self, node: fx.Node, module: MaskedActivation) -> Activation:
        x: Any = node.args[0] if node.args else next(iter(node.kwargs.values()))
        residual = scale = shift = None
        if self.is_addition(x) and len(x.users) == 1:
            self.absorbed.add(x)
            first, second = x.args
            # Of two batch norms one is folded here, the other into its convolution.
            swap = self.is_norm(second) and not self.is_norm(first)
            x, residual = (second, first) if swap else (first, second)
        if self.is_norm(x) and len(x.users) == 1:
            self.absorbed.add(x)
            scale, shift = scale_and_shift(self.module(x))
            x = x.args[0]
        return Activation(node, self.site_of[module], module, x, scale, shift, residual)

    def is_addition(self, node: Any) -> bool:
        return (
            isinstance(node, fx.Node)
            and node.target in _ADDITIONS
            and not node.kwargs
            and len(node.args) == 2
            and all(isinstance(a, fx.Node) and a.op != "get_attr" for a in node.args)
            and node.args[0] is not node.args[1]
            and self.shapes.get(node.args[0]) == self.shapes.get(node.args[1])  # type: ignore[arg-type]
        )

    def is_norm(self, node: Any) -> bool:
        """A batch norm with running statistics."""
        norm = self.module(node)
        return isinstance(norm, _NORMS) and norm.running_mean is not None

    def is_fresh(self, node: fx.Node) -> bool:
        """Does this step write new memory, rather than a view of what it read?"""
        return isinstance(self.module(node), (nn.Linear, nn.modules.conv._ConvNd, *_NORMS))

    def is_conv(self, node: Any) -> bool:
        """A plain nn.Conv2d of one tensor."""
        conv = self.module(node)
        return type(conv) is nn.Conv2d and conv.padding_mode == "zeros" and bool(node.args)

    def call(self, node: fx.Node) -> Call:
        run: Any = node.target
        if node.op == "call_module":
            module: Any = self.module(node)
            source: Any = node.args[0] if node.args else None
            if self.is_norm(node) and self.is_conv(source) and len(source.users) == 1:
                self.absorbed.add(source)
                self.absorbed_by[source] = node
                run = folded(self.module(source), module)
                return Call(node, run, source.args, {})
            run = folded(module, None) if self.is_conv(node) else _pure_module(module)
        elif node.op == "call_method":
            run = getattr(torch.Tensor, str(node.target))
        return Call(node, run, node.args, dict(node.kwargs))


def _pure_module(module: nn.Module) -> nn.Module:
    """The module, with inplace=False if it has that switch."""
    if not getattr(module, "inplace", False):
        return module
    twin = copy.copy(module)
    twin.inplace = False  # type: ignore[assignment]
    return twin


def _attribute(net: nn.Module, path: str) -> Any:
    value: Any = net
    for name in path.split("."):
        value = getattr(value, name)
    return value.detach() if isinstance(value, Tensor) else value


def _sizes_travel(nodes: list[fx.Node]) -> bool:
    """Does a size reach another tensor than the one it was taken from?

    x.view(x.size(0), -1) is harmless; b = x.size(0) ... y.view(b, -1) is not, since y may
    hold more hypotheses than x.
    """
    for node in nodes:
        method = node.target if node.op == "call_method" else None
        attribute = node.args[1] if node.target is getattr else None
        if method not in _SIZES and attribute not in _SIZES:
            continue
        source, reached = node.args[0], list(node.users)
        while reached:
            user = reached.pop()
            if user.target is operator.getitem and user.args[0] is not source:
                reached.extend(user.users)
            elif user.op != "call_method" or user.args[0] is not source:
                return True
    return False
