"""The linear part of each step of a program: what it does to impulses.

An affine step y = L x + b turns an impulse x into L x = (L x + b) - (L 0 + b). `linear_parts` turns
each step into a function `run(values, n)` of the values that n impulses have reached so far; a
value that is missing is zero. A step that is not listed here is not known to be affine.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from fastbcd.graph.trace import FunctionalBatchNorm
from fastbcd.masking.activations import MaskedPoly
from fastbcd.scoring.collapsed import patches
from fastbcd.scoring.collapsed.patches import Patch, Value, stored, whole
from fastbcd.scoring.program import Activation, Convolution, Operation, Program, Step

Values = dict[fx.Node, Any]
LinearPart = Callable[[Values, int], Any]  # returns a Value, or a tuple of them


class NotAffine(Exception):
    """The net has another nonlinearity than masked ReLUs; the message names its place."""


def called(*names: str) -> set[Any]:
    """The methods, functions and modules of torch that have these names."""
    homes = (operator, torch, F, nn)
    targets = {getattr(home, name) for home in homes for name in names if hasattr(home, name)}
    return targets.union(names)


SIZES = called("size", "dim", "numel", "ndimension", "shape", "ndim", "dtype", "device")
SUMS = called("add")
DIFFERENCES = called("sub")
CATS = called("cat", "concat", "concatenate")
PRODUCTS = called("mul", "matmul")
# These do the same at all positions of an image.
ALIKE = {
    FunctionalBatchNorm,
    *called("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "batch_norm", "neg"),
    *called("Identity", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "dropout", "dropout2d"),
    *called("contiguous", "clone"),
}
AFFINE = {
    *(ALIKE | PRODUCTS),
    *called("truediv", "div", "sum", "mean", "linear", "Linear", "chunk", "split", "getitem"),
    *called("conv2d", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose2d"),
    *called("flatten", "view", "reshape", "permute", "transpose", "unsqueeze", "squeeze"),
    *called("movedim", "Flatten", "Unflatten", "PixelShuffle", "ChannelShuffle"),
    *called("avg_pool1d", "avg_pool2d", "avg_pool3d", "AvgPool1d", "AvgPool2d", "AvgPool3d"),
    *called("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *called("AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d"),
    *called("pad", "ConstantPad1d", "ConstantPad2d", "ZeroPad2d"),
    *called("ReflectionPad2d", "ReplicationPad2d"),
}


def linear_parts(program: Program) -> dict[fx.Node, LinearPart]:
    """By node, the linear part of each step that depends on the image."""
    rules = _Rules(program, {program.placeholder})
    parts = {}
    for step in program.steps:
        if rules.depends_on_image(step):
            parts[step.node] = rules.linear_part(step)
            rules.varies.add(step.node)
    return parts


class _Rules(NamedTuple):
    program: Program
    varies: set[fx.Node]  # tensors, and tuples of them, that depend on the image

    def depends_on_image(self, step: Step) -> bool:
        """Does the step give tensors that depend on the image? Sizes do not."""
        if self.varies.isdisjoint(step.inputs):
            return False
        if step.node in self.program.shapes or step.node in self.program.tuples:
            return True
        target: Any = step.node.target
        if target is getattr:
            target = step.node.args[1]
        if target not in SIZES:  # a number that is read from a tensor
            raise _refusal(step)
        return False

    def linear_part(self, step: Step) -> LinearPart:
        """The function that takes impulses through this step."""
        if isinstance(step, Activation):
            if isinstance(step.module, MaskedPoly):
                raise NotAffine(f"removed ReLUs of site {str(step.node.target)!r} are quadratics")
            # z = x*scale + residual; the shift is a constant
            return self.total(step, [(step.x, step.scale), (step.residual, None)])
        try:
            return self.of_operation(step)
        except (TypeError, ValueError, LookupError):  # other arguments than expected
            raise _refusal(step) from None

    def of_operation(self, step: Operation) -> LinearPart:
        key: Any = step.node.target
        if isinstance(step.run, nn.Module):
            key = type(step.run)
        if key in SUMS | DIFFERENCES and not step.kwargs:
            first, second = step.args
            sign = -1.0 if key in DIFFERENCES else None
            return self.total(step, [(first, None), (second, sign)])
        if key in CATS:
            return self.cat(*step.args, **step.kwargs)
        source = self.source(step)
        if isinstance(step.run, Convolution):
            without_bias = step.run._replace(bias=None)
            return lambda values, n: patches.convolve(values[source], without_bias)
        if key is operator.getitem and source in self.program.tuples:
            return lambda values, n: values[source][step.args[1]]
        if key not in AFFINE:
            raise LookupError(key)
        return self.difference(step, source, key)

    def source(self, step: Operation) -> fx.Node:
        """The one tensor that is no constant, read once; products may read it second."""
        constants = self.program.constants.keys()
        tensors = (self.program.shapes.keys() - constants) | self.varies
        leaves = tree_leaves((step.args, step.kwargs))
        (read,) = [leaf for leaf in leaves if isinstance(leaf, fx.Node) and leaf in tensors]
        readable = 2 if step.node.target in PRODUCTS else 1
        if read not in self.varies or read not in step.args[:readable]:
            raise ValueError("not one value that depends on the image")
        return read

    def difference(self, step: Operation, source: fx.Node, key: Any) -> LinearPart:
        """The result of a step less its result for zeros; of patches, where that is possible."""
        alike = key in ALIKE
        strides = None
        if key is operator.getitem:
            strides = _strides(step.args[1])
        if key is F.pad and not step.kwargs:
            alike = not any(step.args[1][:4])  # channels are added

        def run(values: Values, n: int) -> Any:
            value = values[source]
            if strides and isinstance(value, Patch):
                return patches.subsample(value, *strides)
            if not alike:
                value = whole(value)
            numbers = stored(value)
            result = self.call(step, {source: numbers}, n)
            constant = self.call(step, {source: torch.zeros_like(numbers[:1])}, 1)
            result = tree_map(operator.sub, result, constant)
            if isinstance(value, Patch):
                return value._replace(value=result)
            return result

        return run

    def call(self, step: Operation, values: Values, n: int) -> Any:
        """Run the step on these values, on constants, and on sizes as for n images."""

        def value(node: fx.Node) -> Any:
            if node in values:
                return values[node]
            if node in self.program.constants:
                return self.program.constants[node]
            if node in self.program.shapes:  # only its size matters
                return torch.empty((n, *self.program.shapes[node][1:]), device="meta")
            function: Any = node.target
            if node.op == "call_method":
                function = getattr(Tensor, function)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
            return function(*args, **kwargs)

        args, kwargs = fx.node.map_arg((step.args, step.kwargs), value)
        return step.run(*args, **kwargs)

    def total(self, step: Step, terms: list[tuple[Any, Any]]) -> LinearPart:
        """The sum of some values, each times a factor unless that is None."""
        shapes = self.program.shapes
        shape = shapes[step.node]

        def run(values: Values, n: int) -> Value:
            parts: list[Value] = []
            for term, factor in terms:
                if term not in values:
                    continue
                part = values[term]
                if shapes[term] != shape:  # it is broadcast
                    part = whole(part).expand(n, *shape[1:])
                if factor is not None:
                    part = scaled(part, factor)
                parts.append(part)
            numbers, make_value = patches.aligned(parts)
            return make_value(reduce(operator.add, numbers))

        return run

    def cat(self, tensors: Any, dim: int = 0) -> LinearPart:
        """The concatenation of values along a dimension that is not the batch."""
        shapes = self.program.shapes
        if dim == 0 or not shapes.keys() >= set(tensors):
            raise ValueError("not a concatenation of features")

        def run(values: Values, n: int) -> Value:
            like = next(values[node] for node in tensors if node in values)
            parts = []
            for node in tensors:
                part = values.get(node)
                if part is None:
                    part = patches.nothing((n, *shapes[node][1:]), like)
                if dim != 1:
                    part = whole(part)
                parts.append(part)
            numbers, make_value = patches.aligned(parts)
            return make_value(torch.cat(numbers, dim))

        return run


def _strides(index: Any) -> list[int] | None:
    """The steps of x[:, :, ::rows, ::columns]; None for another index of features."""
    if not isinstance(index, tuple) or index[0] != slice(None):
        raise ValueError("it would cut the batch")
    if len(index) != 4 or index[1] != slice(None):
        return None
    rows, columns = index[2:]
    plain = [slice(None, None, getattr(part, "step", None)) for part in (rows, columns)]
    if plain != [rows, columns]:
        return None
    return [part.step or 1 for part in plain]


def _refusal(step: Any) -> NotAffine:
    name = step.node.name
    if step.node.op == "call_module":
        name = step.node.target
    kind = getattr(step.run, "__name__", type(step.run).__name__)
    return NotAffine(f"node {name!r} ({kind}) is not an affine function of the image")


def scaled(value: Value, factor: Tensor | float) -> Value:
    """value * factor, a number or one for each channel."""
    numbers = stored(value)
    if isinstance(factor, Tensor):
        factor = factor.view(-1, *(1,) * (numbers.ndim - 2))
    if isinstance(value, Patch):
        return value._replace(value=numbers * factor)
    return numbers * factor
