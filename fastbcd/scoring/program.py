"""A network as a list of steps: its graph, with batch norm and residual fused into activations.

    act(bn(x) + r)  ->  masked_relu(x, mask, scale, shift, residual=r)
    bn(conv(x))     ->  conv'(x), if no activation follows directly
    conv(bn(x))     ->  conv'(x), if the convolution does not pad

A site that keeps no ReLU is the identity, and no step: hypotheses only remove ReLUs.

Weights and masks are read when the program is made, so it is valid for one call of `score`.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fastbcd import ops
from fastbcd.graph.trace import drop_emptied, pure_module, trace, without_inplace
from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.masks import mask_modules

_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_SIZES = {"size", "shape", "numel", "dim", "ndim"}
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class NotTraceable(Exception):
    """The network cannot be run as a program; the message is the reason."""


class Convolution(NamedTuple):
    """x -> conv2d(x) with constant weights, for x in channels_last order."""

    weight: Tensor  # [C_out, C_in / groups, kh, kw]
    bias: Tensor | None  # [C_out]
    stride: tuple[int, int]
    padding: tuple[int, int] | str
    dilation: tuple[int, int]
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


def _folded(conv: nn.Conv2d, norm: Any = None, first: Any = None) -> Convolution:
    """conv(x), norm(conv(x)) or conv(first(x)) as one convolution."""
    weight, bias = conv.weight.detach(), None if conv.bias is None else conv.bias.detach()
    if first is not None:
        # w*bn(x) + b = (w*scale)*x + (w*shift + b), without padding, which bn would shift
        scale, shift = (s.reshape(conv.groups, 1, -1, 1, 1) for s in scale_and_shift(first))
        grouped = weight.unflatten(0, (conv.groups, -1))
        more = (grouped * shift).sum((2, 3, 4)).flatten()
        weight, bias = (grouped * scale).flatten(0, 1), more if bias is None else bias + more
    if norm is not None:
        # bn(w*x + b) = (scale*w)*x + (scale*b + shift)
        scale, shift = scale_and_shift(norm)
        weight = weight * scale.reshape(-1, 1, 1, 1)
        bias = shift if bias is None else bias * scale + shift
    weight = weight.contiguous(memory_format=torch.channels_last)
    tail: Any = (conv.stride, conv.padding, conv.dilation, conv.groups)
    return Convolution(weight, bias, *tail)


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
        if residual is not None and residual.dtype != x.dtype:  # under autocast
            residual = residual.to(x.dtype)
        small = {"scale": self.scale, "shift": self.shift, "residual": residual, "out": out}
        if (coef := self.module.coefficients()) is not None:
            return ops.masked_poly(x, mask, coef.detach(), trials=True, **small)
        return ops.masked_relu(x, mask, trials=True, **small)

    def sum(self, x: Tensor, off: Tensor, residual: Tensor | None, out: Tensor | None) -> Tensor:
        """x * scale + shift + residual, as in `run`; off: a mask without bits."""
        small = {"scale": self.scale, "shift": self.shift, "residual": residual, "out": out}
        return ops.masked_relu(x, off, trials=True, **small)


class Operation(NamedTuple):
    """Any other step: run(*args, **kwargs) on tensors whose first dimension is the batch."""

    node: fx.Node
    run: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]

    @property
    def inputs(self) -> list[fx.Node]:
        return _nodes((self.args, self.kwargs))

    def __call__(self, values: dict[fx.Node, Any]) -> Any:
        """Run the step on the values of its inputs."""
        args, kwargs = fx.node.map_arg((self.args, self.kwargs), values.__getitem__)
        return self.run(*args, **kwargs)


class Program(NamedTuple):
    """The steps in order of execution, and facts about their values for one image."""

    steps: list[Activation | Operation]
    source: list[Any]  # the traced net, whichever sites are emptied: nodes and what they call
    placeholder: fx.Node
    output: Any  # one node, or nodes in the structure that the net returns
    constants: dict[fx.Node, Any]  # values that do not depend on the images
    uses: dict[fx.Node, int]  # how many steps read a value; plus 1 for an output
    fresh: set[fx.Node]  # values in memory of their own, which an activation may overwrite
    uniform: bool  # a size of one tensor is used for another: all values need equal batches
    shapes: dict[fx.Node, tuple[int, ...]]  # of values that are tensors, for a batch of one
    tuples: set[fx.Node]  # values that are tuples or lists of tensors
    bytes_per_image: dict[fx.Node, int]
    multiply_adds: dict[fx.Node, int]

    @property
    def outputs(self) -> list[fx.Node]:
        return _nodes(self.output)

    @property
    def activations(self) -> list[Activation]:
        """Those that keep a ReLU, or are not the identity, in the order of their sites."""
        found = [step for step in self.steps if isinstance(step, Activation)]
        return sorted(found, key=lambda step: step.site)


def make_program(net: nn.Module, image: Tensor) -> Program:
    """Trace the net (in eval mode) and fuse what belongs to an activation.

    image: a batch of one. `NotTraceable` says why a net has no program.
    """
    modules = mask_modules(net)
    try:
        graph = without_inplace(net, trace(net))
    except Exception as error:  # whatever the net's own forward raises on fx proxies
        raise NotTraceable(f"torch.fx cannot trace it ({error})") from error
    calls = Counter(net.get_submodule(n.target) for n in graph.find_nodes(op="call_module"))
    if any(calls[module] != 1 for module in modules.values()):
        raise NotTraceable("a masked activation is called more than once, or not at all")
    source = [(n.name, n.op, net.get_submodule(n.target) if n.op == "call_module" else n.target,
               n.args, n.kwargs) for n in graph.nodes]  # fmt: skip
    drop_emptied(net, graph)
    nodes = list(graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    output = nodes[-1].args[0]
    if len(inputs) != 1:
        raise NotTraceable(f"it takes {len(inputs)} inputs instead of one batch of images")
    _check_writes(nodes)
    fusion = _Fusion(net, graph, modules.values())
    fusion.run(image)
    steps = fusion.steps(nodes)
    for node in _nodes(output):
        if fusion.shapes.get(node, ())[:1] != image.shape[:1]:
            raise NotTraceable(f"its output {node.name!r} is not a tensor with one row per image")
    uses = Counter(_nodes(output))
    for step in steps:
        uses.update(step.inputs)
    constants = {n: fusion.env[n] for n in nodes if n in fusion.fixed}
    fresh = {s.node for s in steps if uses.get(s.node) == 1 and fusion.is_fresh(s.node)}
    return Program(
        steps, source, inputs[0], output, constants, uses, fresh, _sizes_travel(nodes),
        fusion.shapes, fusion.tuples, fusion.bytes, fusion.multiply_adds,
    )  # fmt: skip


def in_bfloat16(program: Program) -> Program:
    """The program with convolutions in bfloat16, to run under autocast, which converts the rest."""

    def lower(step: Any) -> Any:
        if not isinstance(step.run, Convolution):
            return step
        tensors = ((name, getattr(step.run, name)) for name in ("weight", "bias"))
        half: Any = {name: t.bfloat16() for name, t in tensors if t is not None}
        return step._replace(run=step.run._replace(**half))

    return program._replace(steps=[lower(step) for step in program.steps])


def with_flat_output(program: Program) -> Program:
    """The program followed by flatten: outputs [B, ...] become [B, numbers]."""
    last = program.output
    with last.graph.inserting_after(last):
        flat = last.graph.call_function(torch.flatten, (last, 1))
    size = math.prod(program.shapes[last])
    return program._replace(
        steps=[*program.steps, Operation(flat, torch.flatten, (last, 1), {})], output=flat,
        uses=program.uses | {flat: 1}, shapes=program.shapes | {flat: (1, size)},
        multiply_adds=program.multiply_adds | {flat: 0},
        bytes_per_image=program.bytes_per_image | {flat: program.bytes_per_image[last]},
    )  # fmt: skip


class _Fusion(fx.Interpreter):
    """Surveys the graph on one image; then turns nodes into steps, absorbing what precedes them."""

    def __init__(self, net: nn.Module, graph: fx.Graph, sites: Iterable[MaskedActivation]) -> None:
        super().__init__(net, garbage_collect_values=False, graph=graph)
        self.extra_traceback = False
        self.site_of = {module: i for i, module in enumerate(sites)}
        self.fixed: set[fx.Node] = set()  # parameters, buffers, and what is computed from them
        for n in graph.nodes:
            inputs = n.all_input_nodes if n.op in ("call_function", "call_method") else ()
            if n.op == "get_attr" or (inputs and self.fixed.issuperset(inputs)):
                self.fixed.add(n)
        self.absorbed: set[fx.Node] = set()
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}
        self.tuples: set[fx.Node] = set()
        self.bytes: dict[fx.Node, int] = {}
        self.multiply_adds: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(n)
        self.multiply_adds[n] = counter.get_total_flops() // 2
        if isinstance(value, Tensor):
            self.shapes[n] = tuple(value.shape)
            self.bytes[n] = value.numel() * value.element_size()
            return value.detach() if n.op == "get_attr" else value
        if any(isinstance(t, Tensor) for t in tree_leaves(value)):
            self.tuples.add(n)
        return value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return pure_module(self.fetch_attr(target))(*args, **kwargs)

    def steps(self, nodes: list[fx.Node]) -> list[Activation | Operation]:
        """Last node first, so that an activation absorbs its inputs before they become steps."""
        found: list[Activation | Operation] = []
        for node in reversed(nodes):
            known = node in self.absorbed or node in self.fixed
            if node.op.startswith("call_") and not known:
                is_site = self.called(node) in self.site_of
                found.append(self.activation(node) if is_site else self.call(node))
        return found[::-1]

    def called(self, node: Any) -> Any:
        """The module that a node calls; None for any other node or value."""
        calls = isinstance(node, fx.Node) and node.op == "call_module"
        return self.fetch_attr(str(node.target)) if calls else None

    def activation(self, node: fx.Node) -> Activation:
        module, x = self.called(node), _first_argument(node)
        residual = scale = shift = None
        if self.is_addition(x) and len(x.users) == 1:
            self.absorbed.add(x)
            first, second = x.args
            # Of two batch norms one is folded here, the other into its convolution.
            swap = self.is_norm(second) and not self.is_norm(first)
            x, residual = (second, first) if swap else (first, second)
        if self.is_norm(x) and len(x.users) == 1:
            self.absorbed.add(x)
            scale, shift = scale_and_shift(self.called(x))
            x = x.args[0]
        return Activation(node, self.site_of[module], module, x, scale, shift, residual)

    def call(self, node: fx.Node) -> Operation:
        run: Any = node.target
        if node.op == "call_method":
            run = getattr(Tensor, str(node.target))
        elif node.op == "call_module":
            module, source = self.called(node), _first_argument(node)
            alone = isinstance(source, fx.Node) and len(source.users) == 1
            if self.is_norm(node) and self.is_conv(source) and alone:
                self.absorbed.add(source)
                self.multiply_adds[node] += self.multiply_adds.pop(source)
                run = _folded(self.called(source), module)
                return Operation(node, run, source.args, {})
            if self.is_conv(node) and self.is_norm(source) and alone and not any(module.padding):
                self.absorbed.add(source)
                run = _folded(module, first=self.called(source))
                return Operation(node, run, source.args, {})
            run = _folded(module) if self.is_conv(node) else pure_module(module)
        return Operation(node, run, node.args, dict(node.kwargs))

    def is_addition(self, node: Any) -> bool:
        """x + y of two different values of the same shape."""
        if not isinstance(node, fx.Node) or node.target not in _ADDITIONS or node.kwargs:
            return False
        terms: Any = {a for a in node.args if isinstance(a, fx.Node) and a not in self.fixed}
        shapes = {self.shapes.get(term) for term in terms}
        return len(node.args) == len(terms) == 2 and len(shapes) == 1

    def is_norm(self, node: Any) -> bool:
        """A batch norm with running statistics, of one tensor given by position."""
        norm = self.called(node)
        return isinstance(norm, _NORMS) and norm.running_mean is not None and bool(node.args)

    def is_conv(self, node: Any) -> bool:
        """A plain nn.Conv2d of one tensor given by position."""
        conv = self.called(node)
        return type(conv) is nn.Conv2d and conv.padding_mode == "zeros" and bool(node.args)

    def is_fresh(self, node: fx.Node) -> bool:
        """Does this step write new memory, rather than return a view of its input?"""
        return isinstance(self.called(node), (nn.Linear, nn.modules.conv._ConvNd, *_NORMS))


def _nodes(arguments: Any) -> list[fx.Node]:
    """The nodes in nested arguments, each once."""
    found: dict[fx.Node, None] = {}
    fx.node.map_arg(arguments, lambda n: found.setdefault(n))
    return list(found)


def _first_argument(node: fx.Node) -> Any:
    return next(iter((*node.args, *node.kwargs.values())), None)


def _check_writes(nodes: list[fx.Node]) -> None:
    """Refuse operations that still write into their input in the graph without in-place ones."""
    for node in nodes:
        name = str(getattr(node.target, "__name__", node.target))
        unknown = node.op == "call_method" and not hasattr(Tensor, name)
        writes = node.op == "call_function" and name.endswith("_") and name[-2:] != "__"
        if unknown or writes or name in ("setitem", "ipow", "ior") or "out" in node.kwargs:
            raise NotTraceable(f"node {node.name!r} ({name}) writes into its input")


def _sizes_travel(nodes: list[fx.Node]) -> bool:
    """Is a size used for another tensor than the one it was taken from?

    x.view(x.size(0), -1) is harmless; b = x.size(0) ... y.view(b, -1) is not, since y may
    hold more hypotheses than x.
    """
    for node in nodes:
        name = node.args[1] if node.target is getattr else node.target
        if name not in _SIZES or node.op not in ("call_method", "call_function"):
            continue
        source, reached = node.args[0], list(node.users)
        while reached:
            user = reached.pop()
            if user.target is operator.getitem and user.args[0] is not source:
                reached.extend(user.users)
            elif user.op != "call_method" or user.args[0] is not source:
                return True
    return False
