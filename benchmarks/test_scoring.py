"""Scoring K hypotheses: fastbcd's engines against the authors' loop, vmap and torch.compile.

    make bench                                             the table
    pytest benchmarks/test_scoring.py -k resnet20          one net

A round scores 8 hypotheses of 100 ReLUs and the base on one batch of images that are already
normalised; the implementations take turns. Peers:
    authors         one hypothesis at a time, eager, NCHW, their batch norm and
                    relu(x)*a + (1-a)*x with a float mask
    authors, NHWC   the same in channels_last
    vmap            torch.func.vmap over the stacked float masks
    compiled        torch.compile of the loop's body, in channels_last
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import fastbcd
from fastbcd.masking.masks import mask_modules
from fastbcd.scoring.program import make_program
from fastbcd.scoring.sequential import Sequential
from fastbcd.scoring.stacked import Stacked
from nets import build

K, D = 8, 100
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
CASES = [("resnet18", 491_520, 32), ("resnet18", 100_000, 32), ("resnet20", 188_416, 128),
         ("resnet20", 20_000, 128)]  # fmt: skip
PEERS = ["authors", "authors, NHWC", "vmap", "compiled", "sequential", "fastbcd"]


class SnlActivation(nn.Module):
    """relu(x)*a + (1-a)*x, as in SNL and in the authors' code."""

    def __init__(self, alphas: Tensor) -> None:
        super().__init__()
        self.register_buffer("alphas", alphas.float().unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) * self.alphas + (1 - self.alphas) * x


def authors_net(net: fx.GraphModule) -> nn.Module:
    """The same network with the authors' activation in place of ours."""
    twin = copy.deepcopy(net)
    for name, module in mask_modules(net).items():
        twin.set_submodule(name, SnlActivation(module.mask))
    return twin


class Loop:
    """Write a hypothesis's float masks into the net, run it; the next one."""

    def __init__(
        self, net: fx.GraphModule, removals: list[Tensor], last: bool, compiled: bool
    ):
        masks = fastbcd.masks(net)
        base = fastbcd.MaskSet(masks.sites, masks.bits)
        self.names = [s.name for s in masks.sites]
        device = next(net.parameters()).device
        self.hypotheses = [
            [m.float().unsqueeze(0).to(device) for m in base.without(ids).split()]
            for ids in [torch.empty(0, dtype=torch.int64), *removals]
        ]
        self.net = authors_net(net)
        if last:
            self.net.to(memory_format=torch.channels_last)
        self.sites = [self.net.get_submodule(n) for n in self.names]
        self.run = torch.compile(self.net, dynamic=False) if compiled else self.net

    def __call__(self, x: Tensor) -> Tensor:
        logits = []
        for alphas in self.hypotheses:
            for site, alpha in zip(self.sites, alphas, strict=True):
                site.alphas.copy_(alpha)
            logits.append(self.run(x))
        return torch.stack(logits)


def vmapped(net: fx.GraphModule, removals: list[Tensor]) -> Callable[[Tensor], Tensor]:
    loop = Loop(net, removals, last=False, compiled=False)
    stacked = {
        f"{name}.alphas": torch.stack([h[i] for h in loop.hypotheses])
        for i, name in enumerate(loop.names)
    }
    one = torch.func.vmap(
        lambda alphas, x: torch.func.functional_call(loop.net, alphas, (x,)),
        in_dims=(0, None),
    )
    return lambda x: one(stacked, x)


def engine(net: fx.GraphModule, removals: list[Tensor], images: Tensor, name: str):
    masks = fastbcd.masks(net).copy()  # sequential writes into the net
    fast = name == "fastbcd"
    made = (
        Stacked(make_program(net, images[:1]), masks)
        if fast
        else Sequential(net, masks)
    )
    lanes = 2 if images.shape[0] == 128 else 1
    work = made.prepare(dict(enumerate(removals)), lanes)
    batch = 32 if name == "fastbcd" else images.shape[0]

    def run(x: Tensor) -> Tensor:
        parts = []
        for piece in x.split(batch):
            found = {}
            for numbers, logits in made.logits(piece, work, True):
                found.update(zip(numbers, logits, strict=True))
            parts.append(torch.stack([found[k] for k in sorted(found)]))
        return torch.cat(parts, 1)

    return run


def make(
    implementation: str, net, removals, x
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    nhwc = x.contiguous(memory_format=torch.channels_last)
    if implementation == "vmap":
        return vmapped(net, removals), x
    if implementation == "fastbcd":
        return engine(net, removals, nhwc, implementation), nhwc
    if implementation == "sequential":
        return engine(net, removals, x, implementation), x
    last = implementation != "authors"
    loop = Loop(net, removals, last, compiled=implementation == "compiled")
    return loop, nhwc if last else x


def peak_memory(function: Callable[[], object], device: str) -> float:
    """MiB that `function` takes at its worst moment; on the CPU sampled every millisecond."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - start) / 2**20
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(
            0
        )  # what earlier calls freed goes back first
    page = resource.getpagesize() / 2**20

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    start, peak, done = resident(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    function()
    done.set()
    thread.join()
    return max(peak - start, 0.0)


@pytest.fixture(scope="module")
def truths() -> dict:
    return {}


# The topmost parameter varies fastest, so the peers of a case run one after the other.
@pytest.mark.parametrize("implementation", PEERS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "relus", "images"), CASES)
def test_score(benchmark, truths, implementation, name, relus, images, device) -> None:
    x = torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(
        device
    )
    net = fastbcd.convert(build(name).to(device), x[:2])
    masks = fastbcd.masks(net)
    gone = masks.sample(masks.total - relus, seed=0, step=0, trial=0)
    fastbcd.set_masks(net, masks.without(gone))
    removals = [masks.sample(D, seed=1, step=0, trial=t) for t in range(K)]
    benchmark.group = (
        f"score {name}, {relus:,} ReLUs, {K} x {D}, {images} images, {device}"
    )
    benchmark.extra_info["implementation"] = implementation
    with torch.inference_mode():
        run, images_in = make(implementation, net, removals, x)
        logits = run(images_in)
        truth = truths.setdefault((name, relus, device), logits)
        scale = truth.abs().max()
        tolerance = (
            1e-2 if device == "cuda" else 1e-3
        )  # the peers' convolutions use TF32
        assert ((logits - truth).abs() <= tolerance * scale).all(), (
            "all peers compute the same logits"
        )

        def once() -> None:
            run(images_in)
            if device == "cuda":
                torch.cuda.synchronize()

        benchmark.pedantic(once, rounds=3 if name == "resnet18" else 5, warmup_rounds=1)
        benchmark.extra_info["memory"] = peak_memory(once, device)
