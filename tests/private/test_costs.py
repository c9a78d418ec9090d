"""Private inference: the cost model against figures worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd import MaskSet, private
from fastbcd.private import Constant, Protocol
from helpers import nets

LINEAR_MB, LINEAR_ROUNDS = 7.3, 21  # ResNet-20 without any ReLU, as measured with CrypTen


def resnet20_masks() -> MaskSet:
    with torch.device("meta"):
        net = fastbcd.models.resnet20(num_classes=10, image_size=32)
    return MaskSet.full({s.name: s.shape for s in fastbcd.masks(net).sites})


@pytest.mark.parametrize(
    ("relus", "measured_mb", "added_bytes"),
    [
        (188_416, 94.7, 87_425_024),
        (94_208, 51.0, 43_712_512),
        (18_840, 16.0, 8_741_760),
        (3_772, 9.0, 1_750_208),
    ],
)
def test_crypten_as_measured(relus, measured_mb, added_bytes) -> None:
    full = resnet20_masks()
    gone = full.sample(full.total - relus, seed=0, step=0, trial=0)
    cost = private.cost(full.without(gone), "crypten")
    assert cost.bytes == added_bytes
    assert LINEAR_MB + cost.bytes / 1e6 == pytest.approx(measured_mb, abs=0.1)
    assert LINEAR_ROUNDS + cost.rounds == 192
    assert not cost.emptied


def test_terms_of_a_second() -> None:
    masks = MaskSet.full({"a": (4, 5, 5), "b": (50,)}).without(range(100, 150))
    cost = private.cost(masks, "crypten", bandwidth="1Mbit", rtt="20ms")
    site, empty = cost.sites
    assert (site.bytes, site.rounds) == (46_400, 9)
    assert site.compute == pytest.approx(100 * 2.2e-6)
    assert site.transfer == pytest.approx(46_400 * 8 / 1e6)
    assert site.latency == pytest.approx(0.18)
    assert cost.seconds == site.seconds == pytest.approx(0.00022 + 0.3712 + 0.18)
    assert (empty.bytes, empty.rounds, empty.seconds, empty.saved_rounds) == (0, 0, 0, 9)
    assert (cost.emptied, cost.saved_rounds) == ((empty,), 9)


def test_delphi_by_hand() -> None:
    cost = private.cost(MaskSet.full({"a": (10,)}), "delphi-gc", bandwidth="8Mbit", rtt="100ms")
    assert (cost.bytes, cost.rounds) == (182_480, 1)
    assert cost.seconds == pytest.approx(10 * 158.2e-6 + 0.18248 + 0.1)


@pytest.mark.parametrize(("name", "size", "micro"), [("semi2k", 144, 3.2), ("cheetah", 98, 4)])
def test_unknown_is_not_zero(name, size, micro) -> None:
    masks = MaskSet.full({"a": (10,), "b": (10,)}).without(range(10))
    cost = private.cost(masks, f"spu-{name}", bandwidth="8Mbit")
    setup = 6 if name == "cheetah" else 0
    assert cost.bytes == 10 * size
    assert cost.rounds is cost.seconds is cost.saved_rounds is None
    assert cost.known_seconds == pytest.approx(setup + 10 * micro * 1e-6 + size * 10 / 1e6)
    assert cost.sites[0].seconds == 0  # nothing is kept there, so nothing is unknown
    assert "unknown" in str(cost)
    nothing = private.cost(masks.without(range(10, 20)), f"spu-{name}")
    assert (nothing.rounds, nothing.seconds) == (0, setup)


def test_quadratics_cost_squares() -> None:
    net = nets.make("mixture")
    fastbcd.set_masks(net, fastbcd.masks(net).without([*range(100), 384, 385]))
    cost = private.cost(net, "crypten")
    poly, relu = cost.sites
    assert (poly.relus, poly.squares, poly.bytes, poly.rounds) == (284, 100, 133_376, 10)
    assert (relu.relus, relu.squares, relu.bytes, relu.rounds) == (10, 0, 4_640, 9)
    assert private.cost(fastbcd.masks(net), "crypten", poly=["act"]) == cost
    assert private.cost(net, "delphi-gc").bytes is None
    everything = fastbcd.masks(net).bits.nonzero().flatten()
    fastbcd.set_masks(net, fastbcd.masks(net).without(everything))
    poly = private.cost(net, "crypten").sites[0]
    assert (poly.bytes, poly.rounds, poly.saved_rounds) == (16 * 384, 1, 9)


def test_a_protocol_of_ones_own() -> None:
    mine = Protocol("mine", *(Constant(v, "prototype") for v in (100, 1e-6, 4)))
    cost = private.cost(MaskSet.full({"a": (10,), "b": (5,)}), mine, bandwidth="1Gbit", rtt=0)
    assert (cost.bytes, cost.rounds) == (1500, 8)
    assert cost.seconds == pytest.approx(15e-6 + 12e-6)
    assert "100 (prototype)" in str(cost)


def test_every_constant_has_a_source() -> None:
    assert set(private.PROTOCOLS) == {"delphi-gc", "crypten", "spu-semi2k", "spu-cheetah"}
    for protocol in private.PROTOCOLS.values():
        assert all(len(c.source) > 10 for c in protocol.constants().values())


def test_the_table() -> None:
    masks = MaskSet.full({"first": (1000,), "second": (10,)}).without(range(1000, 1010))
    text = str(private.cost(masks, "crypten", bandwidth="1Gbit", rtt="10ms"))
    lines = text.splitlines()
    assert lines[0].startswith("crypten, 1.00 Gbit/s, round trip 10.0 ms: 1,000 ReLUs")
    assert lines[4].split() == ["total", "1,000", "1,010", "464", "kB", "9", "2.20", "ms", "3.71",
                                "ms", "90.0", "ms", "95.9", "ms"]  # fmt: skip
    assert "1 emptied sites save 9 rounds" in text
    assert "464 (CrypTen 0.4.1" in text
    assert "square" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"protocol": "crypton"}, "did you mean 'crypten'"),
        ({"bandwidth": 0}, "bandwidth=0; give it with its unit"),
        ({"rtt": -1}, "rtt=-1"),
        ({"rtt": math.nan}, "rtt=nan"),
        ({"poly": ["b"]}, "poly names 'b', which is no site"),
    ],
)
def test_cost_refuses(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        private.cost(MaskSet.full({"a": (3,)}), **arguments)


def test_protocols_refuse() -> None:
    with pytest.raises(ValueError, match="a cost cannot be -1"):
        Constant(-1, "a slip")
    with pytest.raises(TypeError, match="relu_bytes of protocol 'x' is 4; give Constant"):
        Protocol("x", 4, Constant(1, "here"), Constant(1, "here"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="give a MaskSet"):
        private.cost([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("quantity", ["seconds", "bytes", "rounds"])
def test_a_target_under_a_protocol_that_knows_no_squares(quantity) -> None:
    """Garbled circuits: what they do not state is needed for polynomial sites only."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 9), fastbcd.MaskedReLU(9), nn.Linear(9, 3))
    data = torch.randn(30, 1, 2, 2), torch.arange(30) % 3
    one = MaskSet.full({"a": (9,)}).without(range(1, 9))
    wan = {"protocol": "delphi-gc", "bandwidth": "100Mbit", "rtt": "40ms"}
    most = getattr(private.cost(one, **wan), quantity)
    target = private.Target(**{quantity: most}, **wan)
    run = fastbcd.bcd(net, data, target, drc=3, rt=2, finetune=None)
    assert run.masks.count() == (9 if quantity == "rounds" else 1)
