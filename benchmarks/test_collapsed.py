"""Few ReLUs left: collapsed against the authors' loop and stacked, by the number of ReLUs.

    make bench                                             the table and the plot
    pytest benchmarks/test_collapsed.py -k resnet20        one net

ReLUs are spread over the sites as in the paper's own 15K net (its figure of ReLUs by layer; for
ResNet-20 alike by stage), hypotheses remove 100 of them. A round of collapsed scores 16
hypotheses and the base on 64 images, with the form built and the affine part cached; `first pass`
computes the affine part in every round. The loops' cost is the same for every hypothesis, so
they run fewer of them; the table shows the time for one hypothesis and one image. Each case also
records how long the form took to build, and what a call of 50 hypotheses on 2,000 images takes.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import fastbcd
from fastbcd.masking.masks import MaskSet
from fastbcd.scoring.collapsed.affine_cache import AffineCache
from fastbcd.scoring.collapsed.build import FormBuilder
from fastbcd.scoring.collapsed.engine import Collapsed
from fastbcd.scoring.engine import Request
from fastbcd.scoring.plan import CollapsedPlanner, stacked_seconds
from fastbcd.scoring.program import Program, make_program
from fastbcd.scoring.stacked import Stacked
from nets import build
from test_scoring import Loop

# Kept ReLUs by site: ResNet18 at 15K as the paper shows it; for ResNet-20 the same stages.
PAPER = [
    73,
    721,
    13,
    3063,
    790,
    589,
    477,
    111,
    1635,
    246,
    546,
    16,
    1894,
    2908,
    1620,
    294,
]
SITES = {
    "resnet18": PAPER,
    "resnet20": [73, 73, 721, 13, 721, 13, 3063, 790, 589, 477, 477, 111, 111, 1894, 1894, 2908,
                 1620, 1620, 294],
}  # fmt: skip
CASES = [("resnet18", r) for r in (2_000, 6_000, 15_000, 30_000, 60_000)]
CASES += [("resnet20", r) for r in (2_000, 5_000)]
IMPLEMENTATIONS = ["authors", "stacked", "fastbcd", "first pass"]
D, IMAGES = 100, 64
TRIALS = {"authors": 3, "stacked": 7, "fastbcd": 16, "first pass": 16}
CALL = (50, 2_000)  # hypotheses and images of the whole call


def paper_masks(net, name: str, relus: int) -> MaskSet:
    """`relus` ReLUs, spread as in the paper, at random places of each site."""
    sites, wanted = fastbcd.masks(net).sites, SITES[name]
    bits = torch.zeros(fastbcd.masks(net).total, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    counts = [round(n * relus / sum(wanted)) for n in wanted]
    counts = [min(n, site.numel) for n, site in zip(counts, sites, strict=True)]
    counts[-3] += relus - sum(counts)
    for site, n in zip(sites, counts, strict=True):
        bits[site.start + torch.randperm(site.numel, generator=generator)[:n]] = True
    return MaskSet(sites, bits)


_last: dict[tuple[str, int], SimpleNamespace] = {}  # one form at a time: they are large


def prepared(name: str, relus: int) -> SimpleNamespace:
    if (name, relus) in _last:
        return _last[name, relus]
    _last.clear()
    x = torch.randn(IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    nhwc = x.contiguous(memory_format=torch.channels_last)
    net = fastbcd.convert(build(name), x[:2])
    masks = paper_masks(net, name, relus)
    fastbcd.set_masks(net, masks)
    removals = [masks.sample(D, seed=1, step=0, trial=t) for t in range(CALL[0])]
    program = make_program(net, nhwc[:1])
    stacked = Stacked(program, masks)
    request = Request(net, masks, removals, *CALL, nhwc[:2], None, 2**40)
    builder = FormBuilder(program, request)
    start = time.perf_counter()
    form = builder.build(with_image=False)
    seconds = time.perf_counter() - start
    case = SimpleNamespace(
        net=net, masks=masks, removals=removals, x=x, nhwc=nhwc, stacked=stacked,
        collapsed=Collapsed(form, builder.net, AffineCache()), build=seconds,
        auto=auto_choice(request, program),
    )  # fmt: skip
    _last[name, relus] = case
    return case


def auto_choice(request: Request, program: Program) -> str:
    """What score(engine="auto") would take for the whole call."""
    collapsed = CollapsedPlanner(request, program).seconds
    return "collapsed" if collapsed < stacked_seconds(request, program) else "stacked"


def runner(case: SimpleNamespace, implementation: str):
    """A function that scores the base and some hypotheses on all images."""
    removals = case.removals[: TRIALS[implementation]]
    if implementation == "authors":
        loop = Loop(case.net, removals, last=False, compiled=False)
        return lambda: loop(case.x)
    engine = case.stacked if implementation == "stacked" else case.collapsed
    work = engine.prepare(
        dict(enumerate(removals)), 1 if implementation == "stacked" else 16
    )
    piece = 32 if implementation == "stacked" else IMAGES
    everything = torch.arange(len(case.nhwc))

    def run() -> Tensor:
        if implementation != "stacked":
            first = implementation == "first pass"
            engine.cache = AffineCache() if first else engine.cache
            engine.cache.limit = 0 if first else 2**40
        parts = []
        for x, images in zip(
            case.nhwc.split(piece), everything.split(piece), strict=True
        ):
            found = {}
            for numbers, logits in engine.logits(x, work, True, images):
                found.update(zip(numbers, logits, strict=True))
            parts.append(torch.stack([found[k] for k in sorted(found)]))
        return torch.cat(parts, 1)

    return run


# The topmost parameter varies fastest, so the peers of a case run one after the other.
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("name", "relus"), CASES)
def test_few_relus(benchmark, implementation, name, relus) -> None:
    with torch.inference_mode():
        case = prepared(name, relus)
        run = runner(case, implementation)
        logits = run()
        truth = runner(case, "authors")()
        shared = min(len(truth), len(logits))
        error = (logits[:shared] - truth[:shared]).abs().max() / truth.abs().max()
        assert error < 1e-4, "all engines compute the same logits"
        benchmark.group = f"one hypothesis, one image: {name}, {relus:,} ReLUs, D = {D}"
        benchmark.extra_info.update(
            implementation=implementation, divide=(TRIALS[implementation] + 1) * IMAGES, net=name,
            relus=relus, images=IMAGES, build=case.build, auto=case.auto, error=float(error),
        )  # fmt: skip
        benchmark.pedantic(
            run, rounds=5 if relus <= 15_000 else 2
        )  # run() above was the warm-up
