"""The networks: SNL's counts, names and order, tracing, scoring, bad sizes."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd import MaskedPoly, models

COUNTS = [
    ("resnet18", 32, {}, [65536] * 4 + [32768] * 4 + [16384] * 4 + [8192] * 4),
    ("resnet18", 32, {"stem_relu": True}, 557_056),
    ("resnet18", 64, {}, 1_966_080),
    ("resnet18", 64, {"stem_relu": True}, 2_228_224),
    ("wide_resnet22_8", 32, {}, [16384] + [131072] * 6 + [65536] * 6 + [32768] * 5),
    ("wide_resnet22_8", 32, {"final_relu": True}, 1_392_640),
    ("wide_resnet22_8", 64, {}, 5_439_488),
    ("resnet20", 32, {}, [16384] * 7 + [8192] * 6 + [4096] * 6),
]


def small(name: str, **options) -> nn.Module:
    torch.manual_seed(0)
    narrow = {"resnet18": {"width": 4}, "resnet20": {"width": 4}, "wide_resnet22_8": {"factor": 1}}
    return models.build(name, 5, 8, **narrow[name], **options).eval()


@pytest.mark.parametrize(("name", "size", "options", "counts"), COUNTS)
def test_counts(name, size, options, counts) -> None:
    with torch.device("meta"):
        net = models.build(name, 100, size, **options)
    sizes = [m.mask.numel() for m in net.modules() if hasattr(m, "mask")]
    assert sizes == counts if isinstance(counts, list) else sum(sizes) == counts


def test_published_totals() -> None:
    assert {n: sum(c) for n, s, _, c in COUNTS if isinstance(c, list)} == {
        "resnet18": 491_520, "wide_resnet22_8": 1_359_872, "resnet20": 188_416,
    }  # fmt: skip


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("option", [False, True])
def test_sites_are_in_execution_order(name, option) -> None:
    extra = {"resnet18": "stem_relu", "wide_resnet22_8": "final_relu"}.get(name)
    net = small(name, **({extra: True} if option and extra else {}))
    called = []
    for site, module in net.named_modules():
        if hasattr(module, "mask"):
            module.register_forward_hook(lambda *_, site=site: called.append(site))
    net(torch.randn(2, 3, 8, 8))
    assert called == [site.name for site in fastbcd.masks(net).sites]


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("replacement", ["identity", "line", "poly"])
def test_stacked_scoring_equals_sequential(name, replacement) -> None:
    net = small(name, replacement=replacement)
    masks = fastbcd.masks(net)
    removals = torch.stack([masks.sample(50, seed=0, step=0, trial=t) for t in range(3)])
    data = torch.randn(20, 3, 8, 8), torch.arange(20) % 5
    one = fastbcd.score(net, removals, data, engine="sequential")
    many = fastbcd.score(net, removals, data, engine="stacked")
    assert torch.equal(one.correct, many.correct)
    torch.testing.assert_close(one.loss, many.loss, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("size", [7, 28])
def test_odd_sizes_and_grey_images(name, size) -> None:
    net = models.build(name, 3, size, in_channels=1)
    assert net.eval()(torch.randn(2, 1, size, size)).shape == (2, 3)


def test_weights_are_named_as_in_snl() -> None:
    keys = set(small("resnet18").state_dict())
    assert {"conv1.weight", "bn1.weight", "layer4.1.conv2.weight", "linear.bias"} <= keys
    assert {"layer2.0.shortcut.0.weight", "layer2.0.shortcut.1.running_mean"} <= keys
    assert not any(k.startswith("layer1.0.shortcut") for k in keys)
    assert "layer1.0.alpha1.mask" in keys
    with torch.device("meta"):
        wide = set(models.wide_resnet22_8().state_dict())
    assert {"block1.layer.0.convShortcut.weight", "block3.layer.2.alpha2.mask", "fc.bias"} <= wide
    assert "block1.layer.1.convShortcut.weight" not in wide


def test_resnet20_pads_its_shortcuts() -> None:
    """Every second pixel; the new channels are zeros on both sides."""
    shortcut = models.resnet20(width=4).layer2[0].shortcut
    x = torch.randn(1, 4, 8, 8)
    y = shortcut(x)
    assert torch.equal(y[:, 2:6], x[:, :, ::2, ::2])
    assert y.shape[1] == 8
    assert not y[:, :2].any()
    assert not y[:, 6:].any()


def test_poly_and_widths() -> None:
    net = models.resnet20(width=4, blocks=1, replacement="poly")
    acts = [m for m in net.modules() if hasattr(m, "mask")]
    assert len(acts) == 7
    assert all(isinstance(m, MaskedPoly) for m in acts)


@pytest.mark.parametrize("name", models.NAMES)
def test_a_net_records_how_to_build_it(name) -> None:
    """arch is plain data, survives deepcopy, is not in the state_dict, and rebuilds the net."""
    extra = {"resnet18": {"stem_relu": True}, "wide_resnet22_8": {"final_relu": True}}.get(name, {})
    net = small(name, in_channels=2, **extra)
    arch = json.loads(json.dumps(copy.deepcopy(net).arch))
    assert arch["name"] == name
    assert (arch["num_classes"], arch["image_size"], arch["in_channels"]) == (5, 8, 2)
    assert not any("arch" in key for key in net.state_dict())
    again = models.build(**arch).eval()
    again.load_state_dict(net.state_dict())
    x = torch.randn(2, 2, 8, 8)
    assert torch.equal(again(x), net(x))


def test_to_poly_records_the_other_activation() -> None:
    net = small("resnet20")
    poly = fastbcd.to_poly(net)
    models.build(**poly.arch).load_state_dict(poly.state_dict())
    assert net.arch["replacement"] == "identity"
    assert models.ResNet([4], 1, 3, 8).arch is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: models.build("resnet81", 10, 32), "did you mean 'resnet18'"),
        (lambda: models.resnet18(num_classes=0), "num_classes=0"),
        (lambda: models.resnet18(image_size=32.0), "image_size=32.0"),
        (lambda: models.resnet20(width=-1), r"widths\[0\]=-1"),
        (lambda: models.resnet18(replacement="relu"), "replacement='relu'"),
        (lambda: models.WideResNet(20, 1, 10, 8), "depth=20"),
        (lambda: models.ResNet([4], 1, 10, 8, shortcut="none"), "shortcut='none'"),
    ],
)
def test_bad_sizes(make, words) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        make()
