"""score and choose on a CUDA device: where data goes, what waits, what fits into memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd import Engine, choose, score
from fastbcd.runtime.limits import default_memory
from fastbcd.scoring.compiled import drop
from fastbcd.scoring.engine import Request
from fastbcd.scoring.stacked import portions
from helpers import fake_cuda
from helpers.nets import images, make, thinned


def hypotheses(net, count: int = 3, size: int = 9) -> list[torch.Tensor]:
    return [fastbcd.masks(net).sample(size, seed=1, step=0, trial=t) for t in range(count)]


@pytest.mark.parametrize("engine", ["sequential", "stacked", "collapsed"])
def test_data_goes_to_the_device_of_the_net(gpu, engine) -> None:
    net, data = thinned(make("resnet"), 0.1), images(7)
    removals = hypotheses(net)
    truth = score(net, removals, data, Engine(engine, batch_size=4))
    there = copy.deepcopy(net).to("cuda")
    found = score(there, removals, data, Engine(engine, batch_size=4))
    assert found.engine == engine
    assert torch.equal(found.correct, truth.correct)
    torch.testing.assert_close(found.loss, truth.loss)
    assert fastbcd.accuracy(there, data) == fastbcd.accuracy(net, data)
    chosen = [choose(n, removals, data, adt=-100.0, engine=engine).number for n in (net, there)]
    assert chosen[0] == chosen[1]
    data, margins = images(200), None
    for step in range(2):  # the second with the margins of the first
        some = {"adt": 9.0, "engine": engine, "confidence": 0.8, "step": step, "margins": margins}
        here, away = (choose(n, removals, data, **some) for n in (net, there))
        assert (here.number, here.seen, here.interval) == (away.number, away.seen, away.interval)
        margins = here.margins


@pytest.mark.filterwarnings("ignore:fastbcd scores")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nets_in_half_precision(gpu, dtype) -> None:
    net, data = thinned(make("mlp")).to(dtype), images(9)
    truth = score(net, hypotheses(net), data)
    assert torch.equal(score(net.to("cuda"), hypotheses(net), data).correct, truth.correct)


@pytest.mark.filterwarnings("ignore:fastbcd runs its slow reference on cuda tensors")
@pytest.mark.parametrize("engine", ["sequential", "stacked", "collapsed"])
def test_batches_neither_wait_nor_copy(gpu, engine) -> None:
    """Sums are read once per call, and masks and ids are on the device before the first batch."""
    net = thinned(make("mlp")).to("cuda")
    removals, counts = hypotheses(net), []
    for batches in (1, 3, 9):
        data = fastbcd.ImageData.from_arrays(*images(4 * batches)).to("cuda")
        drop(net)
        gpu.reset()
        score(net, removals, data, Engine(engine, batch_size=4))
        counts.append({kind: gpu.counts[kind] for kind in ("sync", "h2d", "d2h")})
    assert counts[1] == counts[2], gpu.places


def test_sequential_writes_the_masks_that_a_hypothesis_changes(gpu) -> None:
    net, data = make("resnet").to("cuda"), fastbcd.ImageData.from_arrays(*images(8)).to("cuda")
    launches = []
    for sites in (1, 4):
        ids = torch.tensor([[site.start for site in fastbcd.masks(net).sites[:sites]]])
        gpu.reset()
        score(net, ids, data, Engine("sequential", batch_size=4, precision="float32"))
        launches.append(gpu.counts["launch"])
    assert launches[1] - launches[0] == 2 * 3 * 4  # batches; further sites; clone, fill, two copies


@pytest.mark.filterwarnings("ignore:fastbcd runs its slow reference on cuda tensors")
@pytest.mark.parametrize("engine", ["sequential", "stacked", "collapsed"])
def test_choose_waits_when_a_decision_is_possible(gpu, engine) -> None:
    """Once in many batches, the first and the last look included."""
    net = thinned(make("mlp")).to("cuda")
    x, labels = images(200)
    with torch.no_grad():
        labels = torch.where(torch.arange(200) % 5 > 0, net(x.cuda()).argmax(1).cpu(), labels)
    data = fastbcd.ImageData.from_arrays(x, labels).to("cuda")
    engine, counts = Engine(engine, batch_size=4), []
    for some in (data.first(4), data.first(4), data):  # the first call also plans
        gpu.reset()
        found = choose(net, hypotheses(net, 1, 1), some, adt=4.0, engine=engine)
        counts.append(gpu.counts["sync"])
    assert (found.images, found.accepted) == (200, True)
    assert counts[2] - counts[1] <= 15, gpu.places  # in 50 batches


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_autocast_gives_float32_beside_bfloat16(gpu, engine) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.other, self.relu = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.ReLU()
            self.norm = nn.GroupNorm(2, 4)  # in float32 under CUDA's autocast

        def forward(self, x):
            return self.relu(self.norm(self.conv(x)) + self.other(x))

    torch.manual_seed(0)
    data = images(600)
    layers = nn.Conv2d(3, 4, 3), Block(), nn.Flatten(), nn.Linear(144, 5)
    net = fastbcd.convert(nn.Sequential(*layers).eval().to("cuda"), data[0][:2])
    truth = score(net, hypotheses(net), data, Engine(precision="float32"))
    found = score(net, hypotheses(net), data, Engine(engine))
    assert torch.equal(found.correct, truth.correct)
    assert not torch.equal(found.loss, truth.loss)
    torch.testing.assert_close(found.loss, truth.loss, rtol=0.02, atol=0.01)


def test_lanes_are_halved_when_memory_runs_out() -> None:
    net, data = thinned(make("mlp")), images(64)
    removals = hypotheses(net, 8)
    truth = score(net, removals, data)
    sizes = {}
    with fake_cuda.device() as gpu:
        for lanes in (1, 8):
            there = copy.deepcopy(net).to("cuda")
            memory = 2**40 if lanes == 8 else 1
            engine = Engine("stacked", batch_size=64, memory=memory, precision="float32")
            score(there, removals, data, engine)
            torch.cuda.empty_cache()
            sizes[lanes] = gpu.peak[0]
            gpu.peak[0] = 0
    limit = (sizes[1] + sizes[8]) // 2
    with fake_cuda.device(memory=limit):
        there = copy.deepcopy(net).to("cuda")
        engine = Engine("stacked", batch_size=64, memory=2**40, precision="float32")
        with pytest.warns(RuntimeWarning, match="hypotheses at a time instead of 8: out of memory"):
            found = score(there, removals, data, engine)
    assert torch.equal(found.correct, truth.correct)


def test_batches_fill_a_gpu(gpu) -> None:
    net, x = make("mlp"), images(2)[0].to("cuda")

    def cut(hypotheses: int, per_image: int, memory: int, batch_size=None) -> tuple[int, int]:
        request = Request(net, fastbcd.masks(net), [], hypotheses, 50_000, x, batch_size, memory)
        return portions(request, per_image, per_image)

    for hypotheses in (1, 3, 8, 50):
        batch, lanes = cut(hypotheses, 2**20, 2**34)
        assert 1024 <= batch * lanes <= 2**14
        assert lanes == hypotheses
    batch, lanes = cut(8, 2**20, 2**24)
    assert 1 <= batch * lanes <= 16
    assert cut(8, 2**20, 2**34, batch_size=16) == (16, 8)


def test_memory_that_torch_reserved_is_free(gpu) -> None:
    device = torch.device("cuda:0")
    before = default_memory(device)
    block = torch.zeros(2**26, device=device)
    held = default_memory(device)
    del block
    assert held < before
    assert torch.cuda.memory_reserved() > torch.cuda.memory_allocated()
    assert default_memory(device) == before
