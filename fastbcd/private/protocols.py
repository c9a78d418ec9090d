"""Protocols of private inference by what one ReLU costs in them, each figure with its source.

A figure that is not known is None and makes everything that depends on it unknown; it never
counts as 0. Your own protocol is a `Protocol` with your own figures:

    mine = Protocol("mine", relu_bytes=Constant(120, "our prototype"), ...)
    fastbcd.private.cost(masks, mine)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from difflib import get_close_matches


@dataclass(frozen=True)
class Constant:
    """A figure and where it comes from. value=None: it is not known.

    >>> print(Constant(464, "measured"))
    464 (measured)
    """

    value: float | None
    source: str

    def __post_init__(self) -> None:
        if self.value is not None and not (math.isfinite(self.value) and self.value >= 0):
            raise ValueError(
                f"a cost cannot be {self.value} ({self.source}): give a number from 0 on, or None "
                f"if it is not known"
            )

    def __str__(self) -> str:
        return f"{'unknown' if self.value is None else format(self.value, ',g')} ({self.source})"


NOT_KNOWN = Constant(None, "not stated by any source at hand")
NONE_NEEDED = Constant(0, "nothing is set up")


@dataclass(frozen=True)
class Protocol:
    """What ReLUs and squares cost between two parties.

    relu_rounds and square_rounds are those of a whole site, however many units it has: all units
    of a site go together. Bytes and seconds are per unit; bytes go both ways together. Squares are
    what a removed ReLU costs where it became a quadratic with public coefficients.

    >>> ours = [Constant(figure, "our prototype") for figure in (120, 1e-6, 2)]
    >>> fastbcd.private.cost(fastbcd.MaskSet.full({"a": (1000,)}), Protocol("ours", *ours)).bytes
    120000.0
    """

    name: str
    relu_bytes: Constant
    relu_seconds: Constant
    relu_rounds: Constant
    square_bytes: Constant = NOT_KNOWN
    square_seconds: Constant = NOT_KNOWN
    square_rounds: Constant = NOT_KNOWN
    setup_seconds: Constant = NONE_NEEDED

    def constants(self) -> dict[str, Constant]:
        """Every figure by name.

        >>> PROTOCOLS["crypten"].constants()["relu_rounds"].value
        9
        """
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        for name, constant in found.items():
            if not isinstance(constant, Constant):
                raise TypeError(
                    f"{name} of protocol {self.name!r} is {constant!r}; write Constant(value, "
                    f"source), so that every figure says where it comes from"
                )
        return found

    def __post_init__(self) -> None:
        self.constants()


_CRYPTONITE = "kvgarimella/cryptonite, artefact of ASPLOS 2023"
_CRYPTEN = "CrypTen 0.4.1, two parties, measured on loopback; a dealer's triples are not in it"
_SPU = "SPU 0.9.5, two parties, measured"

_DELPHI = Protocol(
    "delphi-gc",
    relu_bytes=Constant(
        18_248,
        f"{_CRYPTONITE}: the garbled circuit, sent to the evaluator offline; labels sent online "
        f"are not in it, nor the 3,590 B that stay at the garbler",
    ),
    relu_seconds=Constant(
        158.2e-6,
        f"{_CRYPTONITE}, EPYC 7502, one thread: garbling 103.7 µs (offline) and evaluation 54.5 µs",
    ),
    relu_rounds=Constant(
        1,
        "by construction, not measured: a garbled circuit takes a constant number of messages "
        "whatever it computes; online Delphi (Mishra et al., USENIX Security 2020) sends labels "
        "one way and the masked outputs back",
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
    """A protocol by its name; one that is given as such passes.

    >>> find_protocol("crypten").relu_bytes.value
    464
    """
    if isinstance(protocol, Protocol):
        return protocol
    if protocol not in PROTOCOLS:
        near = get_close_matches(str(protocol), PROTOCOLS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ValueError(
            f"there is no protocol {protocol!r}{hint} choose from {', '.join(PROTOCOLS)}, or give "
            f"a fastbcd.private.Protocol of your own"
        )
    return PROTOCOLS[protocol]
