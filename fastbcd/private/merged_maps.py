"""The maps of a merged net: linear runs as one convolution, one product, or values that move."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fastbcd.masking.activations import MaskedLine
from fastbcd.private.linear_runs import MOVING, Kind, LinearRuns, Path, Value

CANVAS = 2**22  # numbers of a layer that are computed at a time to find a kernel


class MergedMap(nn.Module):
    """The sum of one part for each source, and a bias for each position: `bias` [*shape].

    The zeros around an image are added in front of the run, not of each of its layers: the result
    is that of the run except near the border. The bias is exact there too.
    """

    def __init__(self, parts: list[nn.Module], bias: Tensor) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.bias = nn.Parameter(bias)

    def forward(self, *sources: Tensor) -> Tensor:
        """Sources [B, ...] -> [B, *shape]."""
        y = self.bias
        for part, source in zip(self.parts, sources, strict=True):
            y = y + part(source)
        return y


class DenseMap(nn.Module):
    """One product of all numbers of all sources: [B, ...] -> [B, *shape]."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.shape = bias.shape
        self.linear = nn.Linear(weight.shape[1], weight.shape[0])
        self.linear.weight = nn.Parameter(weight)
        self.linear.bias = nn.Parameter(bias.flatten())

    def forward(self, *sources: Tensor) -> Tensor:
        flat = torch.cat([source.flatten(1) for source in sources], 1)
        return self.linear(flat).reshape(-1, *self.shape)


class Moved(nn.Module):
    """Channels that are picked, pixels that are skipped; `coef` [C, 1, 1], if any, multiplies."""

    def __init__(
        self, channels: Tensor, steps: tuple[int, int], coef: Tensor | None, inputs: int
    ) -> None:
        """channels: of the input, of which there are `inputs`; that number itself means zeros."""
        super().__init__()
        same = torch.equal(channels, torch.arange(inputs, device=channels.device))
        self.channels = None if same else nn.Buffer(channels)
        self.steps = steps
        self.coef = None if coef is None else nn.Parameter(coef)

    def forward(self, x: Tensor) -> Tensor:
        down, right = self.steps
        x = x[:, :, ::down, ::right]
        if self.channels is not None:
            x = F.pad(x, (0, 0, 0, 0, 0, 1)).index_select(1, self.channels)
        if self.coef is not None:
            x = x * self.coef
        return x


class Maps:
    """Makes the maps of a net, computed in double precision."""

    def __init__(self, net: nn.Module, runs: LinearRuns, linear: set[str]) -> None:
        """linear: the nodes that are merged, without those at cuts."""
        self.runs = runs
        self.linear = linear
        self.modules: dict[str, Any] = {
            str(node.target): copy.deepcopy(runs.function(node)).double().eval()
            for node in runs.nodes
            if node.op == "call_module" and node.name in runs.paths
        }
        self.dtype = next(net.parameters()).dtype
        self.device = next(net.parameters()).device

    @torch.no_grad()
    def map_to(self, node: fx.Node, value: Value) -> nn.Module:
        """The map from the sources of a value to it."""
        shapes = self.runs.shapes
        nothing = {source: self._zeros(1, *shapes[source]) for source, _ in value}
        bias = self._run(nothing, node)[0]
        if value[0][1].kind == Kind.MIXES:
            weights = [self._weights(source, node).flatten(1) for source, _ in value]
            return DenseMap(torch.cat(weights, 1).to(self.dtype), bias.to(self.dtype))
        parts = [self._part(source, path, node) for source, path in value]
        return MergedMap(parts, bias.to(self.dtype))

    def _part(self, source: str, path: Path, node: fx.Node) -> nn.Module:
        kernel = self._kernel(source, path, node).to(self.dtype)
        if path.kind == Kind.CONVOLVES:
            return _convolution(
                kernel, path, self.runs.shapes[source], self.runs.shapes[node.name]
            )
        scale, channels = kernel[:, :, 0, 0].abs().max(1)
        channels[scale == 0] = kernel.shape[1]
        steps = path.rows.stride, path.columns.stride
        factors = None
        if path.kind == Kind.SCALES:
            factors = kernel.sum((1, 2, 3)).view(-1, 1, 1)
        return Moved(channels, steps, factors, kernel.shape[1])

    def _kernel(self, source: str, path: Path, node: fx.Node) -> Tensor:
        """The weights of one output pixel, [C_out, C_in, rows, columns], far from all borders."""
        spans = (path.rows, path.columns)
        places = [math.ceil((span.before + span.after) / span.stride) for span in spans]
        begins = [p * s.stride - s.before for p, s in zip(places, spans, strict=True)]
        sides = [
            b + s.size + s.after + s.stride for b, s in zip(begins, spans, strict=True)
        ]
        weights = self._weights(source, node, tuple(sides), tuple(places))
        rows, columns = begins
        return weights[
            :, :, rows : rows + spans[0].size, columns : columns + spans[1].size
        ]

    def _weights(
        self,
        source: str,
        node: fx.Node,
        sides: tuple[int, ...] = (),
        place: tuple[int, ...] = (),
    ) -> Tensor:
        """The derivatives of the outputs at a place by a source, [outputs, *source].

        sides: of a source of another size than the net's.
        """
        shape = self.runs.shapes[source]
        if sides:
            shape = (shape[0], *sides)
        outputs = self.runs.shapes[node.name][0]
        if not place:
            outputs = math.prod(self.runs.shapes[node.name])
        each = max(1, CANVAS // math.prod(shape))
        weights = []
        for numbers in torch.arange(outputs).split(each):
            with torch.enable_grad():
                x = self._zeros(len(numbers), *shape).requires_grad_()
                y = self._run({source: x}, node)
                whole = (slice(None), slice(None))
                y = y[whole + place].flatten(1)
                chosen = y[torch.arange(len(numbers)), numbers].sum()
            weights.append(torch.autograd.grad(chosen, x)[0])
        return torch.cat(weights)

    def _run(self, given: dict[str, Tensor], node: fx.Node) -> Tensor:
        """The value of a node as a function of these sources; others count as zero."""
        values: dict[str, Tensor] = dict(given)
        for other in self.runs.nodes:
            inputs = [values[s.name] for s in other.all_input_nodes if s.name in values]
            merged = other.name in self.linear or other is node
            if other.name not in values and merged and inputs:
                values[other.name] = self._apply(other, inputs)
        return values[node.name]

    def _apply(self, node: fx.Node, inputs: list[Tensor]) -> Tensor:
        if node.op == "call_module":
            module = self.modules[str(node.target)]
            if isinstance(module, MOVING):
                return inputs[0]
            if isinstance(module, MaskedLine):
                c0, c1 = module.coef.view(2, -1, *[1] * (inputs[0].ndim - 2))
                return c1 * inputs[0] + c0
            return module(inputs[0])
        if len(node.all_input_nodes) == 2:  # an addition, of which one term may be zero
            return sum(inputs[1:], inputs[0])
        if node.op == "call_method":
            return getattr(inputs[0], str(node.target))(*node.args[1:], **node.kwargs)
        function: Any = node.target
        return function(inputs[0], *node.args[1:], **node.kwargs)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.double, device=self.device)


def _convolution(
    kernel: Tensor, path: Path, before: tuple[int, ...], after: tuple[int, ...]
) -> nn.Module:
    """The convolution of this kernel, from one shape to another."""
    spans = (path.rows, path.columns)
    conv = nn.Conv2d(
        kernel.shape[1],
        kernel.shape[0],
        (spans[0].size, spans[1].size),
        stride=(spans[0].stride, spans[1].stride),
        padding=(spans[0].before, spans[1].before),
        bias=False,
    )
    conv.weight = nn.Parameter(kernel.contiguous())
    missing = []  # zeros after the last pixel, besides those on both sides
    for span, old, new in zip(spans, before[1:], after[1:], strict=True):
        missing.append((new - 1) * span.stride + span.size - old - 2 * span.before)
    if max(missing) <= 0 and all(
        n > -s.stride for n, s in zip(missing, spans, strict=True)
    ):
        return conv
    return nn.Sequential(nn.ZeroPad2d((0, missing[1], 0, missing[0])), conv)
