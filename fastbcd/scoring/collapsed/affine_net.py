"""The affine net: the net with every ReLU removed, so that sites are the identity or lines.

It runs on images, with its constants, and on impulses, from a site onward and without constants.
Both give the values at every site, before the activation, and the logits; `check_linear` compares
them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from fastbcd.ops import reference
from fastbcd.scoring.collapsed.linear_rules import Context, NotAffine, Run, linear_part, scaled
from fastbcd.scoring.collapsed.patches import Patch, Value, stored, whole
from fastbcd.scoring.engine import Request
from fastbcd.scoring.program import Activation, Call, Convolution, Program
from fastbcd.scoring.stacked import peak_bytes

IMAGE = -1  # the source of impulses in the image itself; sites count from 0
TOGETHER = 8  # impulses that are checked in a batch of whole images


class AffineNet:
    """A program as an affine map; `NotAffine` says why there is none."""

    def __init__(self, program: Program) -> None:
        self.program = program
        context = Context(program, {program.placeholder})
        self.linear: dict[fx.Node, Run] = {}
        self.cost: dict[fx.Node, int] = {}  # multiply-adds for one number of the result
        for step in program.steps:
            if context.depends_on_image(step):
                self.linear[step.node] = linear_part(step, context)
                context.varies.add(step.node)
                if isinstance(step, Call) and isinstance(step.run, Convolution):
                    self.cost[step.node] = step.run.weight[0].numel()
        self.starts = {IMAGE: program.placeholder, **{s.site: s.node for s in program.activations}}
        self.off = {  # no bit is set: the activation is the identity
            s.node: torch.zeros_like(s.module.mask, dtype=torch.uint8).unsqueeze(0)
            for s in program.activations
        }
        found = ((s.node, s.module.coefficients()) for s in program.activations)
        self.lines = {node: coef[:2].detach() for node, coef in found if coef is not None}

    def run(self, x: Tensor) -> Iterator[tuple[fx.Node, Tensor, Tensor]]:
        """Images [B, ...] through the affine net: (node, z, y) at sites and logits, [B, ...].

        z is the value before the activation, y the one after it; they are one tensor where it is
        the identity. The caller may change y in place before the next step reads it.
        """
        program = self.program
        values: dict[fx.Node, Any] = {**program.constants, program.placeholder: x}
        left = dict(program.uses)
        for step in program.steps:
            if isinstance(step, Activation):
                y = values[step.x].unsqueeze(0)
                residual = None if step.residual is None else values[step.residual].unsqueeze(0)
                out = y if step.x in program.fresh else None
                off = self.off[step.node]
                if y.dtype == torch.float64 and y.device.type != "cpu":  # there is no kernel
                    z = reference.masked_relu(y, off, step.scale, step.shift, residual, True)
                else:
                    z = step.sum(y, off, residual, out)
                z = z.squeeze(0)
                values[step.node] = z
                if (line := self.lines.get(step.node)) is not None:
                    c0, c1 = (c.view(-1, *(1,) * (z.ndim - 2)) for c in line)
                    values[step.node] = c1 * z + c0
                yield step.node, z, values[step.node]
            else:
                values[step.node] = step(values)
            for node in step.inputs:
                left[node] -= 1
                if not left[node] and node not in program.constants:
                    del values[node]
        yield program.output, values[program.output], values[program.output]

    def reached(self, source: int) -> list[Activation | Call]:
        """The steps that an impulse at a source can change, in order."""
        seen, found = {self.starts[source]}, []
        for step in self.program.steps:
            if step.node in self.linear and seen & set(step.inputs):
                seen.add(step.node)
                found.append(step)
        return found

    def push(
        self, source: int, impulses: Value, steps: list[Activation | Call]
    ) -> Iterator[tuple[fx.Node, Value]]:
        """Impulses [n, ...] added to what a source gives: (node, value) after each step.

        At a site the value is the one before its activation.
        """
        values: dict[fx.Node, Any] = {self.starts[source]: impulses}
        last = {node: step.node for step in steps for node in step.inputs}
        for step in steps:
            value = self.linear[step.node](values, len(stored(impulses)))
            yield step.node, value
            line = self.lines.get(step.node)
            values[step.node] = value if line is None else scaled(value, line[1])
            for node in step.inputs:
                if last[node] is step.node:
                    values.pop(node, None)


# The structure that was checked, by net; weights may differ.
_checked: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def check_linear(request: Request, facts: list[Any], program: Program) -> None:
    """`NotAffine` if impulses at any site, or in the image, arrive otherwise than in the net.

    In double, once for a net with the same facts. A rule that loses a path, an operation that is
    not affine or that mixes the images of a batch: each gives a difference.
    """
    net, like = request.net, request.example[:1]
    if _checked.get(net) == facts:
        return
    values = peak_bytes(program) + sum(program.bytes_per_image[s.node] for s in program.activations)
    weights = sum(t.nbytes for t in (*net.parameters(), *net.buffers()))
    needed = 2 * ((1 + TOGETHER) * values + weights)
    if needed > request.memory:
        raise NotAffine(
            f"its linear part is checked in double, which takes {needed / 2**20:,.0f} MiB, and "
            f"{request.memory / 2**20:,.0f} MiB may be used (Engine(memory=...) allows more)"
        )
    try:
        affine = AffineNet(_in_double(program))
        generator = torch.Generator().manual_seed(0)
        cases = []
        for number, (source, node) in enumerate(affine.starts.items()):
            shape = program.shapes[node][1:]
            random = tuple(int(torch.randint(n, (1,), generator=generator)) for n in shape)
            last, first = tuple(n - 1 for n in shape), (*random[:1], *(0 for _ in shape[1:]))
            cases += [(source, random), (source, last if number % 2 else first)]
        image = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        for i in range(0, len(cases), TOGETHER):
            _compare(affine, image.to(like.device), cases[i : i + TOGETHER])
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise NotAffine(f"its linear part cannot be computed ({error})") from error
    _checked[net] = facts


def _compare(net: AffineNet, image: Tensor, cases: list[tuple[int, tuple[int, ...]]]) -> None:
    """Row 0 is the image itself; the other rows have one number each added somewhere."""
    x = image.repeat(1 + len(cases), *(1,) * (image.ndim - 1))
    added: list[tuple[fx.Node, int, Tensor]] = []
    pushed: dict[fx.Node, dict[int, Tensor]] = {}
    for row, (source, place) in enumerate(cases, 1):
        start = net.starts[source]
        impulse: Any = image.new_zeros(1, *net.program.shapes[start][1:])
        impulse[0][place] = 4.0 * (-1) ** row
        added.append((start, row, impulse[0]))
        if len(place) == 3:
            top, left = place[1:]
            one = impulse[:, :, top : top + 1, left : left + 1]
            impulse = Patch(one, top, left, tuple(impulse.shape[2:]))
        for node, value in net.push(source, impulse, net.reached(source)):
            if node is net.program.output or node in net.off:
                pushed.setdefault(node, {})[row] = whole(value)[0]

    def add(where: fx.Node, value: Tensor) -> None:
        for start, row, numbers in added:
            if start is where:
                value[row] += numbers

    add(net.program.placeholder, x)
    for node, value, after in net.run(x):
        found = value - value[:1]
        for row, response in pushed.get(node, {}).items():
            found[row] -= response
        if not found.abs().max() <= 1e-9 * value.abs().max().clamp(min=1):
            raise NotAffine(
                f"an impulse arrives at node {node.name!r} in another way than in the net"
            )
        add(node, after)


def _in_double(program: Program) -> Program:
    def double(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.double() if value.is_floating_point() else value
        return copy.deepcopy(value).double() if isinstance(value, nn.Module) else value

    steps, constants = tree_map(double, (program.steps, program.constants))
    return program._replace(steps=steps, constants=constants)
