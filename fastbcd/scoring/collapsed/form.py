"""The collapsed form of a net: an affine map with R kinks.

relu(z) = z + relu(-z), so a kept ReLU adds its kink c = relu(-z) to the identity, and

    z_s    = U_s x + u_s + sum over earlier sites r of  c_r H_rs      (row vectors, by site)
    logits = W x + w     + sum over all sites r of      c_r G_r
    c_s    = m_s · relu(-z_s)

U, u, W, w belong to the affine net, in which every activation is the identity; H and G are the
responses of the affine net to unit impulses at the kept ReLUs. They do not depend on which ReLUs
a hypothesis removes: a removal only sets entries of c to zero. So a form is kept between calls,
for as long as the net and all that it computes with.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fastbcd.masking.masks import MaskSet
from fastbcd.scoring.program import Activation, Program


class Block(NamedTuple):
    """What kinks start .. stop-1 add to one site: matrix [stop - start, n_site]."""

    start: int
    stop: int
    matrix: Tensor


@dataclass
class Form:
    """Kinks are numbered site after site; those of site s are bounds[s] .. bounds[s+1]-1."""

    ids: Tensor  # LongTensor[R], the flat id of each kink's ReLU
    bounds: list[int]
    blocks: list[list[Block]]  # H by site, in the order of kinks; blocks of zeros are left out
    out: Tensor  # G [R, classes]
    constant: Tensor  # u [R]
    constant_out: Tensor  # w [classes]
    image: Tensor | None  # U [P, R], P numbers in an image; None: run the affine net instead
    image_out: Tensor | None  # W [P, classes]
    affine: AffineCache = field(default_factory=lambda: AffineCache())

    @property
    def kinks(self) -> int:
        return len(self.ids)

    def holds(self, masks: MaskSet) -> bool:
        """Are all kept ReLUs among the kinks?"""
        return int(masks.bits[self.ids].sum()) == masks.count()

    def restrict(self, masks: MaskSet) -> None:
        """Become the form of the same net with fewer ReLUs, site by site to save memory."""
        kept = masks.bits[self.ids]
        if kept.all():
            return
        place = kept.nonzero().flatten().to(self.out.device)
        before = [0, *kept.cumsum(0).tolist()]  # how many kept kinks come before each old one
        bounds = [before[bound] for bound in self.bounds]
        for s, site in enumerate(self.blocks):
            columns = place[bounds[s] : bounds[s + 1]] - self.bounds[s]
            self.blocks[s] = []
            for block in site:
                start, stop = before[block.start], before[block.stop]
                if start < stop and len(columns):
                    rows = place[start:stop] - block.start
                    matrix = block.matrix.index_select(0, rows).index_select(1, columns)
                    self.blocks[s].append(Block(start, stop, matrix))
        self.ids, self.bounds = self.ids[kept], bounds
        self.out, self.constant = self.out[place], self.constant[place]
        self.image = None if self.image is None else self.image[:, place]
        self.affine.restrict(place)


def find(ids: Tensor, wanted: Tensor) -> Tensor:
    """The place of each of `wanted` in `ids`, which has no repeats."""
    order = torch.argsort(ids)
    return order[torch.searchsorted(ids[order], wanted)]


class AffineCache:
    """U x + u and W x + w of the batches of the data, by their numbers, while memory allows."""

    def __init__(self) -> None:
        self.limit = 0  # bytes
        self.example: Tensor | None = None  # the first images of the data
        self.entries: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # images, [R, B], [B, classes]

    def begin(self, example: Tensor, limit: int) -> None:
        """Store at most `limit` bytes, and only of the data that begins with this example."""
        if self.example is None or not torch.equal(self.example, example):
            self.entries = {}
        self.example, self.limit = example.clone(), limit
        while self.entries and self.bytes > limit:
            self.entries.popitem()

    @property
    def images(self) -> int:
        return sum(len(x) for x, _, _ in self.entries.values())

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for entry in self.entries.values() for t in entry)

    def find(self, number: int, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """What is known of a batch, if its images x are those that were seen."""
        if number in self.entries and torch.equal(self.entries[number][0], x):
            return self.entries[number][1:]
        self.entries.pop(number, None)
        return None

    def add(self, number: int, x: Tensor, at_sites: Tensor, logits: Tensor) -> None:
        if self.bytes + x.nbytes + at_sites.nbytes + logits.nbytes <= self.limit:
            self.entries[number] = x.clone(), at_sites, logits

    def restrict(self, kinks: Tensor) -> None:
        """Drop the rows of kinks that were removed."""
        for number, (x, z, y) in self.entries.items():
            self.entries[number] = x, z.index_select(0, kinks), y


class Signature:
    """Everything that a program reads, apart from the bits of its masks.

    Tensors (weights, statistics, buffers of every kind) are compared number by number, the rest
    (structure, eps, strides, numbers in the code) as text: any change counts.
    """

    def __init__(self, program: Program) -> None:
        self.facts: list[Any] = []
        self.tensors: list[Tensor] = []
        steps = [(*step[:2], type(step.module), *step[3:]) if isinstance(step, Activation)
                 else tuple(step) for step in program.steps]  # fmt: skip
        self._add([steps, program.constants, program.output])

    def _add(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            own = {k: v for k, v in vars(value).items() if k[0] != "_" and k != "training"}
            state = [*value.named_parameters(), *value.named_buffers()]
            value = [type(value), own, state]
        if isinstance(value, dict):
            value = list(value.items())
        if isinstance(value, list | tuple):
            self.facts.append(len(value))
            for item in value:
                self._add(item)
        elif isinstance(value, Tensor):
            self.facts.append((tuple(value.shape), value.dtype, value.device))
            self.tensors.append(value.detach())
        else:
            self.facts.append(value.name if isinstance(value, fx.Node) else repr(value))

    def equals(self, other: Signature) -> bool:
        return self.facts == other.facts and all(map(torch.equal, self.tensors, other.tensors))


_forms: weakref.WeakKeyDictionary[nn.Module, tuple[Signature, Form]] = weakref.WeakKeyDictionary()


def cached_form(net: nn.Module, signature: Signature, masks: MaskSet) -> Form | None:
    """The form that was built for this net, if it still holds, without the removed ReLUs."""
    known, form = _forms.get(net, (None, None))
    if known is None or form is None:
        return None
    if not signature.equals(known) or not form.holds(masks):
        drop_form(net)  # its memory is free before another is built
        return None
    form.restrict(masks)
    return form


def keep_form(net: nn.Module, signature: Signature, form: Form) -> None:
    """Remember the form for as long as the net lives and is not changed."""
    signature.tensors = [t.clone() for t in signature.tensors]  # the net may change its own
    _forms[net] = signature, form


def drop_form(net: nn.Module) -> None:
    """Forget the form of a net."""
    _forms.pop(net, None)
