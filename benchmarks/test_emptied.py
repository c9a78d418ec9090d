"""The same number of ReLUs in few sites and in many: what the engines gain from emptied sites.

    make bench                                             the table
    pytest benchmarks/test_emptied.py -k stacked           one engine

ResNet-20 with 8,000 ReLUs at random in 5 of its 19 sites, which lie at equal distances. A round
scores 8 hypotheses of 100 ReLUs and the base on 64 images; "collapsed" has its form built and its
affine part cached, "first pass" computes the affine part, "build" builds the form. Peers:
    not dropped     the same masks, with emptied sites as steps of the program
    19 sites        as many ReLUs in all sites
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fastbcd
from fastbcd.masking.masks import MaskSet
from fastbcd.runtime.malloc import kept_memory
from fastbcd.scoring import program as programs
from fastbcd.scoring.collapsed.affine_cache import AffineCache
from fastbcd.scoring.collapsed.build import FormBuilder
from fastbcd.scoring.collapsed.engine import Collapsed
from fastbcd.scoring.engine import Request
from fastbcd.scoring.stacked import Stacked
from nets import build

RELUS, SITES, K, D, IMAGES = 8_000, (1, 5, 9, 13, 17), 8, 100, 64
WAYS = ["stacked", "collapsed", "first pass", "build"]
_forms: dict[str, Collapsed] = {}  # by implementation


def masks_of(net, used) -> MaskSet:
    """RELUS of the ReLUs of these sites, at random."""
    masks = fastbcd.masks(net).copy()
    for i, site in enumerate(masks.sites):
        masks.bits[site.start : site.start + site.numel] = i in used
    return masks.without(masks.sample(masks.count() - RELUS, seed=0, step=0, trial=0))


def prepared(way: str, implementation: str) -> tuple[Callable[[], object], float]:
    """What is timed, and its largest difference from the net's own logits."""
    x = torch.randn(IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    net = fastbcd.convert(build("resnet20"), x[:2])
    masks = masks_of(net, range(19) if implementation == "19 sites" else SITES)
    fastbcd.set_masks(net, masks)
    truth, x = net(x), x.contiguous(memory_format=torch.channels_last)
    with pytest.MonkeyPatch.context() as patch:
        if implementation == "not dropped":
            patch.setattr(programs, "drop_emptied", lambda net, graph: None)
        program = programs.make_program(net, x[:1])
    removals = {t: masks.sample(D, seed=1, step=0, trial=t) for t in range(K)}
    if way == "stacked":
        engine, lanes, piece = Stacked(program, masks), 2, 32
    else:
        request = Request(net, masks, [], K, IMAGES, x[:2], None, 2**40)
        builder = FormBuilder(program, request)
        if way == "build":
            return lambda: builder.build(with_image=False), 0.0
        if implementation not in _forms:
            form = builder.build(with_image=False)
            _forms[implementation] = Collapsed(form, builder.net, AffineCache())
        engine, lanes, piece = _forms[implementation], K, IMAGES
        engine.cache = AffineCache()
        engine.cache.limit = 2**40 if way == "collapsed" else 0
    work = engine.prepare(removals, lanes)

    def run() -> torch.Tensor:
        base = []
        for some, images in zip(
            x.split(piece), torch.arange(len(x)).split(piece), strict=True
        ):
            for numbers, logits in engine.logits(some, work, True, images):
                base += [logits[0]] if numbers == [-1] else []
        return torch.cat(base)

    return run, float((run() - truth).abs().max() / truth.abs().max())


# The topmost parameter varies fastest, so the peers of a case run one after the other.
@pytest.mark.parametrize("implementation", ["fastbcd", "not dropped", "19 sites"])
@pytest.mark.parametrize("way", WAYS)
def test_emptied(benchmark, way, implementation) -> None:
    with torch.inference_mode(), kept_memory():
        run, error = prepared(way, implementation)
        assert error < 1e-4, "all compute the net's logits"
        benchmark.group = f"{way}: resnet20, {RELUS:,} ReLUs in 5 sites, {K} x {D}"
        benchmark.extra_info["implementation"] = implementation
        benchmark.pedantic(run, rounds=1 if way == "build" else 15)
