"""Private inference: the cost model against figures worked out by hand."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd import MaskSet, private
from fastbcd.descent.budget import counts_of, limits_of
from fastbcd.masking.conversion_report import comparisons_of
from fastbcd.private import Constant, Protocol
from fastbcd.private.layers import product
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


def test_images_of_a_run_share_rounds_and_the_bytes_of_weights() -> None:
    """Eight images in one CrypTen run: 192 rounds, and 7.2 instead of 11.0 MB each, as measured."""
    net = fastbcd.models.resnet20(num_classes=10, image_size=32)
    full = fastbcd.masks(net)
    fastbcd.set_masks(net, full.without(full.sample(full.total - 8_000, seed=0, step=0, trial=0)))
    one, eight = (private.cost(net, "crypten", batch=batch) for batch in (1, 8))
    assert (one.images, eight.images) == (1, 8)
    assert one.per_image == one.total
    assert one.rounds == eight.rounds == 192
    assert one.bytes / 1e6 == pytest.approx(11.0, abs=0.05)
    assert eight.per_image.bytes / 1e6 == pytest.approx(7.2, abs=0.05)
    assert eight.activations.bytes == 8 * one.activations.bytes
    weights = sum(p.numel() for p in net.parameters() if p.dim() > 1)
    assert 8 * one.bytes - eight.bytes == 7 * 16 * weights
    assert eight.relus == 8_000
    assert "the whole inference of 8 images" in str(eight)
    assert "for each image: 7.2" in str(eight)
    with pytest.raises(ValueError, match="batch=0; it must be a whole number, 1 or more"):
        private.cost(net, batch=0)


def test_terms_of_a_second() -> None:
    masks = MaskSet.full({"a": (4, 5, 5), "b": (50,)}).without(range(100, 150))
    cost = private.cost(masks, "crypten", bandwidth="1Mbit", rtt="20ms")
    site, empty = cost.sites
    assert (site.bytes, site.rounds) == (46_400, 9)
    assert site.compute == pytest.approx(100 * 2.2e-6)
    assert site.transfer == pytest.approx(46_400 * 8 / 1e6)
    assert site.latency == pytest.approx(0.18)
    assert cost.seconds == site.seconds == pytest.approx(0.00022 + 0.3712 + 0.18)
    assert (empty.bytes, empty.rounds, empty.seconds) == (0, 0, 0)
    assert (cost.emptied, cost.saved_rounds) == ((empty,), 9)


def test_delphi_by_hand() -> None:
    cost = private.cost(MaskSet.full({"a": (10,)}), "delphi-gc", bandwidth="8Mbit", rtt="100ms")
    assert (cost.bytes, cost.rounds) == (182_480, 1)
    assert cost.seconds == pytest.approx(10 * 158.2e-6 + 0.18248 + 0.1)


def test_unknown_is_not_zero() -> None:
    masks = MaskSet.full({"a": (10,), "b": (10,)}).without(range(10))
    figures = {"relu_rounds": Constant(None, "not counted"), "setup_seconds": Constant(6, "here")}
    ours = dataclasses.replace(private.PROTOCOLS["spu-semi2k"], **figures)
    cost = private.cost(masks, ours, bandwidth="8Mbit")
    assert cost.bytes == 10 * 144
    assert cost.rounds is cost.seconds is cost.saved_rounds is None
    assert cost.known_seconds == pytest.approx(6 + 10 * 1.424e-6 + 0.007783 + 144 * 10 / 1e6)
    assert cost.sites[0].seconds == 0  # nothing is kept there, so nothing is unknown
    assert "unknown" in str(cost)
    nothing = private.cost(masks.without(range(10, 20)), ours)
    assert (nothing.rounds, nothing.seconds) == (0, 6)
    net = fastbcd.models.resnet20(10, image_size=8, width=2, blocks=1)
    assert private.cost(net, "delphi-gc").seconds is None
    assert private.cost(net, "spu-semi2k", weights_of="server").bytes is None
    assert private.cost(net, "delphi-gc", activations_only=True).seconds > 0


# ResNet-20, 8,000 ReLUs at random, one image, weights of both parties: MB, messages each way (SPU)
# or rounds (CrypTen); two parties, measured without the logits' way back in SPU.
WHOLE = [
    ("crypten", "line", 11.0, 192),
    ("crypten", "poly", 13.9, 211),  # 16.8 MB as general products; a square is half of it
    ("spu-semi2k", "identity", 31.3, 193),
    ("spu-semi2k", "line", 32.7, 212),
    ("spu-cheetah", "line", 35.8, 502),
]


@pytest.mark.parametrize(("protocol", "replacement", "mb", "messages"), WHOLE)
def test_whole_inferences_as_measured(protocol, replacement, mb, messages) -> None:
    net = fastbcd.models.resnet20(10, image_size=32, replacement=replacement)
    full = fastbcd.masks(net)
    kept = full.without(full.sample(full.total - 8000, seed=0, step=0, trial=0))
    fastbcd.set_masks(net, kept)
    cost = private.cost(net, protocol, bandwidth="10Gbit", rtt=0)
    assert cost.bytes / 1e6 == pytest.approx(mb, rel=0.01)
    shown = cost.layers[-1].messages if protocol.startswith("spu") else 0
    assert cost.total.messages - shown == messages
    target = private.Target(bytes=cost.bytes, protocol=protocol)
    assert target.met(net)
    assert target.cost(net) == cost.bytes == limits_of(target, net).value(counts_of(kept))
    assert not private.Target(bytes=cost.bytes - 1, protocol=protocol).met(net)


def test_ciphertexts_of_a_vector() -> None:
    """Dense maps to 10 classes took so many under SPU 0.9.5's Cheetah, each way."""
    for terms, sent in ((64, 1), (4096, 2), (16_384, 4)):
        assert product("", 1, terms, 10, inputs=terms).amounts["sent"] == sent


def test_weights_that_the_server_has() -> None:
    """12,000 ReLUs at 5 sites, lines, SPU's Cheetah: 36.15 and 19.2 MB, 222 messages."""
    net = fastbcd.models.resnet20(10, image_size=32, replacement="line")
    kept = fastbcd.masks(net).copy()
    kept.bits[:] = False
    for site in kept.sites[:5]:
        kept.bits[site.start : site.start + 2400] = True
    fastbcd.set_masks(net, kept)
    shared, owned = (private.cost(net, "spu-cheetah", weights_of=who) for who in ("both", "server"))
    assert shared.bytes / 1e6 == pytest.approx(36.15, rel=0.01)
    assert owned.bytes / 1e6 == pytest.approx(19.2, rel=0.02)
    assert shared.total.messages - 1 == 222
    assert owned.total.messages is None


def test_max_pools_count_as_comparisons() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten(),
                          nn.Linear(16, 5))  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = fastbcd.convert(model, torch.zeros(2, 3, 8, 8))
    cost = private.cost(copy.deepcopy(net), "crypten")
    pool = {layer.name: layer for layer in cost.layers}["2"]
    assert comparisons_of(net) == 16 * 8
    assert (pool.bytes, pool.rounds) == (16 * 8 * 464, 4 * 9)  # 9 values: a tree of 4 levels
    assert cost.bytes == cost.activations.bytes + cost.linear.bytes
    assert not cost.not_included
    today = private.cost(net, "crypten", activations_only=True)
    assert (today.bytes, len(today.not_included)) == (cost.activations.bytes, 1)
    assert private.Target(bytes=cost.bytes).met(net)
    assert not private.Target(bytes=cost.bytes - 1).met(net)


def test_a_net_that_was_not_used_is_refused() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), fastbcd.MaskedReLU(3))
    with pytest.raises(ValueError, match=r"the layers of Sequential are not known.*pass images="):
        private.cost(net)
    whole = private.cost(net, images=torch.zeros(2, 1, 2, 2))
    assert whole.linear.bytes == 16 * (4 + 12 + 3)
    assert private.cost(net) == whole
    again = copy.deepcopy(net)
    fastbcd.score(again, torch.tensor([[0]]), (torch.zeros(3, 1, 2, 2), torch.arange(3)))
    assert private.cost(again) == whole


def test_quadratics_cost_squares() -> None:
    net = nets.make("mixture")
    fastbcd.set_masks(net, fastbcd.masks(net).without([*range(100), 384, 385]))
    cost = private.cost(net, "crypten", activations_only=True)
    poly, relu = cost.sites
    assert (poly.relus, poly.squares, poly.bytes, poly.rounds) == (284, 100, 133_376, 10)
    assert (relu.relus, relu.squares, relu.bytes, relu.rounds) == (10, 0, 4_640, 9)
    assert private.cost(fastbcd.masks(net), "crypten", poly=["act"]) == cost
    assert private.cost(net, "delphi-gc", activations_only=True).bytes is None
    everything = fastbcd.masks(net).bits.nonzero().flatten()
    fastbcd.set_masks(net, fastbcd.masks(net).without(everything))
    poly = private.cost(net, "crypten", activations_only=True).sites[0]
    assert (poly.bytes, poly.rounds) == (16 * 384, 1)


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
        ({"poly": ["b"]}, "'b' of poly or line is no site"),
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
    wan["activations_only"] = True
    most = getattr(private.cost(one, **wan), quantity)
    target = private.Target(**{quantity: most}, **wan)
    run = fastbcd.bcd(net, data, target, drc=3, rt=2, finetune=None)
    assert run.masks.count() == (9 if quantity == "rounds" else 1)
