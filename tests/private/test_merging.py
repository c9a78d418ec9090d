"""Merged linear runs: equal to the net's own layers, at the cuts that cost least."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx, nn

import fastbcd
from fastbcd import private
from fastbcd.private.cuts import Cutting
from fastbcd.private.linear_runs import LinearRuns
from fastbcd.private.merged_layers import MergedLayers
from fastbcd.private.merged_maps import DenseMap, MergedMap
from fastbcd.private.merging import merged_at
from helpers import nets


class Recorded(fx.Interpreter):
    """The value of every node."""

    def __init__(self, net: nn.Module, graph: fx.Graph) -> None:
        super().__init__(fx.GraphModule(net, graph))
        self.values: dict[str, torch.Tensor] = {}

    def run_node(self, n):
        self.values[n.name] = super().run_node(n)
        return self.values[n.name]


def with_sites(net: nn.Module, used: set[int], part: float = 0.5) -> nn.Module:
    """The sites that are not in use keep nothing, the others a part of their ReLUs."""
    kept = fastbcd.masks(net).copy()
    for number, site in enumerate(kept.sites):
        share = part if number in used else 1.0
        kept.bits[site.start : site.start + round(share * site.numel)] = False
    fastbcd.set_masks(net, kept)
    return net.eval()


class Odd(nn.Module):
    """Strides, paddings and dilations that differ, and a branch of another window."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, (3, 5), stride=(1, 2), padding=(0, 2))
        self.b = nn.Conv2d(4, 4, 3, padding=2, dilation=2)
        self.c = nn.Conv2d(4, 6, 2, stride=2, padding=1)
        self.act = fastbcd.MaskedLine((4, 22, 12))
        self.act2 = fastbcd.MaskedReLU((6, 12, 7))
        self.head = nn.Linear(6 * 84, 5)

    def forward(self, x):
        y = self.act(self.a(x))
        y = self.c(self.b(y) + y)
        return self.head(self.act2(y).flatten(1))


def residual(shortcut: str, used: set[int]) -> nn.Module:
    net = fastbcd.models.ResNet(
        [4, 6, 8], 2, 5, 24, stem_relu=True, shortcut=shortcut, replacement="line"
    )
    return with_sites(nets.randomize(net), used)


def large(name: str) -> nn.Module:
    """Nets for images of 24×24, whose maps have an interior, in double precision."""
    torch.manual_seed(0)
    if name == "odd":
        net = with_sites(nets.randomize(Odd()), {1})
    elif name == "wide":
        net = fastbcd.models.WideResNet(10, 1, 5, 24, replacement="line")
        net = with_sites(nets.randomize(net), {1, 4})
    else:
        net = residual(*{"projection": ("projection", {0, 5}), "pad": ("pad", {2, 3, 8})}[name])
    net.example_shape = (3, 24, 24)
    return net.double()


LARGE = ["odd", "wide", "projection", "pad"]


@pytest.mark.parametrize("name", LARGE)
def test_maps_equal_the_runs_in_the_interior(name) -> None:
    """And everywhere where nothing but the biases is not zero; dense maps everywhere."""
    net = large(name)
    runs = LinearRuns(net)
    merged = merged_at(net, runs, frozenset())
    truth = Recorded(net, runs.graph)
    truth.run(torch.randn(2, 3, 24, 24, dtype=torch.double))
    maps = [node for node in merged.graph.nodes if str(node.target).startswith("to_")]
    assert len(maps) >= 2
    for node in maps:
        module = merged.get_submodule(node.target)
        sources = [truth.values[source.name] for source in node.args]
        value = truth.values[node.name.removeprefix("to_")]
        difference = (module(*sources) - value).abs() / value.abs().max()
        if isinstance(module, DenseMap):
            assert difference.max() < 1e-13
            continue
        wide = max(max(p.shape[2:]) for p in module.parts.parameters() if p.ndim == 4)
        edge = min(wide // 2 + 1, value.shape[-1] // 2 - 1)
        assert difference[:, :, edge:-edge, edge:-edge].max() < 1e-13
        if wide == 1:
            assert difference.max() < 1e-13


@pytest.mark.parametrize("name", LARGE)
def test_biases_are_exact_at_the_border(name) -> None:
    """A map of zeros is the run of zeros, at each position."""
    net = large(name)
    runs = LinearRuns(net)
    merged = merged_at(net, runs, frozenset())
    for node in (n for n in merged.graph.nodes if n.name == "to_c" or n.name.startswith("to_add")):
        module = merged.get_submodule(node.target)
        if isinstance(module, MergedMap) and [s.op for s in node.args] == ["placeholder"]:
            truth = Recorded(net, runs.graph)
            truth.run(torch.zeros(1, 3, 24, 24, dtype=torch.double))
            expected = truth.values[node.name.removeprefix("to_")][0]
            torch.testing.assert_close(module.bias, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in nets.TRACEABLE if name != "sizes"])
def test_with_every_cut_the_logits_are_the_same(name) -> None:
    """Then no two layers with a border are merged; max-pools and concatenations stay."""
    net, x = nets.emptied(nets.thinned(nets.make(name)), 0).double(), nets.images(4)[0].double()
    fastbcd.private.cost(net, images=x)
    runs = LinearRuns(net)
    cuts = frozenset(n.name for n in runs.nodes if n.name in runs.paths and runs.may_be_cut(n))
    merged = merged_at(net, runs, cuts)
    torch.testing.assert_close(merged(x), net(x), rtol=1e-10, atol=1e-10)


USED = [pytest.param({0}, marks=pytest.mark.long), {2, 3, 8}, {1, 4, 6}]


@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("protocol", ["crypten", "spu-semi2k", "spu-cheetah"])
def test_no_cuts_cost_less(used, protocol) -> None:
    """Of all sets of cuts, by the cost of the merged nets themselves."""
    net = with_sites(fastbcd.models.ResNet([4, 6], 2, 5, 12, stem_relu=True), used)
    net.example_shape = (3, 12, 12)
    target = private.Target(bytes=0, protocol=protocol)
    runs = LinearRuns(net)
    sites = frozenset(name for name, count in fastbcd.masks(net).counts().items() if count)
    best = Cutting(runs, target.price_of).best(sites)
    free = [n.name for n in runs.nodes if runs.is_linear(n, sites) and runs.may_be_cut(n)]
    costs = {}
    for flags in itertools.product((False, True), repeat=len(free)):
        cuts = frozenset(itertools.compress(free, flags))
        merged = merged_at(net, runs, cuts)
        costs[cuts] = private.cost(merged, protocol).linear.bytes
    assert costs[best.nodes] == min(costs.values())
    revealed = private.cost(net, protocol).layers[-1].bytes
    assert best.cost == pytest.approx(min(costs.values()) - revealed, rel=1e-12)


def test_a_merged_net_is_a_net(tmp_path) -> None:
    """It scores, costs, saves, exports, is trained and reduced further; the net stays as it is."""
    torch.manual_seed(0)
    net = with_sites(fastbcd.models.resnet20(5, 8, width=4, replacement="line"), {0, 8, 13})
    images = torch.randn(20, 3, 8, 8), torch.arange(20) % 5
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    result = private.merge(net, images, "spu-cheetah", epochs=1)
    merged = result.net
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert fastbcd.masks(merged).counts() == {
        name: count for name, count in fastbcd.masks(net).counts().items() if count
    }
    assert result.costs[1] == private.cost(merged, "spu-cheetah")
    assert result.costs[1].bytes < result.costs[0].bytes
    assert result.accuracies == tuple(fastbcd.accuracy(n, images) for n in (net, merged))
    assert "merged: " in str(result)
    again = private.merge(net, images, "spu-cheetah", epochs=0).net
    assert not torch.equal(again(images[0]), merged(images[0]))
    again.load_state_dict(merged.state_dict())
    assert torch.equal(again(images[0]), merged(images[0]))
    assert private.export(merged, images[0], tmp_path / "net.pt2") < 1e-5
    ids = fastbcd.masks(merged).bits.nonzero()[:3].flatten()
    scores = fastbcd.score(merged, ids[:, None], images)
    assert scores.correct.shape == (3,)
    assert fastbcd.bcd(merged, images, budget=40, drc=20, rt=1, finetune=None).masks.count() == 40


def test_the_target_decides_what_is_counted() -> None:
    """The cuts are those of its quantity and its connection."""
    net = with_sites(fastbcd.models.resnet20(5, 32, width=4), {0, 3, 6})
    images = torch.randn(4, 3, 32, 32), torch.arange(4)
    costs = {}
    for name in ("bytes", "rounds"):
        target = private.Target(**{name: 0}, protocol="spu-semi2k")
        costs[name] = private.merge(net, images, target, epochs=0).costs[1]
    assert costs["bytes"].bytes < costs["rounds"].bytes
    assert costs["bytes"].rounds > costs["rounds"].rounds


def test_merge_refuses() -> None:
    images = torch.randn(4, 3, 8, 8), torch.arange(4)
    with pytest.raises(ValueError, match="epochs=-1"):
        private.merge(nets.make("resnet"), images, epochs=-1)
    with pytest.raises(ValueError, match="the net keeps no ReLU"):
        private.merge(with_sites(nets.make("resnet"), set()), images)
    with pytest.raises(ValueError, match="linear runs of Untraceable are not known"):
        private.merge(nets.make("untraceable"), images)


@pytest.mark.parametrize("replacement", ["identity", "line", "poly"])
@pytest.mark.parametrize("quantity", ["seconds", "bytes"])
def test_a_target_of_the_merged_net(replacement, quantity) -> None:
    """Its cost is that of the merged net, and inner sites go before the last ReLUs of others."""
    torch.manual_seed(0)
    net = fastbcd.models.resnet20(5, 16, width=4, blocks=2, replacement=replacement)
    images = torch.randn(40, 3, 16, 16), torch.arange(40) % 5
    options = {"protocol": "spu-semi2k", "merged": True}
    unmerged = private.Target(**{quantity: 0}, protocol="spu-semi2k").cost(net)
    share = 0.95 if replacement == "poly" else 0.7  # quadratics are never merged
    target = private.Target(**{quantity: share * unmerged}, **options)
    assert not target.met(net)
    run = fastbcd.bcd(net, images, target, drc=fastbcd.Fraction(0.5), rt=2, finetune=None)
    assert target.met(run.model)
    merged = private.merge(run.model, images, target, epochs=0)
    measured = getattr(private.cost(merged.net, "spu-semi2k"), quantity)
    assert measured == pytest.approx(target.cost(run.model), rel=1e-9)
    assert measured <= target.most * (1 + 1e-9)
    if replacement != "poly":
        assert any(count == 0 for count in run.masks.counts().values())


def test_families_are_sites_inside_of_blocks() -> None:
    net = fastbcd.models.resnet20(5, 8, width=2, blocks=1)
    families = MergedLayers(net, lambda layers: 0.0).families()
    names = [site.name for site in fastbcd.masks(net).sites]
    chosen = [[names[n] for n in family] for family in families]
    inner = [f"layer{n}.0.alpha1" for n in (1, 2, 3)]
    assert chosen[0] == inner
    assert chosen[1] == ["alpha", "layer1.0.alpha1", "layer1.0.alpha2"]
    assert len(chosen) == 4


def test_merged_targets_refuse() -> None:
    with pytest.raises(ValueError, match="leave out activations_only"):
        private.Target(1.0, merged=True, activations_only=True)
    net = nets.make("untraceable")
    private.cost(net, images=torch.zeros(1, 3, 8, 8))
    target = private.Target(1.0, merged=True)
    with pytest.raises(ValueError, match="linear runs of Untraceable are not known"):
        target.met(net)
    assert repr(target).endswith("merged=True)")
    assert target.describe()["merged"] is True
