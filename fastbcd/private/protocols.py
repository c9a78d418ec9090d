"""Protocols: what a ReLU costs between two parties, each figure with its source.

protocols.json holds those known by name. An unknown value is None, and everything that depends on
it is unknown too.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from fastbcd.descent.budget import Totals
from fastbcd.private.units import bits_per_second, round_trip

LAN_BANDWIDTH = "1Gbit"
LAN_RTT = "1ms"


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
        if self.value is None:
            return f"unknown ({self.source})"
        return f"{self.value:,g} ({self.source})"

    def times(self, count: Any) -> Any:
        """The cost of so many, a number or an array: NaN if it is unknown and any are in use."""
        if self.value is None:
            return np.where(count, math.nan, 0.0)
        return count * float(self.value)


UNKNOWN = Constant(None, "not stated by any source")
NO_SETUP = Constant(0, "nothing is set up")


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
        for name, constant in self.constants().items():
            if not isinstance(constant, Constant):
                where = f"{name} of protocol {self.name!r}"
                raise TypeError(f"{where} is {constant!r}; give Constant(value, source)")

    def constants(self) -> dict[str, Constant]:
        """The values by name.

        >>> PROTOCOLS["crypten"].constants()["relu_rounds"].value
        9
        """
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}


_FILE = resources.files("fastbcd.private") / "protocols.json"
PROTOCOLS = {
    name: Protocol(name, **{key: Constant(*pair) for key, pair in figures.items()})
    for name, figures in json.loads(_FILE.read_text("utf-8")).items()
}


class Amounts(NamedTuple):
    """What is spent: numbers, or arrays of one shape. NaN: unknown."""

    bytes: Any
    rounds: Any
    compute: Any  # seconds, as the next two
    transfer: Any
    latency: Any

    @property
    def seconds(self) -> Any:
        return self.compute + self.transfer + self.latency

    def known(self) -> dict[str, float | None]:
        """Numbers by name; None: unknown."""
        numbers: dict[str, float | None] = {}
        for name, value in self._asdict().items():
            numbers[name] = None if math.isnan(value) else float(value)
        return numbers


class Channel(NamedTuple):
    """A protocol over a connection.

    >>> Channel.of("crypten", "1Gbit", "10ms").amounts(Totals(1000, 0, 2, 0)).latency
    0.18
    """

    protocol: Protocol
    bandwidth: float  # bits per second
    rtt: float  # seconds

    @classmethod
    def of(cls, protocol: str | Protocol, bandwidth: float | str, rtt: float | str) -> Channel:
        """With texts read and checked."""
        return cls(_protocol_of(protocol), bits_per_second(bandwidth), round_trip(rtt))

    def amounts(self, totals: Totals) -> Amounts:
        """What so many ReLUs and squares, in so many sites, spend; without the set-up."""
        price = self.protocol
        size = price.relu_bytes.times(totals.relus)
        size = size + price.square_bytes.times(totals.squares)
        rounds = price.relu_rounds.times(totals.relu_sites)
        rounds = rounds + price.square_rounds.times(totals.square_sites)
        compute = price.relu_seconds.times(totals.relus)
        compute = compute + price.square_seconds.times(totals.squares)
        return Amounts(
            bytes=size,
            rounds=rounds,
            compute=compute,
            transfer=8 * size / self.bandwidth,
            latency=rounds * self.rtt,
        )


def _protocol_of(protocol: str | Protocol) -> Protocol:
    if isinstance(protocol, Protocol):
        return protocol
    if protocol in PROTOCOLS:
        return PROTOCOLS[protocol]
    hint = ""
    for near in get_close_matches(str(protocol), PROTOCOLS, n=1):
        hint = f"did you mean {near!r}? "
    names = f"choose from {', '.join(PROTOCOLS)}, or give a fastbcd.private.Protocol"
    raise ValueError(f"there is no protocol {protocol!r}; {hint}{names}")
