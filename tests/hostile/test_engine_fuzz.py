"""Random networks of all accepted operations: every engine gives the logits of the plain net."""

from __future__ import annotations

import pytest
import torch

import fastbcd
from fastbcd.data.for_net import data_for
from fastbcd.scoring.answers import prepared
from helpers.hostile import seeds
from helpers.nets import emptied, thinned
from helpers.random_nets import random_net


def differences(net, engine: str, seed: int) -> float | str:
    """The largest relative difference from the net over random hypotheses, or why it refused."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(5, 4, 8, 8, generator=generator)
    data = (x, torch.arange(5))
    images = data_for(net, data)
    masks = fastbcd.masks(net).copy()
    kept = masks.bits.nonzero().flatten()
    removals = [kept[torch.rand(len(kept), generator=generator) < p] for p in (0.1, 0.5, 1.0)]
    removals += [kept[-2:], kept[len(kept) // 2 :][:1]]
    try:
        engine_of = fastbcd.Engine(engine, batch_size=4)
        with prepared(net, dict(enumerate(removals)), images, engine_of) as answers:
            plan = answers.plan
            assert plan.engine.name == engine
            work = plan.engine.prepare(dict(enumerate(removals)), 1 + seed % 4)
            found: dict[int, torch.Tensor] = {}
            with torch.inference_mode():
                given = x.double().contiguous(memory_format=plan.engine.memory_format)
                for numbers, logits in plan.engine.logits(given, work, True):
                    found.update(zip(numbers, logits.clone(), strict=True))
    except ValueError as error:
        return str(error)
    worst = 0.0
    for number, logits in found.items():
        fastbcd.set_masks(net, masks if number < 0 else masks.without(removals[number]))
        with torch.no_grad():
            truth = net(x.double())
        worst = max(worst, float((logits - truth).abs().max() / truth.abs().max()))
    fastbcd.set_masks(net, masks)
    return worst


def attack(seed: int, nonlinear: bool) -> dict[str, float | str]:
    net = random_net(seed, steps=4 + seed % 9, nonlinear=nonlinear)
    net = thinned(net, (0.02, 0.1, 0.5)[seed % 3])
    net = emptied(net, seed) if seed % 2 else net
    found = {}
    for engine in ("stacked", "collapsed"):
        found[engine] = differences(net, engine, seed)
        if isinstance(found[engine], float):
            operations = [name for name, _ in net.ops]
            assert found[engine] < 1e-9, f"seed {seed}, {engine}: {found[engine]} of {operations}"
        else:
            assert f"engine={engine!r} cannot score RandomNet: " in found[engine]
    return found


def test_random_nets() -> None:
    """What an engine takes is exact; nets of accepted operations are nearly all taken."""
    found = [attack(seed, nonlinear=seed % 4 == 3) for seed in seeds(24)]
    taken = [sum(isinstance(f[e], float) for f in found) for e in ("stacked", "collapsed")]
    assert len(found) < 24 or min(taken) > len(found) // 2


@pytest.mark.filterwarnings("ignore:fastbcd ")
def test_random_nets_on_a_gpu(gpu) -> None:
    """Every engine finds there what it finds on the CPU, or refuses on both."""
    for seed in seeds(2):
        data = (torch.randn(5, 4, 8, 8, generator=torch.Generator().manual_seed(seed)), range(5))
        for engine in ("sequential", "stacked", "collapsed"):
            here, there = (scored(seed, data, engine, device) for device in ("cpu", "cuda"))
            assert type(here) is type(there), (engine, here, there)
            if not isinstance(here, str):
                torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-4)


def scored(seed: int, data: tuple, engine: str, device: str) -> torch.Tensor | str:
    """The losses of random hypotheses in float32, or why the engine refused."""
    net = random_net(seed, steps=4 + seed % 9, nonlinear=seed % 4 == 3).float()
    net = emptied(thinned(net, (0.05, 0.2, 0.6)[seed % 3]), seed).to(device)
    masks = fastbcd.masks(net).copy()
    size = max(1, masks.count() // 5)
    removals = [masks.sample(size, seed=0, step=0, trial=t) for t in range(3)]
    try:
        engine_of = fastbcd.Engine(engine, precision="float32")
        return fastbcd.score(net, removals, data, engine_of).loss
    except ValueError as error:
        return str(error)
