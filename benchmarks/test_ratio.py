"""How many times faster than the authors' loop, compared with what is stored in ratios.json.

    pytest benchmarks/test_ratio.py                             fails where a ratio has fallen
    FASTBCD_STORE_RATIOS=1 pytest benchmarks/test_ratio.py      stores the ratios of this run

Ours and the authors' loop take turns in one process, and the least CPU time of each counts, so that
a busy machine slows both. Time is that of one hypothesis on one image; the form of `collapsed` is
built and its affine part cached.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_collapsed import paper_masks

import fastbcd
from nets import build
from test_scoring import Loop

STORED = Path(__file__).with_name("ratios.json")
LOST = 0.8  # of a stored ratio: below it something has become slower
ROUNDS, IMAGES, D = 4, 64, 100
CASES = [
    ("resnet18", 6_000, "collapsed", 16),
    ("resnet18", 15_000, "collapsed", 16),
    ("resnet18", 100_000, "stacked", 4),
    ("resnet20", 20_000, "stacked", 8),
]


def cpu_seconds(function: Callable[[], object]) -> float:
    """CPU time of all threads of this process."""
    start = time.process_time()
    function()
    return time.process_time() - start


@pytest.mark.parametrize(("name", "relus", "engine", "hypotheses"), CASES)
def test_ratio_to_the_authors_loop(benchmark, name, relus, engine, hypotheses) -> None:
    x = torch.randn(IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    data = (x, torch.arange(IMAGES) % 10)
    net = fastbcd.convert(build(name), x[:2])
    masks = paper_masks(net, name, relus)
    fastbcd.set_masks(net, masks)
    removals = [masks.sample(D, seed=1, step=0, trial=t) for t in range(hypotheses)]
    loop = Loop(
        net, removals[:1], last=False, compiled=False
    )  # the base and one hypothesis

    def ours() -> None:
        fastbcd.score(net, removals, data, engine=engine)

    def theirs() -> None:
        with torch.inference_mode():
            loop(x)

    ours()  # the form, and the first use of every kernel
    theirs()
    times = [
        (cpu_seconds(theirs) / 2, cpu_seconds(ours) / (1 + hypotheses))
        for _ in range(ROUNDS)
    ]
    ratio = min(slow for slow, _ in times) / min(fast for _, fast in times)
    case = f"{name}, {relus:,} ReLUs, {engine}"
    benchmark.group = f"score, ratio to the authors' loop: {case}"
    benchmark.extra_info.update(
        implementation="fastbcd", ratio=ratio, divide=1 + hypotheses
    )
    benchmark.pedantic(ours, rounds=1)
    stored = json.loads(STORED.read_text())
    if os.environ.get("FASTBCD_STORE_RATIOS"):
        stored[case] = round(ratio, 2)
        STORED.write_text(json.dumps(stored, indent=2) + "\n")
    assert ratio >= LOST * stored[case], (
        f"{case}: {ratio:.2f} instead of {stored[case]:.2f}"
    )
