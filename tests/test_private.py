"""Private inference: the cost model against figures worked out by hand, gather form, export."""

from __future__ import annotations

import importlib
import json
import math
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastbcd
import nets
from fastbcd import MaskedPoly, MaskedReLU, MaskSet, cli, private
from fastbcd.private import Constant, Protocol
from fastbcd.private.gathering import GatheredPoly, GatheredReLU
from fastbcd.runs import State, state_bytes
from fastbcd.starts.gates import SoftReLU

# ------------------------------------------------------------------------------- cost

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
    cost = private.cost(masks, "crypten", bandwidth=1e6, rtt=0.02)
    site, empty = cost.sites
    assert (site.bytes, site.rounds) == (46_400, 9)
    assert site.compute == pytest.approx(100 * 2.2e-6)
    assert site.transfer == pytest.approx(46_400 * 8 / 1e6)
    assert site.latency == pytest.approx(0.18)
    assert cost.seconds == site.seconds == pytest.approx(0.00022 + 0.3712 + 0.18)
    assert (empty.bytes, empty.rounds, empty.seconds, empty.saved_rounds) == (0, 0, 0, 9)
    assert (cost.emptied, cost.saved_rounds) == ((empty,), 9)


def test_delphi_by_hand() -> None:
    cost = private.cost(MaskSet.full({"a": (10,)}), "delphi-gc", bandwidth=8e6, rtt=0.1)
    assert (cost.bytes, cost.rounds) == (182_480, 1)
    assert cost.seconds == pytest.approx(10 * 158.2e-6 + 0.18248 + 0.1)


@pytest.mark.parametrize(("name", "size", "micro"), [("semi2k", 144, 3.2), ("cheetah", 98, 4)])
def test_unknown_is_not_zero(name, size, micro) -> None:
    masks = MaskSet.full({"a": (10,), "b": (10,)}).without(range(10))
    cost = private.cost(masks, f"spu-{name}", bandwidth=8e6)
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
    cost = private.cost(MaskSet.full({"a": (10,), "b": (5,)}), mine, bandwidth=1e9, rtt=0)
    assert (cost.bytes, cost.rounds) == (1500, 8)
    assert cost.seconds == pytest.approx(15e-6 + 12e-6)
    assert "100 (prototype)" in str(cost)


def test_every_constant_has_a_source() -> None:
    assert set(private.PROTOCOLS) == {"delphi-gc", "crypten", "spu-semi2k", "spu-cheetah"}
    for protocol in private.PROTOCOLS.values():
        assert all(len(c.source) > 10 for c in protocol.constants().values())


def test_the_table() -> None:
    masks = MaskSet.full({"first": (1000,), "second": (10,)}).without(range(1000, 1010))
    text = str(private.cost(masks, "crypten", bandwidth=1e9, rtt=0.01))
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
        ({"bandwidth": 0}, "bandwidth=0; give bits a second"),
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
    with pytest.raises(TypeError, match="relu_bytes of protocol 'x' is 4; write Constant"):
        Protocol("x", 4, Constant(1, "here"), Constant(1, "here"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="give a MaskSet"):
        private.cost([1, 2])  # type: ignore[arg-type]


# ------------------------------------------------------------------------------- gather form


class CountReLUs(TorchDispatchMode):
    """How many numbers go through relu."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "relu" in func.name():
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*nets.TRACEABLE, "untraceable"])
def test_gather_form_is_the_same_function(name) -> None:
    net, x = nets.thinned(nets.make(name)), nets.images(6)[0]
    small = private.gather_form(net)
    assert torch.equal(small(x), net(x))
    with CountReLUs() as seen, torch.no_grad():
        small(x)
    assert seen.count == len(x) * fastbcd.masks(net).count()


@pytest.mark.parametrize("kind", [MaskedReLU, MaskedPoly])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
def test_a_site_in_every_state(kind, dtype, last) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Identity(), kind((4, 3, 2)))
    x = torch.randn(5, 4, 3, 2, dtype=dtype)
    x[0, :, 0, 0] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    if last:
        x = x.to(memory_format=torch.channels_last)
    poly = kind is MaskedPoly
    for mask, expected in (
        (torch.ones(4, 3, 2, dtype=torch.bool), nn.ReLU),
        (torch.zeros(4, 3, 2, dtype=torch.bool), GatheredPoly if poly else nn.Identity),
        (torch.rand(4, 3, 2) > 0.5, GatheredPoly if poly else GatheredReLU),
    ):
        net[1].mask.copy_(mask)
        small = private.gather_form(net)
        assert type(small[1]) is expected
        assert small(x).dtype == dtype
        assert torch.equal(small(x).nan_to_num(7), net(x).nan_to_num(7))


def test_gather_form_is_a_copy() -> None:
    net, x = nets.thinned(nets.make("mixture")).train(), nets.images(4)[0]
    before = {k: t.clone() for k, t in net.state_dict().items()}
    small = private.gather_form(net)
    assert small.training
    y = small.eval()(x)
    net.conv.weight.data.zero_()
    net.act.coef.data.zero_()
    net.act2.mask.zero_()
    assert torch.equal(small(x), y)
    net.load_state_dict(before)
    assert net.training
    assert torch.equal(net.eval()(x), y)


def test_one_activation_in_two_places() -> None:
    act = MaskedReLU((6,))
    net = nn.Sequential(nn.Linear(4, 6), act, nn.Linear(6, 6), act)
    act.mask[::2] = False
    small, x = private.gather_form(net), torch.randn(3, 4)
    assert small[1] is small[3]
    assert torch.equal(small(x), net(x))


def test_gather_form_refuses() -> None:
    with pytest.raises(ValueError, match="has no masked activations"):
        private.gather_form(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="site '0' is a SoftReLU, which belongs to an unfinished"):
        private.gather_form(nn.Sequential(SoftReLU(torch.tensor([True]))))


def test_models_in_gather_form() -> None:
    net = fastbcd.models.resnet20(num_classes=10, image_size=8, width=4, replacement="poly")
    nets.thinned(net, 0.3)
    x = torch.randn(2, 3, 8, 8)
    y = private.gather_form(net)(x)  # in train mode: untrained quadratics grow without bound
    assert y.isfinite().all()
    assert torch.equal(y, net(x))


# ------------------------------------------------------------------------------- export


@pytest.mark.parametrize("name", ["resnet", "mixture"])
def test_export_round_trip(name, tmp_path) -> None:
    net = nets.thinned(nets.make(name)).train()
    path = tmp_path / "net.pt2"
    assert private.export(net, nets.images(3)[0], path) == 0
    assert net.training
    x = nets.images(7)[0]
    again = torch.export.load(path)
    assert torch.equal(again.module()(x), net.eval()(x))
    operators = {str(node.target) for node in again.graph.nodes}
    assert "aten.index_select.default" in operators
    assert not [name for name in operators if "fastbcd" in name]


def test_export_to_onnx(tmp_path) -> None:
    pytest.importorskip("onnxscript")
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    net = nets.thinned(nets.make("mixture"))
    path = tmp_path / "net.onnx"
    assert private.export(net, nets.images(3)[0], path) < 1e-5
    x = nets.images(7)[0]
    session = runtime.InferenceSession(path)
    (logits,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), net(x).detach(), atol=1e-5, rtol=1e-4)
    assert {"Gather", "Relu"} <= {node.op_type for node in onnx.load(path).graph.node}


def test_export_refuses(tmp_path, monkeypatch) -> None:
    net, x = nets.make("mlp"), nets.images(2)[0]
    with pytest.raises(ValueError, match=r"net.txt must end in .pt2 or .onnx"):
        private.export(net, x, tmp_path / "net.txt")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        private.export(net, x, tmp_path / "no" / "net.pt2")
    with pytest.raises(ValueError, match="example has a batch of 1"):
        private.export(net, x[:1], tmp_path / "net.pt2")
    with pytest.raises(ValueError, match=r"torch.export cannot take Untraceable"):
        private.export(nets.make("untraceable"), x, tmp_path / "net.pt2")
    net.get_parameter("1.weight").data[0, 0] = math.nan
    with pytest.raises(ValueError, match="own logits on the example are not finite"):
        private.export(net, x, tmp_path / "net.pt2")
    real = importlib.import_module

    def missing(name, *rest):
        if name == "onnxscript":
            raise ImportError(name)
        return sys if name == "onnx" else real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"needs the package onnxscript: pip install fastbcd\["):
        private.export(net, x, tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------- ranges


def test_ranges_are_those_of_the_values() -> None:
    net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(192), nn.Linear(192, 5)).train()
    x, labels = nets.images(40)
    (site,) = private.activation_ranges(net, (x * 3 - 1, labels), batch_size=7).sites
    z = (x * 3 - 1).flatten()
    assert (site.low, site.high) == (float(z.min()), float(z.max()))
    for q, found in zip((0.5, 0.99, 0.999), site.quantiles, strict=True):
        true = float(z.abs().quantile(q, interpolation="higher"))
        assert true * 0.999 <= found <= true * 1.01
    assert net.training
    assert not net[1]._forward_pre_hooks


def test_ranges_do_not_depend_on_batches_and_see_every_site() -> None:
    net, data = nets.thinned(nets.make("resnet")), nets.images(20)
    whole = private.activation_ranges(net, data, batch_size=20)
    assert [s.name for s in whole.sites] == list(fastbcd.masks(net).counts())
    parts = private.activation_ranges(net, data, batch_size=3)
    for a, b in zip(whole.sites, parts.sites, strict=True):
        assert (a.low, a.high) == pytest.approx((b.low, b.high), rel=1e-5)
    assert "|z| 99.9%" in str(whole)


def test_ranges_outside_the_fixed_point() -> None:
    x, labels = nets.images(10)
    net = nn.Sequential(nn.Flatten(), MaskedPoly(192), nn.Linear(192, 5))
    x = x.clamp(-20, 20)
    x[0, 0, 0, 0] = 100.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # All kept: 100 < 2^(16 - 1 - 8). A square of it, twice the fraction, is too large.
        assert private.activation_ranges(net, (x, labels), fixed_point=(16, 8)).sites[0].fits
    with pytest.warns(RuntimeWarning, match=r"site '1' sees values from .* to 100, beyond ±64"):
        private.activation_ranges(net, (x, labels), fixed_point=(16, 9))
    net[1].mask[0] = False
    with pytest.warns(RuntimeWarning, match="range of 16 bits with 6 after the point"):
        ranges = private.activation_ranges(net, (x, labels), fixed_point=(16, 6))
    assert ranges.sites[0].limit == 2.0**1.5
    assert "outside ±2.828" in str(ranges)
    x[0, 0, 0, 0] = math.inf
    with pytest.warns(RuntimeWarning, match="the net itself overflows"):
        private.activation_ranges(net, (x, labels))


def test_ranges_refuse() -> None:
    net = nets.make("mlp")
    with pytest.raises(ValueError, match=r"fixed_point=\(16, 15\)"):
        private.activation_ranges(net, nets.images(2), fixed_point=(16, 15))
    with pytest.raises(ValueError, match="there are no images"):
        private.activation_ranges(net, fastbcd.load("fashion-mnist-mini").first(0))


# ------------------------------------------------------------------------------- commands

NET = """
from torch import nn

def small():
    return nn.Sequential(nn.Conv2d(1, 4, 5, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(196, 20),
                         nn.ReLU(), nn.Linear(20, 10))
"""


@pytest.fixture
def run(tmp_path, monkeypatch) -> nn.Module:
    """A finished run in `out`, its masks in `masks.safetensors`; the net."""
    (tmp_path / "my_nets.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_nets", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    module = importlib.import_module("my_nets")
    data = fastbcd.load("fashion-mnist-mini").first(16)
    net = fastbcd.convert(module.small(), next(data.batches(2))[0], replacement="poly")
    fastbcd.bcd(net, data, budget=100, drc=58, rt=2, finetune=None, run_dir="out")
    fastbcd.masks(net).save("masks.safetensors")
    return net.eval()


def fastbcd_(line: str) -> int:
    return cli.main(shlex.split(line))


def test_cost_command(run, capsys) -> None:
    assert fastbcd_("cost out --json --bandwidth 100Mbit --rtt 40ms") == 0
    (found,) = json.loads(capsys.readouterr().out)
    expected = private.cost(run, "crypten", 1e8, 0.04)
    assert found == json.loads(json.dumps(expected.as_dict()))
    assert [s["name"] for s in found["sites"]] == [s.name for s in fastbcd.masks(run).sites]
    assert found["total"]["squares"] == 116
    assert fastbcd_("cost masks.safetensors --protocol delphi-gc spu-semi2k") == 0
    out = capsys.readouterr().out
    assert f"{private.cost(fastbcd.masks(run), 'delphi-gc')}\n\nspu-semi2k, " in out
    Path("recipe").mkdir()
    Path("out").rename("recipe/3-bcd")
    assert fastbcd_("cost recipe") == 0
    assert capsys.readouterr().out.strip() == str(private.cost(run))


def test_cost_of_an_unfinished_start(run, capsys) -> None:
    """Between epochs a start's state holds what it trains, not masks."""
    for path in Path("out").glob("*.safetensors"):
        path.unlink()
    state = State(1, {"net.1.mask": torch.ones(4)}, {})
    Path("out/state.safetensors").write_bytes(state_bytes(state))
    assert fastbcd_("cost out") == 2
    assert "has no final masks yet (none for site '1'): let it end" in capsys.readouterr().err


def test_export_command(run, capsys) -> None:
    net = "--model my_nets:small --data fashion-mnist-mini"
    assert fastbcd_(f"export out {net} --out net.pt2") == 0
    assert "net.pt2: 100 of 216 ReLUs, any batch of 1×28×28" in capsys.readouterr().out
    x = torch.randn(3, 1, 28, 28)
    assert torch.equal(torch.export.load("net.pt2").module()(x), run(x))
    bits = torch.zeros(216, dtype=torch.bool)
    MaskSet(fastbcd.masks(run).sites, bits).save("none.safetensors")
    assert fastbcd_(f"export none.safetensors {net} --weights out --out none.pt2") == 0
    fastbcd.set_masks(run, MaskSet.load("none.safetensors"))
    assert torch.equal(torch.export.load("none.pt2").module()(x), run(x))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cost nothing", "there is nothing at nothing"),
        ("cost .", "is no run directory"),
        ("cost my_nets.py", "is not a readable safetensors file"),
        ("export out --model my_nets:small --data fashion-mnist-mini --out a.txt", "must end in"),
        ("export out --weights out --out a.pt2", "a run directory has its own"),
        ("export masks.safetensors --out a.pt2", "give the net's --weights too"),
    ],
)
def test_errors_are_one_line(run, line, message, capsys) -> None:
    assert fastbcd_(line) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--bandwidth fast", "--bandwidth 0", "--rtt soon"])
def test_units_are_checked(option, capsys) -> None:
    with pytest.raises(SystemExit):
        fastbcd_(f"cost somewhere {option}")
    assert option.split()[1] in capsys.readouterr().err
