"""cost: bytes, rounds and seconds of the activations of one image in private inference.

For a site that keeps n ReLUs and has s squares (removed ReLUs that became quadratics):

    bytes   = n * relu_bytes + s * square_bytes
    rounds  = [n > 0] * relu_rounds + [s > 0] * square_rounds
    seconds = n * relu_seconds + s * square_seconds  +  8 * bytes / bandwidth  +  rounds * rtt

The total is the same for n ReLUs and s squares of all sites, with the numbers of sites that have
any in place of [n > 0] and [s > 0], plus the protocol's set-up. Linear layers, which cost the same
for all masks, and the other nonlinear operations of a net, which are listed, are not included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch import nn

from fastbcd.descent.budget import Totals
from fastbcd.masking.activations import MaskedPoly
from fastbcd.masking.calls import check_calls
from fastbcd.masking.conversion_report import NonlinearOp, nonlinear_of
from fastbcd.masking.masks import MaskSet, mask_modules
from fastbcd.masking.masks import masks as masks_of
from fastbcd.private.protocols import LAN_BANDWIDTH, LAN_RTT, Channel, Protocol
from fastbcd.private.units import columns, si

TERMS = ("compute", "transfer", "latency")


@dataclass(frozen=True)
class SiteCost:
    """The cost of one site. None: a value of the protocol is unknown.

    >>> site = cost(fastbcd.MaskSet.full({"a": (16, 8, 8)}), "crypten").sites[0]
    >>> site.relus, site.bytes, site.rounds
    (1024, 475136.0, 9.0)
    """

    name: str
    units: int
    relus: int
    squares: int
    bytes: float | None
    rounds: float | None
    saved_rounds: float | None  # of a site that keeps no ReLU; 0 for the others
    compute: float | None  # seconds, as the next two
    transfer: float | None
    latency: float | None

    @property
    def totals(self) -> Totals:
        """Its ReLUs and squares, and whether it has any."""
        return Totals(self.relus, self.squares, self.relus > 0, self.squares > 0)

    @property
    def terms(self) -> tuple[float | None, ...]:
        """The seconds of computation, bytes and rounds."""
        return tuple(getattr(self, term) for term in TERMS)

    @property
    def seconds(self) -> float | None:
        """compute + transfer + latency."""
        return _sum(self.terms)


@dataclass(frozen=True)
class Cost:
    """The cost of each site and in total; `str` gives a table.

    A total is None if the value of one site is; `known_seconds` is the sum of what is known.

    >>> c = cost(fastbcd.MaskSet.full({"a": (16, 8, 8)}), "spu-semi2k", bandwidth="1Gbit")
    >>> c.bytes, c.rounds, round(c.known_seconds, 4)
    (147456.0, None, 0.0045)
    """

    protocol: Protocol
    bandwidth: float  # bits per second
    rtt: float  # seconds
    sites: tuple[SiteCost, ...]
    not_included: tuple[NonlinearOp, ...] = ()

    @cached_property
    def total(self) -> SiteCost:
        """The sum of the sites, without the set-up."""
        nothing = Totals(0, 0, 0, 0)
        columns = zip(nothing, *(site.totals for site in self.sites), strict=True)
        return _priced(
            Channel(self.protocol, self.bandwidth, self.rtt),
            Totals(*map(sum, columns)),
            name="total",
            units=sum(site.units for site in self.sites),
            saved_rounds=_sum(site.saved_rounds for site in self.sites),
        )

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
        """Of all sites, one after the other."""
        return self.total.rounds

    @property
    def saved_rounds(self) -> float | None:
        """By the emptied sites."""
        return self.total.saved_rounds

    @property
    def emptied(self) -> tuple[SiteCost, ...]:
        """The sites that keep no ReLU."""
        return tuple(site for site in self.sites if site.relus == 0)

    @property
    def setup(self) -> float | None:
        """Seconds, once."""
        return self.protocol.setup_seconds.value

    @property
    def seconds(self) -> float | None:
        """setup + compute + transfer + latency."""
        return _sum([self.setup, self.total.seconds])

    @property
    def known_seconds(self) -> float:
        """The seconds without the unknown terms: a lower bound."""
        terms = [term for site in self.sites for term in site.terms]
        return sum(filter(None, [self.setup, *terms]))

    def as_dict(self) -> dict[str, Any]:
        """All values, ready for JSON; None where a value is unknown."""
        totals = ("setup", "seconds", "known_seconds", "saved_rounds")
        return {
            **asdict(self),
            "total": asdict(self.total),
            **{name: getattr(self, name) for name in totals},
        }

    def __str__(self) -> str:
        connection = f"{si(self.bandwidth, 'bit/s')}, round trip {si(self.rtt, 's')}"
        relus = f"{self.relus:,} ReLUs, the activations of one image"
        lines = [f"{self.protocol.name}, {connection}: {relus}"]
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
) -> Cost:
    """The cost of the activations of one image in private inference.

    Args:
        masks: the ReLUs kept, or a net with masks.
        protocol: "delphi-gc", "crypten", "spu-semi2k", "spu-cheetah" or a `Protocol`.
        bandwidth: such as "100Mbit", both directions together. rtt: a round trip, such as "40ms";
            a round counts as a whole one, an upper bound where both parties send at the same time.
        poly: names of the sites whose removed ReLUs are quadratics, if `masks` is not a net.

    >>> masks = fastbcd.MaskSet.full({"a": (16, 8, 8), "b": (10,)}).without(range(1024, 1034))
    >>> c = cost(masks, "crypten", bandwidth="1Gbit", rtt="1ms")
    >>> c.bytes, c.rounds, [(s.name, s.saved_rounds) for s in c.emptied]
    (475136.0, 9.0, [('b', 9)])
    """
    channel = Channel.of(protocol, bandwidth, rtt)
    others: tuple[NonlinearOp, ...] = ()
    if isinstance(masks, nn.Module):
        if poly:
            raise ValueError("poly= is for masks without a net; leave it out")
        check_calls(masks)
        acts = mask_modules(masks)
        poly = [name for name, act in acts.items() if isinstance(act, MaskedPoly)]
        others = nonlinear_of(masks)
        masks = masks_of(masks)
    if not isinstance(masks, MaskSet):
        raise TypeError(f"masks is a {type(masks).__name__}; give a MaskSet or a net with masks")
    unknown = set(poly) - masks.counts().keys()
    if unknown:
        raise ValueError(f"poly names {min(unknown)!r}, which is no site of these masks")
    sites = []
    for site in masks.sites:
        relus = masks.counts()[site.name]
        squares = (site.numel - relus) * (site.name in poly)
        saved = 0 if relus else channel.protocol.relu_rounds.value
        sites.append(
            _priced(
                channel,
                Totals(relus, squares, relus > 0, squares > 0),
                name=site.name,
                units=site.numel,
                saved_rounds=saved,
            )
        )
    return Cost(*channel, tuple(sites), others)


def _priced(channel: Channel, totals: Totals, **facts: Any) -> SiteCost:
    """What so many ReLUs and squares cost, with the other facts of a site."""
    spent: dict[str, Any] = channel.amounts(totals).known()
    return SiteCost(relus=totals.relus, squares=totals.squares, **facts, **spent)


def _sum(terms: Iterable[float | None]) -> float | None:
    """The sum; None if a term is unknown."""
    total: float = 0
    for term in terms:
        if term is None:
            return None
        total += term
    return total


def seconds_text(cost: Cost) -> str:
    """The seconds of a cost, with ≥ if a part of them is unknown."""
    text = si(cost.known_seconds, "s")
    if cost.seconds is None:
        return f"≥ {text}"
    return text


def _rows(cost: Cost) -> list[list[str]]:
    """A row per site and one of the total; squares have a column if there are any."""
    rows = [["site", "ReLUs", "of", "squares", "bytes", "rounds", *TERMS, "seconds"]]
    for site in (*cost.sites, cost.total):
        row = [site.name, f"{site.relus:,}", f"{site.units:,}", f"{site.squares:,}"]
        row += [si(site.bytes, "B"), si(site.rounds)]
        row += [si(seconds, "s") for seconds in site.terms]
        row.append(si(site.seconds, "s"))
        rows.append(row)
    rows[-1][-1] = seconds_text(cost)  # with the set-up
    if not cost.total.squares:
        rows = [row[:3] + row[4:] for row in rows]
    return rows


def _notes(cost: Cost) -> Iterator[tuple[str, list[str]]]:
    """Titles with their lines, below the table."""
    if cost.setup:
        yield f"{si(cost.setup, 's')} of the total is set-up", []
    if cost.emptied:
        saved = [f"{site.name}  {si(site.saved_rounds)} rounds" for site in cost.emptied]
        yield f"{len(saved)} emptied sites save {si(cost.saved_rounds)} rounds:", saved
    if cost.not_included:
        yield "not included, besides linear layers:", [str(other) for other in cost.not_included]
    sources = [f"{name:<14} {constant}" for name, constant in cost.protocol.constants().items()]
    if not cost.total.squares:
        sources = [source for source in sources if not source.startswith("square")]
    yield "sources:", sources
