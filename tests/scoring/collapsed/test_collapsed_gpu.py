"""collapsed on a CUDA device: what waits for it, what is copied there, how much runs at once."""

from __future__ import annotations

import pytest
import torch

import fastbcd
from fastbcd import Engine, masks, score
from fastbcd.scoring.collapsed import build
from fastbcd.scoring.collapsed.build import FormBuilder
from fastbcd.scoring.engine import Request
from fastbcd.scoring.plan import make_plan
from fastbcd.scoring.program import make_program
from fastbcd.scoring.stacked import peak_bytes
from helpers.affine_nets import some_removals
from helpers.nets import images, make, thinned


def builder_of(net, memory: int = 2**30) -> FormBuilder:
    x = images(2)[0].to("cuda")
    request = Request(net, masks(net).copy(), [], 1, 2, x, None, memory)
    return FormBuilder(make_program(net, x[:1]), request)


@pytest.mark.parametrize("with_image", [False, True])
def test_building_a_form_copies_no_indices(gpu, monkeypatch, with_image) -> None:
    """However many batches of impulses there are; it waits for nothing."""
    net = thinned(make("resnet"), 0.5).to("cuda")
    batches, forms = [], []
    with torch.inference_mode():
        for most in (64, 1024):
            monkeypatch.setattr(build, "MOST", most)
            builder = builder_of(net)
            gpu.reset()
            forms.append(builder.build(with_image))
            assert gpu.counts["h2d"] == gpu.counts["d2h"] == gpu.counts["sync"] == 0, gpu.places
            batches.append(len(list(builder.batches(with_image))))
    assert batches[1] < batches[0]
    order = [torch.argsort(form.ids) for form in forms]
    values = [form.constant[: form.kinks].cpu()[o] for form, o in zip(forms, order, strict=True)]
    torch.testing.assert_close(*values)


def test_batches_of_impulses_fit_the_memory(gpu) -> None:
    net = thinned(make("resnet"), 0.5).to("cuda")
    each = peak_bytes(builder_of(net).net.program)
    large = [builder_of(net, memory).large for memory in (2**10, 8 * 300 * each, 2**34)]
    assert large == [build.LARGE, 300, build.MOST]


def test_a_batch_waits_once(gpu) -> None:
    """To compare its images with those of the values that are cached."""
    net = thinned(make("resnet"), 0.1).to("cuda")
    removals, waits = list(some_removals(net, 2).values()), []
    for batches in (4, 9):
        data = fastbcd.ImageData.from_arrays(*images(5 * batches)).to("cuda")
        for _ in range(2):
            gpu.reset()
            score(net, removals, data, Engine("collapsed", batch_size=5))
        waits.append(gpu.counts["sync"])
    assert waits[1] - waits[0] == 9 - 4, gpu.places


@pytest.mark.parametrize("hypotheses", [1, 8, 50])
def test_products_have_all_of_their_columns(gpu, hypotheses) -> None:
    net, x = thinned(make("resnet"), 0.1).to("cuda"), images(2)[0].to("cuda")
    removals = [masks(net).sample(3, seed=0, step=0, trial=0)]
    request = Request(net, masks(net).copy(), removals, hypotheses, 50_000, x, None, 2**34)
    with torch.inference_mode():
        plan = make_plan(request, "collapsed")
    assert 8192 - plan.batch < plan.batch * plan.lanes <= 8192
