"""cost: bytes, rounds and seconds of one run of private inference, for one image or several.

For an operation of n units at s sites, or in a linear layer, by its amounts:

    bytes   = n * bytes per unit
    rounds  = s * rounds per site
    seconds = n * seconds per unit  +  8 * bytes / bandwidth  +  rounds * rtt

A site that keeps any ReLU is one site of ReLUs; a site with removed ReLUs that became quadratics or
lines is one site of those. The total is the sum, plus the protocol's set-up. Batch norms are
counted as parts of the layers beside them; gathers send nothing. Images of one run share its
rounds, and the bytes that go by the weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor, nn

from fastbcd.descent.budget import counts_of
from fastbcd.masking.activations import MaskedLine, MaskedPoly
from fastbcd.masking.calls import check_calls
from fastbcd.masking.conversion_report import NonlinearOp, nonlinear_of
from fastbcd.masking.masks import MaskSet, mask_modules
from fastbcd.masking.masks import masks as masks_of
from fastbcd.private.layers import Layer, layers_of
from fastbcd.private.protocols import (
    LAN_BANDWIDTH,
    LAN_RTT,
    UNKNOWN,
    Channel,
    Protocol,
    Spent,
)
from fastbcd.private.units import columns, si
from fastbcd.runtime.validate import check_choice, check_whole

TERMS = ("compute", "transfer", "latency")
OWNERS = ("both", "server")
NOTHING = {"relu": 0, "square": 0, "line": 0}


@dataclass(frozen=True, kw_only=True)
class SiteCost:
    """The cost of a site, of a layer, or of several. None: a value of the protocol is unknown.

    >>> site = cost(fastbcd.MaskSet.full({"a": (16, 8, 8)}), "crypten").sites[0]
    >>> site.relus, site.bytes, site.rounds
    (1024, 475136.0, 9.0)
    """

    name: str
    units: int = 0
    relus: int = 0
    squares: int = 0  # removed ReLUs that became quadratics
    lines: int = 0
    bytes: float | None  # both directions together
    messages: float | None  # each way
    rounds: float | None  # round trips, one after the other
    compute: float | None  # seconds, as the next two
    transfer: float | None
    latency: float | None

    @property
    def terms(self) -> tuple[float | None, ...]:
        """The seconds of computation, bytes and rounds."""
        return tuple(getattr(self, term) for term in TERMS)

    @property
    def seconds(self) -> float | None:
        """compute + transfer + latency."""
        if None in self.terms:
            return None
        return sum(filter(None, self.terms))


@dataclass(frozen=True)
class Cost:
    """The cost of each site, of each linear layer and in total; `str` gives a table.

    A total is None if the value of one part is; `known_seconds` is the sum of what is known.

    >>> c = cost(fastbcd.MaskSet.full({"a": (16, 8, 8)}), "delphi-gc", bandwidth="1Gbit")
    >>> c.bytes, c.rounds, round(c.known_seconds, 4)
    (18685952.0, 1.0, 0.3125)
    """

    protocol: Protocol
    bandwidth: float  # bits per second
    rtt: float  # seconds
    sites: tuple[SiteCost, ...]
    layers: tuple[SiteCost, ...]  # none if only activations are counted
    activations: SiteCost  # the sum of the sites
    linear: SiteCost  # the sum of the layers
    total: SiteCost  # of both, without the set-up
    not_included: tuple[NonlinearOp, ...] = ()
    images: int = 1  # of the run, whose costs these are

    @property
    def per_image(self) -> SiteCost:
        """The total divided by the images of the run.

        >>> net = fastbcd.models.resnet20(num_classes=10, image_size=32)
        >>> one, eight = (cost(net, "crypten", batch=batch) for batch in (1, 8))
        >>> one.rounds, eight.rounds, eight.per_image.rounds
        (192.0, 192.0, 24.0)
        """
        shares: dict[str, Any] = {}
        for name in (*Spent._fields, "transfer", "latency"):
            value = getattr(self.total, name)
            if value is not None:
                value = value / self.images
            shares[name] = value
        return replace(self.total, **shares)

    @property
    def relus(self) -> int:
        """ReLUs kept."""
        return self.total.relus

    @property
    def bytes(self) -> float | None:
        """Sent, both directions together."""
        return self.total.bytes

    @property
    def rounds(self) -> float | None:
        """Of all parts, one after the other."""
        return self.total.rounds

    @property
    def saved_rounds(self) -> float | None:
        """By the emptied sites."""
        spent = Channel(self.protocol, 1, 0).spent(
            "relu", units=0, sites=len(self.emptied)
        )
        return _known(spent.rounds)

    @property
    def emptied(self) -> tuple[SiteCost, ...]:
        """The sites that keep no ReLU."""
        return tuple(site for site in self.sites if site.relus == 0)

    @property
    def setup(self) -> float | None:
        """Seconds, once."""
        return _known(self.protocol.setup_seconds.times({"runs": 1}, "runs"))

    @property
    def seconds(self) -> float | None:
        """setup + compute + transfer + latency."""
        if self.setup is None or self.total.seconds is None:
            return None
        return self.setup + self.total.seconds

    @property
    def known_seconds(self) -> float:
        """The seconds without the unknown terms: a lower bound."""
        terms = [term for part in (*self.sites, *self.layers) for term in part.terms]
        return sum(filter(None, [self.setup, *terms]))

    def as_dict(self) -> dict[str, Any]:
        """All values, ready for JSON; None where a value is unknown."""
        totals = ("setup", "seconds", "known_seconds", "saved_rounds")
        return asdict(self) | {name: getattr(self, name) for name in totals}

    def __str__(self) -> str:
        connection = f"{si(self.bandwidth, 'bit/s')}, round trip {si(self.rtt, 's')}"
        what = "the whole inference" if self.layers else "the activations"
        images = "one image"
        if self.images > 1:
            images = f"{self.images} images"
        lines = [
            f"{self.protocol.name}, {connection}: {self.relus:,} ReLUs, {what} of {images}"
        ]
        lines += [f"  {line}" for line in columns(_rows(self), width=11)]
        for title, items in _notes(self):
            lines.append(f"  {title}")
            lines += [f"    {item}" for item in items]
        return "\n".join(lines)


def cost(
    masks: MaskSet | nn.Module,
    protocol: str | Protocol = "crypten",
    *,
    bandwidth: float | str = LAN_BANDWIDTH,
    rtt: float | str = LAN_RTT,
    poly: Collection[str] = (),
    line: Collection[str] = (),
    weights_of: str = "both",
    images: Tensor | None = None,
    batch: int = 1,
    activations_only: bool = False,
) -> Cost:
    """The cost of one run of private inference.

    Args:
        masks: a net with masks, or the ReLUs kept: of these the activations are counted alone.
        protocol: "delphi-gc", "crypten", "spu-semi2k", "spu-cheetah" or a `Protocol`.
        bandwidth: such as "100Mbit", both directions together.
        rtt: a round trip, such as "40ms".
        poly, line: names of the sites whose removed ReLUs are quadratics or lines, if `masks` is
            not a net.
        weights_of: "both" parties, which hold shares of them, or the "server".
        images: like those that the net takes, [B, ...]; needed if it was not used with any so far.
        batch: images of the run, which share rounds; `per_image` of the result divides by them.
        activations_only: leave out linear layers, max-pools and all else but masked ReLUs.

    >>> masks = fastbcd.MaskSet.full({"a": (16, 8, 8), "b": (10,)}).without(range(1024, 1034))
    >>> c = cost(masks, "crypten", bandwidth="1Gbit", rtt="1ms")
    >>> c.bytes, c.rounds, [s.name for s in c.emptied], c.saved_rounds
    (475136.0, 9.0, ['b'], 9.0)
    >>> c = cost(fastbcd.models.resnet20(num_classes=10, image_size=32), "crypten")
    >>> c.linear.bytes, c.linear.rounds, c.activations.rounds
    (7292832.0, 21.0, 171.0)
    """
    channel = Channel.of(protocol, bandwidth, rtt)
    check_choice("weights_of", weights_of, OWNERS)
    check_whole("batch", batch, 1)
    kinds = dict.fromkeys(poly, "square") | dict.fromkeys(line, "line")
    if isinstance(masks, MaskSet):
        unknown = kinds.keys() - masks.counts().keys()
        if unknown:
            raise ValueError(
                f"{min(unknown)!r} of poly or line is no site of these masks"
            )
        return _summed(channel, masks, kinds, batch)
    if not isinstance(masks, nn.Module):
        raise TypeError(
            f"masks is a {type(masks).__name__}; give a MaskSet or a net with masks"
        )
    if kinds:
        raise ValueError("poly= and line= are for masks without a net; leave them out")
    check_calls(masks)
    kept = masks_of(masks)
    others = nonlinear_of(masks)
    if activations_only:
        return _summed(channel, kept, kinds_of(masks), batch, others=others)
    layers = spent_on(channel, layers_of(masks, images, batch), weights_of)
    others = tuple(op for op in others if not op.comparisons)
    return _summed(channel, kept, kinds_of(masks), batch, layers, others)


def _summed(
    channel: Channel,
    masks: MaskSet,
    kinds: Mapping[str, str],
    batch: int,
    layers: Mapping[str, Spent] = MappingProxyType({}),
    others: tuple[NonlinearOp, ...] = (),
) -> Cost:
    """The cost of each part and of all."""
    sizes = np.array([site.numel for site in masks.sites])
    counts = _counts(masks, kinds)
    units = {kind: batch * n for kind, n in counts.items()}
    each = channel.activations(units, {kind: n > 0 for kind, n in counts.items()})
    totals = {kind: n.sum() for kind, n in counts.items()}
    used = {kind: (n > 0).sum() for kind, n in counts.items()}
    all_units = {kind: n.sum() for kind, n in units.items()}
    activations = channel.activations(all_units, used)
    linear = Spent().plus(layers.values())
    sites = []
    for i, site in enumerate(masks.sites):
        spent = Spent(*(column[i] for column in each))
        here = {kind: n[i] for kind, n in counts.items()}
        sites.append(_priced(channel, site.name, spent, sizes[i], here))
    return Cost(
        *channel,
        sites=tuple(sites),
        layers=tuple(_priced(channel, name, spent) for name, spent in layers.items()),
        activations=_priced(channel, "activations", activations, sizes.sum(), totals),
        linear=_priced(channel, "layers", linear),
        total=_priced(
            channel, "total", activations.plus([linear]), sizes.sum(), totals
        ),
        not_included=others,
        images=batch,
    )


def _counts(masks: MaskSet, kinds: Mapping[str, str]) -> dict[str, np.ndarray]:
    """At each site, the ReLUs and what removed ReLUs became."""
    relus = counts_of(masks)
    counts = {"relu": relus}
    for kind in ("square", "line"):
        here = [kinds.get(site.name) == kind for site in masks.sites]
        counts[kind] = np.where(here, [site.numel for site in masks.sites] - relus, 0)
    return counts


def kinds_of(net: nn.Module) -> dict[str, str]:
    """What the removed ReLUs of each site are, if that is "square" or "line"."""
    kinds = {}
    for name, act in mask_modules(net).items():
        if isinstance(act, MaskedPoly):
            kinds[name] = "square"
        elif isinstance(act, MaskedLine):
            kinds[name] = "line"
    return kinds


def spent_on(
    channel: Channel, layers: Iterable[Layer], weights_of: str
) -> dict[str, Spent]:
    """What layers spend, by name."""
    spent: dict[str, Spent] = {}
    for name, kind, amounts in layers:
        if kind == "layer" and weights_of == "server":
            kind = "owned"
        before = spent.get(name, Spent())
        spent[name] = before.plus([channel.spent(kind, **amounts)])
    return spent


def _priced(
    channel: Channel,
    name: str,
    spent: Spent,
    units: int = 0,
    counts: Mapping[str, Any] = NOTHING,
) -> SiteCost:
    return SiteCost(
        name=name,
        units=int(units),
        relus=int(counts["relu"]),
        squares=int(counts["square"]),
        lines=int(counts["line"]),
        transfer=_known(channel.transfer(spent)),
        latency=_known(channel.latency(spent)),
        **{quantity: _known(value) for quantity, value in spent._asdict().items()},
    )


def _known(value: Any) -> float | None:
    if math.isnan(value):
        return None
    return float(value)


def seconds_text(cost: Cost) -> str:
    """The seconds of a cost, with ≥ if a part of them is unknown."""
    text = si(cost.known_seconds, "s")
    if cost.seconds is None:
        return f"≥ {text}"
    return text


def _rows(cost: Cost) -> list[list[str]]:
    """A row per site and layer, and their sums; squares have a column if there are any."""
    rows = [["site", "ReLUs", "of", "squares", "bytes", "rounds", *TERMS, "seconds"]]
    parts = [*cost.sites, *cost.layers]
    if cost.layers:
        parts += [cost.activations, cost.linear]
    for part in [*parts, cost.total]:
        row = [part.name, "", "", ""]
        if part.units:
            row[1:] = [f"{part.relus:,}", f"{part.units:,}", f"{part.squares:,}"]
        row += [si(part.bytes, "B"), si(part.rounds)]
        row += [si(seconds, "s") for seconds in (*part.terms, part.seconds)]
        rows.append(row)
    rows[-1][-1] = seconds_text(cost)  # with the set-up
    if not cost.total.squares:
        rows = [row[:3] + row[4:] for row in rows]
    return rows


def _notes(cost: Cost) -> Iterator[tuple[str, list[str]]]:
    """Titles with their lines, below the table."""
    if cost.setup:
        yield f"{si(cost.setup, 's')} of the total is set-up", []
    if cost.images > 1:
        part = cost.per_image
        figures = f"{si(part.bytes, 'B')}, {si(part.rounds)} rounds"
        yield f"for each image: {figures}, {si(part.seconds, 's')}", []
    if cost.emptied:
        names = [site.name for site in cost.emptied]
        yield f"{len(names)} emptied sites save {si(cost.saved_rounds)} rounds:", names
    if cost.not_included:
        besides = "" if cost.layers else ", besides linear layers"
        yield f"not included{besides}:", [str(other) for other in cost.not_included]
    used = {
        "relu": True,
        "square": cost.total.squares,
        "line": cost.total.lines,
        "setup": True,
    }
    sources = []
    for name, constant in cost.protocol.constants().items():
        if used.get(name.partition("_")[0], cost.layers) and constant is not UNKNOWN:
            sources.append(f"{name:<15} {constant}")
    yield "sources:", sources
