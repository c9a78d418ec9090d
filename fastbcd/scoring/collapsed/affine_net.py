"""The affine net: the net with every ReLU removed, so that sites are the identity or lines.

It runs on images, with its constants, and on impulses, from a site onward and without constants.
Both give the values at every site, before the activation, and the logits; `check_linear` compares
them.
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
from fastbcd.scoring.collapsed.linear_rules import NotAffine, linear_parts, scaled
from fastbcd.scoring.collapsed.patches import LARGE, Patch, Value, stored, whole
from fastbcd.scoring.engine import Request
from fastbcd.scoring.program import Activation, Convolution, Program, Step
from fastbcd.scoring.stacked import peak_bytes

IMAGE = -1  # the source of impulses in the image itself; sites count from 0


class AffineNet:
    """A program as an affine map; `NotAffine` says why there is none."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.linear = linear_parts(program)
        self.output_shape = program.shapes[program.output][1:]
        self.starts = {IMAGE: program.placeholder}
        self.off: dict[fx.Node, Tensor] = {}  # masks without bits: the activation is the identity
        self.lines: dict[fx.Node, Tensor] = {}  # c0 and c1 of each channel, [2, C]
        for site in program.activations:
            self.starts[site.site] = site.node
            self.off[site.node] = torch.zeros_like(site.module.mask, dtype=torch.uint8).unsqueeze(0)
            if site.coef is not None:
                self.lines[site.node] = site.coef[:2]
        self.site_of = {node: site for site, node in self.starts.items() if site != IMAGE}

    def run(self, x: Tensor) -> Iterator[tuple[fx.Node, Tensor, Tensor]]:
        """Images [B, ...] through the affine net: (node, z, y) at sites and logits, [B, ...].

        z is the value before the activation, y the one after it; they are one tensor where it is
        the identity. The caller may change y in place before the next step reads it.
        """
        program = self.program
        values: dict[fx.Node, Any] = {**program.constants, program.placeholder: x}
        for step, unread in zip(program.steps, program.last_uses, strict=True):
            if isinstance(step, Activation):
                z = self._sum(step, values)
                y = z
                if step.node in self.lines:
                    c0, c1 = self.lines[step.node].view(2, -1, *(1,) * (z.ndim - 2))
                    y = c1 * z + c0
                values[step.node] = y
                yield step.node, z, y
            else:
                values[step.node] = step(values)
            for node in unread:
                del values[node]
        logits = values[program.output]
        yield program.output, logits, logits

    def _sum(self, step: Activation, values: dict[fx.Node, Any]) -> Tensor:
        """x * scale + shift + residual at a site, [B, ...]."""
        x = values[step.x].unsqueeze(0)
        residual = None
        if step.residual is not None:
            residual = values[step.residual].unsqueeze(0)
        off = self.off[step.node]
        if x.dtype == torch.float64 and x.device.type != "cpu":  # there is no kernel
            z = reference.masked(x, off, None, step.scale, step.shift, residual, trials=True)
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
            for node, z, _ in self.run(piece):
                if node not in self.site_of:
                    parts.append(z.flatten(1).T)  # the logits
                    continue
                if z.ndim == 4:
                    z = z.movedim(1, -1)
                site = self.site_of[node]
                parts[site] = z.flatten(1).index_select(1, of_site[site]).T
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
                value = scaled(value, self.lines[step.node][1])
            values[step.node] = value
            for node in step.inputs:
                if last_reader[node] is step.node:
                    values.pop(node, None)

    def multiply_adds(self, source: int, impulse: Value, steps: list[Step]) -> int:
        """Of an impulse, by the numbers that convolutions compute of it."""
        weights = {
            step.node: step.run.weight for step in steps if isinstance(step.run, Convolution)
        }
        return sum(
            weights[node][0].numel() * stored(value).numel()
            for node, value in self.push(source, impulse, steps)
            if node in weights
        )


def check_linear(request: Request, program: Program) -> None:
    """`NotAffine` if impulses at any site, or in the image, arrive otherwise than in the net.

    In double, once for a structure. A rule that loses a path, an operation that is not affine or
    that mixes the images of a batch: each gives a difference.
    """
    values = peak_bytes(program) + sum(program.bytes_per_image[s.node] for s in program.activations)
    weights = sum(t.nbytes for t in (*request.net.parameters(), *request.net.buffers()))
    needed = 2 * (7 * values + weights)  # 4 images, and 3 impulses one by one
    if needed > request.memory:
        raise NotAffine(
            f"its linear part is checked in double, which takes {needed / 2**20:,.0f} MiB, and "
            f"{request.memory / 2**20:,.0f} MiB may be used (Engine(memory=...) allows more)"
        )
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(request.example[:1].shape, generator=generator, dtype=torch.float64)
    image = noise.to(request.example.device)
    try:
        net = AffineNet(_in_double(program))
        for source, node in net.starts.items():
            shape = program.shapes[node][1:]
            anywhere = [int(torch.randint(n, (1,), generator=generator)) for n in shape]
            corners = [[anywhere[0], *(0 for _ in shape[1:])], [n - 1 for n in shape]]
            _compare(net, image, source, [anywhere, *corners])
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise NotAffine(f"its linear part cannot be computed ({error})") from error


def _compare(net: AffineNet, image: Tensor, source: int, positions: list[list[int]]) -> None:
    """Row 0 of a batch is the image itself; each other row has one impulse added at the source."""
    start = net.starts[source]
    steps = net.reached(source)
    x = image.repeat(1 + len(positions), *(1,) * (image.ndim - 1))
    impulses = image.new_zeros(len(x), *net.program.shapes[start][1:])
    responses: list[dict[fx.Node, Tensor]] = []
    for row, position in enumerate(positions, 1):
        index = (row, *position)
        impulses[index] = 4.0
        pushed = net.push(source, _as_value(impulses[row : row + 1], position), steps)
        responses.append(
            {n: whole(v)[0] for n, v in pushed if n in net.off or n is net.program.output}
        )
    if source == IMAGE:
        x += impulses
    for node, z, y in net.run(x):
        difference = z[1:] - z[:1]
        for row, response in enumerate(responses):
            difference[row] -= response.get(node, 0)
        if not difference.abs().max() <= 1e-9 * z.abs().max().clamp(min=1):
            raise NotAffine(
                f"an impulse arrives at node {node.name!r} in another way than in the net"
            )
        if node is start:
            y += impulses


def _as_value(impulse: Tensor, position: list[int]) -> Value:
    """The impulse [1, ...] as a patch of one pixel, if it is an image."""
    if impulse.ndim != 4:
        return impulse
    _, top, left = position
    height, width = impulse.shape[2:]
    box = (range(top, top + 1), range(left, left + 1))
    pixel = impulse[:, :, top : top + 1, left : left + 1]
    return Patch(pixel, box, (height, width))


def _in_double(program: Program) -> Program:
    def double(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return copy.deepcopy(value).double()
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        return value

    steps, constants = tree_map(double, (program.steps, program.constants))
    return program._replace(steps=steps, constants=constants)
