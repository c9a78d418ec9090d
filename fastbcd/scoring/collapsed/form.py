"""The collapsed form of a net: an affine map with R kinks.

relu(z) = z + relu(-z), so a kept ReLU adds its kink c = relu(-z) to the identity, and

    z_s = U_s x + u_s + sum over earlier kinks i of  c_i H_is      (row vectors, by site)
    c_s = m_s · relu(-z_s)

and the logits are z of the last target, after all sites. Where a removed ReLU is a line, a kept one
adds c = relu(z) - c1·z - c0 = relu(-z) + (1 - c1)·z - c0 to that line. U and u belong to the affine
net, in which every ReLU is removed; H holds the responses of the affine net to unit impulses at
the kept ReLUs. They do not depend on which ReLUs a hypothesis removes: a removal only sets entries
of c to zero. So a form is kept between calls, for as long as the net and all that it computes with.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fastbcd.masking.masks import MaskSet


@dataclass(frozen=True)
class Form:
    """Numbers of site s are bounds[s] .. bounds[s+1]-1; the logits follow the last site's."""

    ids: Tensor  # LongTensor[R], the flat id of each kink's ReLU
    places: (
        Tensor  # LongTensor[R], where its z is in the channels_last memory of its site
    )
    bounds: list[int]
    responses: list[
        Tensor
    ]  # Hᵀ by target: what each earlier kink adds, [n_s, bounds[s]]
    constant: Tensor  # u [R + classes]
    image: (
        Tensor | None
    )  # U [P, R + classes], P numbers in an image; None: run the affine net
    lines: (
        Tensor | None
    )  # c0 and 1 - c1 of each kink, [2, R]; None: all are the identity

    @property
    def kinks(self) -> int:
        """R."""
        return len(self.ids)

    def holds(self, masks: MaskSet) -> bool:
        """Are all kept ReLUs among the kinks?"""
        return int(masks.bits[self.ids].sum()) == masks.count()

    def kept_numbers(self, masks: MaskSet) -> Tensor:
        """Which kinks are kept, and all logits, as numbers of this form."""
        logits = torch.arange(self.kinks, len(self.constant))
        kinks = masks.bits[self.ids].nonzero().flatten()
        return torch.cat([kinks, logits]).to(self.constant.device)

    def shrunk(self, kept: Tensor) -> Form:
        """The form of the same net with fewer ReLUs. This one is used up, which saves memory."""
        bounds = torch.searchsorted(kept.cpu(), torch.tensor(self.bounds)).tolist()
        responses: list[Tensor] = []
        for s, (low, high) in enumerate(pairwise(bounds)):
            rows = self.responses[s].index_select(0, kept[low:high] - self.bounds[s])
            responses.append(rows.index_select(1, kept[:low]))
            self.responses[s] = rows.new_empty(0)
        kinks = kept[: bounds[-2]]
        image = self.image
        if image is not None:
            image = image[:, kept]
        lines = self.lines
        if lines is not None:
            lines = lines[:, kinks]
        ids = self.ids[kinks.to(self.ids.device)]
        return Form(
            ids,
            self.places[kinks],
            bounds,
            responses,
            self.constant[kept],
            image,
            lines,
        )


def find(ids: Tensor, wanted: Tensor) -> Tensor:
    """The index of each of `wanted` in `ids`, which has no repeats."""
    order = torch.argsort(ids)
    return order[torch.searchsorted(ids[order], wanted)]
