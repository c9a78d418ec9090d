"""What one ReLU costs in protocols of private inference, each value with its source.

An unknown value is None, and everything that depends on it is unknown too. protocols.json holds
those known by name. A protocol of your own:

    mine = Protocol("mine", relu_bytes=Constant(120, "our prototype"), ...)
    fastbcd.private.cost(masks, mine)
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import resources


@dataclass(frozen=True)
class Constant:
    """A value and its source. None: the value is unknown.

    >>> print(Constant(464, "measured"))
    464 (measured)
    """

    value: float | None
    source: str

    def __post_init__(self) -> None:
        if self.value is not None and not (math.isfinite(self.value) and self.value >= 0):
            raise ValueError(
                f"a cost cannot be {self.value} ({self.source}): give a number of 0 or more, or "
                f"None if it is unknown"
            )

    def __str__(self) -> str:
        return f"{'unknown' if self.value is None else format(self.value, ',g')} ({self.source})"


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


PROTOCOLS = {
    name: Protocol(name, **{key: Constant(*pair) for key, pair in constants.items()})
    for name, constants in json.loads(
        resources.files(__package__).joinpath("protocols.json").read_text(encoding="utf-8")
    ).items()
}


def find_protocol(protocol: str | Protocol) -> Protocol:
    """The protocol of that name; a `Protocol` is returned as it is."""
    if isinstance(protocol, Protocol):
        return protocol
    if protocol not in PROTOCOLS:
        near = get_close_matches(str(protocol), PROTOCOLS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"there is no protocol {protocol!r}; {hint}choose from {', '.join(PROTOCOLS)}, or give "
            f"a fastbcd.private.Protocol"
        )
    return PROTOCOLS[protocol]
