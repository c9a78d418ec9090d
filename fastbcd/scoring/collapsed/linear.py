"""The linear part of each step of a program: what it does to impulses.

An affine step f(x) = L x + b turns an impulse x into L x = f(x) - f(0). Whether steps are affine is
not decided here: `why_not_affine` compares impulses with the net.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from fastbcd.graph.trace import FunctionalBatchNorm
from fastbcd.masking.activations import MaskedPoly
from fastbcd.scoring.collapsed.patches import (
    Patch,
    common_box,
    convolve,
    stored,
    subsample,
    whole,
)
from fastbcd.scoring.program import Activation, Convolution, Program, Step

Values = dict[fx.Node, Any]
# These can do the same at all positions of an image.
ALIKE = {
    operator.add, operator.sub, operator.neg, torch.add, torch.sub, torch.cat, F.pad,
    F.batch_norm, nn.BatchNorm2d, FunctionalBatchNorm, nn.Identity, nn.Dropout,
}  # fmt: skip


class NotAffine(Exception):
    """The net has another nonlinearity than masked ReLUs; the message names its place."""


def linear_parts(program: Program) -> dict[fx.Node, LinearPart]:
    """By node, the linear part of each step that depends on the image."""
    varies = {program.placeholder}
    parts = {}
    for step in program.steps:
        if isinstance(step, Activation) and isinstance(step.module, MaskedPoly):
            raise NotAffine(
                f"removed ReLUs of site {str(step.node.target)!r} are quadratics"
            )
        inputs = [node for node in step.inputs if node in varies]
        if inputs and step.node in program.shapes:
            parts[step.node] = LinearPart(program, step, inputs)
            varies.add(step.node)
    return parts


class LinearPart(NamedTuple):
    """A step as a linear function of impulses."""

    program: Program
    step: Step
    inputs: list[fx.Node]  # those that depend on the image; sizes do not

    def __call__(self, values: Values, n: int) -> Any:
        """The result for values that n impulses have reached so far; one that is missing is 0."""
        step = self.step
        present = {node: values[node] for node in self.inputs if node in values}
        first = next(iter(present.values()))
        if isinstance(step.run, Convolution):
            return convolve(first, step.run._replace(bias=None))
        box = None
        if all(isinstance(value, Patch) for value in present.values()):
            strides = self.strides()
            if strides:
                return subsample(first, *strides)
            if self.alike():
                box = common_box(present.values())
        numbers = {}
        for node in self.inputs:
            if node not in present:
                size = self.program.shapes[node][1:]
                if box is not None:
                    size = (size[0], *map(len, box))
                numbers[node] = stored(first).new_zeros(n, *size)
            elif box is not None:
                numbers[node] = present[node].within(box)
            else:
                numbers[node] = whole(present[node])
        result = self.difference(numbers, n)
        if box is None:
            return result
        return Patch(result, box, first.size)

    def difference(self, numbers: Values, n: int) -> Any:
        """f(x) - f(0)."""
        if isinstance(self.step, Activation):
            return self.preactivation(numbers)
        zeros = tree_map(lambda t: torch.zeros_like(t[:1]), numbers)
        return tree_map(operator.sub, self.apply(numbers, n), self.apply(zeros, 1))

    def preactivation(self, numbers: Values) -> Tensor:
        """x * scale + residual of a site; the shift is a constant."""
        step: Any = self.step
        z = numbers[step.x]
        if step.scale is not None:
            z = z * step.scale.view(-1, *(1,) * (z.ndim - 2))
        if step.residual is not None:
            z = z + numbers[step.residual]
        return z

    def apply(self, numbers: Values, n: int) -> Any:
        """Run the step on these inputs, on constants, and on sizes as for n images."""
        step: Any = self.step

        def value(node: fx.Node) -> Any:
            if node in numbers:
                return numbers[node]
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

    def alike(self) -> bool:
        """Does the step do the same at all positions of an image?"""
        step: Any = self.step
        if isinstance(step, Activation):
            return True
        key = step.node.target
        if isinstance(step.run, nn.Module):
            key = type(step.run)
        if key not in ALIKE or (key is F.pad and any(step.args[1][:4])):
            return False
        images = [self.program.shapes[node][2:] for node in (step.node, *self.inputs)]
        constants = [self.program.constants.get(node) for node in step.inputs]
        sizes = [t.shape[-2:] for t in constants if t is not None and t.ndim > 1]
        return len(set(images)) == 1 and set(sizes) <= {(1, 1)}

    def strides(self) -> list[int] | None:
        """The steps of x[:, :, ::rows, ::columns]; None for another step."""
        if self.step.node.target is not operator.getitem:
            return None
        index: Any = self.step.node.args[1]
        if not isinstance(index, tuple) or len(index) != 4:
            return None
        steps = [getattr(part, "step", 0) for part in index]
        strided = [slice(None, None, step) for step in steps] == list(index)
        if not strided or steps[:2] != [None, None]:
            return None
        return [step or 1 for step in steps[2:]]
