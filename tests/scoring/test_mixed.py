"""Mixed precision: the choices of float32 from hypotheses in few bits. A CPU emulates a GPU's."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd import Engine, choose, score
from fastbcd.scoring import mixed
from fastbcd.scoring.collapsed import engine as collapsed
from fastbcd.scoring.collapsed.affine_cache import AffineCache
from fastbcd.scoring.collapsed.build import FormBuilder
from fastbcd.scoring.collapsed.engine import Collapsed
from fastbcd.scoring.collapsed.linear import NotAffine
from fastbcd.scoring.engine import Request
from fastbcd.scoring.mixed import Mixed
from fastbcd.scoring.program import make_program
from helpers.nets import images, make, thinned

MIXED = Engine("stacked", precision="mixed")
FULL = Engine("stacked", precision="float32")


def trained_net(name: str, replacement: str, keep: float):
    """A net that was trained for a little on images with a pattern for each label."""
    torch.manual_seed(0)
    labels = torch.arange(600) % 5
    patterns = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    x = patterns[labels] + 2 * torch.randn(600, 3, 8, 8)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    if name == "deep":
        for _ in range(3):
            layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 16), nn.ReLU(), nn.Linear(16, 5))
    options = {"epochs": 2, "batch_size": 50, "padding": 0, "flip": False}
    net = fastbcd.convert(model.eval(), x[:20], replacement=replacement)
    fastbcd.train(net, (x, labels), **options)
    return thinned(net.eval(), keep), (x, labels)


@pytest.mark.parametrize("keep", [0.9, 0.4, 0.1])
@pytest.mark.parametrize("replacement", ["identity", "line", "poly"])
@pytest.mark.parametrize("name", ["flat", "deep"])
def test_choices_are_those_of_float32(name, replacement, keep) -> None:
    net, data = trained_net(name, replacement, keep)
    size = fastbcd.masks(net).count() // 4
    removals = [fastbcd.masks(net).sample(size, seed=0, step=0, trial=t) for t in range(5)]
    full, fast = (score(net, removals, data, engine) for engine in (FULL, MIXED))
    assert torch.equal(full.correct, fast.correct)
    assert full.base_correct == fast.base_correct
    assert not torch.equal(full.loss, fast.loss), "few bits were used"
    for adt, confidence in itertools.product((-100.0, 0.5, 5.0, 100.0), (None, 0.9)):
        options = {"adt": adt, "confidence": confidence}
        one, other = (choose(net, removals, data, engine=e, **options) for e in (FULL, MIXED))
        assert (one.number, one.accepted, one.tried) == (other.number, other.accepted, other.tried)
        assert one.rescored is None
        assert 0 < other.rescored < 1


def near_ties():
    """One hypothesis, of which bf16 gets many images wrong: margins of 1e-3 beside logits of 8."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 4, bias=False), fastbcd.MaskedReLU(4),
                        nn.Linear(4, 2)).eval()  # fmt: skip
    with torch.no_grad():
        net[1].weight.copy_(torch.eye(4))
        net[3].weight.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0.001, 0]]))
        net[3].bias.zero_()
    x = torch.zeros(1000, 1, 2, 2)
    x[:, 0, 0] = 8 + torch.rand(1000, 1)  # equal: the third number decides
    x[:, 0, 1, 0] = -1.0  # 0 after its ReLU, -1 without it
    x[:400, 0, 0, 1] -= 3.0  # right, in few bits too
    labels = torch.zeros(1000, dtype=torch.long)
    return net, [torch.tensor([2]), torch.tensor([3])], (x, labels)


def test_near_ties_need_the_guard(monkeypatch) -> None:
    """Equal logits are label 0, as is a third number that lowers the other logit."""
    net, removals, data = near_ties()
    data[0][400:, 0, 1, 0] = torch.rand(600) - 0.5  # its ReLU matters where it is negative
    full, fast = (score(net, removals, data, engine) for engine in (FULL, MIXED))
    assert torch.equal(full.correct, fast.correct)
    assert full.base_correct == fast.base_correct
    choices = [choose(net, removals, data, adt=0.1, engine=e) for e in (FULL, MIXED)]
    assert [c.number for c in choices] == [choices[0].number] * 2
    monkeypatch.setattr(mixed, "SAFETY", 0.0)
    bare = score(net, removals, data, MIXED)
    assert bare.base_correct != full.base_correct, "without the guard counts differ"
    assert bare.base_correct > full.base_correct + 100


def rounded(t: torch.Tensor) -> torch.Tensor:
    """To the 10 bits of TF32."""
    return (t.view(torch.int32) & ~0x1FFF).view(torch.float32)


def scorer(errors: torch.Tensor, exact: torch.Tensor, calls: list):
    """Margins of a hypothesis, in float32 and with errors in few bits."""

    def answers(numbers, images, precision):
        calls.append((precision, len(images)))
        margins = exact[images] + (errors[images] if precision == "bf16" else 0.0)
        return torch.stack([margins, margins.abs()]).expand(len(numbers), 2, -1).clone()

    return answers


def test_the_bound_grows_with_the_errors_that_are_seen() -> None:
    """The first images have small errors; rescored ones show larger ones, until none is near."""
    exact = torch.linspace(-1, 1, 2000, dtype=torch.float64)[torch.randperm(2000)]
    errors = torch.full((2000,), 0.01, dtype=torch.float64)
    errors[mixed.FIRST :] = 0.05 * exact.sign()[mixed.FIRST :] * -1
    calls: list = []
    run = Mixed("bf16")
    found = run(scorer(errors, exact, calls), [0], torch.arange(2000))
    assert torch.equal(found[0, 0] > 0, exact > 0)
    assert run.bound == pytest.approx(0.1)
    assert len(calls) == 4, "few bits; the first images, those in their bound, in the new bound"
    assert run.share == pytest.approx(0.15 + mixed.FIRST / 2000, abs=0.04)


def test_an_error_in_the_ring_is_not_confirmed() -> None:
    exact = torch.linspace(-1, 1, 2000, dtype=torch.float64)
    exact = exact[torch.randperm(2000, generator=torch.Generator().manual_seed(0))]
    errors = torch.full((2000,), 0.1, dtype=torch.float64)
    for outlier in (False, True):
        if outlier:  # beyond the bound of 0.2, and inside the ring
            place = mixed.FIRST + int((exact[mixed.FIRST :] < -0.9).nonzero()[0])
            errors[place] = 0.25 - exact[place]
        run = Mixed("bf16")
        score_ = scorer(errors, exact, [])
        found = run(score_, [-1, 0], torch.arange(2000))
        assert torch.equal(found[0, 0] > 0, exact > 0) != outlier
        assert run.confirms(score_, 0) != outlier


def test_what_is_not_confirmed_is_decided_again_in_float32(monkeypatch) -> None:
    net, data = trained_net("flat", "identity", 0.4)
    removals = [fastbcd.masks(net).sample(200, seed=0, step=0, trial=t) for t in range(5)]
    full = choose(net, removals, data, adt=0.5, engine=FULL)
    monkeypatch.setattr(Mixed, "confirms", lambda self, score, number: False)
    found = choose(net, removals, data, adt=0.5, engine=MIXED)
    assert found.rescored > 0.4
    assert (found.number, found.accepted, found.loss, found.base_loss) == (
        full.number, full.accepted, pytest.approx(full.loss, abs=1e-6),
        pytest.approx(full.base_loss, abs=1e-6),
    )  # fmt: skip


def test_ties_are_decided_by_losses_in_float32() -> None:
    """Two hypotheses with equal counts, whose losses differ by less than the error of bf16."""
    net, data = trained_net("flat", "identity", 0.9)
    kept = fastbcd.masks(net).bits.nonzero().flatten()
    removals = [kept[t : t + 1] for t in range(0, 40, 2)]
    one, other = (choose(net, removals, data, adt=-100.0, engine=e) for e in (FULL, MIXED))
    counts = score(net, removals, data, FULL).correct
    assert (counts == counts.max()).sum() > 1, "the best are tied"
    assert (one.number, one.accepted) == (other.number, other.accepted)
    assert other.loss == pytest.approx(one.loss, abs=1e-6)


@pytest.mark.parametrize("kind", ["double", "metric"])
def test_what_is_always_in_its_own_precision(kind) -> None:
    net, data = thinned(make("resnet")), images(20)
    ids = [fastbcd.masks(net).sample(9, seed=1, step=0, trial=t) for t in range(3)]
    metric = None
    if kind == "double":
        net = net.double()
    else:

        def metric(outputs, targets):
            return (outputs.argmax(1) == targets).double()

    found, truth = (choose(net, ids, data, adt=1.0, engine=e, metric=metric) for e in (MIXED, FULL))
    assert found.rescored is None
    assert found.loss == truth.loss


def test_products_of_collapsed_that_are_rounded(monkeypatch) -> None:
    """TF32, emulated: the factors of H's products have 10 bits; the affine part keeps its own."""
    net, data = trained_net("flat", "identity", 0.1)
    removals = [fastbcd.masks(net).sample(20, seed=0, step=0, trial=t) for t in range(5)]
    plain = collapsed.product

    def product(matrix, c, out):
        if torch.backends.cuda.matmul.fp32_precision == "tf32":
            matrix, c = rounded(matrix.contiguous()), rounded(c.contiguous())
        return plain(matrix, c, out)

    monkeypatch.setattr(collapsed, "product", product)
    full = score(net, removals, data, Engine("collapsed", precision="float32"))
    fast = score(net, removals, data, Engine("collapsed", precision="mixed"))
    assert torch.equal(full.correct, fast.correct)
    assert not torch.equal(full.loss, fast.loss)
    truth = score(net, removals, data, engine="sequential")
    assert torch.equal(truth.correct, fast.correct)


def test_forms_in_tf32_would_not_pass_the_check(monkeypatch) -> None:
    """So they are built in float32: TF32, emulated in the convolutions of the impulses."""
    net = thinned(fastbcd.models.resnet20(num_classes=10, image_size=16).eval(), 0.02)
    x = torch.randn(2, 3, 16, 16)
    request = Request(net, fastbcd.masks(net).copy(), [], 1, 2, x, None, 2**40)
    plain = torch.nn.functional.conv2d

    def conv2d(x, weight, *rest):
        return plain(rounded(x.contiguous()), rounded(weight.contiguous()), *rest)

    with torch.inference_mode():
        builder = FormBuilder(make_program(net, x[:1]), request)
        for tf32 in (False, True):
            with monkeypatch.context() as patch:
                if tf32:
                    patch.setattr(torch.nn.functional, "conv2d", conv2d)
                form = builder.build(with_image=False)
            engine = Collapsed(form, builder.net, AffineCache())
            if tf32:
                with pytest.raises(NotAffine, match=r"logits differ by \d\.\de-0[23]"):
                    engine.check(request)
            else:
                engine.check(request)
