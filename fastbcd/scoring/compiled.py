"""What is made from a net and may be kept between calls: one cache, and one way to empty it.

    made = compiled(net)      kept for as long as the net lives
    drop(net)                 before its weights change: the memory is free at once

The collapsed form and all that was computed with it belong to one state of the weights; they are
also dropped by a call that finds other weights. The other facts depend on the structure only.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.masks import MaskSet
from fastbcd.scoring.collapsed.affine_cache import AffineCache
from fastbcd.scoring.collapsed.form import Form
from fastbcd.scoring.program import Program


class Signature:
    """Everything that a program's net reads, apart from the bits of its masks.

    Tensors (weights, statistics, buffers of every kind) are compared number by number, everything
    else (structure, eps, strides, numbers in the code) as text: any change counts.
    """

    def __init__(self, program: Program) -> None:
        self.facts: list[str] = []
        self.tensors: list[Tensor] = []
        self._add((program.source, program.constants))

    def _add(self, values: Any) -> None:
        leaves, structure = tree_flatten(values)
        self.facts.append(repr(structure))
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self.facts.append(f"{leaf.shape} {leaf.dtype} {leaf.device}")
                self.tensors.append(leaf.detach())
            elif isinstance(leaf, MaskedActivation):
                self._add([type(leaf), leaf.coefficients()])
            elif isinstance(leaf, nn.Module):
                attributes = [item for item in vars(leaf).items() if item[0][0] != "_"]
                state = [*leaf.named_parameters(), *leaf.named_buffers()]
                self._add([type(leaf), attributes, state])
            else:
                self.facts.append(repr(leaf))

    def equals(self, other: Signature) -> bool:
        """Is it of a net that computes the same?"""
        same = map(torch.equal, self.tensors, other.tensors)
        return self.facts == other.facts and all(same)


@dataclass(eq=False)
class Compiled:
    """What is kept of one net. It must not refer to the net, which would then live for ever."""

    signature: Signature | None = None  # of the net that the form was made from
    form: Form | None = None
    images: AffineCache = field(default_factory=AffineCache)  # their values in the form
    # The net's output, when the form was last compared with it.
    answer: Tensor | None = None
    checked: list[Any] | None = None  # the structure whose linear part was checked
    not_affine: str = ""  # why that structure is not affine
    impulse_costs: dict[tuple[int, int], int] = field(default_factory=dict)

    def form_of(self, signature: Signature, masks: MaskSet) -> Form | None:
        """The form that was built, without removed ReLUs; None if it does not hold any more."""
        form = self.form
        if form is None or self.signature is None:
            return None
        if not signature.equals(self.signature) or not form.holds(masks):
            self.drop()  # its memory is free before another is built
            return None
        kept = form.kept_numbers(masks)
        if len(kept) < len(form.constant):
            self.answer = None
            self.form = form.shrunk(kept)
            self.images.keep_rows(kept)
        return self.form

    def keep_form(self, signature: Signature, form: Form) -> None:
        """Remember a form for as long as the net computes the same."""
        # The net may change its own.
        signature.tensors = [tensor.clone() for tensor in signature.tensors]
        self.signature = signature
        self.form = form

    def drop(self) -> None:
        """Forget what depends on the weights."""
        self.signature = None
        self.form = None
        self.answer = None
        self.images.clear()


_by_net: weakref.WeakKeyDictionary[nn.Module, Compiled] = weakref.WeakKeyDictionary()


def compiled(net: nn.Module) -> Compiled:
    """What is kept of a net; empty at first."""
    return _by_net.setdefault(net, Compiled())


def drop(net: nn.Module) -> None:
    """Forget what depends on the weights of a net; a GPU's memory is free at once."""
    made = _by_net.get(net)
    if made is None or made.form is None:
        return
    made.drop()
    if torch.cuda.is_initialized():
        gc.collect()  # torch's pytree leaves lists of tensors in cycles
