"""What one ReLU costs in protocols of private inference, each value with its source.

An unknown value is None, and everything that depends on it is unknown too. A protocol of your own:

    mine = Protocol("mine", relu_bytes=Constant(120, "our prototype"), ...)
    fastbcd.private.cost(masks, mine)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from difflib import get_close_matches


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
        for name, constant in self.constants().items():
            if not isinstance(constant, Constant):
                raise TypeError(
                    f"{name} of protocol {self.name!r} is {constant!r}; give Constant(value, "
                    f"source)"
                )

    def constants(self) -> dict[str, Constant]:
        """The values by name.

        >>> PROTOCOLS["crypten"].constants()["relu_rounds"].value
        9
        """
        return {f.name: getattr(self, f.name) for f in fields(self)[1:]}


_CRYPTONITE = "kvgarimella/cryptonite, artefact of ASPLOS 2023"
_CRYPTEN = "CrypTen 0.4.1, two parties, measured on loopback; without the dealer's triples"
_SPU = "SPU 0.9.5, two parties, measured"

_DELPHI = Protocol(
    "delphi-gc",
    relu_bytes=Constant(
        18_248,
        f"{_CRYPTONITE}: the garbled circuit, sent to the evaluator offline, without the labels "
        f"sent online and the 3,590 B that stay at the garbler",
    ),
    relu_seconds=Constant(
        158.2e-6,
        f"{_CRYPTONITE}, EPYC 7502, one thread: garbling 103.7 µs (offline) and evaluation 54.5 µs",
    ),
    relu_rounds=Constant(
        1,
        "by construction, not measured: a garbled circuit takes a constant number of messages; "
        "online Delphi (Mishra et al., USENIX Security 2020) sends labels one way and the masked "
        "outputs back",
    ),
)
_CRYPTEN_2PC = Protocol(
    "crypten",
    relu_bytes=Constant(464, _CRYPTEN),
    relu_seconds=Constant(2.2e-6, _CRYPTEN),
    relu_rounds=Constant(9, f"{_CRYPTEN}: for each site that keeps any ReLU"),
    square_bytes=Constant(16, _CRYPTEN),
    square_seconds=Constant(0.09e-6, _CRYPTEN),
    square_rounds=Constant(1, _CRYPTEN),
)
_SEMI2K = Protocol(
    "spu-semi2k",
    relu_bytes=Constant(144, f"{_SPU}, SEMI2K"),
    relu_seconds=Constant(3.2e-6, f"{_SPU}, SEMI2K"),
    relu_rounds=Constant(None, f"{_SPU}, SEMI2K: rounds were not counted"),
)
_CHEETAH = Protocol(
    "spu-cheetah",
    relu_bytes=Constant(98, f"{_SPU}, Cheetah"),
    relu_seconds=Constant(4e-6, f"{_SPU}, Cheetah, roughly"),
    relu_rounds=Constant(None, f"{_SPU}, Cheetah: rounds were not counted"),
    setup_seconds=Constant(6, f"{_SPU}, Cheetah, roughly"),
)
PROTOCOLS = {p.name: p for p in (_DELPHI, _CRYPTEN_2PC, _SEMI2K, _CHEETAH)}


def find_protocol(protocol: str | Protocol) -> Protocol:
    """The protocol of that name; a `Protocol` is returned as it is.

    >>> find_protocol("crypten").relu_bytes.value
    464
    """
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
