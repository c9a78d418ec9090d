"""Estimates: which engine `auto` takes on which device, and how a device is measured."""

from __future__ import annotations

import pytest
import torch

import fastbcd
from fastbcd import Engine, MaskSet, models, score
from fastbcd.scoring import profile
from fastbcd.scoring.engine import Request
from fastbcd.scoring.plan import CollapsedPlanner, stacked_seconds
from fastbcd.scoring.profile import TABLE, Profile, profile_of
from fastbcd.scoring.program import make_program
from helpers.nets import images, make

GPUS = [name for name in TABLE if name not in ("", "cpu")]


@pytest.fixture
def net(gpu):
    torch.manual_seed(0)
    return models.resnet18(num_classes=10, image_size=32).eval()


def estimates(net, device: str, relus: int, precision: str = "float32") -> dict[str, float]:
    """Seconds of 8 hypotheses on 50,000 images, with so many ReLUs at random."""
    net = net.to("cpu" if device == "cpu" else "cuda")
    full = fastbcd.masks(net)
    bits = torch.zeros(full.total, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    bits[torch.randperm(full.total, generator=generator)[:relus]] = True
    masks = MaskSet(full.sites, bits)
    removals = [masks.sample(100, seed=0, step=0, trial=t) for t in range(8)]
    x = torch.zeros(2, 3, 32, 32).to(net.get_parameter("conv1.weight").device)
    rates = Profile(device, **TABLE[device])
    request = Request(net, masks, removals, 8, 50_000, x, None, 2**35, precision, rates)
    with torch.inference_mode():
        program = make_program(net, x[:1])
        planner = CollapsedPlanner(request, program)
        return {"stacked": stacked_seconds(request, program), "collapsed": planner.seconds}


@pytest.mark.parametrize("device", ["cpu", *GPUS])
def test_the_engine_follows_device_and_precision(net, device) -> None:
    """Few bits help convolutions most, so that on GPUs `collapsed` pays for fewer ReLUs."""
    cheapest = []
    for relus in (300, 15_000, 300_000):
        seconds = estimates(net, device, relus)
        cheapest.append(min(seconds, key=seconds.__getitem__))
    assert cheapest == ["collapsed", "collapsed", "stacked"]
    if device == "cpu":
        return
    full, fast = (estimates(net, device, 15_000, p) for p in ("float32", "mixed"))
    assert fast["stacked"] < 0.6 * full["stacked"]
    assert fast["stacked"] / full["stacked"] < fast["collapsed"] / full["collapsed"]


def test_estimates_of_an_a100_are_those_on_paper(net) -> None:
    """µs per image and hypothesis: a float32 pass is about 57 by its products alone."""
    for precision, least, most in (("float32", 50, 80), ("mixed", 4, 15)):
        seconds = estimates(net, "A100", 100_000, precision)["stacked"]
        assert least < seconds / 9 / 50_000 * 1e6 < most


def test_profiles_are_known_by_name_or_measured(monkeypatch) -> None:
    names = {"NVIDIA A100-SXM4-80GB": "A100", "NVIDIA RTX A5000": "A5000",
             "NVIDIA GeForce RTX 4090": "RTX 4090", "NVIDIA H100 PCIe": "H100"}  # fmt: skip
    for name, row in names.items():
        profile_of.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert profile_of(torch.device("cuda")) == Profile(name, **TABLE[row])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(profile, "SIDE", 64)
    monkeypatch.setattr(profile, "BYTES", 2**16)
    measured = profile.measured(torch.device("cpu"), "another")
    profile_of.cache_clear()
    assert measured.name == "another"
    assert all(0 < rate < 1e15 for rate in measured[1:])


def test_seconds_are_those_of_what_takes_longest() -> None:
    device = Profile("a", float32=10.0, tf32=20.0, bf16=40.0, bandwidth=5.0, launch=0.5)
    assert device.seconds("float32", 100) == 10.0
    assert device.seconds("bf16", 100, moved=100) == 20.0
    assert device.seconds("bf16", 100, moved=5, launches=8) == 4.0


def test_explain_prints_the_estimate_of_each_engine(capsys) -> None:
    net, data = make("resnet"), images(9)
    score(net, torch.tensor([[0]]), data, Engine("collapsed"), explain=True)
    line = next(line for line in capsys.readouterr().out.splitlines() if "estimates" in line)
    for word in ("sequential", "stacked", "collapsed", " s", "on cpu"):
        assert word in line
