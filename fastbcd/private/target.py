"""Target: a budget as a cost in private inference instead of a number of ReLUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from torch import nn

from fastbcd.descent.budget import (
    Bound,
    Budget,
    Limits,
    Totals,
    counts_of,
    limits_of,
    relus,
)
from fastbcd.masking.masks import MaskSet
from fastbcd.masking.masks import masks as masks_of
from fastbcd.private.costs import OWNERS, Cost, cost, kinds_of, spent_on
from fastbcd.private.layers import Layer, layers_of
from fastbcd.private.merged_layers import MergedLayers
from fastbcd.private.protocols import (
    LAN_BANDWIDTH,
    LAN_RTT,
    UNKNOWN,
    Channel,
    Protocol,
    Spent,
)
from fastbcd.private.units import in_bytes, in_seconds, si
from fastbcd.runtime.validate import check_choice, check_number, check_whole

# The values of a protocol that a quantity depends on, for ReLUs and for squares.
NEEDS = {
    "seconds": ["bytes", "seconds", "rounds"],
    "bytes": ["bytes"],
    "rounds": ["rounds"],
}


@dataclass(frozen=True, repr=False)
class Target(Budget):
    """At most so many seconds, bytes or rounds for the private inference of one image: a budget.

    Costs are those of `private.cost`: linear layers and max-pools included.

    Args:
        seconds, bytes, rounds: one of them; texts such as "800ms" and "20MB" are read.
        protocol: a name or a `Protocol` of your own. One with an unknown value that the cost
            depends on is refused.
        bandwidth, rtt: with their units, such as "100Mbit" and "40ms".
        relus: keep at most so many ReLUs as well.
        weights_of: "both" parties, which hold shares of them, or the "server".
        activations_only: count masked activations alone.
        merged: count the net after `private.merge`. Sites are then valued by what they save
            together. The result meets the target once it is merged.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> target = Target(bytes=1900, protocol="crypten")  # 464 bytes per ReLU, 880 of linear layers
    >>> run = fastbcd.bcd(net, data, target, drc=2, finetune=None)
    >>> run.masks.count(), target.cost(net), target.met(net)
    (2, 1808.0, True)
    >>> Target(seconds=1.5, protocol="crypten", bandwidth="100Mbit", rtt="40ms")
    Target(seconds=1.5, protocol='crypten', bandwidth='100Mbit', rtt='40ms')
    """

    seconds: float | str | None = None
    bytes: float | str | None = None
    rounds: float | None = None
    _: KW_ONLY
    protocol: str | Protocol = "crypten"
    bandwidth: float | str = LAN_BANDWIDTH
    rtt: float | str = LAN_RTT
    relus: int | None = None
    weights_of: str = "both"
    activations_only: bool = False
    merged: bool = False

    def __post_init__(self) -> None:
        named = [name for name in NEEDS if getattr(self, name) is not None]
        if len(named) != 1:
            wrong = f"{' and '.join(named) or 'nothing'} was given"
            raise ValueError(f"a Target is one of {', '.join(NEEDS)}; {wrong}")
        numbers: dict[str, Any] = {"protocol": self.channel.protocol}
        if self.seconds is not None:
            numbers["seconds"] = in_seconds(self.seconds)
        if self.bytes is not None:
            numbers["bytes"] = in_bytes(self.bytes)
        if self.rounds is not None:
            check_number("rounds", self.rounds, 0)
        check_whole("relus", self.relus, 0, optional=True)
        check_choice("weights_of", self.weights_of, OWNERS)
        for name in ("activations_only", "merged"):
            check_choice(name, getattr(self, name), (False, True))
        if self.merged and self.activations_only:
            raise ValueError(
                "merged=True counts linear layers; leave out activations_only"
            )
        for name, value in numbers.items():
            object.__setattr__(self, name, value)
        self._check_known("relu")

    @cached_property
    def channel(self) -> Channel:
        """Protocol, bits per second, round trip in seconds."""
        return Channel.of(self.protocol, self.bandwidth, self.rtt)

    @property
    def quantity(self) -> str:
        """ "seconds", "bytes" or "rounds"."""
        return next(name for name in NEEDS if getattr(self, name) is not None)

    @property
    def most(self) -> float:
        """The largest cost allowed, in the unit of `quantity`."""
        return getattr(self, self.quantity)

    def cost(self, masks: MaskSet | nn.Module, poly: Any = ()) -> float:
        """What a net costs now, as `private.cost` computes it; of masks alone, the activations."""
        if isinstance(masks, MaskSet):
            if not self.activations_only:
                raise ValueError(
                    f"{self} counts linear layers: give the net instead of its masks"
                )
        elif self.merged:
            return limits_of(self, masks).value(counts_of(masks_of(masks)))
        spent = cost(
            masks,
            self.protocol,
            bandwidth=self.bandwidth,
            rtt=self.rtt,
            poly=poly,
            weights_of=self.weights_of,
            activations_only=self.activations_only,
        )
        return getattr(spent, self.quantity)

    def whole_cost(self, net: nn.Module) -> Cost:
        """What `private.cost` says of a net under the protocol and connection of the target."""
        return cost(
            net,
            self.protocol,
            bandwidth=self.bandwidth,
            rtt=self.rtt,
            weights_of=self.weights_of,
        )

    def price_of(self, layers: Iterable[Layer]) -> float:
        """What layers cost, in the quantity of the target."""
        spent = spent_on(self.channel, layers, self.weights_of)
        return float(self._value(Spent().plus(spent.values())))

    def met(self, net: nn.Module) -> bool:
        """Whether the net's cost, and its number of ReLUs, are within the target."""
        limits = limits_of(self, net)
        return bool(limits.met(counts_of(masks_of(net))))

    def bounds(
        self, units: np.ndarray, poly: np.ndarray, net: nn.Module | None = None
    ) -> tuple[Bound, ...]:
        """The bounds for a net whose sites have so many neurons.

        poly: where removed ReLUs become quadratics or, in a net without any, lines.
        """
        kinds = set() if net is None else set(kinds_of(net).values())
        replaced = "line" if kinds == {"line"} else "square"
        fixed = Spent()
        merged: MergedLayers | None = None
        if poly.any():
            self._check_known(replaced)
        if len(kinds) > 1 and self.channel.spent("line", units=1, sites=1) != (
            0,
            0,
            0,
            0,
        ):
            raise ValueError(
                f"{self}: the net has lines and quadratics, which both cost under "
                f"{self.channel.protocol.name!r}; give a net of one kind"
            )
        if net is not None and not self.activations_only:
            layers = layers_of(net)
            if self.merged:
                merged = MergedLayers(net, self.price_of)
                layers = merged.others(layers)
            spent = spent_on(self.channel, layers, self.weights_of)
            fixed = fixed.plus(spent.values())
            for kind in (
                "layer" if self.weights_of == "both" else "owned",
                "line",
                "reveal",
            ):
                self._check_known(kind)
        measure = partial(self._measure, replaced, fixed)
        bound = Bound(self.quantity, measure, self.most)
        if merged is not None:
            lines = poly & (replaced == "line")
            measure = partial(self._merged_measure, measure, merged, units * lines)
            bound = Bound(self.quantity, measure, self.most, tuple(merged.families()))
        self._check_reachable(bound, units, poly, replaced)
        if self.relus is None:
            return (bound,)
        return bound, relus(self.relus)

    def _check_reachable(
        self, bound: Bound, units: np.ndarray, poly: np.ndarray, replaced: str
    ) -> None:
        """Refuse a target below the least cost, or one that removing ReLUs cannot reach."""
        least = Limits(units, poly, (bound,)).least()
        if least > self.most:
            unit = {"seconds": "s", "bytes": "B"}.get(self.quantity, "")
            text = f"{si(least, unit)}{' rounds' * (not unit)}"
            raise ValueError(
                f"{self}: this net without ReLUs costs {text}, which is the least; give at least "
                f"that, or activations_only=True"
            )
        price = bound.prices()
        if poly.any() and price.squares > price.relus:
            raise ValueError(
                f"{self}: under {self.channel.protocol.name!r} a {replaced} costs more than a "
                f"ReLU, so that removing ReLUs saves nothing at the sites that have them"
            )

    def describe(self) -> dict[str, Any]:
        """What config.json records: all that the costs depend on."""
        constants = self.channel.protocol.constants()
        figures = {name: c.value for name, c in constants.items() if c is not UNKNOWN}
        _, bandwidth, rtt = self.channel
        return {
            **self._settings(),
            "bandwidth": bandwidth,
            "rtt": rtt,
            "figures": figures,
        }

    def _measure(self, replaced: str, fixed: Spent, totals: Totals) -> Any:
        """The cost of a mask's totals, or of arrays of them, beside what is fixed."""
        channel = self.channel
        units = {"relu": totals.relus, replaced: totals.squares}
        spent = channel.activations(
            units, {"relu": totals.relu_sites, replaced: totals.square_sites}
        ).plus([fixed])
        value = self._value(spent)
        if self.quantity == "seconds":
            value = value + (channel.protocol.setup_seconds.value or 0.0)
        # What is unknown is of replacements that the net does not have: `bounds` refuses others.
        return np.nan_to_num(value, nan=0.0)

    def _merged_measure(
        self,
        measure: Callable[[Totals], Any],
        merged: MergedLayers,
        lines: np.ndarray,
        totals: Totals,
    ) -> Any:
        """The cost of the merged net; the lines of emptied sites are parts of its layers.

        lines: the neurons of each site whose removed ReLUs are lines, [sites].
        """
        counts = totals.counts
        if counts is None:  # the price of one ReLU, or site
            return measure(totals)
        if lines.any():
            left = np.where((counts > 0) & (lines > 0), lines - counts, 0)
            totals = totals._replace(
                squares=left.sum(-1), square_sites=(left > 0).sum(-1)
            )
        return measure(totals) + merged.cost(counts)

    def _value(self, spent: Spent) -> Any:
        """The quantity of the target, without the set-up."""
        if self.quantity == "seconds":
            return self.channel.seconds(spent)
        return getattr(spent, self.quantity)

    def _check_known(self, unit: str) -> None:
        """Refuse a protocol that does not state what operations of a kind cost."""
        constants = self.channel.protocol.constants()
        names = [f"{unit}_{kind}" for kind in NEEDS[self.quantity]]
        if self.quantity == "seconds":
            names.append("setup_seconds")
        for name in names:
            if constants[name].value is None:
                raise ValueError(
                    f"{self.quantity} cannot be a target under {self.channel.protocol.name!r}: its "
                    f"{name} is {constants[name]}; give another quantity, a Protocol that states "
                    f"it, or activations_only=True if it is of linear layers"
                )

    def _settings(self) -> dict[str, Any]:
        settings = {
            self.quantity: self.most,
            "protocol": self.channel.protocol.name,
            "bandwidth": self.bandwidth,
            "rtt": self.rtt,
        }
        if self.relus is not None:
            settings["relus"] = self.relus
        if self.weights_of != "both":
            settings["weights_of"] = self.weights_of
        for name in ("activations_only", "merged"):
            if getattr(self, name):
                settings[name] = True
        return settings

    def __repr__(self) -> str:
        settings = (f"{name}={value!r}" for name, value in self._settings().items())
        return f"Target({', '.join(settings)})"
