"""senet: allocation, sensitivity, relearned masks against plain references; runs."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fastbcd
from fastbcd import Finetune, MaskedReLU, senet
from fastbcd.masking.masks import mask_modules
from fastbcd.starts.method import allocate
from fastbcd.starts.senet import SenetSettings, Sensitive, differences, relu_sensitivity
from fastbcd.training.teacher import TeacherLogits
from helpers.nets import make, thinned
from helpers.start_cases import SHORT, data, made, same, state

TUNED = dataclasses.replace(SHORT, epochs=2, lr=0.02, mismatch=0.1)
QUICK = {"epochs": 4, "every": 2, "lr": 0.02, "batch_size": 32, "finetune": TUNED}

# ----------------------------------------------------------------------- stage 1: allocation


@given(st.data())
def test_allocation(draw) -> None:
    """All is spent, no place overflows, and places that are not full are in proportion."""
    most = draw.draw(st.lists(st.integers(0, 500), min_size=1, max_size=8))
    number = st.integers(0, 10**6).map(lambda n: n / 10**6)
    weights = draw.draw(st.lists(number, min_size=len(most), max_size=len(most)))
    budget = draw.draw(st.integers(0, sum(most)))
    given = allocate(budget, weights, most)
    assert sum(given) == budget
    assert all(0 <= n <= m for n, m in zip(given, most, strict=True))
    if any(n and not w for n, w in zip(given, weights, strict=True)):
        assert all(n == m for n, m, w in zip(given, most, weights, strict=True) if w)
        return
    # c ReLUs per weight: a place that is not full has c·weight, rounded to a neighbour.
    rows = [r for r in zip(given, most, weights, strict=True) if r[2]]
    least = max([(n - 1) / w for n, m, w in rows], default=0)
    assert all((n + 1) / w >= least * (1 - 1e-9) for n, m, w in rows if n < m)


def test_allocation_by_hand() -> None:
    assert allocate(12, [0.5, 0.25, 0.25], [100, 100, 100]) == [6, 3, 3]
    assert allocate(12, [0.5, 0.25, 0.25], [2, 100, 6]) == [2, 5, 5]
    assert allocate(3, [1, 1], [5, 5]) == [2, 1]
    assert allocate(4, [1, 0, 0], [2, 5, 5]) == [2, 1, 1]
    with pytest.raises(ValueError, match="budget=5; there is room for 4"):
        allocate(5, [1.0], [4])


def test_allocation_of_the_authors() -> None:
    """The shares that RLNet's code has for SENet's masks of ResNet18.

    One list is below all sizes, so that it is in proportion to the sensitivities; in the other, for
    smaller images, the last stage is full.
    """
    free = [0.0032707, 0.0106088, 0.0121798, 0.0143421, 0.0157835, 0.0406095, 0.0558872, 0.0583837,
            0.0637158, 0.1542388, 0.1863831, 0.1894372, 0.1973712, 0.4307339, 0.4532779, 0.4571369,
            0.4577633]  # fmt: skip
    full = [0.00967, 0.0313, 0.036, 0.04236, 0.0466, 0.12, 0.165, 0.172, 0.188, 0.45555, 0.5505,
            0.56, 0.583, 1, 1, 1, 1]  # fmt: skip
    sizes = [65_536] * 5 + [32_768] * 4 + [16_384] * 4 + [8_192] * 4
    weights = [share * size for share, size in zip(free, sizes, strict=True)]
    counts = allocate(100_000, weights, sizes)
    shares = [count / size for count, size in zip(counts, sizes, strict=True)]
    assert shares == pytest.approx(full, rel=0.004)


class Branches(nn.Module):
    """Sites after one layer, after an addition of two, and after none; a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.more, self.shortcut = (nn.Conv2d(a, 4, 1) for a in (3, 4, 4))
        self.norm, self.head, self.unused = nn.BatchNorm2d(4), nn.Linear(4, 5), nn.Linear(2, 2)
        self.acts = nn.ModuleList(MaskedReLU((4, 8, 8)) for _ in range(3))
        for number, act in enumerate(self.acts):
            act.order = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.acts[0](self.norm(self.conv(x)))
        x = self.acts[1](self.shortcut(x) + self.more(x))
        return self.head(self.acts[2](x - 0.1).mean((2, 3)))


def test_sensitivity_of_sites() -> None:
    """The share of the smaller weights in the layers that run since the site before."""
    torch.manual_seed(0)
    net = Branches()
    every = [net.conv, net.more, net.shortcut, net.head, net.unused]
    sizes = torch.cat([layer.weight.detach().abs().flatten() for layer in every]).sort().values
    for density in (0.1, 0.5, 1.0):
        cut = sizes[len(sizes) - round(density * len(sizes))]
        gone = {layer: (layer.weight.abs() < cut).double() for layer in every}
        both = torch.cat([gone[net.more], gone[net.shortcut]]).mean().item()
        found = relu_sensitivity(net, data(2), density)
        assert found == pytest.approx([gone[net.conv].mean().item(), both, both])
    assert not any(module._forward_hooks for module in net.modules())


def test_a_site_without_layers_has_the_sensitivity_of_the_whole_net() -> None:
    """One before all layers, and one that is not called."""
    net = nn.Sequential(nn.Flatten(), MaskedReLU(192), nn.Linear(192, 6), MaskedReLU(6))
    net[2].unused = MaskedReLU(3)
    first, unused, last = relu_sensitivity(net, data(2), 0.25)
    assert first == unused == 0.75
    assert last == pytest.approx(0.75, abs=0.01)


# --------------------------------------------------------------------- stage 2: relearned masks


def plain_differences(net: nn.Module, teacher: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """One site after the other: what replaces its ReLUs, on its inputs; the teacher's outputs."""
    found = []
    for name, act in mask_modules(net).items():
        seen = []
        act.register_forward_hook(lambda m, given, output, seen=seen: seen.append(given[0]))
        other = mask_modules(teacher)[name]
        other.register_forward_hook(lambda m, given, output, seen=seen: seen.append(output))
        with torch.no_grad():
            net.eval()(x)
            teacher.eval()(x)
        own, truth = seen
        if hasattr(act, "coef"):
            c0, c1, *c2 = act.coef.detach()[:, None, :, None, None]
            own = sum(c * own**2 for c in c2) + c1 * own + c0
        found.append((own - truth).abs().mean(0))
    return found


@pytest.mark.parametrize("name", ["resnet", "line", "poly", "mlp", "untraceable"])
@pytest.mark.filterwarnings("ignore:.*torch.fx cannot trace:RuntimeWarning")
def test_differences_are_those_of_the_formula(name) -> None:
    net, teacher, images = thinned(make(name)), make(name), data(50)  # two batches
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.1)
    before = state(net)
    logits = TeacherLogits(teacher, images, Finetune(padding=1), matched=True)
    found = differences(net, logits, images)
    assert same(state(net), before)
    truth = plain_differences(
        copy.deepcopy(net), copy.deepcopy(teacher), next(images.batches(50))[0]
    )
    for own, expected in zip(found, truth, strict=True):
        torch.testing.assert_close(own, expected.double(), rtol=1e-4, atol=1e-7)


def test_each_site_keeps_its_largest_values() -> None:
    net = thinned(make("resnet"))
    kept = fastbcd.masks(net).copy()
    method = made(Sensitive, SenetSettings(seed=3), net, 100)
    first = fastbcd.masks(net).copy()  # at random
    values = [torch.randn(site.shape) for site in kept.sites]
    chosen = method.largest_by_site(values)
    for masks in (first, chosen):
        assert masks.count() == 100
        assert list(masks.counts().values()) == method.counts
        assert not (masks.bits & ~kept.bits).any()
    for value, allowed, bits in zip(values, kept.split(), chosen.split(), strict=True):
        if bits.any() and (allowed & ~bits).any():
            assert value[bits].min() >= value[allowed & ~bits].max()
    other = make("resnet")
    made(Sensitive, SenetSettings(seed=4), other, 100)
    assert fastbcd.masks(other).iou(first) < 0.9


# ---------------------------------------------------------------------------------- results


@pytest.mark.parametrize("name", ["resnet", "poly"])
def test_masks_are_relearned_now_and_then(name) -> None:
    net = make(name)
    found = senet(net, data(48), 101, **QUICK)
    assert [r.count for r in found.history] == [101] * 4
    assert ["changed" in r.notes for r in found.history] == [False, True, False, True]
    assert all(0 <= r.notes.get("changed", 0) <= 1 for r in found.history)
    assert found.accuracy["trained"] == found.accuracy["thresholded"]
    coefficients = [n for n, p in net.named_parameters() if n.endswith("coef") and p.requires_grad]
    assert bool(coefficients) == (name == "poly")


def test_it_stops_when_masks_hardly_change() -> None:
    start = senet(make("mlp"), data(), 20, **{**QUICK, "epochs": 50, "every": 1, "tolerance": 0.3})
    changed = [r.notes["changed"] for r in start.history]
    assert changed[-1] <= 0.3 < min(changed[:-1])
    assert len(changed) < 50


def test_a_budget_that_is_met_trains_nothing() -> None:
    net = thinned(make("resnet"))
    before = fastbcd.masks(net).copy()
    found = senet(net, data(32), before.count(), **QUICK)
    assert found.history == []
    assert found.masks == before


def test_without_losses_of_the_teacher_masks_are_learned_from_it() -> None:
    """From an unconverted teacher, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 9), nn.ReLU(), nn.Linear(9, 5))
    tune = dataclasses.replace(TUNED, distill=0.0, mismatch=0.0)
    net = fastbcd.convert(model, data(1).images)
    start = senet(net, data(), 4, **{**QUICK, "finetune": tune}, teacher=model)
    assert start.masks.count() == 4
    assert start.history[-1].notes["changed"] < 1
