"""The linear part of each step of a program: what it does to impulses.

An affine step y = L x + b turns an impulse x into L x; constants have no effect. `linear_part`
turns a step into a function `run(values, n)` of the values that n impulses have reached so far; a
value that is missing is zero. A step without a rule is not known to be affine: `NotAffine`.

A rule is called with the function or module of the step and its arguments; the value that depends
on the image, `x`, is a meta tensor. It returns a function of that value, or None if the step is
linear as it is, on whole values.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from fastbcd.graph.trace import FunctionalBatchNorm
from fastbcd.masking.activations import MaskedLine, MaskedReLU
from fastbcd.scoring.collapsed import patches
from fastbcd.scoring.collapsed.patches import Patch, Value, stored, whole
from fastbcd.scoring.program import Activation, Convolution, Operation, Program, scale_and_shift

Values = dict[fx.Node, Any]
Run = Callable[[Values, int], Any]  # a Value, or a tuple of them
# What of a tensor does not depend on its numbers.
_SIZES = {"size", "dim", "numel", "ndimension", "shape", "ndim", "dtype", "device"}
_SUMS, _DIFFERENCES = (operator.add, torch.add, "add"), (operator.sub, torch.sub, "sub")
_CATS = (torch.cat, torch.concat, torch.concatenate)
_PRODUCTS = (operator.mul, torch.mul, "mul", operator.matmul, torch.matmul, "matmul")


class NotAffine(Exception):
    """The net has another nonlinearity than masked ReLUs; the message names its place."""


class Context(NamedTuple):
    """The net around a step."""

    program: Program
    varies: set[fx.Node]  # tensors, and tuples of them, that depend on the image

    def depends_on_image(self, step: Activation | Operation) -> bool:
        """Does the step give tensors that depend on the image? Sizes do not."""
        if not self.varies & set(step.inputs):
            return False
        tensors = step.node in self.program.shapes or step.node in self.program.tuples
        target = step.node.args[1] if step.node.target is getattr else step.node.target
        if not tensors and isinstance(step, Operation) and target not in _SIZES:
            raise refusal(step)  # a number that is read from a tensor
        return tensors

    def source(self, step: Operation) -> fx.Node:
        """The one tensor that is no constant, read once; products may read it second."""
        known = self.program.shapes.keys() - self.program.constants.keys() | self.varies
        leaves = tree_leaves((step.args, step.kwargs))
        read = [n for n in leaves if isinstance(n, fx.Node) and n in known]
        places = 2 if step.node.target in _PRODUCTS else 1
        if len(read) != 1 or read[0] not in self.varies or read[0] not in step.args[:places]:
            raise ValueError("not one value that depends on the image")
        return read[0]

    def call(self, run: Any, step: Operation, values: Values, n: int) -> Any:
        """Run with the step's arguments: whole values, constants, sizes as for n images."""

        def value(node: fx.Node) -> Any:
            if node in values:
                return whole(values[node])
            if node in self.program.constants:
                return self.program.constants[node]
            if node in self.program.shapes:  # only its size matters
                return torch.empty((n, *self.program.shapes[node][1:]), device="meta")
            called: Any = node.target
            called = getattr(Tensor, called) if node.op == "call_method" else called
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
            return called(*args, **kwargs)

        args, kwargs = fx.node.map_arg((step.args, step.kwargs), value)
        return run(*args, **kwargs)


def linear_part(step: Activation | Operation, context: Context) -> Run:
    """The function that takes impulses through this step."""
    node, shapes = step.node, context.program.shapes
    if isinstance(step, Activation):
        if not isinstance(step.module, MaskedReLU | MaskedLine):
            raise NotAffine(f"removed ReLUs of site {str(node.target)!r} are quadratics")
        # z = x*scale + residual; the shift is a constant
        return _total(node, [(step.x, step.scale), (step.residual, None)], shapes)
    key: Any = type(step.run) if isinstance(step.run, nn.Module) else node.target
    try:
        if key in _SUMS or key in _DIFFERENCES:
            (a, b), sign = step.args, None if key in _SUMS else -1.0
            if step.kwargs or node not in shapes:
                raise ValueError("not a sum of two tensors")
            return _total(node, [(a, None), (b, sign)], shapes)
        if key in _CATS:
            return _cat(shapes, *step.args, **step.kwargs)
        source = context.source(step)
        if isinstance(step.run, Convolution):
            function: Any = partial(patches.convolve, conv=step.run)
        elif source in context.program.tuples:
            function = operator.itemgetter(step.args[1])
            if key is not operator.getitem or not isinstance(step.args[1], int):
                raise TypeError(key)
        else:
            function = context.call(partial(RULES[key], step.run), step, {}, 1)
    except (TypeError, ValueError, LookupError):  # no rule, or arguments that it does not expect
        raise refusal(step) from None
    except NotAffine as reason:
        raise refusal(step, str(reason)) from None
    if function is None:
        return partial(context.call, step.run, step)
    return lambda values, n: function(values[source])


def refusal(step: Operation, why: str = "is not an affine function of the image") -> NotAffine:
    run, name = step.run, step.node.target if step.node.op == "call_module" else step.node.name
    what = type(run).__name__ if isinstance(run, nn.Module) else getattr(run, "__name__", str(run))
    return NotAffine(f"node {name!r} ({what}) {why}")


def _total(node: fx.Node, terms: list[tuple[Any, Any]], shapes: dict[fx.Node, Any]) -> Run:
    """The sum of some values, each times a factor unless that is None."""

    def run(values: Values, n: int) -> Value:
        parts: list[Value] = []
        for term, factor in terms:
            if term in values:
                part = values[term]
                if shapes[term] != shapes[node]:  # it is broadcast
                    part = whole(part).expand(n, *shapes[node][1:])
                parts.append(part if factor is None else scaled(part, factor))
        numbers, make_value = patches.aligned(parts)
        return make_value(reduce(operator.add, numbers))

    return run


def scaled(value: Value, factor: Tensor | float) -> Value:
    """value * factor, a number or one for each channel."""
    if isinstance(factor, Tensor):
        factor = factor.view(-1, *(1,) * (stored(value).ndim - 2))
    return mapped(value, lambda v: v * factor)


def mapped(value: Value, function: Callable[[Tensor], Tensor]) -> Value:
    """A function that does the same at all positions of an image, and nothing to zeros."""
    if isinstance(value, Patch):
        return value._replace(value=function(value.value))
    return function(value)


def _cat(shapes: dict[fx.Node, Any], tensors: Any, dim: int = 0) -> Run:
    if dim == 0 or not all(p in shapes for p in tensors):
        raise ValueError(dim)

    def run(values: Values, n: int) -> Value:
        found = [values[p] if dim == 1 else whole(values[p]) for p in tensors if p in values]
        reached, make_value = patches.aligned(found)
        parts, inner = iter(reached), reached[0].shape[2:] if dim == 1 else ()
        return make_value(torch.cat([
            next(parts) if p in values
            else reached[0].new_zeros(n, shapes[p][1], *(inner or shapes[p][2:]))
            for p in tensors
        ], dim))  # fmt: skip

    return run


def _dropout(run: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if training:
        raise NotAffine("drops values at random, also in eval mode")
    return lambda v: v


def _conv2d(run: Any, x: Any, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0,
            dilation: Any = 1, groups: int = 1) -> Any:  # fmt: skip
    stride, padding, dilation = (p if isinstance(p, tuple | list | str) else (p, p)
                                 for p in (stride, padding, dilation))  # fmt: skip
    conv = Convolution(weight, None, stride, padding, dilation, groups)
    return partial(patches.convolve, conv=conv)


def _without_bias(run: Any, x: Any) -> Any:
    module = copy.copy(run)
    module._parameters = {**module._parameters, "bias": None}
    return lambda v: module(whole(v))


def _batch_norm(run: Any, x: Any, training: bool = False) -> Any:
    if training or run.running_mean is None:
        raise NotAffine("normalises by the statistics of the batch")
    return partial(scaled, factor=scale_and_shift(run)[0])


def _functional_batch_norm(
    run: Any, x: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5, **tracked: Any,
) -> Any:  # fmt: skip
    return _batch_norm(SimpleNamespace(**locals()), x, training)


def _pad(run: Any, x: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    if mode != "constant":
        return None
    return lambda v: mapped(whole(v) if any(pad[:4]) else v, lambda t: F.pad(t, pad))


def _parts(run: Any, x: Any, *size: Any, **options: Any) -> Any:
    """A tuple of values: patches too, when channels are cut."""
    on_channels = options.get("dim", size[1] if len(size) > 1 else 0) == 1

    def parts(v: Value) -> tuple[Value, ...]:
        if isinstance(v, Patch) and on_channels:
            return tuple(v._replace(value=part) for part in run(v.value, *size, **options))
        return tuple(run(whole(v), *size, **options))

    return parts


def _index(run: Any, x: Any, index: Any) -> Any:
    index = index if isinstance(index, tuple) else (index,)
    if index[0] != slice(None):
        raise ValueError("it would cut the batch")
    spatial: Any = index[2:] if len(index) == 4 and index[1] == slice(None) else [None]
    if not all(isinstance(s, slice) and s.start is s.stop is None for s in spatial):
        return None
    steps = [s.step or 1 for s in spatial]
    return lambda v: patches.subsample(v, *steps) if isinstance(v, Patch) else v[index]


def _mean(run: Any, x: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    if options or isinstance(dim, int | None) or sorted(d % 4 for d in dim) != [2, 3]:
        return None

    def mean(v: Value) -> Tensor:
        if isinstance(v, Patch):  # over all H·W positions
            return v.value.sum((2, 3), keepdim) / math.prod(v.size)
        return v.mean(dim, keepdim)

    return mean


def _adaptive_pool(run: Any, x: Any, output_size: Any) -> Any:
    return _mean(run, x, (2, 3), True) if output_size in (1, (1, 1), [1, 1]) else None


_TABLE: list[tuple[list[Any], Callable[..., Any]]] = [
    ([
        "flatten", "view", "reshape", "permute", "transpose", "unsqueeze", "squeeze", "sum",
        "movedim", torch.flatten, torch.reshape, torch.permute, torch.transpose, torch.unsqueeze,
        torch.squeeze, torch.sum, torch.movedim, F.avg_pool1d, F.avg_pool2d, F.adaptive_avg_pool1d,
        nn.Flatten, nn.Unflatten, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
        nn.AdaptiveAvgPool3d, F.avg_pool3d, F.adaptive_avg_pool3d, nn.ReflectionPad2d,
        nn.ReplicationPad2d, nn.PixelShuffle, nn.ChannelShuffle,
    ], lambda run, x, *args, **kwargs: None),
    ([*_PRODUCTS, operator.truediv, torch.div, "div", "truediv"], lambda run, x, y: None),
    ([nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, "contiguous", "clone"],
     lambda run, x, *args, **kwargs: lambda v: v),
    ([F.dropout, F.dropout2d], _dropout),
    ([operator.neg, torch.neg, "neg"], lambda run, x: partial(mapped, function=run)),
    ([F.conv2d, torch.conv2d], _conv2d),
    ([F.linear], lambda run, x, weight, bias=None: lambda v: F.linear(whole(v), weight)),
    ([nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d], _without_bias),
    ([nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d], _batch_norm),
    ([F.batch_norm], _functional_batch_norm),
    ([FunctionalBatchNorm],
     lambda run, x, **tensors: _functional_batch_norm(run, x, **tensors, **run.options)),
    ([F.pad], _pad),
    ([nn.ConstantPad1d, nn.ConstantPad2d, nn.ZeroPad2d], lambda run, x: _pad(run, x, run.padding)),
    (["chunk", "split", torch.chunk, torch.split], _parts),
    ([operator.getitem], _index),
    ([torch.mean, "mean"], _mean),
    ([F.adaptive_avg_pool2d], _adaptive_pool),
    ([nn.AdaptiveAvgPool2d], lambda run, x: _adaptive_pool(run, x, run.output_size)),
]  # fmt: skip
RULES = {target: rule for targets, rule in _TABLE for target in targets}
