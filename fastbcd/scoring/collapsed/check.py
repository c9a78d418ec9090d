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
from fastbcd.scoring.collapsed.patches import whole
from fastbcd.scoring.collapsed.tiles import ImpulseBatch, Positions
from fastbcd.scoring.program import Activation, Call, Convolution, Program

TOGETHER = 8  # impulses in a batch of whole images


def check_linear(program: Program, like: Tensor) -> None:
    """`NotAffine` if impulses at any site, or in the image, arrive otherwise than in the net."""
    try:
        net = AffineNet(_in_double(program))
        generator = torch.Generator().manual_seed(0)
        like = like[:1].double()
        cases = []
        for number, source in enumerate(net.starts):
            shape = program.shapes[net.starts[source]][1:]
            last = tuple(n - 1 for n in shape)
            random = tuple(int(torch.randint(n, (1,), generator=generator)) for n in shape)
            corner = last if number % 2 else (*random[:1], *(0 for _ in shape[1:]))
            cases += [(source, shape, place) for place in (random, corner)]
        image = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
        for i in range(0, len(cases), TOGETHER):
            amounts = 4 * torch.randn(TOGETHER, generator=generator, dtype=torch.float64)
            _compare(net, image, cases[i : i + TOGETHER], amounts.to(like))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise NotAffine(f"its linear part cannot be computed ({error})") from error


def _compare(net: AffineNet, image: Tensor, cases: list[Any], amounts: Tensor) -> None:
    output = net.program.output
    x = image.repeat(1 + len(cases), *(1,) * (image.ndim - 1))
    added: dict[fx.Node, tuple[Any, Tensor]] = {}
    pushed: dict[fx.Node, dict[int, Tensor]] = {}
    for row, ((source, shape, place), amount) in enumerate(zip(cases, amounts, strict=False), 1):
        node = net.starts[source]
        if source == IMAGE:
            x[row][place] += amount
        else:
            index, numbers = added.get(node, ((), amount.new_empty(0)))
            here = torch.tensor([(row, *place)])
            index = torch.cat([torch.stack(index, 1), here]) if index else here
            added[node] = index.unbind(1), torch.cat([numbers, amount[None]])
        flat = torch.arange(int(torch.tensor(shape).prod())).view(shape)[place].view(1)
        box = (*place[1:], *(p + 1 for p in place[1:])) if len(shape) == 3 else (0, 0, 0, 0)
        impulse = Positions(tuple(shape), flat).impulses(ImpulseBatch(0, 1, box), image)
        for reached, value in net.push(source, impulse, net.reached(source)):
            if reached is output or reached in net.off:
                pushed.setdefault(reached, {})[row] = whole(value)[0] * amount
    for node, value in net.run(x, added):
        found = value - value[:1]
        expected = torch.zeros_like(found)
        for row, response in pushed.get(node, {}).items():
            expected[row] = response
        error = (found - expected).abs().max()
        if not error <= 1e-9 * value.abs().max().clamp(min=1):
            raise NotAffine(
                f"an impulse arrives at node {node.name!r} in another way than in the net"
            )


def _in_double(program: Program) -> Program:
    def double(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.double() if value.is_floating_point() else value
        return copy.deepcopy(value).double() if isinstance(value, nn.Module) else value

    steps: list[Activation | Call] = []
    for step in program.steps:
        if isinstance(step, Activation):
            step = step._replace(scale=double(step.scale), shift=double(step.shift))
        elif isinstance(step.run, Convolution):
            convolution: Any = Convolution(*map(double, step.run))
            step = step._replace(run=convolution)
        else:
            step = step._replace(run=double(step.run))
        steps.append(step)
    constants = {node: double(value) for node, value in program.constants.items()}
    return program._replace(steps=steps, constants=constants)
