"""Is the linear part of each step right? Impulses as patches against the affine net, in double.

Numbers are added to an image and to the results of activations, and followed to all later sites
and the logits in two ways: through the net's own operations, on whole batches, and through the
rules of linear_rules.py, on the boxes that they have reached. A rule that loses a path, an
operation that is not affine or that mixes the images of a batch: each gives a difference.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from fastbcd.scoring.collapsed.affine_net import IMAGE, AffineNet
from fastbcd.scoring.collapsed.linear_rules import NotAffine
from fastbcd.scoring.collapsed.patches import Patch, whole
from fastbcd.scoring.program import Activation, Call, Convolution, Program

TOGETHER = 8  # impulses in a batch of whole images


def check_linear(program: Program, like: Tensor) -> None:
    """`NotAffine` if impulses at any site, or in the image, arrive otherwise than in the net."""
    try:
        net = AffineNet(_in_double(program))
        generator = torch.Generator().manual_seed(0)
        cases = []
        for number, (source, node) in enumerate(net.starts.items()):
            shape = program.shapes[node][1:]
            last = tuple(n - 1 for n in shape)
            random = tuple(int(torch.randint(n, (1,), generator=generator)) for n in shape)
            corner = last if number % 2 else (*random[:1], *(0 for _ in shape[1:]))
            cases += [(source, random), (source, corner)]
        image = torch.randn(like[:1].shape, generator=generator, dtype=torch.float64)
        for i in range(0, len(cases), TOGETHER):
            amounts = 4 * torch.randn(TOGETHER, generator=generator, dtype=torch.float64)
            _compare(net, image.to(like.device), cases[i : i + TOGETHER], amounts.tolist())
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise NotAffine(f"its linear part cannot be computed ({error})") from error


def _compare(net: AffineNet, image: Tensor, cases: list[Any], amounts: list[float]) -> None:
    """Row 0 is the image itself; the other rows have one number each added somewhere."""
    x = image.repeat(1 + len(cases), *(1,) * (image.ndim - 1))
    added: dict[fx.Node, list[Any]] = {}
    pushed: dict[fx.Node, dict[int, Tensor]] = {}
    for row, ((source, place), amount) in enumerate(zip(cases, amounts, strict=False), 1):
        start = net.starts[source]
        shape = net.program.shapes[start][1:]
        if source == IMAGE:
            x[row][place] += amount
        added.setdefault(start, []).append((row, place, amount))
        impulse: Any = image.new_zeros(1, *(shape if len(shape) != 3 else (shape[0], 1, 1)))
        if len(shape) == 3:
            impulse[0, place[0]] = amount
            impulse = Patch(impulse, place[1], place[2], shape[1:])
        else:
            impulse[0][place] = amount
        for node, value in net.push(source, impulse, net.reached(source)):
            if node is net.program.output or node in net.off:
                pushed.setdefault(node, {})[row] = whole(value)[0]
    for node, value in net.run(x):
        found = value - value[:1]
        for row, response in pushed.get(node, {}).items():
            found[row] -= response
        if not found.abs().max() <= 1e-9 * value.abs().max().clamp(min=1):
            raise NotAffine(
                f"an impulse arrives at node {node.name!r} in another way than in the net"
            )
        for row, place, amount in added.get(node, []):
            value[row][place] += amount


def _in_double(program: Program) -> Program:
    def double(value: Any) -> Any:
        if isinstance(value, Convolution):
            return Convolution(*map(double, value))
        if isinstance(value, Tensor):
            return value.double() if value.is_floating_point() else value
        return copy.deepcopy(value).double() if isinstance(value, nn.Module) else value

    steps: list[Activation | Call] = [
        step._replace(scale=double(step.scale), shift=double(step.shift))
        if isinstance(step, Activation) else step._replace(run=double(step.run))
        for step in program.steps
    ]  # fmt: skip
    constants = {node: double(value) for node, value in program.constants.items()}
    return program._replace(steps=steps, constants=constants)
