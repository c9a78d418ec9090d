"""score in the middle of a user's process: autocast, precision flags, threads, memory."""

from __future__ import annotations

import gc
import linecache
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import graph_module

import fastbcd
from fastbcd import Engine, models, score
from fastbcd.runtime.tf32 import products, repeatable_convolutions
from helpers.nets import images, make, thinned


def hypotheses(net, count: int = 4, size: int = 9) -> list[torch.Tensor]:
    return [fastbcd.masks(net).sample(size, seed=1, step=0, trial=t) for t in range(count)]


@pytest.mark.parametrize("engine", ["sequential", "stacked", "collapsed"])
def test_autocast_around_it_changes_nothing(engine) -> None:
    net, data = thinned(make("resnet")), images(40)
    ids = hypotheses(net)
    plain = score(net, ids, data, engine=engine)
    with torch.autocast("cpu", torch.bfloat16):
        found = score(net, ids, data, engine=engine)
        assert torch.is_autocast_enabled("cpu")
        assert fastbcd.accuracy(net, data) == 100 * plain.base_correct / 40
    assert found.engine == engine
    assert torch.equal(found.loss, plain.loss)
    assert torch.equal(found.correct, plain.correct)


def test_nets_in_double() -> None:
    net, data = thinned(make("resnet")).double(), images(20)
    truth = score(net, hypotheses(net), data, engine="sequential")
    for engine in ("stacked", "collapsed"):
        found = score(net, hypotheses(net), data, engine=engine)
        assert torch.allclose(found.loss, truth.loss, atol=1e-12)


@pytest.mark.filterwarnings("ignore:fastbcd scores")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nets_in_half_precision_are_scored_sequentially(dtype) -> None:
    """Rounding would make the counts depend on the engine."""
    net, data = thinned(make("resnet")).to(dtype), images(20)
    assert score(net, hypotheses(net), data).engine == "sequential"
    with pytest.raises(ValueError, match="depend on the engine by rounding; use engine='sequ"):
        score(net, hypotheses(net), data, engine="stacked")


FLAGS = [
    (torch.backends.cuda.matmul, "fp32_precision"), (torch.backends.cudnn.conv, "fp32_precision"),
    (torch.backends.mkldnn.matmul, "fp32_precision"), (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "benchmark"), (torch.backends.cudnn, "enabled"),
]  # fmt: skip


def flags() -> list[object]:
    return [getattr(*place) for place in FLAGS]


@pytest.mark.parametrize("precision", ["ieee", "tf32", "none"])
def test_the_new_interface_of_tf32_may_be_used_before(precision) -> None:
    """With one library set by the new interface, reading the old one raises."""
    before = torch.backends.cudnn.conv.fp32_precision
    net, data = make("mlp"), images(8)
    try:
        torch.backends.cudnn.conv.fp32_precision = precision
        expected = flags()
        score(net, hypotheses(net, 1, 2), data)
        fastbcd.saliency(net, data)
        tune = fastbcd.Finetune(epochs=1, batch_size=4, padding=0)
        fastbcd.bcd(net, data, 40, drc=5, rt=1, finetune=tune)
        fastbcd.train(net, data, epochs=1, batch_size=4, padding=0)
        assert flags() == expected
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def test_flags_of_threads_that_overlap_are_restored() -> None:
    """The one that began first ends first: the last one must restore what was there at first."""
    expected = flags()
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with products(tf32=True), repeatable_convolutions():
            inside.set()
            leave.wait(600)

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(600)
    with products(tf32=False):
        leave.set()
        thread.join()
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cudnn.deterministic == expected[3]
    assert flags() == expected


def test_two_threads_score_two_nets() -> None:
    """torch.fx patches nn.Module while it traces; other threads must not notice."""
    nets = [models.resnet20(num_classes=5, image_size=8).eval() for _ in range(2)]
    data = images(6)
    truth = [score(net, hypotheses(net, 2), data, engine="sequential").loss for net in nets]
    expected = flags()
    failures: list[BaseException] = []

    def work(k: int) -> None:
        try:
            for _ in range(6):
                engine = ("stacked", "sequential")[k]
                found = score(nets[k], hypotheses(nets[k], 2), data, engine=engine)
                assert torch.allclose(found.loss, truth[k], atol=1e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert flags() == expected


def test_a_trace_waits_for_that_of_another_thread() -> None:
    """torch.fx patches nn.Module for the process: a trace that ends would undo another's patch."""
    first_begun, second_begun, first_ended = (threading.Event() for _ in range(3))

    class Meets(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.conv, self.number = nn.Conv2d(3, 2, 1), number

        def forward(self, x):
            begun, other = ((first_begun, second_begun), (second_begun, first_ended))[self.number]
            begun.set()
            other.wait(0.3)
            return torch.relu(self.conv(x))

    failures: list[BaseException] = []

    def work(net: nn.Module, ended: threading.Event) -> None:
        try:
            converted = fastbcd.convert(net, torch.randn(1, 3, 4, 4))
            assert fastbcd.masks(converted).total == 32
        except BaseException as error:
            failures.append(error)
        ended.set()

    ended = first_ended, threading.Event()
    threads = [threading.Thread(target=work, args=(Meets(i), ended[i])) for i in range(2)]
    threads[0].start()
    first_begun.wait(600)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert not failures


# ---------------------------------------------------------------------------------- memory


def test_nothing_is_left_of_a_call() -> None:
    """No source code, node or tensor of a call stays behind when the weights change."""
    net, data = thinned(make("resnet"), 0.1), images(20)
    ids, tune = hypotheses(net, 2, 3), fastbcd.Finetune(epochs=1, batch_size=10, padding=0)

    def step() -> tuple[int, int, int]:
        score(net, ids, data, engine="collapsed")
        fastbcd.Finetuner(net, data, tune).run(1)
        fastbcd.accuracy(net, data)
        gc.collect()
        kinds = (torch.Tensor, torch.fx.Node)
        held = sum(issubclass(type(o), kinds) for o in gc.get_objects())
        return len(graph_module._loader.eval_cache), len(linecache.cache), held

    step()
    first = step()
    assert [step() for _ in range(2)] == [first] * 2


CHILD = """
import sys, torch, fastbcd
from fastbcd.scoring.collapsed import build
torch.manual_seed(0)
net = fastbcd.models.resnet20(num_classes=10, image_size=16).eval()
masks = fastbcd.masks(net)
bits = torch.zeros(masks.total, dtype=torch.bool)
bits[torch.randperm(masks.total)[:5000]] = True
fastbcd.set_masks(net, fastbcd.MaskSet(masks.sites, bits))
data = torch.randn(40, 3, 16, 16), torch.arange(40) % 10
ids = torch.stack([fastbcd.masks(net).sample(20, seed=0, step=0, trial=t) for t in range(4)])
few = fastbcd.MaskSet(masks.sites, bits & (torch.rand(len(bits)) < 0.02))
small = fastbcd.models.resnet20(num_classes=10, image_size=16).eval()
fastbcd.set_masks(small, few)
fastbcd.score(small, few.bits.nonzero()[:4], data, engine="collapsed")  # libraries are loaded

def kib(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here
before = kib("VmRSS")
fastbcd.score(net, ids, data, fastbcd.Engine("collapsed", memory=int(sys.argv[1])))
print(1024 * (kib("VmHWM") - before))
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_building_a_form_stays_within_memory() -> None:
    """What is refused below some amount of memory takes no more than that when it is allowed."""
    net, x = models.resnet20(num_classes=10, image_size=16).eval(), torch.randn(2, 3, 16, 16)
    masks = fastbcd.masks(net)
    bits = torch.zeros(masks.total, dtype=torch.bool)
    torch.manual_seed(0)
    bits[torch.randperm(masks.total)[:5000]] = True
    fastbcd.set_masks(net, fastbcd.MaskSet(masks.sites, bits))
    with pytest.raises(ValueError, match="while it is built") as refused:
        score(net, torch.zeros(0, 1).long(), (x, torch.zeros(2).long()),
              Engine("collapsed", memory=2**24))  # fmt: skip
    needed = int(str(refused.value).split(" MiB while it is built")[0].split()[-1].replace(",", ""))
    memory = (needed + 1) * 2**20
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(memory)], capture_output=True, text=True, timeout=600
    )
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) < 1.1 * memory, (int(child.stdout) / 2**20, memory / 2**20)
