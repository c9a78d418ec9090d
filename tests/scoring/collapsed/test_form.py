"""collapsed: the form of a net gives the net's own logits, for every hypothesis."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fastbcd import MaskedReLU, convert, masks, models, score
from fastbcd.ops import reference
from fastbcd.ops.kink import kink
from fastbcd.scoring.collapsed.patches import Patch, Positions, convolve, subsample, whole
from fastbcd.scoring.engine import Request
from fastbcd.scoring.plan import CollapsedPlanner
from fastbcd.scoring.program import Convolution, make_program
from helpers.affine_nets import engine_of, some_removals, worst_difference, zoo
from helpers.nets import images, make, randomize, thinned

AFFINE = ["mlp", "resnet", "preactivation", "sizes", "line"]


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


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 9), st.data(), st.integers(1, 4), st.integers(1, 4),
    st.integers(1, 3), st.integers(-1, 3), st.integers(1, 3),
)  # fmt: skip
def test_patches_convolve_like_whole_images(h, w, data, kh, kw, stride, padding, dilation) -> None:
    """A padding of -1 stands for "same", which adds one more at the end for even kernels."""
    same = padding < 0
    if same:
        stride = 1
    elif min(h + 2 * padding - dilation * (kh - 1), w + 2 * padding - dilation * (kw - 1)) < 1:
        return
    top, left = data.draw(st.integers(0, h - 1)), data.draw(st.integers(0, w - 1))
    bottom, right = data.draw(st.integers(top + 1, h)), data.draw(st.integers(left + 1, w))
    value = torch.randn(2, 3, bottom - top, right - left, dtype=torch.float64)
    patch = Patch(value, (range(top, bottom), range(left, right)), (h, w))
    conv = Convolution(
        torch.randn(4, 3, kh, kw, dtype=torch.float64), None, (stride, stride),
        "same" if same else (padding, padding), (dilation, dilation), 1,
    )  # fmt: skip
    truth = conv(whole(patch))
    found = convolve(patch, conv)
    assert torch.allclose(whole(found), truth, atol=1e-12)
    assert torch.equal(whole(subsample(patch, stride, kh)), whole(patch)[:, :, ::stride, ::kh])
    if (
        not same
        and stride == 1
        and h > 6
        and w > 6
        and bottom - top == right - left == 1
        and dilation == 1
    ):
        assert found.value[0, 0].numel() <= kh * kw


def test_impulses_stay_small() -> None:
    """Only what an impulse reaches is convolved."""
    torch.manual_seed(0)
    net = models.resnet20(num_classes=10, image_size=32).eval()
    now = masks(net)
    x = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    program = make_program(net, x[:1])
    forward = sum(program.multiply_adds.values())
    request = Request(net, now, [], 1, 1, x, None, 2**40)
    planner = CollapsedPlanner(request, program)
    costs = [planner.impulses(s) / site.numel for s, site in enumerate(now.sites)]
    assert costs[-1] == 0  # nothing but the mean and the classifier follows
    assert all(a > b for a, b in pairwise(costs[7:]))
    assert costs[0] < 0.75 * forward
    assert costs[-2] < 0.02 * forward


class NormAct(nn.Module):
    """Batch norm and ReLU by functions, as timm's BatchNormAct2d; `always`: in eval mode too."""

    def __init__(self, channels: int, mode: str) -> None:
        super().__init__()
        self.norm, self.mode = nn.BatchNorm2d(channels, eps=0.1), mode

    def forward(self, x):
        training = {"follows": self.training, "frozen": False, "always": True}[self.mode]
        norm = self.norm
        state = norm.running_mean, norm.running_var, norm.weight, norm.bias
        return F.relu(F.batch_norm(x, *state, training, 0.1, norm.eps))


def net_with(mode: str) -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 4, 3, padding=1), NormAct(4, mode), nn.Conv2d(4, 4, 3)
    model = nn.Sequential(*stem, NormAct(4, "frozen"), nn.Flatten(), nn.Linear(144, 5))
    return convert(randomize(model).eval(), images(2)[0])


@pytest.mark.parametrize("mode", ["follows", "frozen"])
def test_functional_batch_norm_in_eval_mode(mode) -> None:
    """The converted net against the form, in double; `score` takes it."""
    net = thinned(net_with(mode))
    found = score(net, masks(net).bits.nonzero()[:3], images(20), engine="collapsed")
    assert found.engine == "collapsed"
    net, x = net.double(), images(7)[0].double()
    assert worst_difference(net, engine_of(net, x), x, some_removals(net), 4) < 1e-12


def test_functional_batch_norm_of_the_batch_is_refused() -> None:
    net = net_with("always")
    with pytest.raises(
        ValueError, match=r"batch_norm.* is not an affine function|cannot be computed"
    ):
        score(net, torch.tensor([[0]]), images(20), engine="collapsed")


# -------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (17, 3, 5), (64, 2, 4), (130, 1, 300), (3, 0, 2)])
@pytest.mark.parametrize("fresh", [False, True])
def test_kinks_equal_the_reference(dtype, shape, fresh, device) -> None:
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("on a GPU float64 runs the reference itself")
    n, trials, batch = shape
    torch.manual_seed(0)
    table = torch.randn(n + 7, trials, batch, dtype=dtype, device=device)
    table[3:5] = float("nan") if not fresh else 0.0
    a = torch.randn(n + 2, batch, dtype=dtype, device=device)[1 : n + 1]
    mask = torch.randint(2, (n + 3, trials), dtype=torch.uint8, device=device)[2 : n + 2]
    found, truth = table.clone(), table.clone()
    kink(found[3 : n + 3], a, mask, fresh=fresh)
    truth[3 : n + 3] = reference.kink(truth[3 : n + 3], a, mask, fresh)
    assert torch.equal(found.nan_to_num(7.0), truth.nan_to_num(7.0))


def test_batches_cover_a_site_once() -> None:
    bits = torch.randperm(6 * 10 * 7).view(6, 10, 7) < 111
    units = Positions(bits, torch.device("cpu"))
    groups = units.batches
    assert [g.start for g in groups[1:]] == [g.stop for g in groups[:-1]]
    assert groups[-1].stop == 111
    like = torch.zeros(1)
    flat = torch.cat([whole(units.impulses(g, like)).flatten(1) for g in groups])
    assert torch.equal(flat.nonzero()[:, 1], units.flat)
    assert torch.equal(units.flat.sort().values, bits.flatten().nonzero().flatten())
    value = torch.randn(2, 6, 10, 7)
    assert torch.equal(units.gather(value), value.flatten(1)[:, units.flat])


@pytest.mark.parametrize("box", [(0, 0, 10, 7), (3, 2, 5, 4), (9, 6, 10, 7), (0, 1, 8, 2)])
def test_positions_outside_a_patch_are_zero(box) -> None:
    units = Positions(torch.randperm(6 * 10 * 7).view(6, 10, 7) < 300, torch.device("cpu"))
    top, left, bottom, right = box
    value = torch.randn(2, 6, bottom - top, right - left)
    patch = Patch(value, (range(top, bottom), range(left, right)), (10, 7))
    assert torch.equal(units.gather(patch), whole(patch).flatten(1)[:, units.flat])
