"""bcd with a confidence: resumable, the same on any number of ranks, recorded."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import fastbcd
from helpers.nets import images, make, thinned


class Killed(Exception):
    pass


def net_and_data(n: int = 400):
    """A net, and labels that it mostly gets right."""
    net, (x, labels) = thinned(make("mlp")), images(n, 0)
    with torch.no_grad():
        answers = net(x).argmax(1)
    return net, (x, torch.where(torch.arange(n) % 20 == 0, labels, answers))


def run(net, data, **settings):
    budget = fastbcd.masks(net).count() - 12
    given = {"drc": 3, "rt": 3, "adt": 4.0, "finetune": None, "confidence": 0.9, **settings}
    return fastbcd.bcd(copy.deepcopy(net), data, budget, **given)


def test_a_run_that_was_killed_continues_with_the_same_decisions(tmp_path) -> None:
    """The margins of earlier steps are a part of the saved state."""
    net, data = net_and_data()
    whole = run(net, data)

    def kill(net, step):
        if step.number == 3:
            raise Killed

    with pytest.raises(Killed):
        run(net, data, run_dir=tmp_path, finetune=kill)
    kill.__code__ = (lambda net, step: None).__code__
    resumed = run(net, data, run_dir=tmp_path, finetune=kill)
    assert torch.equal(resumed.masks.bits, whole.masks.bits)
    for one, other in zip(resumed.history, whole.history, strict=True):
        assert (one.chosen, one.images, one.interval) == (
            other.chosen,
            other.images,
            other.interval,
        )
    assert any(0 < step.images[0] < 400 for step in whole.history)
    # The first step asks the base about all images, and its margins are kept.
    of_base = [step.images[-1] for step in whole.history]
    assert of_base[0] == 400
    assert min(of_base[1:]) < 400
    saved = fastbcd.load_run(tmp_path, model=copy.deepcopy(net))
    assert torch.equal(saved.masks.bits, whole.masks.bits)


def test_what_is_recorded(tmp_path) -> None:
    net, data = net_and_data()
    exact = run(net, data, run_dir=tmp_path / "exact", confidence=None)
    found = run(net, data, run_dir=tmp_path / "sampled", confidence=0.9)
    records = [json.loads((tmp_path / name / "history.jsonl").read_text().splitlines()[1])
               for name in ("exact", "sampled")]  # fmt: skip
    configs = [json.loads((tmp_path / name / "config.json").read_text())["settings"]
               for name in ("exact", "sampled")]  # fmt: skip
    assert records[0]["images"] is None
    assert configs[0]["confidence"] is None
    assert configs[1]["confidence"] == 0.9
    assert set(records[1]["images"]) >= {"-1", "0"}
    step = found.history[1]
    low, high = step.interval
    assert low <= step.drops[step.chosen] <= high
    assert exact.history[0].images is None


def test_the_test_set_is_measured_every_n_steps_and_at_the_end() -> None:
    net, data = net_and_data(60)
    history = run(net, data, test=data, test_every=3, confidence=None).history
    assert [step.test_accuracy is not None for step in history] == [False, False, True, True]
    with pytest.raises(ValueError, match="test_every=0"):
        run(net, data, test_every=0)


def test_the_loop_of_ones_own_takes_a_confidence() -> None:
    net, data = net_and_data(200)
    budget = fastbcd.masks(net).count() - 6
    for step in fastbcd.steps(net, data, budget, drc=3, rt=2, confidence=0.9):
        assert step.images is not None
    with pytest.raises(ValueError, match="confidence=2"):
        fastbcd.steps(net, data, budget - 1, confidence=2)
