"""collapsed: hypotheses scored on an affine map with kinks (form.py) instead of on the net.

Exact up to rounding, and cheap when few ReLUs are left: a hypothesis costs one number of H for
each pair of kept ReLUs, whatever the convolutions would cost. For a chunk of T hypotheses and B
images, c [R, T·B] is filled site by site, a site being some rows of it that lie together:

    z_s = (U x + u)_s + H_sᵀ c[before s]             one GEMM for all trials and images
    c_s = m_s · relu(-z_s)                           one fused pass over its output

and logits = W x + w + Gᵀ c. Hypotheses that begin at a later site see everything before it as a
shift of the affine part, which the base net gives.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastbcd.masking.masks import MaskSet
from fastbcd.ops.kink import kinks
from fastbcd.scoring.collapsed.affine_net import AffineNet
from fastbcd.scoring.collapsed.build import Builder
from fastbcd.scoring.collapsed.form import Affine, Form, find
from fastbcd.scoring.collapsed.linear_rules import NotAffine
from fastbcd.scoring.program import Program

PIECE = 32  # images at a time through the affine net


class Trials(NamedTuple):
    """Hypotheses that run together, from kink `start` on: the first of the first changed site."""

    numbers: list[int]
    start: int
    masks: Tensor  # uint8 [R - start, T]


class Collapsed:
    """The engine: the form of a net, and memory that every chunk uses again."""

    name = "collapsed"
    memory_format = torch.channels_last

    def __init__(self, form: Form, builder: Builder) -> None:
        self.form, self.builder = form, builder
        # A form that has shrunk keeps its order of kinks; the builder's tiles may be others now.
        self.order = None if torch.equal(form.ids, builder.ids) else find(builder.ids, form.ids)
        self.memory = form.out.new_empty(0)

    def prepare(self, removals: dict[int, Tensor], lanes: int) -> list[Trials]:
        """Hypotheses by number, in groups of at most `lanes` that begin near each other."""
        form, bounds = self.form, torch.tensor(self.form.bounds)
        gone = {k: find(form.ids, ids) for k, ids in removals.items() if len(ids)}
        first = {
            k: int(bounds[torch.searchsorted(bounds, columns.min(), right=True) - 1])
            for k, columns in gone.items()
        }
        order = sorted(gone, key=lambda k: first[k])
        groups = []
        for i in range(0, len(order), lanes):
            numbers = order[i : i + lanes]
            start = first[numbers[0]]
            masks = torch.ones(form.kinks - start, len(numbers), dtype=torch.uint8)
            for t, k in enumerate(numbers):
                masks[gone[k] - start, t] = 0
            groups.append(Trials(numbers, start, masks.to(form.out.device)))
        return groups

    def logits(
        self, x: Tensor, groups: list[Trials], base: bool
    ) -> Iterator[tuple[list[int], Tensor]]:
        """(numbers, logits [n, B, classes]) of every hypothesis, and of the base as number -1."""
        at_sites, at_end = self.affine(x)
        c = None
        if base or any(group.start for group in groups):
            everything = torch.ones(self.form.kinks, 1, dtype=torch.uint8, device=x.device)
            c, logits = self.run(at_sites, at_end, everything, 0)
            c = c.clone()  # the memory is used again
            if base:
                yield [-1], logits
        shifted = {0: (at_sites, at_end)}
        for group in groups:
            if group.start not in shifted:
                assert c is not None
                shifted[group.start] = self.shift(at_sites, at_end, c, group.start)
            yield group.numbers, self.run(*shifted[group.start], group.masks, group.start)[1]

    def affine(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """U x + u at the kinks [R, B], W x + w [B, classes]."""
        form = self.form
        found = form.known.find(x)
        if found is None:
            if form.image is not None and form.image_out is not None:
                flat = x.movedim(1, -1).reshape(len(x), -1)
                found = (torch.addmm(form.constant[:, None], form.image.T, flat.T),
                         torch.addmm(form.constant_out, flat, form.image_out))  # fmt: skip
            else:
                pieces = [self.builder.at_taps(piece) for piece in x.split(PIECE)]
                found = torch.cat([z.T for z, _ in pieces], 1), torch.cat([y for _, y in pieces])
                if self.order is not None:
                    found = found[0].index_select(0, self.order.to(x.device)), found[1]
            form.known.keep(x, *found)
        return found

    def run(
        self, at_sites: Tensor, at_end: Tensor, masks: Tensor, start: int
    ) -> tuple[Tensor, Tensor]:
        """c [R - start, T·B] and logits [T, B, classes] of T masks over the kinks from `start`.

        at_sites [R - start, B], at_end [B, classes]: what the image and earlier kinks give.
        """
        form = self.form
        trials, batch = masks.shape[1], len(at_end)
        c = self.buffer((form.kinks - start) * trials * batch).view(-1, trials * batch)
        for s, blocks in enumerate(form.blocks):
            a, b = form.bounds[s] - start, form.bounds[s + 1] - start
            if a < 0 or a == b:
                continue
            z = c[a:b]
            fresh = True
            for block in blocks:
                low = max(block.start, start)
                if low < block.stop:
                    earlier = c[low - start : block.stop - start]
                    rows = block.matrix[low - block.start :]
                    if fresh:
                        torch.mm(rows.T, earlier, out=z)
                    else:
                        z.addmm_(rows.T, earlier)
                    fresh = False
            kinks(z.unflatten(1, (trials, batch)), at_sites[a:b], masks[a:b], fresh=fresh)
        logits = (form.out[start:].T @ c).T.unflatten(0, (trials, batch)) + at_end
        return c, logits

    def shift(
        self, at_sites: Tensor, at_end: Tensor, c: Tensor, start: int
    ) -> tuple[Tensor, Tensor]:
        """The affine part at the kinks from `start` on, with what the base's earlier ones add."""
        form = self.form
        moved = at_sites[start:].clone()
        for s, blocks in enumerate(form.blocks):
            a, b = form.bounds[s] - start, form.bounds[s + 1] - start
            for block in blocks if a >= 0 else []:
                high = min(block.stop, start)
                if block.start < high:
                    rows = block.matrix[: high - block.start]
                    moved[a:b].addmm_(rows.T, c[block.start : high])
        return moved, torch.addmm(at_end, c[:start].T, form.out[:start])

    def buffer(self, numbers: int) -> Tensor:
        if len(self.memory) < numbers:
            self.memory = self.form.out.new_empty(numbers)
        return self.memory[:numbers]

    def check(self, net: nn.Module, images: Tensor) -> None:
        """Two images through the net and through the form."""
        truth = net(images)
        known, self.form.known = self.form.known, Affine()
        ((_, logits),) = self.logits(images.contiguous(memory_format=self.memory_format), [], True)
        self.form.known = known
        error = (logits[0] - truth).abs().max()
        if not error <= 1e-3 * truth.abs().max().clamp(min=1e-6):
            raise NotAffine(
                f"its logits differ by {float(error):.1e} from those of its collapsed form"
            )


# -------------------------------------------------------------------------- kept between calls


class _Kept(NamedTuple):
    weights: list[Tensor]
    form: Form


_kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()


def form_at_hand(net: nn.Module, masks: MaskSet) -> Form | None:
    """The form that was built for this net, if its weights still stand; without what was removed.

    Weights are compared number by number: any change counts, however it was made.
    """
    kept = _kept.get(net)
    if kept is None:
        return None
    now = _weights(net)
    same = len(now) == len(kept.weights) and all(map(_equal, now, kept.weights))
    if not same or not kept.form.holds(masks):
        del _kept[net]  # its memory is free before another is built
        return None
    form = kept.form.restricted(masks)
    _kept[net] = kept._replace(form=form)
    return form


def keep_form(net: nn.Module, form: Form) -> None:
    """Remember the form for as long as the net lives and its weights stand."""
    _kept[net] = _Kept([w.clone() for w in _weights(net)], form)


def _weights(net: nn.Module) -> list[Tensor]:
    """Everything that the form depends on; masks and counters of batches are not."""
    return [t.detach() for t in net.state_dict().values() if t.is_floating_point()]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)


def make_builder(program: Program, masks: MaskSet, example: Tensor) -> Builder:
    """What can be known of the form before it is built; `NotAffine` says why there is none."""
    if example.dtype not in (torch.float32, torch.float64):
        raise NotAffine(f"it computes in {example.dtype}; float32 or float64 is needed")
    return Builder(AffineNet(program), masks, example)
