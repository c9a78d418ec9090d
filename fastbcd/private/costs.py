"""cost: bytes, rounds and seconds of the activations of one image in private inference.

For a site that keeps n ReLUs and has s squares (removed ReLUs that became quadratics):

    bytes   = n * relu_bytes + s * square_bytes
    rounds  = [n > 0] * relu_rounds + [s > 0] * square_rounds
    seconds = n * relu_seconds + s * square_seconds  +  8 * bytes / bandwidth  +  rounds * rtt

The total is the sum over the sites plus the protocol's set-up. Linear layers are not included:
they cost the same for all masks. Nor are the other nonlinear operations of a net (max-pools), which
are listed. Bytes grow with the ReLUs kept, rounds with the sites that keep
any, so an emptied site is listed with the rounds that it saves.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

from torch import nn

from fastbcd.masking.activations import MaskedPoly
from fastbcd.masking.masks import MaskSet, mask_modules, masks
from fastbcd.masking.missed_relus import NonlinearOp
from fastbcd.private.protocols import Protocol, find_protocol

LAN_BANDWIDTH, LAN_RTT = 1e9, 1e-3  # bits per second, seconds


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
    not_included: tuple[NonlinearOp, ...] = ()  # other nonlinear operations of the net
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
        names = [f.name for f in fields(SiteCost)[1:]]
        sums: Any = {name: _sum(getattr(s, name) for s in self.sites) for name in names}
        total, setup = SiteCost("total", **sums), self.protocol.setup_seconds.value
        terms = [setup, *(t for s in self.sites for t in (s.compute, s.transfer, s.latency))]
        vars(self).update(
            {name: sums[name] for name in ("relus", "bytes", "rounds", "saved_rounds")},
            total=total, emptied=tuple(s for s in self.sites if s.relus == 0), setup=setup,
            seconds=_sum([setup, total.seconds]), known_seconds=sum(filter(None, terms)),
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """All values, ready for JSON; None where a value is unknown."""
        times = {"setup": self.setup, "seconds": self.seconds, "known_seconds": self.known_seconds}
        return {
            "protocol": self.protocol.name,
            "bandwidth": self.bandwidth,
            "rtt": self.rtt,
            "total": {**asdict(self.total), **times},
            "emptied": [s.name for s in self.emptied],
            "sites": [{**asdict(s), "seconds": s.seconds} for s in self.sites],
            "not_included": [asdict(op) for op in self.not_included],
            "constants": {k: asdict(c) for k, c in self.protocol.constants().items()},
        }

    def __str__(self) -> str:
        names = ["ReLUs", "of", "squares", "bytes", "rounds", "compute", "transfer", "latency",
                 "seconds"]  # fmt: skip
        rows = [["site", *names], *map(_cells, self.sites), _cells(self.total)]
        rows[-1][-1] = si(self.seconds, "s")  # with the set-up
        constants = self.protocol.constants()
        if not self.total.squares:
            rows = [row[:3] + row[4:] for row in rows]
            constants = {k: c for k, c in constants.items() if not k.startswith("square")}
        width = max(len(row[0]) for row in rows)
        lines = [
            f"{self.protocol.name}, {si(self.bandwidth, 'bit/s')}, round trip "
            f"{si(self.rtt, 's')}: {self.relus:,} ReLUs, the activations of one image",
            *(f"  {row[0]:<{width}}" + "".join(f"{c:>11}" for c in row[1:]) for row in rows),
        ]
        if self.setup:
            lines.append(f"  {si(self.setup, 's')} of the total is set-up")
        if self.seconds is None:
            lines.append(f"  at least {si(self.known_seconds, 's')}: the rest is unknown")
        if self.emptied:
            saved = _number(self.saved_rounds)
            lines.append(f"  {len(self.emptied)} emptied sites save {saved} rounds:")
            lines += [f"    {s.name}  {_number(s.saved_rounds)} rounds" for s in self.emptied]
        if self.not_included:
            lines += ["  not included, besides linear layers:"]
            lines += [f"    {op}" for op in self.not_included]
        width = max(map(len, constants))
        lines += ["  sources:", *(f"    {k:<{width}}  {c}" for k, c in constants.items())]
        return "\n".join(lines)


def cost(
    masks: MaskSet | nn.Module,
    protocol: str | Protocol = "crypten",
    *,
    bandwidth: float = LAN_BANDWIDTH,
    rtt: float = LAN_RTT,
    poly: Collection[str] = (),
) -> Cost:
    """The cost of the activations of one image in private inference.

    A round counts as a whole round trip, which is an upper bound where both parties send at the
    same time.

    Args:
        masks: the ReLUs kept, or a net with masks.
        protocol: "delphi-gc", "crypten", "spu-semi2k", "spu-cheetah" or a `Protocol`.
        bandwidth: bits per second, both directions together.
        rtt: round trip in seconds.
        poly: names of the sites whose removed ReLUs are quadratics, if `masks` is not a net.

    >>> masks = fastbcd.MaskSet.full({"a": (16, 8, 8), "b": (10,)}).without(range(1024, 1034))
    >>> c = cost(masks, "crypten", bandwidth=1e9, rtt=1e-3)
    >>> c.bytes, c.rounds, [(s.name, s.saved_rounds) for s in c.emptied]
    (475136.0, 9.0, [('b', 9)])
    """
    kept, quadratic = _sites(masks, poly)
    chosen = find_protocol(protocol)
    if not (isinstance(bandwidth, int | float) and bandwidth > 0):
        raise ValueError(f"bandwidth={bandwidth!r}; give bits per second, above 0")
    if not (isinstance(rtt, int | float) and 0 <= rtt < math.inf):
        raise ValueError(f"rtt={rtt!r}; give the round trip in seconds, 0 or more")
    made = partial(_site, chosen, bandwidth=bandwidth, rtt=rtt)
    counts = zip(kept.sites, kept.counts().values(), strict=True)
    sites = [made(s.name, s.numel, relus=n, poly=s.name in quadratic) for s, n in counts]
    nets = masks.modules() if isinstance(masks, nn.Module) else ()
    reports: list[Any] = [getattr(m, "conversion_report", None) for m in nets]
    others = tuple(op for report in reports if report for op in report.nonlinear)
    return Cost(chosen, float(bandwidth), float(rtt), tuple(sites), others)


def _sites(given: MaskSet | nn.Module, poly: Collection[str]) -> tuple[MaskSet, set[str]]:
    if isinstance(given, nn.Module):
        if poly:
            raise ValueError("poly= is for masks without a net; leave it out")
        found = mask_modules(given)
        return masks(given), {name for name, m in found.items() if isinstance(m, MaskedPoly)}
    if not isinstance(given, MaskSet):
        raise TypeError(f"masks is a {type(given).__name__}; give a MaskSet or a net with masks")
    unknown = set(poly) - {s.name for s in given.sites}
    if unknown:
        raise ValueError(f"poly names {min(unknown)!r}, which is no site of these masks")
    return given, set(poly)


def _site(
    p: Protocol, name: str, units: int, *, relus: int, poly: bool, bandwidth: float, rtt: float
) -> SiteCost:
    squares = units - relus if poly else 0

    def figure(kind: str, relus: int, squares: int) -> float | None:
        counts = {f"relu_{kind}": relus, f"square_{kind}": squares}
        values = ((n, getattr(p, key).value) for key, n in counts.items())
        # What is not used costs 0, even if its value is unknown.
        return _sum(None if n and value is None else float(n * (value or 0)) for n, value in values)

    size, compute = figure("bytes", relus, squares), figure("seconds", relus, squares)
    rounds = figure("rounds", relus > 0, squares > 0)
    return SiteCost(
        name, units, relus, squares, size, rounds, 0 if relus else p.relu_rounds.value, compute,
        None if size is None else 8 * size / bandwidth, None if rounds is None else rounds * rtt,
    )  # fmt: skip


def _sum(terms: Iterable[float | None]) -> float | None:
    """The sum; None if a term is unknown."""
    found = list(terms)
    return None if None in found else sum(t for t in found if t is not None)


def _cells(site: SiteCost) -> list[str]:
    """A row of the table."""
    times = (site.compute, site.transfer, site.latency, site.seconds)
    counts = (f"{n:,}" for n in (site.relus, site.units, site.squares))
    return [site.name, *counts, si(site.bytes, "B"), _number(site.rounds),
            *(si(t, "s") for t in times)]  # fmt: skip


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,g}"


def si(value: float | None, unit: str) -> str:
    """A value with three digits and a unit prefix.

    >>> si(87_425_024, "B"), si(2.2e-6, "s"), si(0, "s"), si(None, "s")
    ('87.4 MB', '2.20 µs', '0 s', 'unknown')
    """
    if not value:
        return "unknown" if value is None else f"0 {unit}"
    prefixes = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T"}
    power = max(-3, min(0 if unit == "s" else 4, math.floor(math.log10(value) / 3 + 1e-12)))
    scaled = value / 1000.0**power
    digits = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
    return f"{scaled:,.{digits}f} {prefixes[power]}{unit}"
