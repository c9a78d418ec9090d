"""The affine net: the net with every ReLU removed, so that sites are the identity or lines.

It runs on images, with its constants, and on impulses, from a site onward and without constants.
Both give the values at every site, before the activation, and the logits; `check_linear` compares
them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from fastbcd.ops import reference
from fastbcd.scoring.collapsed.linear_rules import Context, NotAffine, Run, linear_part, scaled
from fastbcd.scoring.collapsed.patches import Patch, Value, stored, whole
from fastbcd.scoring.engine import Request
from fastbcd.scoring.program import Activation, Convolution, Operation, Program
from fastbcd.scoring.stacked import peak_bytes

IMAGE = -1  # the source of impulses in the image itself; sites count from 0
TOGETHER = 8  # impulses that are checked in a batch of whole images


class AffineNet:
    """A program as an affine map; `NotAffine` says why there is none."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.linear: dict[fx.Node, Run] = {}
        self.cost: dict[fx.Node, int] = {}  # multiply-adds for one number of the result
        context = Context(program, {program.placeholder})
        for step in program.steps:
            if context.depends_on_image(step):
                self.linear[step.node] = linear_part(step, context)
                context.varies.add(step.node)
                if isinstance(step, Operation) and isinstance(step.run, Convolution):
                    self.cost[step.node] = step.run.weight[0].numel()
        self.starts = {IMAGE: program.placeholder}
        self.off: dict[fx.Node, Tensor] = {}  # masks without bits: the activation is the identity
        self.lines: dict[fx.Node, Tensor] = {}  # c0 and c1 of each channel, [2, C]
        for site in program.activations:
            self.starts[site.site] = site.node
            self.off[site.node] = torch.zeros_like(site.module.mask, dtype=torch.uint8).unsqueeze(0)
            coefficients = site.module.coefficients()
            if coefficients is not None:
                self.lines[site.node] = coefficients[:2].detach()

    def run(self, x: Tensor) -> Iterator[tuple[fx.Node, Tensor, Tensor]]:
        """Images [B, ...] through the affine net: (node, z, y) at sites and logits, [B, ...].

        z is the value before the activation, y the one after it; they are one tensor where it is
        the identity. The caller may change y in place before the next step reads it.
        """
        program = self.program
        values: dict[fx.Node, Any] = {**program.constants, program.placeholder: x}
        unread = dict(program.uses)
        for step in program.steps:
            if isinstance(step, Activation):
                z = self._sum(step, values)
                y = self._on_line(step.node, z)
                values[step.node] = y
                yield step.node, z, y
            else:
                values[step.node] = step(values)
            for node in step.inputs:
                unread[node] -= 1
                if not unread[node] and node not in program.constants:
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
            z = reference.masked_relu(x, off, step.scale, step.shift, residual, True)
        else:
            out = None
            if step.x in self.program.fresh:
                out = x
            z = step.sum(x, off, residual, out)
        return z.squeeze(0)

    def _on_line(self, node: fx.Node, z: Tensor) -> Tensor:
        """c1·z + c0 where removed ReLUs are lines, else z."""
        if node not in self.lines:
            return z
        c0, c1 = self.lines[node].view(2, -1, *(1,) * (z.ndim - 2))
        return c1 * z + c0

    def reached(self, source: int) -> list[Activation | Operation]:
        """The steps that an impulse at a source can change, in order."""
        changed = {self.starts[source]}
        steps = []
        for step in self.program.steps:
            if step.node in self.linear and changed & set(step.inputs):
                changed.add(step.node)
                steps.append(step)
        return steps

    def push(
        self, source: int, impulses: Value, steps: list[Activation | Operation]
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


class Impulse(NamedTuple):
    """A number that is added at one position, for one image of a batch."""

    row: int
    source: int
    position: tuple[int, ...]
    value: float


def check_linear(request: Request, program: Program) -> None:
    """`NotAffine` if impulses at any site, or in the image, arrive otherwise than in the net.

    In double, once for a structure. A rule that loses a path, an operation that is not affine or
    that mixes the images of a batch: each gives a difference.
    """
    values = peak_bytes(program) + sum(program.bytes_per_image[s.node] for s in program.activations)
    weights = sum(t.nbytes for t in (*request.net.parameters(), *request.net.buffers()))
    needed = 2 * ((1 + TOGETHER) * values + weights)
    if needed > request.memory:
        raise NotAffine(
            f"its linear part is checked in double, which takes {needed / 2**20:,.0f} MiB, and "
            f"{request.memory / 2**20:,.0f} MiB may be used (Engine(memory=...) allows more)"
        )
    like = request.example[:1]
    generator = torch.Generator().manual_seed(0)
    try:
        net = AffineNet(_in_double(program))
        impulses = _impulses(net, generator)
        image = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device)
        for i in range(0, len(impulses), TOGETHER):
            _compare(net, image, impulses[i : i + TOGETHER])
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise NotAffine(f"its linear part cannot be computed ({error})") from error


def _impulses(net: AffineNet, generator: torch.Generator) -> list[Impulse]:
    """Two for each source: at a random position, and in the first or in the last corner."""
    impulses: list[Impulse] = []
    for number, (source, node) in enumerate(net.starts.items()):
        shape = net.program.shapes[node][1:]
        anywhere = tuple(int(torch.randint(n, (1,), generator=generator)) for n in shape)
        corner = tuple(n - 1 for n in shape)
        if number % 2 == 0:
            corner = (*anywhere[:1], *(0 for _ in shape[1:]))
        for position in (anywhere, corner):
            row = 1 + len(impulses) % TOGETHER
            impulses.append(Impulse(row, source, position, 4.0 * (-1) ** row))
    return impulses


def _compare(net: AffineNet, image: Tensor, impulses: list[Impulse]) -> None:
    """Row 0 of a batch is the image itself; each other row has one impulse added somewhere."""
    x = image.repeat(1 + len(impulses), *(1,) * (image.ndim - 1))
    responses: dict[fx.Node, dict[int, Tensor]] = {}
    for impulse in impulses:
        steps = net.reached(impulse.source)
        for node, value in net.push(impulse.source, _as_value(net, impulse, image), steps):
            if node is net.program.output or node in net.off:
                responses.setdefault(node, {})[impulse.row] = whole(value)[0]

    def add_impulses(source: fx.Node, values: Tensor) -> None:
        for impulse in impulses:
            if net.starts[impulse.source] is source:
                place = (impulse.row, *impulse.position)
                values[place] += impulse.value

    add_impulses(net.program.placeholder, x)
    for node, z, y in net.run(x):
        difference = z - z[:1]
        for row, response in responses.get(node, {}).items():
            difference[row] -= response
        if not difference.abs().max() <= 1e-9 * z.abs().max().clamp(min=1):
            raise NotAffine(
                f"an impulse arrives at node {node.name!r} in another way than in the net"
            )
        add_impulses(node, y)


def _as_value(net: AffineNet, impulse: Impulse, like: Tensor) -> Value:
    """The impulse as one image, or as a patch of one pixel."""
    shape = net.program.shapes[net.starts[impulse.source]][1:]
    if len(shape) != 3:
        image = like.new_zeros(1, *shape)
        image[0][impulse.position] = impulse.value
        return image
    channel, top, left = impulse.position
    pixel = like.new_zeros(1, shape[0], 1, 1)
    pixel[0, channel] = impulse.value
    return Patch(pixel, top, left, shape[1:])


def _in_double(program: Program) -> Program:
    def double(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return copy.deepcopy(value).double()
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        return value

    steps, constants = tree_map(double, (program.steps, program.constants))
    return program._replace(steps=steps, constants=constants)
