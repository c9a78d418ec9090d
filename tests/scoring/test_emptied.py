"""Sites that keep no ReLU: no step of a program is left of them, and every engine agrees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd import Engine, MaskedReLU, MaskSet, masks, score, set_masks
from fastbcd.scoring.collapsed import build as building
from fastbcd.scoring.program import Activation, Convolution, NotTraceable, Operation, make_program
from helpers.affine_nets import engine_of, zoo
from helpers.nets import TRACEABLE, emptied, images, make, randomize, thinned


class Awkward(nn.Module):
    """Every neighbourhood of a site: what may be folded when it is emptied, and what may not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.twice, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4) for _ in range(4)])
        self.point = nn.Conv2d(4, 6, 1, groups=2, bias=False)  # does not pad: takes the norm before
        self.acts = nn.ModuleList([MaskedReLU((4, 8, 8)) for _ in range(7)])
        self.linear, self.flat = nn.Linear(6, 7), nn.BatchNorm1d(7)
        self.last, self.head = MaskedReLU(7), nn.Linear(7, 5)

    def forward(self, x):
        a = self.acts[0](self.one(x))
        b = self.acts[1](self.two(a))  # convolution, site, convolution
        c = self.acts[2](self.norm(self.twice(b)))  # modules that are called twice
        d = self.norm(self.twice(c))
        e = self.acts[3](d) + d  # the batch norm is read by something else
        f = self.two(e)
        g = self.acts[4](self.norms[0](f)) - 0.5 * f  # the convolution is
        h = self.acts[5](self.norms[1](self.one(x)) + self.norms[2](g))
        y = self.point(self.acts[6](self.norms[3](h)))
        return self.head(self.last(self.flat(self.linear(y.mean((2, 3))))))


def awkward() -> nn.Module:
    torch.manual_seed(0)
    return randomize(Awkward()).eval()


def keep_only(net: nn.Module, sites) -> nn.Module:
    bits = masks(net).bits
    for i, site in enumerate(masks(net).sites):
        bits[site.start : site.start + site.numel] &= i in sites
    set_masks(net, MaskSet(masks(net).sites, bits))
    return net


def program_of(net: nn.Module):
    with torch.inference_mode():
        return make_program(net, images(1)[0].to(next(net.parameters())))


def assert_scores_agree(net: nn.Module, engines, seed: int = 0, dtype=torch.float32) -> None:
    """The counts and losses of sequential, which runs the net's own modules."""
    net, (x, labels) = net.to(dtype), images(30, seed)
    size = max(1, masks(net).count() // 8)
    ids = [masks(net).sample(size, seed=seed, step=0, trial=t) for t in range(4)]
    truth = score(net, ids, (x, labels), engine="sequential")
    assert len(set(truth.loss.tolist())) == 4, "the hypotheses differ"
    for name in engines:
        found = score(net, ids, (x, labels), Engine(name, batch_size=7))
        assert found.engine == name
        assert found.correct.tolist() == truth.correct.tolist()
        assert found.base_correct == truth.base_correct
        torch.testing.assert_close(found.loss, truth.loss, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [*TRACEABLE, "awkward", "zoo"])
def test_random_emptied_sites(name) -> None:
    affine = name not in ("dense", "poly", "mixture")  # the others pool by maxima, or square
    engines = ["stacked", "collapsed"] if affine else ["stacked"]
    for seed in range(3):
        net = {"awkward": awkward, "zoo": zoo}.get(name, lambda: make(name))()
        net = emptied(thinned(net), seed)
        dtype = torch.float64 if seed == 2 else torch.float32
        if seed == 1 and name != "sizes":  # whose view is for contiguous tensors
            net = net.to(memory_format=torch.channels_last)
        assert_scores_agree(net, engines, seed, dtype)
        in_use = {i for i, n in enumerate(masks(net).counts().values()) if n}
        replaced = {i for i, s in enumerate(masks(net).sites)
                    if not isinstance(net.get_submodule(s.name), fastbcd.MaskedReLU)}  # fmt: skip
        assert {step.site for step in program_of(net).activations} == in_use | replaced


def passes(net: nn.Module) -> list[str]:
    """The steps that are neither convolutions nor linear, as the name of what runs."""
    kept: list[str] = []
    for step in program_of(net).steps:
        name = "site" if isinstance(step, Activation) else type(step.run).__name__
        if isinstance(step, Operation):
            name = getattr(step.run, "__name__", name)
        if name not in ("Convolution", "Linear"):
            kept.append(name)
    return kept


def test_batch_norms_of_emptied_sites_are_folded() -> None:
    """Before: a site each. After: nothing but the additions of the residuals."""
    net, tail = make("resnet"), ["AdaptiveAvgPool2d", "Flatten"]
    shortcut = ["Identity"]  # of the first block: a module of the net that does nothing
    assert passes(net) == ["site", "site", *shortcut, "site", "site", "site", *tail]
    assert passes(keep_only(net, {1})) == ["site", *shortcut, "add", "add", *tail]
    assert passes(keep_only(net, set())) == [*shortcut, "add", "add", *tail]


def test_what_something_else_reads_is_not_folded() -> None:
    """The batch norm whose convolution is read twice stays, the one that is read twice folds."""
    net = keep_only(awkward(), set())
    program = program_of(net)
    norms = [str(s.node.target) for s in program.steps
             if isinstance(s, Operation) and isinstance(s.run, nn.BatchNorm2d)]  # fmt: skip
    # norms.2 is behind a subtraction, norms.3 before a convolution
    assert norms == ["norms.0", "norms.2", "norms.3"]
    folded = [str(s.node.target) for s in program.steps
              if isinstance(s, Operation) and isinstance(s.run, Convolution)]  # fmt: skip
    assert folded == ["one", "two", "norm", "norm", "two", "norms.1", "point"]
    x = images(4)[0]
    with torch.inference_mode():
        engine = engine_of(net, x)
        ((_, logits),) = engine.logits(x.contiguous(memory_format=torch.channels_last), [], True)
        torch.testing.assert_close(logits[0], net(x), rtol=1e-5, atol=1e-5)


def test_no_site_is_left() -> None:
    """Only the base can be scored; a net that is a single site is its own input."""
    x, labels = images(12)
    for net in (keep_only(awkward(), set()), nn.Sequential(nn.Flatten(), MaskedReLU(192))):
        keep_only(net, set())
        truth = score(net, [], (x, labels), engine="sequential")
        found = score(net, [], (x, labels), engine="stacked")
        assert found.base_correct == truth.base_correct
        assert found.base_loss == pytest.approx(truth.base_loss, abs=1e-5)


def test_an_emptied_site_that_is_called_twice_is_refused_as_before() -> None:
    act = MaskedReLU(6)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), act, nn.Linear(6, 6), act).eval()
    act.mask.zero_()
    with pytest.raises(NotTraceable, match="called more than once"):
        program_of(net)


def test_the_form_is_kept_when_a_site_is_emptied(monkeypatch) -> None:
    """And built again when ReLUs come back, or when weights of an emptied site change."""
    built, plain = [], building.FormBuilder.build
    monkeypatch.setattr(
        building.FormBuilder, "build", lambda self, image: built.append(1) or plain(self, image)
    )
    net = thinned(make("resnet"))
    before = masks(net).copy()
    for sites in ({0, 1, 2, 3, 4}, {0, 2, 4}, {2, 4}):
        assert_scores_agree(keep_only(net, sites), ["collapsed", "stacked"])
    assert len(built) == 1
    next(m for m in net.modules() if isinstance(m, nn.BatchNorm2d)).bias.data += 0.3
    assert_scores_agree(net, ["collapsed", "stacked"])
    assert len(built) == 2
    set_masks(net, before)
    assert_scores_agree(net, ["collapsed", "stacked"])
    assert len(built) == 3


def test_forms_of_fewer_sites_are_smaller() -> None:
    """As many ReLUs: pairs within a site have no number in H."""
    numbers = []
    for sites in ({0, 1, 2, 3, 4}, {1, 4}):
        net = keep_only(make("resnet"), sites)
        net = thinned(net, 1 - (masks(net).count() - 200) / masks(net).total)
        assert masks(net).count() == pytest.approx(200, abs=1)
        form = engine_of(net, images(2)[0]).form
        numbers.append(sum(matrix.numel() for matrix in form.responses))
    assert numbers[1] < numbers[0]
