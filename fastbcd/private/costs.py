"""cost: bytes, rounds and seconds of the activations of one image in private inference.

For a site that keeps n ReLUs and has s squares (removed ReLUs that became quadratics):

    bytes   = n * relu_bytes + s * square_bytes
    rounds  = [n > 0] * relu_rounds + [s > 0] * square_rounds
    seconds = n * relu_seconds + s * square_seconds  +  8 * bytes / bandwidth  +  rounds * rtt

The total is the same for n ReLUs and s squares of all sites, with the numbers of sites that have
any in place of [n > 0] and [s > 0], plus the protocol's set-up. Linear layers, which cost the same
for all masks, and the other nonlinear operations of a net, which are listed, are not included.

protocols.json holds what a ReLU costs in the protocols known by name, each value with its source.
An unknown value is None, and everything that depends on it is unknown too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from importlib import resources
from typing import Any

import numpy as np
from torch import nn

from fastbcd.masking.activations import MaskedPoly
from fastbcd.masking.masks import MaskSet, mask_modules
from fastbcd.masking.masks import masks as masks_of
from fastbcd.masking.missed_relus import NonlinearOp
from fastbcd.private.units import bits_per_second, in_seconds

LAN_BANDWIDTH: float = 1e9  # bits per second
LAN_RTT: float = 1e-3  # seconds
TERMS = {"rounds": "latency", "bytes": "transfer", "computation": "compute"}  # of a site's seconds


@dataclass(frozen=True)
class Constant:
    """A value and its source. None: the value is unknown.

    >>> print(Constant(464, "measured"))
    464 (measured)
    """

    value: float | None
    source: str

    def __post_init__(self) -> None:
        if self.value is not None and not 0 <= self.value < math.inf:
            wrong = f"a cost cannot be {self.value} ({self.source})"
            raise ValueError(f"{wrong}: give a number of 0 or more, or None if it is unknown")

    def __str__(self) -> str:
        return f"{'unknown' if self.value is None else format(self.value, ',g')} ({self.source})"


UNKNOWN, NO_SETUP = Constant(None, "not stated by any source"), Constant(0, "nothing is set up")


@dataclass(frozen=True)
class Protocol:
    """The cost of ReLUs and squares between two parties.

    Bytes (both directions together) and seconds are per unit. Rounds are per site, for any number
    of units, which are evaluated together. A square is a removed ReLU that became a quadratic with
    public coefficients.

    >>> ours = [Constant(figure, "our prototype") for figure in (120, 1e-6, 2)]
    >>> fastbcd.private.cost(fastbcd.MaskSet.full({"a": (1000,)}), Protocol("ours", *ours)).bytes
    120000.0
    """

    name: str
    relu_bytes: Constant
    relu_seconds: Constant
    relu_rounds: Constant
    square_bytes: Constant = UNKNOWN
    square_seconds: Constant = UNKNOWN
    square_rounds: Constant = UNKNOWN
    setup_seconds: Constant = NO_SETUP

    def __post_init__(self) -> None:
        for name, c in self.constants().items():
            if not isinstance(c, Constant):
                where = f"{name} of protocol {self.name!r}"
                raise TypeError(f"{where} is {c!r}; give Constant(value, source)")

    def constants(self) -> dict[str, Constant]:
        """The values by name.

        >>> PROTOCOLS["crypten"].constants()["relu_rounds"].value
        9
        """
        return {f.name: getattr(self, f.name) for f in fields(self)[1:]}


_FILE = resources.files("fastbcd.private") / "protocols.json"
PROTOCOLS = {
    name: Protocol(name, **{key: Constant(*pair) for key, pair in constants.items()})
    for name, constants in json.loads(_FILE.read_text(encoding="utf-8")).items()
}


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
    def seconds(self) -> float | None:
        """compute + transfer + latency."""
        return _sum([self.compute, self.transfer, self.latency])


@dataclass(frozen=True)
class Cost:
    """The cost of each site and in total; `str` gives a table.

    A total is None if the value of one site is; `known_seconds` is the sum of what is known.

    >>> c = cost(fastbcd.MaskSet.full({"a": (16, 8, 8)}), "spu-semi2k", bandwidth=1e9)
    >>> c.bytes, c.rounds, round(c.known_seconds, 4)
    (147456.0, None, 0.0045)
    """

    protocol: Protocol
    bandwidth: float  # bits per second
    rtt: float  # seconds
    sites: tuple[SiteCost, ...]
    not_included: tuple[NonlinearOp, ...] = ()
    total: SiteCost = field(init=False, repr=False)  # the sum of the sites, without the set-up
    relus: int = field(init=False, repr=False)  # kept
    bytes: float | None = field(init=False, repr=False)  # sent, both directions together
    rounds: float | None = field(init=False, repr=False)  # of all sites, one after the other
    saved_rounds: float | None = field(init=False, repr=False)  # by the emptied sites
    emptied: tuple[SiteCost, ...] = field(init=False, repr=False)  # the sites that keep no ReLU
    setup: float | None = field(init=False, repr=False)  # seconds, once
    seconds: float | None = field(init=False, repr=False)  # setup + compute + transfer + latency
    known_seconds: float = field(
        init=False, repr=False
    )  # seconds without the unknown terms: a lower bound

    def __post_init__(self) -> None:
        sites, setup = self.sites, self.protocol.setup_seconds.value
        relus, squares = sum(s.relus for s in sites), sum(s.squares for s in sites)
        total = SiteCost(
            "total", sum(s.units for s in sites), relus, squares,
            saved_rounds=_sum(s.saved_rounds for s in sites),
            **amounts(
                self.protocol, relus, squares, sum(s.relus > 0 for s in sites),
                sum(s.squares > 0 for s in sites), bandwidth=self.bandwidth, rtt=self.rtt,
            ),
        )  # fmt: skip
        terms = [setup, *(t for s in sites for t in (s.compute, s.transfer, s.latency))]
        vars(self).update(
            {name: getattr(total, name) for name in ("relus", "bytes", "rounds", "saved_rounds")},
            total=total, emptied=tuple(s for s in sites if s.relus == 0), setup=setup,
            seconds=_sum([setup, total.seconds]), known_seconds=sum(filter(None, terms)),
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """All values, ready for JSON; None where a value is unknown."""
        times = {"setup": self.setup, "seconds": self.seconds, "known_seconds": self.known_seconds}
        return {
            "protocol": self.protocol.name, "bandwidth": self.bandwidth, "rtt": self.rtt,
            "total": {**asdict(self.total), **times},
            "emptied": [s.name for s in self.emptied],
            "sites": [{**asdict(s), "seconds": s.seconds} for s in self.sites],
            "not_included": [asdict(op) for op in self.not_included],
            "constants": {k: asdict(c) for k, c in self.protocol.constants().items()},
        }  # fmt: skip

    def __str__(self) -> str:
        header = ["site", "ReLUs", "of", "squares", "bytes", "rounds", "compute", "transfer",
                  "latency", "seconds"]  # fmt: skip
        rows = [header, *map(_cells, (*self.sites, self.total))]
        rows[-1][-1] = si(self.seconds, "s")  # with the set-up
        constants = self.protocol.constants()
        if not self.total.squares:
            rows = [row[:3] + row[4:] for row in rows]
            constants = {k: c for k, c in constants.items() if not k.startswith("square")}
        width, wide = max(len(row[0]) for row in rows), max(map(len, constants))
        notes: dict[str, list[str]] = {}  # by their title
        if self.known_seconds:
            named = ", ".join(f"{mark} {name}" for mark, name in zip(MARKS, TERMS, strict=True))
            known = "" if self.seconds is not None else ", as far as it is known"
            notes[f"time by site{known}: {named}"] = _bars(self.sites)
        if self.setup:
            notes[f"{si(self.setup, 's')} of the total is set-up"] = []
        if self.seconds is None:
            notes[f"at least {si(self.known_seconds, 's')}: the rest is unknown"] = []
        if self.emptied:
            saved = [f"{s.name}  {si(s.saved_rounds)} rounds" for s in self.emptied]
            notes[f"{len(saved)} emptied sites save {si(self.saved_rounds)} rounds:"] = saved
        if self.not_included:
            notes["not included, besides linear layers:"] = list(map(str, self.not_included))
        notes["sources:"] = [f"{k:<{wide}}  {c}" for k, c in constants.items()]
        lines = [
            f"{self.protocol.name}, {si(self.bandwidth, 'bit/s')}, round trip "
            f"{si(self.rtt, 's')}: {self.relus:,} ReLUs, the activations of one image",
            *(f"  {row[0]:<{width}}" + "".join(f"{c:>11}" for c in row[1:]) for row in rows),
        ]
        for title, items in notes.items():
            lines += [f"  {title}", *(f"    {item}" for item in items)]
        return "\n".join(lines)


def cost(
    masks: MaskSet | nn.Module, protocol: str | Protocol = "crypten", *,
    bandwidth: float | str = LAN_BANDWIDTH, rtt: float | str = LAN_RTT, poly: Collection[str] = (),
) -> Cost:  # fmt: skip
    """The cost of the activations of one image in private inference.

    Args:
        masks: the ReLUs kept, or a net with masks.
        protocol: "delphi-gc", "crypten", "spu-semi2k", "spu-cheetah" or a `Protocol`.
        bandwidth: bits per second or "100Mbit", both directions together. rtt: round trip in
            seconds or "40ms"; a round counts as a whole one, an upper bound where both parties
            send at the same time.
        poly: names of the sites whose removed ReLUs are quadratics, if `masks` is not a net.

    >>> masks = fastbcd.MaskSet.full({"a": (16, 8, 8), "b": (10,)}).without(range(1024, 1034))
    >>> c = cost(masks, "crypten", bandwidth=1e9, rtt=1e-3)
    >>> c.bytes, c.rounds, [(s.name, s.saved_rounds) for s in c.emptied]
    (475136.0, 9.0, [('b', 9)])
    """
    chosen, speed, rtt = find_protocol(protocol), bits_per_second(bandwidth), in_seconds(rtt)
    nets: list[nn.Module] = []
    if isinstance(masks, nn.Module):
        if poly:
            raise ValueError("poly= is for masks without a net; leave it out")
        nets = list(masks.modules())
        poly = [name for name, m in mask_modules(masks).items() if isinstance(m, MaskedPoly)]
        masks = masks_of(masks)
    if not isinstance(masks, MaskSet):
        raise TypeError(f"masks is a {type(masks).__name__}; give a MaskSet or a net with masks")
    unknown = set(poly) - {s.name for s in masks.sites}
    if unknown:
        raise ValueError(f"poly names {min(unknown)!r}, which is no site of these masks")
    sites = []
    for site, relus in zip(masks.sites, masks.counts().values(), strict=True):
        squares = site.numel - relus if site.name in poly else 0
        saved = 0 if relus else chosen.relu_rounds.value
        spent = amounts(chosen, relus, squares, relus > 0, squares > 0, bandwidth=speed, rtt=rtt)
        sites.append(SiteCost(site.name, site.numel, relus, squares, saved_rounds=saved, **spent))
    reports: list[Any] = [getattr(m, "conversion_report", None) for m in nets]
    others = tuple(op for report in reports if report for op in report.nonlinear)
    return Cost(chosen, speed, rtt, tuple(sites), others)


def amounts(
    protocol: Protocol, relus: Any, squares: Any, relu_sites: Any, square_sites: Any, *,
    bandwidth: float, rtt: float,
) -> dict[str, Any]:  # fmt: skip
    """bytes, rounds, compute, transfer and latency of so many units; None: unknown.

    relu_sites and square_sites: the number of sites that have any. All may be arrays.

    >>> amounts(PROTOCOLS["crypten"], 1000, 0, 2, 0, bandwidth=1e9, rtt=0.01)["latency"]
    0.18
    """

    def figure(kind: str, n: Any, s: Any) -> Any:
        total = 0.0 * n
        for count, value in (
            (n, getattr(protocol, f"relu_{kind}").value),
            (s, getattr(protocol, f"square_{kind}").value),
        ):
            if np.any(count):  # what is not used costs 0, even if its value is unknown
                if value is None:
                    return None
                total = total + count * value
        return total

    size, rounds = figure("bytes", relus, squares), figure("rounds", relu_sites, square_sites)
    return {
        "bytes": size, "rounds": rounds, "compute": figure("seconds", relus, squares),
        "transfer": None if size is None else 8 * size / bandwidth,
        "latency": None if rounds is None else rounds * rtt,
    }  # fmt: skip


def find_protocol(protocol: str | Protocol) -> Protocol:
    """The protocol of this name, or the given one."""
    if isinstance(protocol, Protocol):
        return protocol
    if protocol not in PROTOCOLS:
        near = get_close_matches(str(protocol), PROTOCOLS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        names = f"choose from {', '.join(PROTOCOLS)}, or give a fastbcd.private.Protocol"
        raise ValueError(f"there is no protocol {protocol!r}; {hint}{names}")
    return PROTOCOLS[protocol]


def _sum(terms: Iterable[float | None]) -> float | None:
    """The sum; None if a term is unknown."""
    found = list(terms)
    return None if None in found else sum(t for t in found if t is not None)


def _cells(site: SiteCost) -> list[str]:
    """A row of the table."""
    times = (si(t, "s") for t in (site.compute, site.transfer, site.latency, site.seconds))
    counts = (f"{n:,}" for n in (site.relus, site.units, site.squares))
    return [site.name, *counts, si(site.bytes, "B"), si(site.rounds), *times]


MARKS = "█▒░"  # of the terms, in a bar of text


def _bars(sites: Iterable[SiteCost], width: int = 40) -> list[str]:
    """The known seconds of each site as a bar; the longest has `width` characters.

    >>> _bars(cost(fastbcd.MaskSet.full({"a": (4000,), "b": (8000,)}), "crypten").sites, width=20)
    ['a  32.6 ms  ███▒▒▒▒▒░░░', 'b  56.3 ms  ███▒▒▒▒▒▒▒▒▒▒▒░░░░░░']
    """
    terms = {s.name: [getattr(s, term) or 0.0 for term in TERMS.values()] for s in sites}
    scale = width / (max(map(sum, terms.values())) or 1.0)
    long, lines = max(map(len, terms)), []
    for name, several in terms.items():
        bar = "".join(m * round(scale * t) for m, t in zip(MARKS, several, strict=True))
        lines.append(f"{name:<{long}}  {si(sum(several), 's'):>7}  {bar}".rstrip())
    return lines


def si(value: float | None, unit: str = "") -> str:
    """A value with three digits and a unit prefix, or as it is without a unit.

    >>> si(87_425_024, "B"), si(2.2e-6, "s"), si(0, "s"), si(None, "s")
    ('87.4 MB', '2.20 µs', '0 s', 'unknown')
    """
    if not value or not unit:
        return "unknown" if value is None else f"{value:,g} {unit}".rstrip()
    prefixes = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T"}
    power = max(-3, min(0 if unit == "s" else 4, math.floor(math.log10(value) / 3 + 1e-12)))
    scaled = value / 1000.0**power
    digits = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
    return f"{scaled:,.{digits}f} {prefixes[power]}{unit}"
