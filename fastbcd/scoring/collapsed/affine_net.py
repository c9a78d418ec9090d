"""The affine net: the net with every ReLU removed, so that sites are the identity or lines.

It runs on images, with its constants, and on impulses, from a site onward and without constants.
Both give the values at every site, before the activation, and the logits; `why_not_affine`
compares them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from fastbcd.ops import reference
from fastbcd.scoring.collapsed.linear import NotAffine, linear_parts
from fastbcd.scoring.collapsed.patches import (
    LARGE,
    Patch,
    Value,
    stored,
    whole,
    with_numbers,
)
from fastbcd.scoring.program import Activation, Convolution, Program, Step

IMAGE = -1  # the source of impulses in the image itself; sites count from 0


class AffineNet:
    """A program as an affine map; `NotAffine` says why there is none."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.linear = linear_parts(program)
        self.output_shape = program.shapes[program.output][1:]
        self.starts = {IMAGE: program.placeholder}
        self.off: dict[
            fx.Node, Tensor
        ] = {}  # masks without bits: the activation is the identity
        self.lines: dict[fx.Node, Tensor] = {}  # c0 and c1 of each channel, [2, C]
        for site in program.activations:
            self.starts[site.site] = site.node
            self.off[site.node] = torch.zeros_like(
                site.module.mask, dtype=torch.uint8
            ).unsqueeze(0)
            if site.coef is not None:
                self.lines[site.node] = site.coef[:2]
        self.site_of = {
            node: site for site, node in self.starts.items() if site != IMAGE
        }

    def run(self, x: Tensor) -> Iterator[tuple[Step, Any, Any]]:
        """Images [B, ...] through the affine net: (step, z, y), its values [B, ...].

        At a site z is the value before the activation and y the one after it; anywhere else they
        are the same. The caller may change y in place before the next step reads it.
        """
        program = self.program
        values: dict[fx.Node, Any] = {**program.constants, program.placeholder: x}
        for step, unread in zip(program.steps, program.last_uses, strict=True):
            z = (
                self._sum(step, values)
                if isinstance(step, Activation)
                else step(values)
            )
            y = z
            if step.node in self.lines:
                c0, c1 = self.lines[step.node].view(2, -1, *(1,) * (z.ndim - 2))
                y = c1 * z + c0
            values[step.node] = y
            yield step, z, y
            for node in unread:
                del values[node]

    def _sum(self, step: Activation, values: dict[fx.Node, Any]) -> Tensor:
        """x * scale + shift + residual at a site, [B, ...]."""
        x = values[step.x].unsqueeze(0)
        residual = None
        if step.residual is not None:
            residual = values[step.residual].unsqueeze(0)
        off = self.off[step.node]
        if x.dtype == torch.float64 and x.device.type != "cpu":  # there is no kernel
            z = reference.masked(
                x, off, None, step.scale, step.shift, residual, trials=True
            )
        else:
            out = x if step.x in self.program.fresh else None
            z = step._replace(coef=None).run(x, off, residual, out)
        return z.squeeze(0)

    def values_at(self, places: Tensor, bounds: list[int], x: Tensor) -> Tensor:
        """z of images at the kinks of a form, and the logits, [R + classes, B]."""
        of_site = places.split([high - low for low, high in pairwise(bounds[:-1])])
        pieces = []
        for piece in x.split(LARGE // 2):
            parts = [places.new_empty(0, len(piece), dtype=x.dtype)] * len(of_site)
            for step, z, y in self.run(piece):
                if step.node in self.site_of:
                    if z.ndim == 4:
                        z = z.movedim(1, -1)
                    site = self.site_of[step.node]
                    parts[site] = z.flatten(1).index_select(1, of_site[site]).T
                if step.node is self.program.output:
                    parts.append(y.flatten(1).T)
            pieces.append(torch.cat(parts))
        return torch.cat(pieces, 1)

    def reached(self, source: int) -> list[Step]:
        """The steps that an impulse at a source can change, in order."""
        changed = {self.starts[source]}
        steps = []
        for step in self.program.steps:
            if step.node in self.linear and changed & set(step.inputs):
                changed.add(step.node)
                steps.append(step)
        return steps

    def push(
        self, source: int, impulses: Value, steps: list[Step]
    ) -> Iterator[tuple[fx.Node, Value]]:
        """Impulses [n, ...] added to what a source gives: (node, value) after each step.

        At a site the value is the one before its activation.
        """
        values: dict[fx.Node, Any] = {self.starts[source]: impulses}
        last_reader = {node: step.node for step in steps for node in step.inputs}
        for step in steps:
            value = self.linear[step.node](values, len(stored(impulses)))
            yield step.node, value
            if step.node in self.lines:
                slope = self.lines[step.node][1]
                slope = slope.view(-1, *(1,) * (stored(value).ndim - 2))
                value = with_numbers(value, stored(value) * slope)
            values[step.node] = value
            for node in step.inputs:
                if last_reader[node] is step.node:
                    values.pop(node, None)

    def multiply_adds(self, source: int, impulse: Value, steps: list[Step]) -> int:
        """Of an impulse, by the numbers that convolutions compute of it."""
        weights = {
            step.node: step.run.weight
            for step in steps
            if isinstance(step.run, Convolution)
        }
        return sum(
            weights[node][0].numel() * stored(value).numel()
            for node, value in self.push(source, impulse, steps)
            if node in weights
        )


def why_not_affine(program: Program, example: Tensor) -> str:
    """Where impulses in the image, or at any site, arrive otherwise than in the net; "": nowhere.

    In double, once for a structure. An operation that is not affine or that mixes the images of a
    batch, a rule that loses a path: each gives a difference.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, *example.shape[1:], generator=generator, dtype=torch.float64)
    image, dense = noise.to(example.device).split(1)
    try:
        net = AffineNet(_in_double(program))
        # A change of all pixels, of sizes up to 10⁸: every operation sees every kind of number.
        _compare(net, image, IMAGE, [dense * 10 ** (8 * torch.rand_like(dense))])
        for source, node in net.starts.items():
            size = program.shapes[node][1:]
            anywhere = [int(torch.randint(n, (1,), generator=generator)) for n in size]
            first = [anywhere[0], *(0 for _ in size[1:])]
            last = [n - 1 for n in size]
            impulses = [
                _impulse(image, size, position) for position in (anywhere, first, last)
            ]
            _compare(net, image, source, impulses)
    except NotAffine as reason:
        return str(reason)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        return f"its linear part cannot be computed ({error})"
    return ""


def _impulse(like: Tensor, size: tuple[int, ...], position: list[int]) -> Value:
    """One number that is not 0; in an image it is a patch of one pixel."""
    impulse = like.new_zeros(1, *size)
    impulse[0][tuple(position)] = 4.0
    if len(size) != 3:
        return impulse
    _, top, left = position
    box = (range(top, top + 1), range(left, left + 1))
    return Patch(impulse[:, :, top : top + 1, left : left + 1], box, size[1:])


def _compare(net: AffineNet, image: Tensor, source: int, impulses: list[Any]) -> None:
    """Row 0 of a batch is the image itself; to each other row an impulse is added at the source."""
    start = net.starts[source]
    steps = net.reached(source)
    reached = {step.node for step in steps}
    pushed = [net.push(source, impulse, steps) for impulse in impulses]
    added = torch.cat([torch.zeros_like(whole(impulses[0])), *map(whole, impulses)])
    x = image.repeat(len(added), *(1,) * (image.ndim - 1))
    if source == IMAGE:
        x = x + added
    for step, z, y in net.run(x):
        responses = []
        if step.node in reached:
            responses = [whole(next(push)[1]) for push in pushed]
        if step.node in net.linear and isinstance(z, Tensor):
            error = z[1:] - z[:1]
            if responses:
                error = error - torch.cat(responses)
            scale = z[1:].abs().flatten(1).amax(1).clamp(min=1)
            if not (error.abs().flatten(1).amax(1) <= 1e-9 * scale).all():
                kind = getattr(step.run, "__name__", type(step.run).__name__)
                raise NotAffine(
                    f"node {step.node.name!r} ({kind}) is not an affine function of the image"
                )
        if step.node is start:
            y += added


def _in_double(program: Program) -> Program:
    def double(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return copy.deepcopy(value).double()
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        return value

    steps, constants = tree_map(double, (program.steps, program.constants))
    return program._replace(steps=steps, constants=constants)
