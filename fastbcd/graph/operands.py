"""What an activation reads: act(norm(x) + residual), for training (fuse.py) and for scoring."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import fx

ADDITIONS = {operator.add, torch.add, "add"}


class Operands(NamedTuple):
    """act(x), act(norm(x)), act(x + residual) or act(norm(x) + residual)."""

    terms: tuple[fx.Node, ...]  # x, and the residual if there is one
    norm: fx.Node | None  # of x
    absorbed: list[fx.Node]  # the addition and the norm, which nothing else reads


def operands(
    act: fx.Node,
    is_norm: Callable[[fx.Node], bool],
    is_sum: Callable[[fx.Node], bool] = lambda addition: True,
) -> Operands:
    """The operands of a call of an activation with one argument.

    is_norm: may this node be the norm? is_sum: may this addition of two nodes be absorbed?
    """
    (value,) = act.all_input_nodes
    terms = [value]
    absorbed = []
    if adds_two(value) and len(value.users) == 1 and is_sum(value):
        terms = value.all_input_nodes
        absorbed.append(value)
    for norm in terms:
        if len(norm.users) == 1 and is_norm(norm):
            others = [term for term in terms if term is not norm]
            return Operands((*norm.all_input_nodes, *others), norm, [*absorbed, norm])
    return Operands(tuple(terms), None, absorbed)


def adds_two(node: fx.Node) -> bool:
    """Is it x + y of two different nodes, and nothing else?"""
    plain = len(node.args) == len(node.all_input_nodes) == 2 and not node.kwargs
    return plain and node.target in ADDITIONS
