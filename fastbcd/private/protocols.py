"""Protocols: what the operations of a net cost between two parties, each figure with its source.

protocols.json holds those known by name. An unknown value is None, and everything that depends on
it is unknown too.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastbcd.private.units import bits_per_second, round_trip
from fastbcd.runtime.atomic_files import write_atomically

LAN_BANDWIDTH = "1Gbit"
LAN_RTT = "1ms"


@dataclass(frozen=True)
class Constant:
    """A value and its source. None: the value is unknown.

    A mapping has a value for each of several amounts of an operation, such as the inputs and the
    weights of a layer: `Layer.amounts` names them.

    >>> print(Constant(464, "measured"))
    464 (measured)
    >>> Constant({"inputs": 16, "weights": 8}, "fitted").times({"inputs": 2, "weights": 9}, "units")
    104.0
    """

    value: float | Mapping[str, float] | None
    source: str

    def __post_init__(self) -> None:
        for value in self.values.values():
            if not 0 <= value < math.inf:
                wrong = f"a cost cannot be {value} ({self.source})"
                raise ValueError(
                    f"{wrong}: give a number of 0 or more, or None if it is unknown"
                )

    @property
    def values(self) -> Mapping[str, float]:
        """The values by amount, "" for a single one."""
        if isinstance(self.value, Mapping):
            return self.value
        return {} if self.value is None else {"": self.value}

    def __str__(self) -> str:
        texts = [f"{value:,g} {name}".rstrip() for name, value in self.values.items()]
        return f"{' + '.join(texts) or 'unknown'} ({self.source})"

    def times(self, amounts: Mapping[str, Any], per: str) -> Any:
        """The cost of numbers, or of arrays of them; a single value is per `per`.

        NaN if it is unknown and any are in use.
        """
        if self.value is None:
            return np.where(amounts[per], math.nan, 0.0)
        return sum(
            float(value) * amounts[name or per] for name, value in self.values.items()
        )


UNKNOWN = Constant(None, "not stated by any source")
NO_SETUP = Constant(0, "nothing is set up")


@dataclass(frozen=True)
class Protocol:
    """The cost of each operation between two parties.

    relu: ReLUs and comparisons. square, line: removed ReLUs that became quadratics or lines with
    public coefficients; a mean is a line, too. reveal: the logits. layer: a linear layer whose
    weights both parties hold in shares; owned: one whose weights the server has.

    Bytes (both directions together; the parties send alike) and seconds are per unit, of a layer
    per multiplication. Rounds (round trips, one after the other) and messages (each way) are per
    site, for any number of units, which are evaluated together.

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
    setup_bytes: Constant = NO_SETUP
    line_bytes: Constant = UNKNOWN
    line_seconds: Constant = UNKNOWN
    line_rounds: Constant = UNKNOWN
    reveal_bytes: Constant = UNKNOWN
    reveal_seconds: Constant = UNKNOWN
    reveal_rounds: Constant = UNKNOWN
    layer_bytes: Constant = UNKNOWN
    layer_seconds: Constant = UNKNOWN
    layer_rounds: Constant = UNKNOWN
    owned_bytes: Constant = UNKNOWN
    owned_seconds: Constant = UNKNOWN
    owned_rounds: Constant = UNKNOWN
    relu_messages: Constant = UNKNOWN
    square_messages: Constant = UNKNOWN
    line_messages: Constant = UNKNOWN
    reveal_messages: Constant = UNKNOWN
    layer_messages: Constant = UNKNOWN
    owned_messages: Constant = UNKNOWN

    def __post_init__(self) -> None:
        for name, constant in self.constants().items():
            if not isinstance(constant, Constant):
                where = f"{name} of protocol {self.name!r}"
                raise TypeError(
                    f"{where} is {constant!r}; give Constant(value, source)"
                )

    def constants(self) -> dict[str, Constant]:
        """The values by name.

        >>> PROTOCOLS["crypten"].constants()["relu_rounds"].value
        9
        """
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the figures with their sources, as JSON.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     PROTOCOLS["crypten"].save(f"{folder}/crypten.json")
        ...     Protocol.load(f"{folder}/crypten.json") == PROTOCOLS["crypten"]
        True
        """
        figures = {
            name: [constant.value, constant.source]
            for name, constant in self.constants().items()
        }
        text = json.dumps({self.name: figures}, indent=2, ensure_ascii=False)
        write_atomically(Path(path), text.encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Protocol:
        """What `save` wrote."""
        (protocol,) = _read(Path(path).read_text("utf-8")).values()
        return protocol


def _read(text: str) -> dict[str, Protocol]:
    """Protocols by name."""
    protocols = {}
    for name, figures in json.loads(text).items():
        constants = {key: Constant(*pair) for key, pair in figures.items()}
        protocols[name] = Protocol(name, **constants)
    return protocols


_FILE = resources.files("fastbcd.private") / "protocols.json"
PROTOCOLS = _read(_FILE.read_text("utf-8"))


class Spent(NamedTuple):
    """What is spent: numbers, or arrays of one shape. NaN: unknown."""

    bytes: Any = 0.0
    messages: Any = 0.0  # each way
    rounds: Any = 0.0
    compute: Any = 0.0  # seconds

    def plus(self, others: Iterable[Spent]) -> Spent:
        """The sum."""
        return Spent(
            *(sum(column[1:], column[0]) for column in zip(self, *others, strict=True))
        )


class Channel(NamedTuple):
    """A protocol over a connection.

    >>> channel = Channel.of("crypten", "1Gbit", "10ms")
    >>> channel.latency(channel.spent("relu", units=1000, sites=2))
    0.18
    """

    protocol: Protocol
    bandwidth: float  # bits per second
    rtt: float  # seconds

    @classmethod
    def of(
        cls, protocol: str | Protocol, bandwidth: float | str, rtt: float | str
    ) -> Channel:
        """With texts read and checked."""
        return cls(_protocol_of(protocol), bits_per_second(bandwidth), round_trip(rtt))

    def spent(self, kind: str, **amounts: Any) -> Spent:
        """What an operation of so many units, at so many sites, spends; without the set-up."""
        price = self.protocol.constants()
        return Spent(
            bytes=price[f"{kind}_bytes"].times(amounts, "units"),
            messages=price[f"{kind}_messages"].times(amounts, "sites"),
            rounds=price[f"{kind}_rounds"].times(amounts, "sites"),
            compute=price[f"{kind}_seconds"].times(amounts, "units"),
        )

    def activations(self, units: Mapping[str, Any], sites: Mapping[str, Any]) -> Spent:
        """What so many operations of each kind spend."""
        spent = [
            self.spent(kind, units=units[kind], sites=sites[kind]) for kind in units
        ]
        return Spent().plus(spent)

    def transfer(self, spent: Spent) -> Any:
        """The seconds that the bytes take."""
        return 8 * spent.bytes / self.bandwidth

    def latency(self, spent: Spent) -> Any:
        """The seconds that the rounds take."""
        return spent.rounds * self.rtt

    def seconds(self, spent: Spent) -> Any:
        """The seconds of computation, bytes and rounds."""
        return spent.compute + self.transfer(spent) + self.latency(spent)


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
