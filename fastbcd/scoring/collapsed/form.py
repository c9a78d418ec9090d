"""The collapsed form of a net: an affine map with R kinks.

relu(z) = z + relu(-z), so a kept ReLU adds its kink c = relu(-z) to the identity, and

    z_s = U_s x + u_s + sum over earlier sites r of  c_r H_rs      (row vectors, by site)
    c_s = m_s · relu(-z_s)

and the logits are z of the last target, after all sites. Where a removed ReLU is a line, a kept one
adds c = relu(z) - c1·z - c0 = relu(-z) + (1 - c1)·z - c0 to that line. U and u belong to the affine
net, in which every ReLU is removed; H holds the responses of the affine net to unit impulses at
the kept ReLUs. They do not depend on which ReLUs a hypothesis removes: a removal only sets entries
of c to zero. So a form is kept between calls, for as long as the net and all that it computes with.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.masks import MaskSet
from fastbcd.scoring.program import Program


class Block(NamedTuple):
    """What kinks start .. stop-1 add to one target: matrix [stop - start, n_target]."""

    start: int
    stop: int
    matrix: Tensor


@dataclass
class Form:
    """Numbers of site s are bounds[s] .. bounds[s+1]-1; the logits follow the last site's."""

    ids: Tensor  # LongTensor[R], the flat id of each kink's ReLU
    bounds: list[int]
    blocks: list[list[Block]]  # H by target, in the order of kinks; blocks of zeros are left out
    constant: Tensor  # u [R + classes]
    image: Tensor | None  # U [P, R + classes], P numbers in an image; None: run the affine net
    lines: Tensor | None = None  # c0 and 1 - c1 of each kink, [2, R]; None: all are the identity
    affine: AffineCache = field(default_factory=lambda: AffineCache())

    @property
    def kinks(self) -> int:
        return len(self.ids)

    def holds(self, masks: MaskSet) -> bool:
        """Are all kept ReLUs among the kinks?"""
        return int(masks.bits[self.ids].sum()) == masks.count()

    def restrict(self, masks: MaskSet) -> None:
        """Become the form of the same net with fewer ReLUs, target by target to save memory."""
        kept = masks.bits[self.ids]
        if kept.all():
            return
        keep = torch.cat([kept, torch.ones(len(self.constant) - self.kinks, dtype=torch.bool)])
        place = keep.nonzero().flatten().to(self.constant.device)
        before = [0, *keep.cumsum(0).tolist()]  # how many kept numbers come before each old one
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
        if self.lines is not None:
            self.lines = self.lines[:, place[: bounds[-2]]]
        self.ids, self.bounds, self.constant = self.ids[kept], bounds, self.constant[place]
        self.image = None if self.image is None else self.image[:, place]
        self.affine.restrict(place)


def find(ids: Tensor, wanted: Tensor) -> Tensor:
    """The place of each of `wanted` in `ids`, which has no repeats."""
    order = torch.argsort(ids)
    return order[torch.searchsorted(ids[order], wanted)]


class AffineCache:
    """U x + u of images of the data, by their numbers, while memory allows.

    They are stored in blocks, as they were computed. A batch may have images of any blocks, and
    others: a step with a confidence visits the images in an order of its own.
    """

    def __init__(self) -> None:
        self.limit = 0  # bytes
        self.example: Tensor | None = None  # the first images of the data
        self.precision = ""  # of the values
        self.clear()

    def clear(self) -> None:
        self.entries: dict[int, tuple[Tensor, Tensor]] = {}  # images, [R + classes, B]
        self.places = torch.empty(0, 2, dtype=torch.int64)  # by number: block, column; or -1, -1
        self.compared = torch.empty(0, dtype=torch.bool)  # by number: known to be of this call

    def begin(self, example: Tensor, precision: str, limit: int) -> None:
        """Store at most `limit` bytes, only of the data that begins with this example."""
        known = self.example is not None and torch.equal(self.example, example)
        if not known or precision != self.precision:
            self.clear()
        self.example, self.precision, self.limit = example.clone(), precision, limit
        self.compared.fill_(False)
        while self.entries and self.bytes > limit:
            block, _ = self.entries.popitem()
            self.places[self.places[:, 0] == block] = -1

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for entry in self.entries.values() for t in entry)

    def numbers(self, block: int) -> Tensor:
        """Of the images of a block, in its order."""
        found = (self.places[:, 0] == block).nonzero().flatten()
        return found[self.places[found, 1].argsort()]

    def values(self, numbers: Tensor, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """[R + classes, B] of images x: what is known of them, and what `compute` returns."""
        more = int(numbers.max()) + 1 - len(self.places)
        if more > 0:
            self.places = torch.cat([self.places, torch.full((more, 2), -1)])
            self.compared = torch.cat([self.compared, torch.zeros(more, dtype=torch.bool)])
        place = self.places[numbers]
        known = (place[:, 0] >= 0).nonzero().flatten()
        known = known[place[known, 0].argsort(stable=True)]  # by block
        if len(known) and not self.compared[numbers[known]].all():  # comparing waits for a GPU
            same = x if _is_range(known, len(x)) else _select(x, 0, known)
            if not torch.equal(self._read(0, place[known]), same):
                self.clear()
                return self.values(numbers, x, compute)
            self.compared[numbers[known]] = True
        if len(known) == len(x):
            z = self._read(1, place[known])
            return z if _is_range(known, len(x)) else _select(z, 1, known.argsort())
        if not len(known):
            z = compute(x)
            self._add(numbers, x, z)
            return z
        other = (place[:, 0] < 0).nonzero().flatten()
        some = _select(x, 0, other)
        if x.ndim == 4:
            some = some.contiguous(memory_format=torch.channels_last)
        fresh = compute(some)
        z = torch.cat([self._read(1, place[known]), fresh], 1)
        self._add(numbers[other], some, fresh)
        return _select(z, 1, torch.cat([known, other]).argsort())

    def _read(self, kind: int, place: Tensor) -> Tensor:
        """Images (kind 0, along dimension 0) or values (1, along 1) at places, by block."""
        blocks, parts = place[:, 0], []
        for block in blocks.unique_consecutive().tolist():
            columns, part = place[blocks == block, 1], self.entries[block][kind]
            whole = _is_range(columns, part.shape[kind])
            parts.append(part if whole else _select(part, kind, columns))
        return parts[0] if len(parts) == 1 else torch.cat(parts, kind)

    def _add(self, numbers: Tensor, x: Tensor, z: Tensor) -> None:
        if self.bytes + x.nbytes + z.nbytes <= self.limit:
            block = max(self.entries, default=-1) + 1
            self.entries[block] = x.clone(), z
            self.places[numbers, 0] = block
            self.places[numbers, 1] = torch.arange(len(numbers))
            self.compared[numbers] = True

    def restrict(self, place: Tensor) -> None:
        """Drop the rows of kinks that were removed."""
        for number, (x, z) in self.entries.items():
            self.entries[number] = x, z.index_select(0, place)


def _select(t: Tensor, dim: int, places: Tensor) -> Tensor:
    return t.index_select(dim, places.to(t.device))


def _is_range(places: Tensor, length: int) -> bool:
    """Are these 0, 1, ..., length - 1?"""
    return len(places) == length and torch.equal(places, torch.arange(length))


class Signature:
    """Everything that a program's net reads, apart from the bits of its masks.

    Tensors (weights, statistics, buffers of every kind) are compared number by number, the rest
    (structure, eps, strides, numbers in the code) as text: any change counts.
    """

    def __init__(self, program: Program) -> None:
        self.facts: list[Any] = []
        self.tensors: list[Tensor] = []
        self._add((program.source, program.constants))

    def _add(self, values: Any) -> None:
        leaves, structure = tree_flatten(values)
        self.facts.append(repr(structure))
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self.facts.append((tuple(leaf.shape), leaf.dtype, leaf.device))
                self.tensors.append(leaf.detach())
            elif isinstance(leaf, MaskedActivation):
                self._add([type(leaf), leaf.coefficients()])
            elif isinstance(leaf, nn.Module):
                own = {k: v for k, v in vars(leaf).items() if k[0] != "_" and k != "training"}
                state = [*leaf.named_parameters(), *leaf.named_buffers()]
                self._add([type(leaf), own, state])
            else:
                self.facts.append(leaf.name if isinstance(leaf, fx.Node) else repr(leaf))

    def equals(self, other: Signature) -> bool:
        return self.facts == other.facts and all(map(torch.equal, self.tensors, other.tensors))


_forms: weakref.WeakKeyDictionary[nn.Module, tuple[Signature, Form]] = weakref.WeakKeyDictionary()


def cached_form(net: nn.Module, signature: Signature, masks: MaskSet) -> Form | None:
    """The form that was built for this net, if it still holds, without the removed ReLUs."""
    if net not in _forms:
        return None
    known, form = _forms[net]
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
    """Forget the form of a net; a GPU's memory is free at once."""
    if _forms.pop(net, None) and torch.cuda.is_initialized():
        gc.collect()  # torch's pytree leaves lists of tensors in cycles
