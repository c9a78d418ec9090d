"""Private inference: gather form, export, and the ranges of activations."""

from __future__ import annotations

import importlib
import math
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastbcd
from fastbcd import MaskedPoly, MaskedReLU, private
from fastbcd.private.gathering import GatheredPoly, GatheredReLU
from fastbcd.starts.snl import SoftReLU
from helpers import nets

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
    with pytest.raises(ValueError, match="site '0' is a SoftReLU of an unfinished"):
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
