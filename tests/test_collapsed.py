"""collapsed: the form of a net gives the net's own logits, for every hypothesis."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fastbcd import MaskedReLU, MaskSet, masks, models, score, set_masks
from fastbcd.masking import mask_modules
from fastbcd.scoring import building, plan
from fastbcd.scoring.affine import AffineNet
from fastbcd.scoring.building import Builder
from fastbcd.scoring.collapsed import Collapsed, form_at_hand
from fastbcd.scoring.folding import Convolution
from fastbcd.scoring.form import find
from fastbcd.scoring.kinks import kinks, kinks_reference
from fastbcd.scoring.patches import Patch, convolve, subsample, whole
from fastbcd.scoring.program import make_program
from fastbcd.scoring.units import Units
from nets import images, make, randomize, thinned

AFFINE = ["mlp", "resnet", "preactivation", "sizes"]


class Zoo(nn.Module):
    """Every kind of affine step, on small images."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(6, 1, 1))
        self.gain = nn.Parameter(torch.randn(6, 8, 8))
        self.one, self.act1 = nn.Conv2d(3, 6, 3, padding=1), MaskedReLU((6, 8, 8))
        self.norm, self.act2 = nn.BatchNorm2d(6), MaskedReLU((6, 8, 8))
        self.same = nn.Conv2d(6, 4, 3, padding="same", dilation=(2, 1))
        self.groups = nn.Conv2d(6, 4, 3, stride=(2, 3), padding=(2, 1), groups=2)
        self.act3, self.act4 = MaskedReLU((4, 8, 8)), MaskedReLU((4, 5, 3))
        self.reflect = nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect")
        self.weight = nn.Parameter(torch.randn(5, 8, 2, 2))
        self.drop, self.edge = nn.Dropout(0.5), nn.ConstantPad2d(1, 3.0)
        self.bias = nn.Linear(20, 7)
        self.act5, self.bn1 = MaskedReLU((7,)), nn.BatchNorm1d(7)
        self.act6, self.pool = MaskedReLU((5, 5, 5)), nn.AvgPool2d(2)
        self.head = nn.Parameter(torch.randn(5, 7 + 5 + 5 + 2 + 4))

    def forward(self, x):
        a = self.act1(self.one(x)) - self.shift
        b = self.act2(self.norm(0.5 * a) * self.gain + 1.5)
        c = self.act3(self.drop(self.same(b / 2)))
        d = self.act4(self.groups(a))
        wide = torch.cat([c[:, :, ::2, ::2], -F.pad(d, (0, 1, 0, -1), value=2.0)], 1)
        e = self.act6(F.conv2d(self.edge(wide), self.weight, padding=0))
        f = F.adaptive_avg_pool2d(c, (5, 1)).permute(0, 2, 1, 3).flatten(1)
        g = self.act5(self.bn1(self.bias(f)))
        h = self.reflect(c).mean((2, 3)) - g[:, 1:3]
        tall = self.pool(e).sum((2, 3)).unsqueeze(2).squeeze(2)
        small = e.mean(dim=(2, 3)).view(e.size(0), -1)
        means = torch.transpose(d, 1, 2).reshape(x.size(0), 5, 12).mean(2).contiguous()[:, 1:]
        return F.linear(torch.cat([g, tall, small, h, means], 1), self.head)


def zoo() -> nn.Module:
    torch.manual_seed(3)
    net = randomize(Zoo()).eval()
    net.bn1.running_var.uniform_(0.5, 1.5)
    return net


def engine_of(net, x, with_image=False) -> Collapsed:
    """The engine for a net in eval mode, without the plan around it."""
    now = MaskSet(masks(net).sites, masks(net).bits)
    with torch.inference_mode():
        x = x.contiguous(memory_format=torch.channels_last)
        builder = Builder(AffineNet(make_program(net, mask_modules(net), x[:1])), now, x[:2])
        return Collapsed(builder.build(with_image), builder)


def worst_difference(net, engine, x, removals: dict, lanes: int) -> float:
    """The largest difference of logits from the net's own, relative to the largest logit."""
    now = MaskSet(masks(net).sites, masks(net).bits)
    worst = 0.0
    with torch.inference_mode():
        given = x.contiguous(memory_format=torch.channels_last)
        seen = []
        for numbers, logits in engine.logits(given, engine.prepare(removals, lanes), True):
            for number, found in zip(numbers, logits, strict=True):
                set_masks(net, now if number < 0 else now.without(removals[number]))
                truth = net(x)
                worst = max(worst, float((found - truth).abs().max() / truth.abs().max()))
                seen.append(number)
    set_masks(net, now)
    assert sorted(seen) == [-1, *sorted(k for k, ids in removals.items() if len(ids))]
    return worst


def some_removals(net, count=6, size=4) -> dict[int, torch.Tensor]:
    now = masks(net)
    kept = now.bits.nonzero().flatten()
    found = {t: now.sample(size, seed=0, step=0, trial=t) for t in range(count)}
    # The last ReLUs only, a single one, and all of them.
    return found | {90: kept[-2:], 91: kept[len(kept) // 2 :][:1], 92: kept}


@pytest.mark.parametrize("with_image", [False, True])
@pytest.mark.parametrize("name", [*AFFINE, "zoo"])
def test_logits_are_those_of_the_net(name, with_image) -> None:
    net = thinned(zoo() if name == "zoo" else make(name)).double()
    x = images(7)[0].double()
    engine = engine_of(net, x, with_image)
    assert worst_difference(net, engine, x, some_removals(net), lanes=4) < 1e-12


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2),
                  st.integers(1, 2)),
        min_size=1, max_size=3,
    ),
    st.floats(0.02, 1.0), st.integers(1, 5), st.integers(0, 99),
)  # fmt: skip
def test_any_convolutions(layers, keep, lanes, seed) -> None:
    """Random kernels, strides, paddings and dilations, where they leave an image."""
    torch.manual_seed(seed)
    x = torch.randn(3, 2, 9, 7, dtype=torch.float64)
    stack: list[nn.Module] = []
    y = x
    for kh, kw, stride, padding, dilation in layers:
        if min(y.shape[2] + 2 * padding - dilation * (kh - 1),
               y.shape[3] + 2 * padding - dilation * (kw - 1)) < 1:  # fmt: skip
            break
        conv = nn.Conv2d(y.shape[1], 3, (kh, kw), stride, padding, dilation).double()
        stack += [conv, MaskedReLU(tuple(conv(y).shape[1:]))]
        y = conv(y)
    net = nn.Sequential(*stack, nn.Flatten(), nn.Linear(y[0].numel(), 4).double()).eval()
    if not stack:
        return
    net = thinned(net, keep)
    if not masks(net).count():
        return
    engine = engine_of(net, x)
    removals = some_removals(net, 3, min(2, masks(net).count()))
    assert worst_difference(net, engine, x, removals, lanes) < 1e-11


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 9), st.data(), st.integers(1, 4), st.integers(1, 4),
    st.integers(1, 3), st.integers(0, 3), st.integers(1, 3),
)  # fmt: skip
def test_patches_convolve_like_whole_images(h, w, data, kh, kw, stride, padding, dilation) -> None:
    if min(h + 2 * padding - dilation * (kh - 1), w + 2 * padding - dilation * (kw - 1)) < 1:
        return
    top, left = data.draw(st.integers(0, h - 1)), data.draw(st.integers(0, w - 1))
    bottom, right = data.draw(st.integers(top + 1, h)), data.draw(st.integers(left + 1, w))
    value = torch.randn(2, 3, bottom - top, right - left, dtype=torch.float64)
    patch = Patch(value, top, left, (h, w))
    conv = Convolution(
        torch.randn(4, 3, kh, kw, dtype=torch.float64), None, (stride, stride), (padding, padding),
        (dilation, dilation), 1,
    )  # fmt: skip
    truth = conv(patch.whole())
    found = convolve(patch, conv)
    assert torch.allclose(whole(found), truth, atol=1e-12)
    assert torch.equal(whole(subsample(patch, stride, kh)), patch.whole()[:, :, ::stride, ::kh])
    if stride == 1 and h > 6 and w > 6 and bottom - top == right - left == 1 and dilation == 1:
        assert found.value[0, 0].numel() <= kh * kw


def test_impulses_stay_small() -> None:
    """Only what an impulse reaches is convolved."""
    torch.manual_seed(0)
    net = models.resnet20(num_classes=10, image_size=32).eval()
    now = masks(net)
    x = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    program = make_program(net, mask_modules(net), x[:1])
    builder = Builder(AffineNet(program), MaskSet(now.sites, now.bits), x)
    forward = sum(program.multiply_adds.values())
    costs = [builder.impulse_cost(s) for s in range(len(now.sites))]
    assert costs[-1] == 0  # nothing but the mean and the classifier follows
    assert all(a > b for a, b in pairwise(costs[7:]))
    assert costs[0] < 0.75 * forward
    assert costs[-2] < 0.02 * forward


def test_blocks_of_zeros_are_not_stored() -> None:
    class Branches(nn.Module):
        """Two branches that never meet before the end."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.act_a = nn.Linear(6, 5), MaskedReLU(5)
            self.b, self.act_b = nn.Linear(6, 5), MaskedReLU(5)
            self.c, self.act_c = nn.Linear(5, 4), MaskedReLU(4)
            self.head = nn.Linear(9, 3)

        def forward(self, x):
            left = self.act_a(self.a(x.flatten(1)))
            right = self.act_b(self.b(x.flatten(1)))
            return self.head(torch.cat([self.act_c(self.c(left)), right], 1))

    torch.manual_seed(0)
    net, x = Branches().eval(), torch.randn(4, 6, 1, 1)
    engine = engine_of(net, x)
    assert [[(b.start, b.stop) for b in site] for site in engine.form.blocks] == [[], [], [(0, 5)]]
    assert worst_difference(net, engine, x, some_removals(net), 8) < 1e-5
    # A path whose weights are all zero adds nothing either.
    nn.init.zeros_(net.c.weight)
    assert engine_of(net, x).form.blocks == [[], [], []]


def test_later_hypotheses_share_what_comes_before_them() -> None:
    net, x = make("resnet"), images(3)[0]
    engine = engine_of(net, x)
    last = masks(net).sites[-1].start
    ids = {0: torch.tensor([last + 1]), 1: torch.tensor([last + 5, last + 7])}
    (group,) = engine.prepare(ids, lanes=8)
    assert group.start == engine.form.bounds[-2]
    assert group.masks.shape == (2, engine.form.kinks - group.start)
    assert worst_difference(net, engine, x, ids, 8) < 1e-5


# ------------------------------------------------------------------------ score with it


@pytest.mark.parametrize("batch", [None, 5])
def test_scores_equal_those_of_sequential(batch) -> None:
    for net in (thinned(make("resnet")), thinned(zoo())):
        data = images(41)
        ids = list(some_removals(net).values())
        truth = score(net, ids, data, engine="sequential")
        found = score(net, ids, data, engine="collapsed", batch_size=batch)
        assert found.engine == "collapsed"
        assert found.correct.tolist() == truth.correct.tolist()
        assert torch.allclose(found.loss, truth.loss, atol=1e-5)
        assert found.base_correct == truth.base_correct


@pytest.mark.parametrize("name", ["resnet18", "wide_resnet22_8"])
def test_the_papers_nets(name) -> None:
    """Random weights, few ReLUs: logits within 1e-4 of the net's own."""
    torch.manual_seed(0)
    net = randomize(models.build(name, num_classes=20, image_size=16)).eval()
    now = masks(net)
    kept = MaskSet.full({s.name: s.shape for s in now.sites}).sample(150, seed=0, step=0, trial=0)
    bits = torch.zeros(now.total, dtype=torch.bool)
    bits[kept] = True
    set_masks(net, MaskSet(now.sites, bits))
    x = torch.randn(3, 3, 16, 16)
    assert worst_difference(net, engine_of(net, x), x, some_removals(net, 3, 20), 4) < 1e-4


@pytest.fixture
def builds(monkeypatch) -> list[int]:
    """How many forms were built, by their number of kinks."""
    made: list[int] = []
    plain = building.Builder.build

    def build(self, with_image):
        made.append(len(self.ids))
        return plain(self, with_image)

    monkeypatch.setattr(building.Builder, "build", build)
    return made


def test_a_removal_shrinks_the_form(builds) -> None:
    net, data = thinned(make("resnet")), images(30)
    for step in range(3):
        ids = [masks(net).sample(120, seed=5, step=step, trial=t) for t in range(3)]
        # Other batches each time, so that the affine part is computed anew.
        found = score(net, ids, data, engine="collapsed", batch_size=7 + step)
        truth = score(net, ids, data, engine="sequential")
        assert found.correct.tolist() == truth.correct.tolist()
        assert torch.allclose(found.loss, truth.loss, atol=1e-5)
        set_masks(net, masks(net).without(ids[1]))
    assert len(builds) == 1
    now = MaskSet(masks(net).sites, masks(net).bits)
    small, fresh = form_at_hand(net, now), engine_of(net, data[0]).form
    assert small is not None
    # The order of kinks follows the tiles of what was there at first; their values do not.
    place = find(small.ids, fresh.ids)
    assert torch.equal(small.ids[place], fresh.ids)
    assert torch.allclose(small.out[place], fresh.out, atol=1e-6)
    assert small.multiply_adds == fresh.multiply_adds


@pytest.mark.parametrize("change", ["data", "step", "load", "statistics", "masks"])
def test_changes_are_noticed(builds, change) -> None:
    net, data = thinned(make("resnet")), images(30)
    ids = [masks(net).sample(9, seed=5, step=0, trial=t) for t in range(3)]
    before = score(net, ids, data, engine="collapsed")
    conv = next(m for m in net.modules() if isinstance(m, nn.Conv2d))
    if change == "data":
        conv.weight.data[0] *= 1.5
    elif change == "step":
        conv.weight.grad = torch.ones_like(conv.weight)
        torch.optim.SGD([conv.weight], 0.1).step()
    elif change == "load":
        state = net.state_dict()
        net.load_state_dict({k: v * 1.1 if v.is_floating_point() else v for k, v in state.items()})
    elif change == "statistics":
        next(m for m in net.modules() if isinstance(m, nn.BatchNorm2d)).running_var.mul_(3)
    else:  # a ReLU comes back
        bits = masks(net).bits.clone()
        bits[(~bits).nonzero()[0]] = True
        set_masks(net, MaskSet(masks(net).sites, bits))
    found = score(net, ids, data, engine="collapsed")
    truth = score(net, ids, data, engine="sequential")
    assert len(builds) == 2
    assert torch.allclose(found.loss, truth.loss, atol=1e-5)
    assert not torch.equal(found.loss, before.loss)


def test_the_affine_part_is_computed_once(monkeypatch) -> None:
    net, (x, labels) = thinned(make("resnet")), images(50)
    ids = list(some_removals(net).values())
    calls: list[int] = []
    plain = building.Builder.at_taps
    monkeypatch.setattr(
        building.Builder, "at_taps", lambda self, x: calls.append(len(x)) or plain(self, x)
    )
    first = score(net, ids, (x, labels), engine="collapsed", batch_size=20)
    spent = len(calls)
    again = score(net, ids, (x, labels), engine="collapsed", batch_size=20)
    assert len(calls) == spent + 1  # the check on two images
    assert torch.equal(first.loss, again.loss)
    other = score(net, ids, (x + 1, labels), engine="collapsed", batch_size=20)
    truth = score(net, ids, (x + 1, labels), engine="sequential")
    assert torch.allclose(other.loss, truth.loss, atol=1e-5)
    assert len(calls) > spent + 2


@pytest.mark.parametrize(
    ("name", "words"),
    [("dense", "max_pool2d"), ("poly", "polynomial"), ("mixture", "site 'act' is polynomial")],
)
def test_what_stops_it_is_named(name, words) -> None:
    net, data = make(name), images(10)
    with pytest.raises(ValueError, match=words):
        score(net, torch.tensor([[0]]), data, engine="collapsed")
    assert score(net, torch.tensor([[0]]), data, engine="auto").engine == "stacked"


@pytest.mark.parametrize(
    "function",
    [torch.softmax, torch.sigmoid, lambda y, _: y * y, lambda y, _: 1 / y, lambda y, _: y.abs()],
)
def test_nonlinear_steps_are_refused(function) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.head = nn.Linear(192, 9), MaskedReLU(9), nn.Linear(9, 5)

        def forward(self, x):
            y = self.act(self.first(x.flatten(1)))
            return self.head(function(y, 1) if function is torch.softmax else odd(y))

    def odd(y):
        return torch.sigmoid(y) if function is torch.sigmoid else function(y, 1)

    with pytest.raises(ValueError, match="is not an affine function of the image"):
        score(Odd().eval(), torch.tensor([[0]]), images(10), engine="collapsed")


def test_too_little_memory_is_refused_before_any_work(builds) -> None:
    net, data = make("resnet"), images(10)
    with pytest.raises(ValueError, match=r"form of 1,024 ReLUs takes .* MiB.*memory=.*stacked"):
        score(net, torch.tensor([[0]]), data, engine="collapsed", memory=2**20)
    assert not builds


def test_auto_takes_what_costs_less(monkeypatch, capsys) -> None:
    monkeypatch.setattr(plan, "WORTH", 0)
    net, data = make("resnet"), images(400)
    ids = [masks(net).sample(5, seed=0, step=0, trial=t) for t in range(30)]
    assert score(net, ids, data, explain=True).engine == "stacked"
    net = thinned(net, 0.05)
    ids = [masks(net).sample(5, seed=0, step=0, trial=t) for t in range(30)]
    found = score(net, ids, data, explain=True)
    assert found.engine == "collapsed"
    assert f"{masks(net).count()} kinks" in capsys.readouterr().out
    truth = score(net, ids, data, engine="sequential")
    assert found.correct.tolist() == truth.correct.tolist()


def test_no_relus_left() -> None:
    net, data = make("resnet"), images(10)
    set_masks(net, masks(net).without(masks(net).bits.nonzero().flatten()))
    empty = [torch.empty(0, dtype=torch.int64)]
    found = score(net, empty, data, engine="collapsed")
    assert found.correct.tolist() == [found.base_correct]
    assert found.base_loss == pytest.approx(
        score(net, empty, data, engine="sequential").base_loss, abs=1e-6
    )


# -------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 17), (2, 4, 64), (1, 300, 130), (0, 2, 3)])
@pytest.mark.parametrize("fresh", [False, True])
def test_kinks_equal_the_reference(dtype, shape, fresh, device) -> None:
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("the Triton kernel takes float32")
    trials, batch, n = shape
    torch.manual_seed(0)
    table = torch.randn(trials, batch, n + 7, dtype=dtype, device=device)
    table[..., 3:5] = float("nan") if not fresh else 0.0
    a = torch.randn(batch, n + 2, dtype=dtype, device=device)[:, 1 : n + 1]
    mask = torch.randint(2, (trials, n + 3), dtype=torch.uint8, device=device)[:, 2 : n + 2]
    found, truth = table.clone(), table.clone()
    kinks(found[..., 3 : n + 3], a, mask, fresh=fresh)
    kinks_reference(truth[..., 3 : n + 3], a, mask, fresh)
    assert torch.equal(found.nan_to_num(7.0), truth.nan_to_num(7.0))


def test_units_cover_a_site_once() -> None:
    positions = torch.randperm(6 * 10 * 7)[:111].sort().values
    units = Units((6, 10, 7), positions)
    groups = list(units.groups())
    assert [g.start for g in groups[1:]] == [g.stop for g in groups[:-1]]
    assert groups[-1].stop == 111
    like = torch.zeros(1)
    flat = torch.cat([whole(units.impulses(g, like)).flatten(1) for g in groups])
    assert torch.equal(flat.nonzero()[:, 1], positions[units.order])
    value = torch.randn(2, 6, 10, 7)
    assert torch.equal(units.gather(value)[1], value.flatten(1)[:, positions[units.order]])
