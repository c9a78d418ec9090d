"""The linear part of each step of a program: what it does to impulses.

An affine step y = L x + b turns an impulse x into L x; constants have no effect. A rule turns a
step into a function `run(values, n)` of the values that n impulses have reached so far; a value
that is missing is zero. A step without a rule is not known to be affine, and `NotAffine` names it.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from fastbcd.masking.activations import MaskedReLU
from fastbcd.scoring.collapsed import patches
from fastbcd.scoring.collapsed.patches import Patch, Value, whole
from fastbcd.scoring.program import Activation, Call, Convolution, Program, scale_and_shift

Values = dict[fx.Node, Any]
Run = Callable[[Values, int], Any]  # a Value, or a tuple of them
# What of a tensor does not depend on its numbers.
_SIZES = {"size", "dim", "numel", "ndimension", "shape", "ndim", "dtype", "device"}


class NotAffine(Exception):
    """The net has another nonlinearity than masked ReLUs; the message names its place."""


class Context(NamedTuple):
    """What a rule may ask about the net around its step."""

    program: Program
    varies: set[fx.Node]  # tensors, and tuples of them, that depend on the image

    def depends_on_image(self, step: Activation | Call) -> bool:
        """Does the step give tensors that depend on the image? Sizes do not."""
        if not self.varies & set(step.inputs):
            return False
        if step.node in self.program.shapes or step.node in self.program.tuples:
            return True
        target = step.node.args[1] if step.node.target is getattr else step.node.target
        if isinstance(step, Call) and target not in _SIZES:
            raise refusal(step)  # a number that is read from a tensor
        return False

    def source(self, step: Call) -> fx.Node:
        """The one tensor that depends on the image, read once and as the first argument."""
        read: list[fx.Node] = []
        fx.node.map_arg((step.args, step.kwargs), lambda n: read.append(n) or n)  # type: ignore[func-returns-value]
        varying = [n for n in read if n in self.varies]
        if len(varying) != 1 or not step.args or step.args[0] is not varying[0]:
            raise refusal(step)
        if varying[0] in self.program.tuples and step.node.target is not operator.getitem:
            raise refusal(step)
        return varying[0]

    def constant(self, value: Any, step: Call) -> Any:
        """A number, or a tensor of the net that does not depend on the image."""
        if not isinstance(value, fx.Node):
            return value
        if value not in self.program.constants:
            raise refusal(step)
        return self.program.constants[value]

    def shape(self, node: fx.Node, n: int) -> tuple[int, ...]:
        return (n, *self.program.shapes[node][1:])

    def fill(self, arguments: Any, values: Values, n: int) -> Any:
        """Arguments with whole values, constants, and sizes as they are for n images."""

        def value(node: fx.Node) -> Any:
            if node in values:
                return whole(values[node])
            if node in self.program.constants:
                return self.program.constants[node]
            if node in self.program.shapes:  # only its size matters
                return torch.empty(self.shape(node, n), device="meta")
            run: Any = node.target
            run = getattr(torch.Tensor, run) if node.op == "call_method" else run
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
            return run(*args, **kwargs)

        return fx.node.map_arg(arguments, value)


def linear_part(step: Activation | Call, context: Context) -> Run:
    """The function that takes impulses through this step."""
    if isinstance(step, Activation):
        return _activation(step)
    if isinstance(step.run, Convolution):
        return _convolution(step, context, step.run)
    key: Any = type(step.run) if isinstance(step.run, nn.Module) else step.node.target
    try:
        return RULES[key](step, context)
    except (TypeError, ValueError, LookupError):  # no rule, or arguments that it does not expect
        raise refusal(step) from None


def refusal(step: Call) -> NotAffine:
    run, name = step.run, step.node.name
    what = type(run).__name__ if isinstance(run, nn.Module) else getattr(run, "__name__", str(run))
    return NotAffine(f"node {name!r} ({what}) is not an affine function of the image")


# ------------------------------------------------------------------------------- the rules

RULES: dict[Any, Callable[[Call, Context], Run]] = {}


def rule(*targets: Any) -> Callable[[Any], Any]:
    """This function makes the linear part of calls of these functions, methods or modules."""

    def register(function: Any) -> Any:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return register


def argument(step: Call, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by name."""
    if len(step.args) > position:
        return step.args[position]
    return step.kwargs.get(name, default)


def on_source(step: Call, context: Context, function: Callable[[Any], Any]) -> Run:
    """A function of the one value that the step reads."""
    source = context.source(step)
    return lambda values, n: function(values[source])


def scaled(value: Value, factor: Any) -> Value:
    """value * factor, where the factor is a number or the same at all positions of an image."""
    if isinstance(value, Patch):
        return value._replace(value=value.value * factor)
    return value * factor


def total(parts: list[Value]) -> Value:
    return parts[0] if len(parts) == 1 else patches.add(*parts)


def _activation(step: Activation) -> Run:
    if not isinstance(step.module, MaskedReLU):
        raise NotAffine(f"site {str(step.node.target)!r} is polynomial, not a masked ReLU")
    scale = None
    if step.scale is not None:
        scale = step.scale.view(-1, *(1,) * (step.module.mask.ndim - 1))

    def run(values: Values, n: int) -> Value:
        # z = x*scale + residual; the shift is a constant
        parts: list[Value] = []
        if step.x in values:
            x = values[step.x]
            parts.append(x if scale is None else scaled(x, scale))
        if step.residual is not None and step.residual in values:
            parts.append(values[step.residual])
        return total(parts)

    return run


def _convolution(step: Call, context: Context, conv: Convolution) -> Run:
    return on_source(step, context, lambda x: patches.convolve(x, conv))


@rule(F.conv2d, torch.conv2d)
def _functional_convolution(step: Call, context: Context) -> Run:
    def pair(value: Any) -> Any:
        return value if isinstance(value, tuple | list | str) else (value, value)

    options = (pair(argument(step, 3, "stride", 1)), pair(argument(step, 4, "padding", 0)),
               pair(argument(step, 5, "dilation", 1)), argument(step, 6, "groups", 1))  # fmt: skip
    weight = context.constant(argument(step, 1, "weight"), step)
    return _convolution(step, context, Convolution(weight, None, *options))


@rule(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)
def _without_bias(step: Call, context: Context) -> Run:
    if len(step.args) != 1 or step.kwargs:
        raise refusal(step)
    module: Any = copy.copy(step.run)
    module._parameters = {**module._parameters, "bias": None}
    return on_source(step, context, lambda v: module(whole(v)))


@rule(F.linear)
def _functional_linear(step: Call, context: Context) -> Run:
    weight = context.constant(argument(step, 1, "weight"), step)
    return on_source(step, context, lambda v: F.linear(whole(v), weight))


@rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _batch_norm(step: Call, context: Context) -> Run:
    module: Any = step.run
    if module.running_mean is None:
        raise NotAffine(f"{step.node.target!r} normalises by the statistics of the batch")
    scale = scale_and_shift(module)[0]
    scale = scale.view(-1, *(1,) * (len(context.program.shapes[step.node]) - 2))
    return on_source(step, context, lambda v: scaled(v, scale))


_SUMS, _DIFFERENCES = (operator.add, torch.add, "add"), (operator.sub, torch.sub, "sub")


@rule(*_SUMS, *_DIFFERENCES)
def _sum(step: Call, context: Context) -> Run:
    shapes, sign = context.program.shapes, 1.0 if step.node.target in _SUMS else -1.0
    if step.kwargs or len(step.args) != 2 or step.node not in shapes:
        raise refusal(step)

    def run(values: Values, n: int) -> Value:
        parts: list[Value] = []
        for term, factor in zip(step.args, (1.0, sign), strict=True):
            if isinstance(term, fx.Node) and term in values:
                part = values[term]
                if shapes[term] != shapes[step.node]:  # it is broadcast
                    part = whole(part).expand(context.shape(step.node, n))
                parts.append(part if factor > 0 else scaled(part, factor))
        return total(parts)

    return run


@rule(operator.neg, torch.neg, "neg")
def _negate(step: Call, context: Context) -> Run:
    return on_source(step, context, lambda v: scaled(v, -1.0))


_DIVISIONS = (operator.truediv, torch.div, "div", "truediv")
_PRODUCTS = (operator.mul, torch.mul, "mul", operator.matmul, torch.matmul, "matmul", *_DIVISIONS)


@rule(*_PRODUCTS)
def _product(step: Call, context: Context) -> Run:
    division = step.node.target in _DIVISIONS
    varying = [a for a in step.args if a in context.varies]
    if len(varying) != 1 or step.kwargs or (division and varying[0] is not step.args[0]):
        raise refusal(step)
    program = context.program
    for other in step.args:
        known = other in program.constants or other not in program.shapes
        if other is not varying[0] and not known:
            raise refusal(step)  # a tensor that is computed from constants or sizes
    return _as_it_is(step, context)


@rule(torch.cat, torch.concat, torch.concatenate)
def _cat(step: Call, context: Context) -> Run:
    parts: Any = step.args[0] if step.args else step.kwargs["tensors"]
    dim = argument(step, 1, "dim", 0)
    known = isinstance(parts, list | tuple) and all(p in context.program.shapes for p in parts)
    if dim == 0 or not known or not isinstance(dim, int):
        raise refusal(step)

    def run(values: Values, n: int) -> Value:
        found = [values.get(p) for p in parts]
        shapes = [context.shape(p, n) for p in parts]
        some = next(v for v in found if v is not None)
        if dim == 1 and isinstance(some, Patch):
            dot = some.value[:, :1, :1, :1]  # any position of the box will do for what is zero
            return patches.join([
                Patch(dot.new_zeros(n, shape[1], 1, 1), *some.box[:2], some.size) if v is None
                else v if isinstance(v, Patch) else Patch(v, 0, 0, some.size)
                for v, shape in zip(found, shapes, strict=True)
            ])  # fmt: skip
        like = whole(some)
        return torch.cat([
            like.new_zeros(shape) if v is None else whole(v)
            for v, shape in zip(found, shapes, strict=True)
        ], dim)  # fmt: skip

    return run


@rule(F.pad, nn.ConstantPad1d, nn.ConstantPad2d, nn.ZeroPad2d)
def _pad(step: Call, context: Context) -> Run:
    if isinstance(step.run, nn.Module):
        pad: Any = step.run.padding
    elif argument(step, 2, "mode", "constant") == "constant":
        pad = argument(step, 1, "pad")
    else:
        return _as_it_is(step, context)

    def run(value: Value) -> Value:
        if isinstance(value, Patch) and not any(pad[:4]):  # channels only
            return value._replace(value=F.pad(value.value, pad))
        return F.pad(whole(value), pad)

    return on_source(step, context, run)


@rule("chunk", "split", torch.chunk, torch.split)
def _parts(step: Call, context: Context) -> Run:
    """A tuple of values: patches too, when channels are cut."""
    source, along_channels = context.source(step), argument(step, 2, "dim", 0) == 1

    def run(values: Values, n: int) -> tuple[Value, ...]:
        value = values[source]
        if isinstance(value, Patch) and along_channels:
            args, kwargs = context.fill((step.args[1:], step.kwargs), values, n)
            return tuple(value._replace(value=p) for p in step.run(value.value, *args, **kwargs))
        args, kwargs = context.fill((step.args, step.kwargs), values, n)
        return tuple(step.run(*args, **kwargs))

    return run


@rule(operator.getitem)
def _index(step: Call, context: Context) -> Run:
    source, index = context.source(step), step.args[1]
    if source in context.program.tuples:
        if not isinstance(index, int):
            raise refusal(step)
        return lambda values, n: values[source][index]
    every = slice(None)
    if isinstance(index, tuple) and len(index) == 4 and index[:2] == (every, every):
        rows, columns = index[2:]
        if all(isinstance(s, slice) and s.start is s.stop is None for s in (rows, columns)):
            strides = rows.step or 1, columns.step or 1

            def run(v: Value) -> Value:
                return patches.subsample(v, *strides) if isinstance(v, Patch) else v[index]

            if all(isinstance(stride, int) for stride in strides):
                return on_source(step, context, run)
    first = index[0] if isinstance(index, tuple) else index
    if first != every:  # it would cut the batch
        raise refusal(step)
    return _as_it_is(step, context)


@rule(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, "contiguous", "clone")
def _same(step: Call, context: Context) -> Run:
    return on_source(step, context, lambda v: v)


@rule(F.dropout, F.dropout2d)
def _functional_dropout(step: Call, context: Context) -> Run:
    if argument(step, 2, "training", True):
        raise NotAffine(f"node {step.node.name!r} drops values at random, also in eval mode")
    return _same(step, context)


@rule(torch.mean, "mean", nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d)
def _mean(step: Call, context: Context) -> Run:
    if step.node.target in (torch.mean, "mean"):
        dims, keepdim = argument(step, 1, "dim"), argument(step, 2, "keepdim", False)
        whole_image = dims is not None and tuple(dims if not isinstance(dims, int) else [dims]) in (
            (2, 3), (-2, -1), (3, 2), (-1, -2)
        )  # fmt: skip
    else:
        size: Any = argument(step, 1, "output_size")
        size = step.run.output_size if isinstance(step.run, nn.AdaptiveAvgPool2d) else size
        whole_image, keepdim = size in (1, (1, 1), [1, 1]), True
    plain, source = _as_it_is(step, context), context.source(step)

    def run(values: Values, n: int) -> Value:
        value = values[source]
        return patches.mean(value, keepdim) if isinstance(value, Patch) else plain(values, n)

    return run if whole_image else plain


@rule(
    "flatten", "view", "reshape", "permute", "transpose", "unsqueeze", "squeeze", "sum", "movedim",
    torch.flatten, torch.reshape, torch.permute, torch.transpose, torch.unsqueeze, torch.squeeze,
    torch.sum, torch.movedim, F.avg_pool1d, F.avg_pool2d, F.adaptive_avg_pool1d,
    nn.Flatten, nn.Unflatten, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d,
    nn.ReflectionPad2d, nn.ReplicationPad2d, nn.PixelShuffle, nn.ChannelShuffle,
)  # fmt: skip
def _as_it_is(step: Call, context: Context) -> Run:
    """A step that is linear as it is, on whole values."""
    if step.node.target not in _PRODUCTS:
        context.source(step)

    def run(values: Values, n: int) -> Any:
        args, kwargs = context.fill((step.args, step.kwargs), values, n)
        return step.run(*args, **kwargs)

    return run
