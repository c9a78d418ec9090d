"""gather_form: the same net, with each site evaluating only the ReLUs that it keeps.

`where(mask, relu(x), x)` evaluates every ReLU, and private inference pays for every one. Here the
kept units are gathered, activated and written back:

    f = x.flatten(1)
    f[:, kept] = relu(f[:, kept])
    f[:, removed] = c2*f² + c1*f + c0       # where removed ReLUs are quadratics

A site that keeps all ReLUs becomes nn.ReLU, a site that keeps none nn.Identity or the quadratic.
Inference without encryption does not become faster.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fastbcd.kernels.geometry import compute_dtype
from fastbcd.masking.activations import MaskedActivation, MaskedPoly, MaskedReLU
from fastbcd.masking.masks import mask_modules


class GatheredReLU(nn.Module):
    """ReLU at the positions `kept` [n] of a flattened sample, the identity elsewhere.

    >>> act = GatheredReLU(torch.tensor([True, False]))
    >>> act(torch.tensor([[-1.0, -1.0]]))
    tensor([[ 0., -1.]])
    """

    kept: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", mask.flatten().nonzero().flatten())

    def forward(self, x: Tensor) -> Tensor:
        """x [B, *shape] -> [B, *shape]."""
        flat = x.flatten(1)
        relus = torch.relu(flat.index_select(1, self.kept))
        return flat.index_copy(1, self.kept, relus).reshape(x.shape)

    def extra_repr(self) -> str:
        return f"{len(self.kept):,} ReLUs"


class GatheredPoly(GatheredReLU):
    """ReLU at `kept`, c2*z² + c1*z + c0 at `removed`, coef [3, C] by the unit's `channel`."""

    removed: Tensor
    channel: Tensor

    def __init__(self, mask: Tensor, coef: nn.Parameter) -> None:
        super().__init__(mask)
        self.coef = coef
        self.register_buffer("removed", mask.logical_not().flatten().nonzero().flatten())
        self.register_buffer("channel", self.removed // mask[0].numel())

    def forward(self, x: Tensor) -> Tensor:
        """x [B, *shape] -> [B, *shape]."""
        flat, small = x.flatten(1), compute_dtype(x.dtype)
        z = flat.index_select(1, self.removed).to(small)
        c0, c1, c2 = self.coef.to(small).index_select(1, self.channel)
        # c2*z² + c1*z + c0, in the order of operations of reference.py
        y = flat.index_copy(1, self.removed, ((c2 * z + c1) * z + c0).to(x.dtype))
        return (super().forward(y) if len(self.kept) else y).reshape(x.shape)

    def extra_repr(self) -> str:
        return f"{len(self.kept):,} ReLUs, {len(self.removed):,} quadratics"


def gather_form(net: nn.Module) -> nn.Module:
    """A copy of the net in which each site evaluates only the ReLUs it keeps.

    The logits are bit-identical in every dtype that the activations accept. Later changes of the
    masks do not affect the copy.

    >>> net = nn.Sequential(nn.Linear(4, 3), fastbcd.MaskedReLU(3), nn.Linear(3, 2))
    >>> fastbcd.set_masks(net, fastbcd.masks(net).without([1]))
    >>> small, x = gather_form(net), torch.randn(5, 4)
    >>> small[1], torch.equal(small(x), net(x))
    (GatheredReLU(2 ReLUs), True)
    """
    for name, module in mask_modules(net).items():
        if type(module) not in (MaskedReLU, MaskedPoly):
            what = f"site {name!r} is a {type(module).__name__} of an unfinished start"
            raise ValueError(f"{what}: finish snl or autorep first")
    twin = copy.deepcopy(net)
    if isinstance(twin, MaskedActivation):
        return _gathered(twin)
    made: dict[nn.Module, nn.Module] = {}  # the same activation may have several names
    for name, module in list(twin.named_modules(remove_duplicate=False)):
        if isinstance(module, MaskedActivation):
            made[module] = made.get(module) or _gathered(module)
            owner, _, leaf = name.rpartition(".")
            twin.get_submodule(owner).register_module(leaf, made[module])
    return twin


def _gathered(act: MaskedActivation) -> nn.Module:
    mask = act.mask.bool()
    made: nn.Module = nn.ReLU()
    if not mask.all():
        made = GatheredReLU(mask) if mask.any() else nn.Identity()
        made = GatheredPoly(mask, act.coef) if isinstance(act, MaskedPoly) else made
    return made.train(act.training)
