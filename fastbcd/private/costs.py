"""cost: bytes, rounds and seconds that the kept ReLUs take in private inference of one image.

For a site that keeps n ReLUs and has s squares (removed ReLUs that became quadratics):

    bytes   = n * relu_bytes + s * square_bytes
    rounds  = [n > 0] * relu_rounds + [s > 0] * square_rounds
    seconds = n * relu_seconds + s * square_seconds  +  8 * bytes / bandwidth  +  rounds * rtt

and in all the sum over the sites, with the protocol's set-up. Linear layers are not in it: they
cost the same whatever the masks. Traffic is linear in the ReLUs kept, rounds go by how many sites
keep any; so an emptied site is listed with the rounds that it saves.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import nn

from fastbcd.masking.activations import MaskedPoly
from fastbcd.masking.masks import MaskSet, mask_modules, masks
from fastbcd.private.protocols import Protocol, find_protocol

LAN_BANDWIDTH, LAN_RTT = 1e9, 1e-3  # bits a second, seconds


@dataclass(frozen=True)
class SiteCost:
    """One site. None: the protocol's figure is not known.

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
    saved_rounds: float | None  # by keeping no ReLU; 0 for a site that keeps any
    compute: float | None  # seconds, as are the next two
    transfer: float | None
    latency: float | None

    @property
    def seconds(self) -> float | None:
        """compute + transfer + latency."""
        return _sum([self.compute, self.transfer, self.latency])


@dataclass(frozen=True)
class Cost:
    """The cost by site and in all; prints itself as a table.

    A total is None as soon as one site's is; `known_seconds` adds up what is known.

    >>> c = cost(fastbcd.MaskSet.full({"a": (16, 8, 8)}), "spu-semi2k", bandwidth=1e9)
    >>> c.bytes, c.rounds, round(c.known_seconds, 4)
    (147456.0, None, 0.0045)
    """

    protocol: Protocol
    bandwidth: float  # bits a second
    rtt: float  # seconds
    sites: tuple[SiteCost, ...]

    @property
    def total(self) -> SiteCost:
        """The sites added up, without the set-up."""
        added = {
            f.name: _sum([getattr(s, f.name) for s in self.sites])
            for f in fields(SiteCost)
            if f.name != "name"
        }
        return SiteCost("total", **added)  # type: ignore[arg-type]

    @property
    def relus(self) -> int:
        """ReLUs kept."""
        return self.total.relus

    @property
    def bytes(self) -> float | None:
        """Sent both ways together."""
        return self.total.bytes

    @property
    def rounds(self) -> float | None:
        """Of all sites, one after the other."""
        return self.total.rounds

    @property
    def saved_rounds(self) -> float | None:
        """Rounds that the emptied sites save."""
        return self.total.saved_rounds

    @property
    def emptied(self) -> tuple[SiteCost, ...]:
        """The sites that keep no ReLU."""
        return tuple(s for s in self.sites if s.relus == 0)

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
        """The same without the terms that are not known: a lower bound."""
        terms = [self.setup, *(t for s in self.sites for t in (s.compute, s.transfer, s.latency))]
        return sum(t for t in terms if t is not None)

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; None where a figure is not known."""
        times = {"setup": self.setup, "seconds": self.seconds, "known_seconds": self.known_seconds}
        return {
            "protocol": self.protocol.name,
            "bandwidth": self.bandwidth,
            "rtt": self.rtt,
            "total": {**asdict(self.total), **times},
            "emptied": [s.name for s in self.emptied],
            "sites": [{**asdict(s), "seconds": s.seconds} for s in self.sites],
            "constants": {k: asdict(c) for k, c in self.protocol.constants().items()},
        }

    def __str__(self) -> str:
        return "\n".join([self._head(), *self._table(), *self._emptied(), *self._sources()])

    def _head(self) -> str:
        return (
            f"{self.protocol.name}, {si(self.bandwidth, 'bit/s')}, round trip "
            f"{si(self.rtt, 's')}: {self.relus:,} ReLUs, the activations of one image"
        )

    def _table(self) -> list[str]:
        total = self.total
        names = ["ReLUs", "of", "squares", "bytes", "rounds", "compute", "transfer", "latency",
                 "seconds"]  # fmt: skip
        rows = [["site", *names], *map(_cells, self.sites), _cells(total)]
        rows[-1][-1] = si(self.seconds, "s")  # with the set-up
        if not total.squares:
            rows = [row[:3] + row[4:] for row in rows]
        width = max(len(row[0]) for row in rows)
        lines = [f"  {row[0]:<{width}}" + "".join(f"{c:>11}" for c in row[1:]) for row in rows]
        if self.setup:
            lines.append(f"  {si(self.setup, 's')} of the total is set-up")
        if self.seconds is None:
            lines.append(f"  at least {si(self.known_seconds, 's')}: the rest is unknown")
        return lines

    def _emptied(self) -> list[str]:
        if not self.emptied:
            return []
        saved = _number(self.saved_rounds)
        lines = [f"  {len(self.emptied)} emptied sites save {saved} rounds:"]
        return lines + [f"    {s.name}  {_number(s.saved_rounds)} rounds" for s in self.emptied]

    def _sources(self) -> list[str]:
        used = {
            name: constant
            for name, constant in self.protocol.constants().items()
            if self.total.squares or not name.startswith("square")
        }
        width = max(map(len, used))
        return ["  sources:", *(f"    {name:<{width}}  {c}" for name, c in used.items())]


def cost(
    masks: MaskSet | nn.Module,
    protocol: str | Protocol = "crypten",
    bandwidth: float = LAN_BANDWIDTH,
    rtt: float = LAN_RTT,
    *,
    poly: Collection[str] = (),
) -> Cost:
    """What the activations of one image cost in private inference.

    cost = Σ_sites [n>0]·rounds·RTT + bytes/bandwidth + compute, term by term above. A round counts
    as a whole RTT, which is an upper bound where both parties send at the same time.

    Args:
        masks: the ReLUs kept; a net also says which of its sites are quadratics.
        protocol: "delphi-gc", "crypten", "spu-semi2k", "spu-cheetah" or a `Protocol`.
        bandwidth: bits a second, of both directions together.
        rtt: seconds.
        poly: names of the sites whose removed ReLUs are quadratics, for masks without their net.

    >>> masks = fastbcd.MaskSet.full({"a": (16, 8, 8), "b": (10,)}).without(range(1024, 1034))
    >>> c = cost(masks, "crypten", bandwidth=1e9, rtt=1e-3)
    >>> c.bytes, c.rounds, [(s.name, s.saved_rounds) for s in c.emptied]
    (475136.0, 9.0, [('b', 9)])
    """
    kept, quadratic = _sites(masks, poly)
    chosen = find_protocol(protocol)
    if not (isinstance(bandwidth, int | float) and bandwidth > 0):
        raise ValueError(f"bandwidth={bandwidth!r}; give bits a second, more than 0")
    if not (isinstance(rtt, int | float) and 0 <= rtt < math.inf):
        raise ValueError(f"rtt={rtt!r}; give the round trip in seconds, 0 or more")
    counts = kept.counts()
    sites = [
        _site(chosen, s.name, s.numel, counts[s.name], s.name in quadratic, bandwidth, rtt)
        for s in kept.sites
    ]
    return Cost(chosen, float(bandwidth), float(rtt), tuple(sites))


def _sites(given: MaskSet | nn.Module, poly: Collection[str]) -> tuple[MaskSet, set[str]]:
    if isinstance(given, nn.Module):
        if poly:
            raise ValueError("poly= is for masks without their net; this net says it itself")
        found = mask_modules(given)
        return masks(given), {name for name, m in found.items() if isinstance(m, MaskedPoly)}
    if not isinstance(given, MaskSet):
        raise TypeError(f"masks is a {type(given).__name__}; give a MaskSet or a net with masks")
    unknown = set(poly) - {s.name for s in given.sites}
    if unknown:
        raise ValueError(f"poly names {min(unknown)!r}, which is no site of these masks")
    return given, set(poly)


def _site(
    p: Protocol, name: str, units: int, relus: int, poly: bool, bandwidth: float, rtt: float
) -> SiteCost:
    squares = units - relus if poly else 0
    size = _sum([_times(relus, p.relu_bytes.value), _times(squares, p.square_bytes.value)])
    rounds = _sum([
        _times(int(relus > 0), p.relu_rounds.value),
        _times(int(squares > 0), p.square_rounds.value),
    ])  # fmt: skip
    compute = _sum([_times(relus, p.relu_seconds.value), _times(squares, p.square_seconds.value)])
    return SiteCost(
        name, units, relus, squares, size, rounds, 0 if relus else p.relu_rounds.value, compute,
        None if size is None else 8 * size / bandwidth, None if rounds is None else rounds * rtt,
    )  # fmt: skip


def _times(count: int, value: float | None) -> float | None:
    """Nothing of something unknown costs nothing."""
    if count == 0:
        return 0.0
    return None if value is None else float(count * value)


def _sum(terms: list[float | None]) -> float | None:
    """The sum, or None if a term is not known."""
    known = [t for t in terms if t is not None]
    return sum(known) if len(known) == len(terms) else None


def _cells(site: SiteCost) -> list[str]:
    """A row of the table."""
    times = (site.compute, site.transfer, site.latency, site.seconds)
    counts = (f"{n:,}" for n in (site.relus, site.units, site.squares))
    return [site.name, *counts, si(site.bytes, "B"), _number(site.rounds),
            *(si(t, "s") for t in times)]  # fmt: skip


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,g}"


def si(value: float | None, unit: str) -> str:
    """A value in three digits with its prefix.

    >>> si(87_425_024, "B"), si(2.2e-6, "s"), si(0, "s"), si(None, "s")
    ('87.4 MB', '2.20 µs', '0 s', 'unknown')
    """
    if value is None:
        return "unknown"
    if value == 0:
        return f"0 {unit}"
    prefixes = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T"}
    power = max(-3, min(4, math.floor(math.log10(value) / 3 + 1e-12)))
    if unit == "s":
        power = min(power, 0)
    scaled = value / 1000.0**power
    digits = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
    return f"{scaled:,.{digits}f} {prefixes[power]}{unit}"
