"""ranges: the values of a net, and whether an engine's fixed-point numbers hold them.

Private inference computes in fixed point: b bits, f of them after the point. With few ReLUs left
activations can grow beyond that range, and the result is then wrong without an error. A product
has 2 f bits after the point until it is truncated, so layers have smaller limits than activations.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.data.for_net import data_for
from fastbcd.data.images import ImageData
from fastbcd.graph.trace import logits_of
from fastbcd.masking.activations import MaskedPoly
from fastbcd.masking.masks import mask_modules
from fastbcd.private.units import columns
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.runtime.module_mode import eval_mode
from fastbcd.runtime.validate import check_choice

QUANTILES = (0.5, 0.99, 0.999)
PRODUCTS = (nn.Conv1d, nn.Conv2d, nn.Linear)
WIDTHS = (8, 16, 32)
# Bits that an engine needs above a value: SPU's and OpenCheetah's truncations are silently wrong
# from |x| >= 2^(bits - 2) and 2^(bits - 3) on.
HEADROOM = {"crypten": 1, "spu-semi2k": 2, "spu-cheetah": 2, "opencheetah": 3}
FORMATS: dict[str | None, tuple[int, int]] = {"opencheetah": (37, 12)}
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
    # Of narrow comparisons: the bits (low, high) of each site; percent of images with all bits,
    # and with these.
    windows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    accuracies: tuple[float, ...] = ()

    def __str__(self) -> str:
        rows = [["site", "min", "max", *(f"|z| {share:.1%}" for share in QUANTILES)]]
        for site in self.sites:
            row = [site.name]
            for value in (site.low, site.high, *site.quantiles):
                row.append(f"{value:.4g}")
            rows.append([*row, f"  {site.mark}"])
        return "\n".join(columns(rows, width=12))


def ranges(
    net: nn.Module,
    data: Any,
    engine: str | None = None,
    *,
    fixed_point: tuple[int, int] | None = None,
    narrow: int | None = None,
    test: Any = None,
    batch_size: int = 250,
) -> Ranges:
    """Smallest, largest and typical values before each activation over all images, in eval mode.

    Args:
        engine: refuse a net that has values outside of this engine's numbers, of any layer:
            "crypten", "spu-semi2k", "spu-cheetah" or "opencheetah".
        fixed_point: (bits, fraction bits), such as (64, 16). Without an engine values must stay
            below 2^(bits - 1 - fraction), and z² with twice the fraction bits must too at sites
            with quadratics; a warning names the worst. None: the engine's default.
        narrow: 8, 16 or 32: the bits that a comparison is to read. The result has a window of
            bits for each site, as `run` takes them, and what it costs in accuracy.
        test: held-out images for that accuracy; None: data.

    >>> net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(4))
    >>> x = torch.tensor([-2.0, 0.0, 0.5, 1.0]).view(1, 1, 2, 2)
    >>> found = ranges(net, (x, torch.tensor([2])), "crypten", narrow=16)
    >>> found.sites[0].low, found.windows, found.accuracies
    (-2.0, {'1': (3, 19)}, (0.0, 0.0))
    """
    check_choice("narrow", narrow, (None, *WIDTHS))
    if engine is not None:
        check_choice("engine", engine, tuple(HEADROOM))
    if fixed_point is None and (engine or narrow):
        fixed_point = FORMATS.get(engine, (64, 16))
    limits = _limits(net, engine, fixed_point)
    images = data_for(net, data)
    results = _observed(net, images, batch_size, limits)
    _judge(results, engine)
    found = Ranges(tuple(results[: len(mask_modules(net))]))
    if narrow is None or fixed_point is None:
        return found
    windows = {
        site.name: window(site.largest, narrow, fixed_point[1]) for site in found.sites
    }
    held_out = images if test is None else data_for(net, test)
    accuracies = tuple(
        narrow_accuracy(net, held_out, chosen, fixed_point[1])
        for chosen in ({}, windows)
    )
    return Ranges(found.sites, windows, accuracies)


def _limits(
    net: nn.Module, engine: str | None, fixed_point: tuple[int, int] | None
) -> dict[str, float | None]:
    """The largest |z| at each site and, for an engine, of what each layer gives."""
    limits = {name: _limit(act, fixed_point) for name, act in mask_modules(net).items()}
    if engine is None or fixed_point is None:
        return limits
    bits, fraction = fixed_point
    above = bits - HEADROOM[engine]
    limits = dict.fromkeys(limits, 2.0 ** (above - fraction))
    for name, layer in net.named_modules():
        if isinstance(layer, PRODUCTS):
            limits[name] = 2.0 ** (above - 2 * fraction)
    return limits


def _observed(
    net: nn.Module, images: ImageData, batch_size: int, limits: dict[str, float | None]
) -> list[SiteRange]:
    """The values at the sites and layers that have a limit, over all images."""
    sites: dict[str, nn.Module] = dict(mask_modules(net))
    values = {name: _Values(images.device) for name in limits}
    with ExitStack() as stack, eval_mode(net), torch.inference_mode():
        for name, counted in values.items():
            if name in sites:
                hook = sites[name].register_forward_pre_hook(counted.add)
            else:
                layer = net.get_submodule(name)
                hook = layer.register_forward_hook(counted.add_output)
            stack.callback(hook.remove)
        for x, _ in images.batches(batch_size, dtype=dtype_of(net)):
            net(x)
    return [values[name].summary(name, limit) for name, limit in limits.items()]


def _judge(results: list[SiteRange], engine: str | None) -> None:
    """Refuse values outside of the engine's numbers; without an engine, warn of them."""
    outside = [each for each in results if not each.fits]
    if not outside:
        return
    infinite = [each for each in outside if not math.isfinite(each.largest)]
    worst = max(infinite or outside, key=lambda each: each.largest / (each.limit or 1))
    way = "use fewer fraction bits or more bits, or fine-tune with more weight decay"
    if infinite:
        way = "the net itself overflows; look at its weights and batch norms"
    seen = f"{worst.name!r} sees values from {worst.low:.4g} to {worst.high:.4g}"
    if engine is not None:
        raise ValueError(
            f"{engine} would compute wrong logits: {len(outside)} layers leave its numbers; layer "
            f"{seen}, {worst.mark}: {way}"
        )
    text = f"{len(outside)} sites leave the range; site {seen}, {worst.mark}: {way}"
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def window(largest: float, width: int, fraction: int) -> tuple[int, int]:
    """The bits (low, high) that decide the sign of values up to this, the highest of them.

    >>> window(2.0, 16, 16)  # 2 * 2^16 < 2^(19 - 1)
    (3, 19)
    """
    high = math.frexp(largest * 2.0**fraction)[1] + 1
    low = max(0, high - width)
    return low, low + width


@torch.inference_mode()
def narrow_accuracy(
    net: nn.Module, images: Any, windows: dict[str, tuple[int, int]], fraction: int
) -> float:
    """The accuracy in percent if comparisons read these bits, emulated in plaintext.

    A comparison of two shares without their lowest bits misses their carry, so that values
    from 0 to 2^(low - fraction) may be taken for negative.
    """
    generator = torch.Generator(images.device).manual_seed(0)

    def compare(
        act: Any, inputs: tuple[Tensor, ...], output: Tensor, *, low: int
    ) -> Tensor:
        units = inputs[0] * 2.0 ** (fraction - low)
        whole = units.floor()
        drawn = torch.rand(units.shape, generator=generator, device=units.device)
        negative = whole - (drawn > units - whole).to(units.dtype) < 0
        kept = inputs[0].masked_fill(negative, 0.0)
        return torch.where(act.mask, kept, output)

    correct = 0
    with ExitStack() as stack, eval_mode(net):
        for name, (low, _) in windows.items():
            hook = partial(compare, low=low)
            stack.callback(mask_modules(net)[name].register_forward_hook(hook).remove)
        for x, labels in images.batches(250, dtype=dtype_of(net)):
            correct += int((logits_of(net(x)).argmax(1) == labels).sum())
    return 100 * correct / len(images)


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
        self.count(inputs[0])

    def add_output(
        self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> None:
        """Count the values that a layer gives: a forward hook."""
        self.count(output)

    def count(self, values: Tensor) -> None:
        """Count values."""
        z = values.detach().float().flatten()
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
