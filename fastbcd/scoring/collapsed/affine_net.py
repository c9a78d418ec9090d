"""The affine net: the net with every masked ReLU replaced by the identity.

It runs on images, with its constants, and on impulses, from a site onward and without constants.
Both give the values at every site, before the activation, and the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fastbcd.scoring.collapsed.linear_rules import Context, Run, linear_part
from fastbcd.scoring.collapsed.patches import Value, stored
from fastbcd.scoring.program import Activation, Call, Convolution, Program

IMAGE = -1  # the source of impulses in the image itself; sites count from 0


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
        self.starts = {IMAGE: program.placeholder}
        self.starts |= {s.site: s.node for s in program.activations}
        self.off = {  # no bit is set: the activation is the identity
            s.node: torch.zeros_like(s.module.mask, dtype=torch.uint8).unsqueeze(0)
            for s in program.activations
        }

    def run(self, x: Tensor) -> Iterator[tuple[fx.Node, Tensor]]:
        """Images [B, ...] through the affine net: (node, value [B, ...]) at sites and logits.

        The caller may change the value of a site in place before the next step reads it.
        """
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
                values[step.node] = step(values)
            for node in step.inputs:
                left[node] -= 1
                if not left[node] and node not in program.constants:
                    del values[node]
        yield program.output, values[program.output]

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
        """Impulses [n, ...] added to what a source gives: (node, value) after each step."""
        start = self.starts[source]
        values: dict[fx.Node, Any] = {start: impulses}
        last = {node: step.node for step in steps for node in step.inputs}
        if start is self.program.output:
            yield start, impulses
        for step in steps:
            values[step.node] = self.linear[step.node](values, len(stored(impulses)))
            yield step.node, values[step.node]
            for node in step.inputs:
                if last[node] is step.node:
                    values.pop(node, None)
