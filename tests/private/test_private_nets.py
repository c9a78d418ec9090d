"""Private inference: gather form, export, and the ranges of activations."""

from __future__ import annotations

import math
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastbcd
from fastbcd import MaskedLine, MaskedPoly, MaskedReLU, private
from fastbcd.private import exporting
from fastbcd.private.gathering import Copied, GatheredPoly, GatheredReLU, Polynomial
from fastbcd.starts.snl import SoftReLU
from helpers import nets

# ------------------------------------------------------------------------------- gather form


def assert_same(found: torch.Tensor, truth: torch.Tensor) -> None:
    """Bit for bit, except for quadratics, which are computed from one square."""
    ulp = torch.finfo(truth.dtype).eps
    torch.testing.assert_close(found, truth, rtol=8 * ulp, atol=8 * ulp, equal_nan=True)


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
    assert_same(small(x), net(x))
    with CountReLUs() as seen, torch.no_grad():
        small(x)
    assert seen.count == len(x) * fastbcd.masks(net).count()


@pytest.mark.parametrize("kind", [MaskedReLU, MaskedLine, MaskedPoly])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
def test_a_site_in_every_state(kind, dtype, last) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Identity(), kind((4, 3, 2)))
    x = torch.randn(5, 4, 3, 2, dtype=dtype)
    infinity = math.inf if kind is MaskedReLU else 9.0  # c2 * inf + c1 * inf may be NaN
    x[0, :, 0, 0] = torch.tensor([math.nan, infinity, -infinity, -0.0])
    for p in net.parameters():
        nn.init.normal_(p)
    if last:
        x = x.to(memory_format=torch.channels_last)
    empty, some = {
        MaskedReLU: (nn.Identity, GatheredReLU), MaskedLine: (Polynomial, GatheredPoly),
        MaskedPoly: (Polynomial, GatheredPoly),
    }[kind]  # fmt: skip
    for mask, expected in (
        (torch.ones(4, 3, 2, dtype=torch.bool), nn.ReLU),
        (torch.zeros(4, 3, 2, dtype=torch.bool), empty),
        (torch.rand(4, 3, 2) > 0.5, some),
    ):
        net[1].mask.copy_(mask)
        small = private.gather_form(net)
        assert type(small[1]) is expected
        assert small(x).dtype == dtype
        assert_same(small(x), net(x))


@pytest.mark.parametrize("name", [*nets.TRACEABLE, "untraceable"])
def test_emptied_sites_are_dropped(name) -> None:
    """The same function; a converted net has no call of them left."""
    for seed in range(3):
        net, x = nets.emptied(nets.thinned(nets.make(name)), seed), nets.images(4)[0]
        small = private.gather_form(net)
        assert_same(small(x), net(x))
        if isinstance(small, torch.fx.GraphModule):
            calls = {n.target for n in small.graph.find_nodes(op="call_module")}
            gone = {s for s, kept in fastbcd.masks(net).counts().items() if not kept}
            # A line after an addition cannot be folded; quadratics are still the identity.
            assert calls & gone <= ({"3.relu_2"} if name == "line" else set())


class OverwritesASite(nn.Module):
    """What a site returns, or has read, is overwritten while the other is still needed."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which, self.act, self.head = which, MaskedReLU((3, 8, 8)), nn.Linear(3, 5)

    def forward(self, x):
        x = x * 2.0
        y = self.act(x)
        if self.which == "output":
            y += 1.0
        elif self.which == "input":
            x.mul_(3.0)
        else:
            x = y.add_(0.5)  # nothing else is read afterwards
        return self.head((x - 2.0 * y).mean((2, 3)))


CASES = [("output", Copied), ("input", Copied), ("neither", nn.Identity)]


@pytest.mark.parametrize(("which", "kind"), CASES)
def test_a_dropped_site_does_not_share_memory_that_is_overwritten(which, kind) -> None:
    torch.manual_seed(0)
    net, x = OverwritesASite(which).eval(), nets.images(4)[0]
    net.act.mask.zero_()
    small = private.gather_form(net)
    assert type(small.act) is kind
    assert torch.equal(small(x), net(x))


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
    assert_same(net.eval()(x), y)


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
    with pytest.raises(ValueError, match="site '0' is a SoftReLU of an unfinished"):
        private.gather_form(nn.Sequential(SoftReLU(torch.tensor([True]))))


# ------------------------------------------------------------------------------- export


@pytest.mark.parametrize("name", ["resnet", "mixture"])
def test_export_round_trip(name, tmp_path) -> None:
    net = nets.thinned(nets.make(name)).train()
    path = tmp_path / "net.pt2"
    assert private.export(net, nets.images(3)[0], path) == 0
    assert net.training
    x = nets.images(7)[0]
    again = torch.export.load(path)
    assert_same(again.module()(x), net.eval()(x))
    operators = {str(node.target) for node in again.graph.nodes}
    assert "aten.index_select.default" in operators
    assert not [name for name in operators if "fastbcd" in name]


def with_sites(in_use: set[int], replacement: str = "identity") -> nn.Module:
    """The test net; one of the ReLUs of the sites in use is gone, and all of the others."""
    net = nets.make("poly" if replacement == "poly" else "resnet")
    kept = fastbcd.masks(net).copy()
    for i, site in enumerate(kept.sites):
        kept.bits[site.start : site.start + (1 if i in in_use else site.numel)] = False
    fastbcd.set_masks(net, kept)
    return net


@pytest.mark.parametrize("converted", [False, True])
def test_lines_are_folded_into_the_layer_before(converted, tmp_path) -> None:
    """Those of channels without ReLUs, where nothing else reads what the layer gives."""
    net = nets.randomize(fastbcd.models.resnet20(5, 8, width=4, blocks=1, replacement="line"))
    if converted:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
        net = nets.randomize(fastbcd.convert(model, torch.zeros(2, 3, 8, 8), replacement="line"))
    net.eval()
    kept = fastbcd.masks(net).copy()
    first = kept.sites[0]
    part = first.numel // 2  # of the channels of the first site
    kept.bits[:part] = False
    for site in kept.sites[1::2]:
        kept.bits[site.start : site.start + site.numel] = False
    fastbcd.set_masks(net, kept)
    x = nets.images(6)[0]
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    small = private.gather_form(net)
    torch.testing.assert_close(small(x), net(x), rtol=1e-5, atol=1e-5)
    assert type(small.get_submodule(first.name)) is private.gathering.GatheredReLU
    if not converted:  # alpha2 of a block follows an addition
        assert type(small.get_submodule("layer1.0.alpha1")) is nn.Identity
        assert type(small.get_submodule("layer2.0.alpha1")) is nn.Identity
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert private.export(net, x, tmp_path / "net.pt2") < 1e-5


def never_there(in_use: set[int]) -> nn.Module:
    """The same net, written without the ReLUs of the other sites."""
    net = with_sites(in_use)
    for i, site in enumerate(fastbcd.masks(net).sites):
        if i not in in_use:
            net.set_submodule(site.name, nn.Identity())
    return net


def operators(path) -> list[str]:
    """What an exported graph calls, in order."""
    graph = torch.export.load(path).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_no_operation_is_exported_for_emptied_sites(tmp_path) -> None:
    """The graph is that of a net that never had them; of a site in use it has one ReLU."""
    for name, net in (("emptied", with_sites({1, 4})), ("never", never_there({1, 4}))):
        private.export(net, nets.images(3)[0], tmp_path / f"{name}.pt2")
    names = operators(tmp_path / "emptied.pt2")
    assert names == operators(tmp_path / "never.pt2")
    for word, times in {"relu": 2, "index_copy": 2, "identity": 0, "where": 0}.items():
        assert sum(word in name for name in names) == times, word


def test_export_to_onnx(tmp_path) -> None:
    pytest.importorskip("onnxscript")
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    net = with_sites({1, 4})
    path = tmp_path / "net.onnx"
    assert private.export(net, nets.images(3)[0], path) < 1e-5
    x = nets.images(7)[0]
    session = runtime.InferenceSession(path)
    (logits,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), net(x).detach(), atol=1e-5, rtol=1e-4)
    names = [node.op_type for node in onnx.load(path).graph.node]
    for word, times in {"Relu": 2, "Gather": 2, "ScatterND": 2, "Identity": 0, "Where": 0}.items():
        assert names.count(word) == times, names


def test_nothing_is_exported_for_emptied_sites_of_a_net_without_a_graph(tmp_path) -> None:
    """fastbcd.models call their activations by hand: nn.Identity in gather form, then nothing."""
    net = fastbcd.models.resnet20(num_classes=5, image_size=8, width=4, blocks=1).eval()
    kept = fastbcd.masks(net).copy()
    kept.bits[:-9] = False
    fastbcd.set_masks(net, kept)
    assert type(private.gather_form(net).get_submodule(kept.sites[0].name)) is nn.Identity
    private.export(net, nets.images(3)[0], tmp_path / "net.pt2")
    names = operators(tmp_path / "net.pt2")
    for word, times in {"relu": 1, "index_copy": 1, "conv2d": 7, "clone": 0, "where": 0}.items():
        assert sum(word in name for name in names) == times, word


def test_squares_of_sites_without_relus_are_exported(tmp_path) -> None:
    """Without gathers: every unit of such a site is a square."""
    net = nets.randomize(with_sites(set(), "poly"))
    assert private.export(net, nets.images(3)[0], tmp_path / "net.pt2") < 1e-6
    names = operators(tmp_path / "net.pt2")
    assert not [name for name in names if "relu" in name or "index" in name]
    assert sum("square" in name or "pow" in name for name in names) == 3  # one at each site


@pytest.mark.parametrize(
    ("name", "batch", "file", "message"),
    [
        ("mlp", 2, "net.txt", "net.txt must end in .pt2 or .pi or .onnx"),
        ("mlp", 2, "no/net.pt2", "there is no folder"),
        ("mlp", 1, "net.pt2", "example has a batch of 1"),
        ("untraceable", 2, "net.pt2", "torch.export cannot take Untraceable"),
        ("double", 2, "net.onnx", "example is torch.float64; a .onnx file can be checked for"),
    ],
)
def test_export_refuses(name, batch, file, message, tmp_path) -> None:
    net, images = nets.make(name.replace("double", "mlp")), nets.images(batch)[0]
    if name == "double":
        images = images.double()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        private.export(net, images, tmp_path / file)
    assert not list(tmp_path.iterdir())


def test_export_refuses_a_net_that_overflows(tmp_path) -> None:
    net = nets.make("mlp")
    net.get_parameter("1.weight").data[0, 0] = math.nan
    with pytest.raises(ValueError, match="own logits on the example are not finite"):
        private.export(net, nets.images(2)[0], tmp_path / "net.pt2")


class TwoOutputs(nn.Module):
    """A net that returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nets.make("mlp")

    def forward(self, x):
        return {"logits": self.net(x), "brightness": x.mean((1, 2, 3))}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_export_of_a_dict_in_any_precision(dtype, tmp_path) -> None:
    net, x = TwoOutputs().to(dtype).eval(), nets.images(2)[0].to(dtype)
    assert private.export(net, x, tmp_path / "net.pt2") == 0
    again = torch.export.load(tmp_path / "net.pt2").module()(x)
    assert torch.equal(again["logits"], net(x)["logits"])


@pytest.mark.parametrize("difference", [1e-3, math.nan])
def test_a_file_that_is_right_stays_if_the_new_one_is_wrong(
    difference, tmp_path, monkeypatch
) -> None:
    net, x, path = nets.make("mlp").eval(), nets.images(2)[0], tmp_path / "net.pt2"
    private.export(net, x, path)
    before = path.read_bytes()
    logits = net(x).detach()
    wrong = logits + difference * logits.abs().max()
    monkeypatch.setattr(exporting, "_run", lambda *_: [wrong])
    with pytest.raises(RuntimeError, match=r"net\.pt2 was not written: it would give other logits"):
        private.export(net, x, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_half_net_may_differ_by_its_own_rounding(tmp_path, monkeypatch) -> None:
    net, x = nets.make("mlp").half().eval(), nets.images(2)[0].half()
    near = [net(x).detach() * (1 + 2e-3)]
    monkeypatch.setattr(exporting, "_run", lambda *_: near)
    assert private.export(net, x, tmp_path / "net.pt2") > 3e-4


def test_export_names_a_package_that_is_missing(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", sys)
    monkeypatch.setitem(sys.modules, "onnxscript", None)  # its import fails
    with pytest.raises(ImportError, match=r"needs the package onnxscript: pip install fastbcd\["):
        private.export(nets.make("mlp"), nets.images(2)[0], tmp_path / "net.onnx")


# ------------------------------------------------------------------------------- ranges


def test_ranges_are_those_of_the_values() -> None:
    net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(192), nn.Linear(192, 5)).train()
    x, labels = nets.images(40)
    (site,) = private.ranges(net, (x * 3 - 1, labels), batch_size=7).sites
    z = (x * 3 - 1).flatten()
    assert (site.low, site.high) == (float(z.min()), float(z.max()))
    for q, found in zip((0.5, 0.99, 0.999), site.quantiles, strict=True):
        true = float(z.abs().quantile(q, interpolation="higher"))
        assert true * 0.999 <= found <= true * 1.01
    assert net.training
    assert not net[1]._forward_pre_hooks


def test_ranges_do_not_depend_on_batches_and_see_every_site() -> None:
    net, data = nets.thinned(nets.make("resnet")), nets.images(20)
    whole = private.ranges(net, data, batch_size=20)
    assert [s.name for s in whole.sites] == list(fastbcd.masks(net).counts())
    parts = private.ranges(net, data, batch_size=3)
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
        assert private.ranges(net, (x, labels), fixed_point=(16, 8)).sites[0].fits
    with pytest.warns(RuntimeWarning, match=r"site '1' sees values from .* to 100, outside ±64"):
        private.ranges(net, (x, labels), fixed_point=(16, 9))
    net[1].mask[0] = False
    with pytest.warns(RuntimeWarning, match="1 sites leave the range; .*: use fewer fraction bits"):
        ranges = private.ranges(net, (x, labels), fixed_point=(16, 6))
    assert ranges.sites[0].limit == 2.0**1.5
    assert "outside ±2.828" in str(ranges)
    x[0, 0, 0, 0] = math.inf
    with pytest.warns(RuntimeWarning, match="the net itself overflows"):
        private.ranges(net, (x, labels))


def test_ranges_refuse() -> None:
    net = nets.make("mlp")
    for wrong in (0, (16,), "ab"):
        with pytest.raises(ValueError, match="such as"):
            private.ranges(net, nets.images(2), fixed_point=wrong)
    with pytest.raises(ValueError, match=r"fixed_point=\(16, 15\)"):
        private.ranges(net, nets.images(2), fixed_point=(16, 15))


# ----------------------------------------------------------------------- checks of an engine


def two_layers(scale: float) -> nn.Module:
    """The first layer gives values up to `scale`, the second none above 1."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), MaskedReLU(4), nn.Linear(4, 2))
    with torch.no_grad():
        net[1].weight.copy_(scale * torch.eye(4))
        net[1].bias.zero_()
        net[3].weight.fill_(0.1 / scale)
    return net


@pytest.mark.parametrize(
    ("engine", "fixed_point", "most"),
    [
        ("spu-cheetah", (64, 16), 2.0**30), ("spu-semi2k", (64, 18), 2.0**26),
        ("crypten", (64, 16), 2.0**31), ("opencheetah", None, 2.0**10),
        ("spu-cheetah", (32, 8), 2.0**14),
    ],
)  # fmt: skip
def test_an_engine_passes_or_refuses(engine, fixed_point, most) -> None:
    """The bound of a layer has twice the fraction bits: its truncation must not overflow."""
    data = torch.ones(3, 1, 2, 2), torch.zeros(3, dtype=torch.long)
    inside = private.ranges(two_layers(0.99 * most), data, engine, fixed_point=fixed_point)
    assert inside.sites[0].fits
    message = rf"{engine} would compute wrong logits: 1 layers .* layer '1' sees .* outside"
    with pytest.raises(ValueError, match=message):
        private.ranges(two_layers(1.01 * most), data, engine, fixed_point=fixed_point)


def test_narrow_comparisons() -> None:
    """The window holds the largest value; fewer bits are right for fewer values near 0."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), MaskedReLU(2000))
    x = torch.randn(40, 1, 40, 50)
    labels = net(x).argmax(1)
    found = {n: private.ranges(net, (x, labels), "crypten", narrow=n) for n in (8, 16, 32)}
    largest = found[8].sites[0].largest
    for width, ranges in found.items():
        (low, high) = ranges.windows["1"]
        assert high - low == width
        assert largest * 2**16 < 2 ** (high - 1)
        assert low == 0 or largest * 2**16 >= 2 ** (high - 2)
        assert ranges.accuracies[0] == 100
    assert found[32].accuracies[1] == 100
    bare = nn.Sequential(nn.Flatten(), MaskedReLU(2))
    near = torch.tensor([[0.01, 0.5]]).repeat(200, 1).view(200, 1, 1, 2)
    far = torch.tensor([[0.0, 100.0]]).view(1, 1, 1, 2)
    images = torch.cat([near, far]), torch.ones(201, dtype=torch.long)
    lost = private.ranges(bare, images, "crypten", narrow=8)
    assert lost.accuracies[1] < lost.accuracies[0] - 10  # 0.5 is below a unit of 2^(low - 16)


def test_narrow_refuses() -> None:
    with pytest.raises(ValueError, match="narrow=12; choose from"):
        private.ranges(two_layers(1.0), nets.images(2), narrow=12)
    with pytest.raises(ValueError, match="engine='delphi'; choose from"):
        private.ranges(two_layers(1.0), nets.images(2), "delphi")
