"""A network as a list of steps: its graph, with batch norm and residual fused into activations.

    act(bn(x) + r)  ->  masked_relu(x, mask, scale, shift, residual=r)
    bn(conv(x))     ->  conv'(x), if no activation follows directly

A site that keeps no ReLU is the identity, and no step: hypotheses only remove ReLUs.

Weights and masks are read when the program is made, so it is valid for one call of `score`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fastbcd.graph.operands import operands
from fastbcd.graph.trace import drop_emptied, pure_module, trace, without_inplace
from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.masks import mask_modules
from fastbcd.ops.masked import masked

SIZES = {"size", "shape", "numel", "dim", "ndim"}
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# These write new memory, rather than return a view of their input.
FRESH = (nn.Linear, nn.modules.conv._ConvNd, *NORMS)


class NotTraceable(Exception):
    """The network cannot be run as a program; the message is the reason."""


class Convolution(NamedTuple):
    """x -> conv2d(x) with constant weights, for x in channels_last order."""

    weight: Tensor  # [C_out, C_in / groups, kh, kw]
    bias: Tensor | None  # [C_out]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int

    def __call__(self, x: Tensor) -> Tensor:
        return F.conv2d(x, *self)  # type: ignore[arg-type]


def scale_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    """bn(x) = x*scale + shift, scale = weight / sqrt(var + eps), shift = bias - mean*scale."""
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    if norm.bias is not None:
        shift = shift + norm.bias.detach().double()
    dtype = norm.running_mean.dtype
    return scale.to(dtype), shift.to(dtype)


def folded(conv: nn.Conv2d, norm: Any = None) -> Convolution:
    """conv(x) or norm(conv(x)) as one convolution."""
    weight = conv.weight.detach()
    bias = conv.bias
    if bias is not None:
        bias = bias.detach()
    if norm is not None:
        # bn(w*x + b) = (scale*w)*x + (scale*b + shift)
        scale, shift = scale_and_shift(norm)
        weight = weight * scale.reshape(-1, 1, 1, 1)
        bias = shift if bias is None else bias * scale + shift
    options = conv.stride, conv.padding, conv.dilation, conv.groups
    return Convolution(channels_last(weight), bias, *options)


class Activation(NamedTuple):
    """One site: y = act(x * scale + shift + residual)."""

    node: fx.Node
    site: int
    module: MaskedActivation
    x: fx.Node
    residual: fx.Node | None
    scale: Tensor | None
    shift: Tensor | None
    coef: Tensor | None  # of the line or quadratic that replaces removed ReLUs

    @property
    def inputs(self) -> list[fx.Node]:
        return node_list((self.x, self.residual))

    def run(
        self, x: Tensor, mask: Tensor, residual: Tensor | None, out: Tensor | None
    ) -> Tensor:
        """x, residual [T, B, ...] or [B, ...], mask [T, ...] -> [T, B, ...]."""
        if residual is not None:
            residual = residual.to(x.dtype)  # under autocast it may be another
        small = {
            "scale": self.scale,
            "shift": self.shift,
            "residual": residual,
            "out": out,
        }
        return masked(x, mask, self.coef, trials=True, **small)


class Operation(NamedTuple):
    """Any other step: run(*args, **kwargs) on tensors whose first dimension is the batch."""

    node: fx.Node
    run: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]

    @property
    def inputs(self) -> list[fx.Node]:
        return node_list((self.args, self.kwargs))

    def __call__(self, values: dict[fx.Node, Any]) -> Any:
        """Run the step on the values of its inputs."""
        args, kwargs = fx.node.map_arg((self.args, self.kwargs), values.__getitem__)
        return self.run(*args, **kwargs)


Step = Activation | Operation


class Program(NamedTuple):
    """The steps in order of execution, and facts about their values for one image."""

    steps: list[Step]
    # The traced net, whichever sites are emptied: nodes and what they call.
    source: list[Any]
    placeholder: fx.Node
    output: Any  # one node, or nodes in the structure that the net returns
    constants: dict[fx.Node, Any]  # values that do not depend on the images
    last_uses: list[list[fx.Node]]  # by step: values that nothing reads after it
    # Values in memory of their own, which an activation may overwrite.
    fresh: set[fx.Node]
    # A size of one tensor is used for another: all values need equal batches.
    uniform: bool
    # Of values for a batch of one: tensors, and () for tuples of tensors.
    shapes: dict[fx.Node, tuple[int, ...]]
    bytes_per_image: dict[fx.Node, int]
    multiply_adds: dict[fx.Node, int]

    @property
    def forward(self) -> int:
        """Multiply-adds of one image."""
        return sum(self.multiply_adds.values())

    @property
    def outputs(self) -> list[fx.Node]:
        return node_list(self.output)

    @property
    def activations(self) -> list[Activation]:
        """Those that keep a ReLU, or are not the identity, in the order of their sites."""
        activations = [step for step in self.steps if isinstance(step, Activation)]
        return sorted(activations, key=lambda step: step.site)


def make_program(net: nn.Module, image: Tensor) -> Program:
    """Trace the net (in eval mode) and fuse what belongs to an activation.

    image: a batch of one. `NotTraceable` says why a net has no program.
    """
    sites = list(mask_modules(net).values())
    try:
        graph = without_inplace(net, trace(net))
    except Exception as error:  # whatever the net's own forward raises on fx proxies
        raise NotTraceable(f"torch.fx cannot trace it ({error})") from error
    source = [(n.name, n.op, _target(net, n), n.args, n.kwargs) for n in graph.nodes]
    calls = Counter(_target(net, n) for n in graph.nodes)
    if any(calls[module] != 1 for module in sites):
        raise NotTraceable(
            "a masked activation is called more than once, or not at all"
        )
    drop_emptied(net, graph)
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise NotTraceable(
            f"it takes {len(inputs)} inputs instead of one batch of images"
        )
    _check_writes(nodes)
    survey = _Survey(net, graph)
    survey.run(image)
    output = nodes[-1].args[0]
    for node in node_list(output):
        if survey.shapes.get(node, ())[:1] != (1,):
            raise NotTraceable(
                f"its output {node.name!r} is not a tensor with one row per image"
            )
    steps = _Steps(survey, sites).made(nodes)
    users = Counter(node for step in steps for node in step.inputs)
    users.update(node_list(output))
    fresh = {
        s.node
        for s in steps
        if users[s.node] == 1 and isinstance(survey.called(s.node), FRESH)
    }
    return Program(
        steps,
        source,
        inputs[0],
        output,
        {node: survey.env[node] for node in survey.fixed},
        _last_uses(steps, survey.fixed.union(node_list(output))),
        fresh,
        _sizes_travel(nodes),
        survey.shapes,
        survey.bytes,
        survey.multiply_adds,
    )


class _Survey(fx.Interpreter):
    """Runs the graph on one image, and notes facts about its values."""

    def __init__(self, net: nn.Module, graph: fx.Graph) -> None:
        super().__init__(net, garbage_collect_values=False, graph=graph)
        self.extra_traceback = False
        # Parameters, buffers, and what is computed from them.
        self.fixed: set[fx.Node] = set()
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}
        self.bytes: dict[fx.Node, int] = {}
        self.multiply_adds: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(n)
        self.multiply_adds[n] = counter.get_total_flops() // 2
        fixed = n.op == "get_attr"
        if n.op in ("call_function", "call_method") and n.all_input_nodes:
            fixed = self.fixed.issuperset(n.all_input_nodes)
        if fixed:
            self.fixed.add(n)
        if isinstance(value, Tensor):
            self.shapes[n] = tuple(value.shape)
            self.bytes[n] = value.nbytes
            value = value.detach()
        elif any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            self.shapes[n] = ()
        return value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return pure_module(self.fetch_attr(target))(*args, **kwargs)

    def called(self, node: fx.Node) -> Any:
        """The module that a node calls; None for any other node."""
        if node.op != "call_module":
            return None
        return self.fetch_attr(str(node.target))


class _Steps:
    """Turns nodes into steps, which absorb what precedes them."""

    def __init__(self, survey: _Survey, sites: list[MaskedActivation]) -> None:
        self.survey = survey
        self.site_of = {module: number for number, module in enumerate(sites)}
        self.absorbed: set[fx.Node] = set()

    def made(self, nodes: list[fx.Node]) -> list[Step]:
        """Last node first, so that an activation absorbs its inputs before they become steps."""
        steps: list[Step] = []
        for node in reversed(nodes):
            skipped = node in self.absorbed or node in self.survey.fixed
            if skipped or not node.op.startswith("call_"):
                continue
            make: Any = self.operation
            if self.survey.called(node) in self.site_of:
                make = self.activation
            steps.append(make(node))
        return steps[::-1]

    def activation(self, node: fx.Node) -> Activation:
        module = self.survey.called(node)
        reads = operands(node, self.is_norm, self.is_sum)
        self.absorbed.update(reads.absorbed)
        scale = shift = None
        if reads.norm is not None:
            scale, shift = scale_and_shift(self.survey.called(reads.norm))
        coef = module.coefficients()
        if coef is not None:
            coef = coef.detach()
        site = self.site_of[module]
        x, *residual = reads.terms
        added = next(iter(residual), None)
        return Activation(node, site, module, x, added, scale, shift, coef)

    def operation(self, node: fx.Node) -> Operation:
        run: Any = node.target
        if node.op == "call_method":
            run = getattr(Tensor, run)
        if node.op != "call_module":
            return Operation(node, run, node.args, dict(node.kwargs))
        module = self.survey.called(node)
        if self.is_conv(node):
            run = folded(module)
            return Operation(node, run, node.args, {})
        conv: Any = node.args[0] if node.args else None
        if self.is_norm(node) and self.is_conv(conv) and len(conv.users) == 1:
            self.absorbed.add(conv)
            counts = self.survey.multiply_adds
            counts[node] += counts.pop(conv)
            run = folded(self.survey.called(conv), module)
            return Operation(node, run, conv.args, {})
        return Operation(node, pure_module(module), node.args, dict(node.kwargs))

    def is_sum(self, node: fx.Node) -> bool:
        """Do both terms depend on the image, and have they the same shape?"""
        first, second = node.all_input_nodes
        shapes = self.survey.shapes
        alike = shapes.get(first) == shapes.get(second)
        return alike and self.survey.fixed.isdisjoint((first, second))

    def is_norm(self, node: fx.Node) -> bool:
        """A batch norm with running statistics, of one tensor given by position."""
        norm = self.survey.called(node)
        tracked = isinstance(norm, NORMS) and norm.running_mean is not None
        return tracked and bool(node.args)

    def is_conv(self, node: fx.Node) -> bool:
        """A plain nn.Conv2d of one tensor given by position."""
        conv = self.survey.called(node)
        plain = type(conv) is nn.Conv2d and conv.padding_mode == "zeros"
        return plain and bool(node.args)


def channels_last(t: Tensor) -> Tensor:
    """[N, C, H, W] with C innermost; other shapes as they are."""
    if t.ndim != 4:
        return t
    return t.contiguous(memory_format=torch.channels_last)


def node_list(arguments: Any) -> list[fx.Node]:
    """The nodes in nested arguments, each once."""
    nodes: dict[fx.Node, None] = {}
    fx.node.map_arg(arguments, lambda node: nodes.setdefault(node))
    return list(nodes)


def _target(net: nn.Module, node: fx.Node) -> Any:
    """What a node calls."""
    if node.op == "call_module":
        return net.get_submodule(str(node.target))
    return node.target


def _last_uses(steps: list[Step], lasting: set[fx.Node]) -> list[list[fx.Node]]:
    """By step, the values that nothing reads after it; lasting: what is needed to the end."""
    read = set(lasting)
    last_uses = []
    for step in reversed(steps):
        last_uses.append([node for node in step.inputs if node not in read])
        read.update(step.inputs)
    return last_uses[::-1]


def _check_writes(nodes: list[fx.Node]) -> None:
    """Refuse operations that still write into their input in the graph without in-place ones."""
    for node in nodes:
        name = str(getattr(node.target, "__name__", node.target))
        writes = name in ("setitem", "ipow", "ior") or "out" in node.kwargs
        if node.op == "call_method":
            writes |= not hasattr(Tensor, name)
        if node.op == "call_function":
            writes |= name.endswith("_") and not name.endswith("__")
        if writes:
            raise NotTraceable(f"node {node.name!r} ({name}) writes into its input")


def _sizes_travel(nodes: list[fx.Node]) -> bool:
    """Is a size used for another tensor than the one it was taken from?

    x.view(x.size(0), -1) is harmless; b = x.size(0) ... y.view(b, -1) is not, since y may
    hold more hypotheses than x.
    """
    for node in nodes:
        name: Any = node.target
        if name is getattr:
            name = node.args[1]
        if name not in SIZES or node.op not in ("call_method", "call_function"):
            continue
        source = node.args[0]
        users = list(node.users)
        while users:
            user = users.pop()
            if user.target is operator.getitem and user.args[0] is not source:
                users.extend(user.users)
            elif user.op != "call_method" or user.args[0] is not source:
                return True
    return False
