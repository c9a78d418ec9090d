"""Sites whose masks are trained: SNL's soft ReLU and AutoReP's polynomial with an indicator.

`twin` returns the network that trains them: the net's own weights with other activations. At the
end of the training the numbers of the units are cut to bits and written into the net.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbcd import ops
from fastbcd.masking.activations import MaskedActivation, MaskedPoly, MaskedReLU
from fastbcd.masking.masks import MaskSet, masks
from fastbcd.runtime.validate import check_whole
from fastbcd.scoring.accuracy import dtype_of

IDENTITY = (0.0, 1.0, 0.0)  # c0, c1, c2


class SoftReLU(MaskedActivation):
    """a*relu(x) + (1 - a)*x with `alpha` [*shape] learned: 1 at the start, 0 for removed ReLUs.

    `mask` is True for the units that take part; removed ReLUs stay removed.

    >>> act = SoftReLU(torch.tensor([True, False]))
    >>> act(torch.tensor([[-1.0, -1.0]])).tolist()
    [[-0.0, -1.0]]
    """

    def __init__(self, mask: Tensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(tuple(mask.shape), device=mask.device)
        self.mask = _channels_last(mask.bool())
        self.alpha = nn.Parameter(self.mask.to(dtype))

    def activate(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The activation of x + residual, [B, *shape]."""
        return ops.soft_relu(x, self.alpha * self.mask, residual=residual)


class IndicatorPoly(MaskedPoly):
    """`MaskedPoly` whose bits follow `aux` [*shape]: on above the threshold, off below minus it.

    Bits change in `follow` only, not in a forward pass. While `measuring`, the mean and variance
    of x per channel are tracked as in a batch norm.
    """

    mean: Tensor
    var: Tensor
    allowed: Tensor
    measuring = False
    momentum = 0.1  # of the statistics

    def __init__(self, poly: MaskedPoly, aux: Tensor) -> None:
        super().__init__(tuple(poly.mask.shape), device=poly.mask.device)
        self.coef = poly.coef
        self.mask = _channels_last(poly.mask.bool())
        self.aux = nn.Parameter(_channels_last(aux).to(self.mask.device))
        self.register_buffer("allowed", self.mask.clone())
        self.register_buffer("mean", torch.zeros_like(self.coef[0].detach()))
        self.register_buffer("var", torch.ones_like(self.coef[0].detach()))

    def activate(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The activation of x + residual, [B, *shape]."""
        if self.measuring:
            with torch.no_grad():
                seen = (x if residual is None else x + residual).to(self.mean.dtype)
                dims = [d for d in range(x.ndim) if d != 1]
                var, mean = torch.var_mean(seen, dims, correction=0)
                self.mean.lerp_(mean, self.momentum)
                self.var.lerp_(var, self.momentum)
        return ops.indicator_poly(x, self.mask, self.coef, self.aux, residual=residual)

    @torch.no_grad()
    def follow(self, threshold: float) -> None:
        """m ← m·[aux > -threshold] + (1 - m)·[aux > threshold]; removed units stay removed."""
        on = torch.where(self.mask, self.aux > -threshold, self.aux > threshold)
        self.mask.copy_(on & self.allowed)


def count_on(act: IndicatorPoly) -> Tensor:
    """The number of ReLUs that a site keeps; its gradient with respect to aux is softplus(aux).

    >>> act = IndicatorPoly(MaskedPoly(3), torch.zeros(3))
    >>> count_on(act).item()
    3.0
    """
    aux = act.aux
    straight_through = F.softplus(aux.detach()) * (aux - aux.detach())  # 0, with that gradient
    return act.mask.sum() + straight_through.sum()


def twin(net: nn.Module, make: Callable[[Any], MaskedActivation]) -> nn.Module:
    """A network on the net's own parameters and buffers, with make(activation) at every site."""
    shared: dict[int, Any] = {id(t): t for t in (*net.parameters(), *net.buffers())}
    return _replaced(copy.deepcopy(net, shared), make)


def to_poly(net: nn.Module) -> nn.Module:
    """A copy of a net with `MaskedPoly` in place of `MaskedReLU`: the same weights and masks.

    It computes the same as the net: the polynomials start as the identity.

    >>> net = nn.Sequential(nn.Linear(4, 3), fastbcd.MaskedReLU(3))
    >>> to_poly(net)[1]
    MaskedPoly((3,), 3 kept)
    """

    dtype = dtype_of(net)

    def poly(act: MaskedActivation) -> MaskedActivation:
        if not isinstance(act, MaskedReLU):
            return act
        new = MaskedPoly(tuple(act.mask.shape), device=act.mask.device).to(dtype)
        new.mask.copy_(act.mask)
        with torch.no_grad():
            new.coef.copy_(new.coef.new_tensor(IDENTITY)[:, None])
        return new.train(act.training)

    result = _replaced(copy.deepcopy(net), poly)
    if isinstance(getattr(result, "arch", None), dict):
        result.arch = {**result.arch, "replacement": "poly"}  # type: ignore[assignment, dict-item]
    return result


def _replaced(net: nn.Module, make: Callable[[Any], MaskedActivation]) -> nn.Module:
    made: dict[int, MaskedActivation] = {}
    for name, act in list(net.named_modules(remove_duplicate=False)):
        if isinstance(act, MaskedActivation):
            if id(act) not in made:
                made[id(act)] = new = make(act)
                new.order = act.order
            if not name:
                return made[id(act)]
            net.set_submodule(name, made[id(act)])
    return net


def gather(parts: Sequence[Tensor]) -> Tensor:
    """One tensor per site, [*shape] -> all units by their flat ids, on the CPU."""
    return torch.cat([p.detach().flatten().cpu() for p in parts])


def largest(current: MaskSet, values: Tensor, budget: int) -> MaskSet:
    """The `budget` kept units with the largest values, ties by smaller id.

    >>> current = fastbcd.MaskSet.full({"act": (4,)})
    >>> largest(current, torch.tensor([0.1, 0.4, 0.3, 0.4]), 2).bits.tolist()
    [False, True, False, True]
    """
    kept = current.bits.nonzero().flatten()
    order = torch.sort(values[kept], descending=True, stable=True).indices
    bits = torch.zeros_like(current.bits)
    bits[kept[order[:budget]]] = True
    return MaskSet(current.sites, bits)


def check_budget(net: nn.Module, budget: Any) -> None:
    """Refuse what is no module, and a budget that is not a number of ReLUs that it keeps."""
    if not isinstance(net, nn.Module):
        raise TypeError(f"net is a {type(net).__name__}; expected a torch.nn.Module")
    count = masks(net).count()
    check_whole("budget", budget, 0)
    if budget > count:
        raise ValueError(f"budget={budget:,}; the net keeps {count:,} ReLUs, so it is at most that")


def _channels_last(t: Tensor) -> Tensor:
    """A copy of [C, *spatial] with C innermost in memory, as activations lie in training."""
    return t.movedim(0, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 0)
