"""activation_ranges: the values before each activation, to choose a fixed-point format.

Private inference computes in fixed point: b bits, f of them after the point. With few ReLUs left
activations can grow beyond that range, and the result is then wrong without an error.
"""

from __future__ import annotations

import math
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.data.for_net import data_for
from fastbcd.masking.activations import MaskedPoly
from fastbcd.masking.masks import mask_modules
from fastbcd.private.units import columns
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.runtime.module_mode import eval_mode

QUANTILES = (0.5, 0.99, 0.999)
# |z| is binned by the upper 16 bits of its float32: bins of 1/128 of a value or less.
_SHIFT = 16
_BINS = 1 << 15


@dataclass(frozen=True)
class SiteRange:
    """The values z that reach one site's activation.

    >>> site = SiteRange("relu", low=-3.0, high=2.0, quantiles=(0.5, 2.0, 2.5), limit=2.5)
    >>> site.largest, site.fits
    (3.0, False)
    """

    name: str
    low: float
    high: float
    quantiles: tuple[float, ...]  # of |z| at QUANTILES, rounded up by less than 1 %
    limit: float | None  # the largest |z| that the fixed-point format holds here

    @property
    def largest(self) -> float:
        """The largest |z|; NaN if there was one."""
        if math.isnan(self.low):
            return math.nan
        return max(abs(self.low), abs(self.high))

    @property
    def fits(self) -> bool:
        """Whether all values are finite and, if a format was given, inside its range."""
        return self.largest < (self.limit or math.inf)

    @property
    def mark(self) -> str:
        """What is wrong, in a few words."""
        if self.fits:
            return ""
        if not math.isfinite(self.largest):
            return "not finite"
        return f"outside ±{self.limit:.4g}"


@dataclass(frozen=True)
class Ranges:
    """The ranges of all sites; `str` gives a table.

    >>> print(Ranges((SiteRange("relu", -3.0, 2.0, (0.5, 2.0, 2.5), None),)))
    site         min         max   |z| 50.0%   |z| 99.0%   |z| 99.9%
    relu          -3           2         0.5           2         2.5
    """

    sites: tuple[SiteRange, ...]

    def __str__(self) -> str:
        rows = [["site", "min", "max", *(f"|z| {share:.1%}" for share in QUANTILES)]]
        for site in self.sites:
            row = [site.name]
            for value in (site.low, site.high, *site.quantiles):
                row.append(f"{value:.4g}")
            rows.append([*row, f"  {site.mark}"])
        return "\n".join(columns(rows, width=12))


def activation_ranges(
    net: nn.Module,
    data: Any,
    batch_size: int = 250,
    *,
    fixed_point: tuple[int, int] | None = None,
) -> Ranges:
    """Smallest, largest and typical values before each activation over all images, in eval mode.

    fixed_point: (bits, fraction bits), such as (64, 16). Values must stay below
    2^(bits - 1 - fraction), and z² with twice the fraction bits must too at sites with quadratics.
    Other sites are marked, and a warning names the worst.

    >>> net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(4))
    >>> x = torch.tensor([-2.0, 0.0, 0.5, 1.0]).view(1, 1, 2, 2)
    >>> activation_ranges(net, (x, torch.tensor([0]))).sites[0].low
    -2.0
    """
    modules = mask_modules(net)
    limits = {name: _limit(module, fixed_point) for name, module in modules.items()}
    images = data_for(net, data)
    values = {name: _Values(images.device) for name in modules}
    with ExitStack() as stack, eval_mode(net), torch.inference_mode():
        for name, module in modules.items():
            stack.callback(module.register_forward_pre_hook(values[name].add).remove)
        for x, _ in images.batches(batch_size, dtype=dtype_of(net)):
            net(x)
    sites = tuple(values[name].summary(name, limit) for name, limit in limits.items())
    outside = [site for site in sites if not site.fits]
    if outside:
        infinite = [site for site in outside if not math.isfinite(site.largest)]
        worst = max(infinite or outside, key=lambda site: site.largest)
        way = (
            "use fewer fraction bits or more bits, or fine-tune with more weight decay"
        )
        if infinite:
            way = "the net itself overflows; look at its weights and batch norms"
        seen = (
            f"site {worst.name!r} sees values from {worst.low:.4g} to {worst.high:.4g}"
        )
        text = f"{len(outside)} sites leave the range; {seen}, {worst.mark}: {way}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return Ranges(sites)


def _limit(module: nn.Module, fixed_point: tuple[int, int] | None) -> float | None:
    """The bound of |z| at a site: |z| 2^f < 2^(b-1), and with squares z² 2^(2f) < 2^(b-1)."""
    if fixed_point is None:
        return None
    try:
        bits, fraction = fixed_point
        valid = 0 < fraction < bits - 1
    except (TypeError, ValueError):
        valid = False
    if not valid:
        form = "(bits, fraction bits), such as (64, 16), with 0 < fraction < bits - 1"
        raise ValueError(f"fixed_point={fixed_point!r}; give {form}")
    if isinstance(module, MaskedPoly) and not bool(module.mask.all()):
        return 2.0 ** ((bits - 1) / 2 - fraction)
    return 2.0 ** (bits - 1 - fraction)


class _Values:
    """Extremes and a histogram of |z|; the order of the batches does not matter."""

    def __init__(self, device: torch.device) -> None:
        self.low = torch.tensor(math.inf, device=device)
        self.high = torch.tensor(-math.inf, device=device)
        self.counts = torch.zeros(_BINS, dtype=torch.int64, device=device)

    def add(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Count the values that reach the activation: a forward pre-hook."""
        z = inputs[0].detach().float().flatten()
        self.low = torch.minimum(self.low, z.min())
        self.high = torch.maximum(self.high, z.max())
        bins = z.abs().view(torch.int32) >> _SHIFT
        self.counts += torch.bincount(bins, minlength=_BINS)

    def summary(self, name: str, limit: float | None) -> SiteRange:
        """All that was counted."""
        low = float(self.low)
        high = float(self.high)
        if low > high:
            raise ValueError(
                f"site {name!r} was not reached by any image; is it used in forward?"
            )
        below = self.counts.cumsum(0).cpu()
        total = int(below[-1])
        ranks = torch.tensor([math.ceil(share * total) for share in QUANTILES])
        bins = torch.searchsorted(below, ranks).to(torch.int32)
        edges = (bins + 1 << _SHIFT) - 1  # the largest float32 of each bin, as bits
        quantiles = edges.view(torch.float32).double()
        quantiles = quantiles.clamp(max=max(abs(low), abs(high)))
        return SiteRange(name, low, high, tuple(quantiles.tolist()), limit)
