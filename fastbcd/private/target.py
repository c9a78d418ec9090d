"""Target: a budget as a cost in private inference instead of a number of ReLUs."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from torch import nn

from fastbcd.descent.budget import Budget, limits_of
from fastbcd.descent.limits import Bound, Limits, Totals, counts_of, relus
from fastbcd.masking.masks import MaskSet, masks
from fastbcd.private.costs import (
    LAN_BANDWIDTH,
    LAN_RTT,
    Protocol,
    amounts,
    cost,
    find_protocol,
    si,
)  # fmt: skip
from fastbcd.private.units import bits_per_second, in_bytes, in_seconds
from fastbcd.runtime.validate import check_number, check_whole

# The values of a protocol that a quantity depends on, for ReLUs and for squares.
NEEDS = {"seconds": ("bytes", "seconds", "rounds"), "bytes": ("bytes",), "rounds": ("rounds",)}
UNITS = {"seconds": "s", "bytes": "B", "rounds": "rounds"}


@dataclass(frozen=True, repr=False)
class Target(Budget):
    """At most so many seconds, bytes or rounds for the activations of one image: a budget.

    Costs are those of `private.cost`, without linear layers.

    Args:
        seconds, bytes, rounds: one of them; texts such as "800ms" and "20MB" are read.
        protocol: a name or a `Protocol` of your own. One with an unknown value that the cost
            depends on is refused.
        bandwidth, rtt: as in `private.cost`: numbers, or texts such as "100Mbit" and "40ms".
        relus: keep at most so many ReLUs as well.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> target = Target(bytes=1000, protocol="crypten")  # 464 bytes per ReLU
    >>> run = fastbcd.bcd(net, data, target, drc=2, finetune=None)
    >>> run.masks.count(), target.cost(net), target.met(net)
    (2, 928.0, True)
    >>> Target(seconds=1.5, protocol="crypten", bandwidth="100Mbit", rtt="40ms")
    Target(seconds=1.5, protocol='crypten', bandwidth=100000000.0, rtt=0.04)
    """

    seconds: float | str | None = None
    bytes: float | str | None = None
    rounds: float | None = None
    _: KW_ONLY
    protocol: str | Protocol = "crypten"
    bandwidth: float | str = LAN_BANDWIDTH
    rtt: float | str = LAN_RTT
    relus: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in NEEDS if getattr(self, name) is not None]
        if len(given) != 1:
            wrong = f"{' and '.join(given) or 'nothing'} was given"
            raise ValueError(f"a Target is one of {', '.join(NEEDS)}; {wrong}")
        if self.seconds is not None:
            self._set("seconds", in_seconds(self.seconds, "seconds"))
        if self.bytes is not None:
            self._set("bytes", in_bytes(self.bytes))
        if self.rounds is not None:
            check_number("rounds", self.rounds, 0)
        for name, value in zip(("protocol", "bandwidth", "rtt"), self.network, strict=True):
            self._set(name, value)
        check_whole("relus", self.relus, 0, optional=True)
        self._check_known("relu")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def network(self) -> tuple[Protocol, float, float]:
        """Protocol, bits per second, round trip in seconds."""
        speed, rtt = bits_per_second(self.bandwidth), in_seconds(self.rtt)
        return find_protocol(self.protocol), speed, rtt

    @property
    def quantity(self) -> str:
        """ "seconds", "bytes" or "rounds"."""
        return next(name for name in NEEDS if getattr(self, name) is not None)

    @property
    def most(self) -> float:
        """The largest cost allowed, in the unit of `quantity`."""
        return getattr(self, self.quantity)

    def cost(self, masks: MaskSet | nn.Module, poly: Any = ()) -> float:
        """What masks or a net cost now, as `private.cost` computes it."""
        found = cost(masks, self.protocol, bandwidth=self.bandwidth, rtt=self.rtt, poly=poly)
        return getattr(found, self.quantity)

    def met(self, net: nn.Module) -> bool:
        """Whether the net's cost, and its number of ReLUs, are within the target."""
        return bool(limits_of(self, net).met(counts_of(masks(net))))

    def measure(self, totals: Totals) -> Any:
        """The cost of a mask's totals, or of arrays of them; None if it is unknown."""
        protocol, bandwidth, rtt = self.network
        found = amounts(protocol, *totals, bandwidth=bandwidth, rtt=rtt)
        # What is unknown is of squares that the net does not have: `limits` refuses others.
        found = {name: 0.0 if value is None else value for name, value in found.items()}
        if self.quantity != "seconds":
            return found[self.quantity]
        if any(value is None for value in found.values()):
            return None
        spent = found["compute"] + found["transfer"] + found["latency"]
        return (protocol.setup_seconds.value or 0) + spent

    def bounds(self, units: np.ndarray, poly: np.ndarray) -> tuple[Bound, ...]:
        """The bounds for a net whose sites have so many neurons, and quadratics where `poly`."""
        if poly.any():
            self._check_known("square")
        bound = Bound(self.quantity, self.measure, self.most)
        price, least = bound.prices(), Limits(units, poly, (bound,)).least()
        if least > self.most:
            raise ValueError(
                f"{self}: a net that keeps no ReLU costs {self._text(least)}, which is the least; "
                f"give at least that"
            )
        if poly.any() and price.squares > price.relus:
            raise ValueError(
                f"{self}: under {self.network[0].name!r} a square costs more than a ReLU, so that "
                f"removing ReLUs saves nothing at the polynomial sites"
            )
        return (bound,) if self.relus is None else (bound, relus(self.relus))

    def describe(self) -> dict[str, Any]:
        """What config.json records: all that the costs depend on."""
        figures = {name: c.value for name, c in self.network[0].constants().items()}
        return {**self._shown(), "figures": figures}

    def _check_known(self, what: str) -> None:
        setup = ["setup_seconds"] if self.quantity == "seconds" else []
        for name in [*(f"{what}_{kind}" for kind in NEEDS[self.quantity]), *setup]:
            constant = getattr(protocol := self.network[0], name)
            if constant.value is None:
                raise ValueError(
                    f"{self.quantity} cannot be a target under {protocol.name!r}: its {name} is "
                    f"{constant}; give another quantity, or a Protocol that states it"
                )

    def _text(self, value: float) -> str:
        return f"{value:g} rounds" if self.quantity == "rounds" else si(value, UNITS[self.quantity])

    def _shown(self) -> dict[str, Any]:
        protocol, bandwidth, rtt = self.network
        bound = {} if self.relus is None else {"relus": self.relus}
        connection = {"protocol": protocol.name, "bandwidth": bandwidth, "rtt": rtt}
        return {self.quantity: self.most, **connection, **bound}

    def __repr__(self) -> str:
        return f"Target({', '.join(f'{k}={value!r}' for k, value in self._shown().items())})"
