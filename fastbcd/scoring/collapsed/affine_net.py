"""The affine net: what is left of a net when every masked ReLU becomes the identity.

It runs on images, with its constants, and on impulses, from a site onward and without them. Both
give what stands at its taps: at every site, before the activation, and at the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fastbcd.scoring.collapsed.linear_rules import Context, Run, linear_part
from fastbcd.scoring.collapsed.patches import Patch, Value
from fastbcd.scoring.folding import Convolution
from fastbcd.scoring.program import Activation, Call, Program

IMAGE = -1  # the source of impulses in the image itself; sites count from 0


class AffineNet:
    """A program as an affine map with taps; `NotAffine` if it is none."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.varies = {program.placeholder}  # tensors that depend on the image
        self.linear: dict[fx.Node, Run] = {}
        self.cost: dict[fx.Node, int] = {}  # multiply-adds for one number of the result
        context = Context(program, self.varies)
        for step in program.steps:
            if step.node in program.shapes and self.varies & set(step.inputs):
                self.varies.add(step.node)
                self.linear[step.node] = linear_part(step, context)
                if isinstance(step, Call) and isinstance(step.run, Convolution):
                    self.cost[step.node] = step.run.weight[0].numel()
        self.starts = {IMAGE: program.placeholder}
        self.starts |= {s.site: s.node for s in program.steps if isinstance(s, Activation)}
        self.off = {  # no bit is set: the activation is the identity
            s.node: torch.zeros_like(s.module.mask, dtype=torch.uint8).unsqueeze(0)
            for s in program.steps
            if isinstance(s, Activation)
        }

    def taps(self, x: Tensor) -> Iterator[tuple[fx.Node, Tensor]]:
        """Images [B, ...] through the affine net: (node, value [B, ...]) at each tap."""
        program = self.program
        values: dict[fx.Node, Any] = {**program.constants, program.placeholder: x}
        left = dict(program.uses)
        for step in program.steps:
            if isinstance(step, Activation):
                y = values[step.x].unsqueeze(0)
                residual = None if step.residual is None else values[step.residual].unsqueeze(0)
                out = y if step.x in program.fresh else None
                values[step.node] = step.run(y, self.off[step.node], residual, out).squeeze(0)
                yield step.node, values[step.node]
            else:
                args, kwargs = fx.node.map_arg((step.args, step.kwargs), values.__getitem__)
                values[step.node] = step.run(*args, **kwargs)
            for node in step.inputs:
                left[node] -= 1
                if not left[node] and node not in program.constants:
                    del values[node]
        yield program.output, values[program.output]

    def reached(self, source: int) -> list[Activation | Call]:
        """The steps that an impulse at a source can change, in order."""
        seen = {self.starts[source]}
        found = []
        for step in self.program.steps:
            if step.node in self.varies and seen & set(step.inputs):
                seen.add(step.node)
                found.append(step)
        return found

    def push(self, source: int, impulses: Value, steps: list[Activation | Call]) -> Pushed:
        """Impulses [n, ...] added to what a source gives, through the steps that they reach."""
        return Pushed(self, source, impulses, steps)


class Pushed:
    """Iterate: (node, value) at each tap; then `multiply_adds` tells what it took."""

    def __init__(
        self, net: AffineNet, source: int, impulses: Value, steps: list[Activation | Call]
    ) -> None:
        self.net, self.source, self.impulses, self.steps = net, source, impulses, steps
        self.multiply_adds = 0

    def __iter__(self) -> Iterator[tuple[fx.Node, Value]]:
        net, output = self.net, self.net.program.output
        start = net.starts[self.source]
        some = self.impulses.value if isinstance(self.impulses, Patch) else self.impulses
        n = some.shape[0]
        values: dict[fx.Node, Any] = {start: self.impulses}
        last = {node: step.node for step in self.steps for node in step.inputs}
        if start is output:
            yield start, self.impulses
        for step in self.steps:
            value = net.linear[step.node](values, n)
            values[step.node] = value
            if step.node in net.cost:
                result = value.value if isinstance(value, Patch) else value
                self.multiply_adds += net.cost[step.node] * result.numel()
            if isinstance(step, Activation) or step.node is output:
                yield step.node, value
            for node in step.inputs:
                if last[node] is step.node:
                    values.pop(node, None)
