"""The memory that plans may use is measured once for a run, so that portions and rounding stay."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastbcd
from fastbcd.descent import job as descent
from fastbcd.runs.directory import read_start, read_state
from fastbcd.scoring import answers as scoring
from helpers.nets import images, make, thinned
from helpers.run_cases import records

FIRST, WHOLE = 300_000, 2**40


class Killed(Exception):
    pass


@pytest.fixture
def machine(monkeypatch):
    """Free memory, which changes with every look at it, and the plans that are made."""

    found = SimpleNamespace(free=itertools.repeat(FIRST), whole=WHOLE, plans=[])
    real = scoring.make_plan

    def measure(device: torch.device, *, whole: bool = False) -> int:
        return found.whole if whole else next(found.free)

    def make_plan(request: Any, engine: str) -> Any:
        plan = real(request, engine)
        found.plans.append((plan.engine.name, plan.batch, plan.lanes, request.memory))
        return plan

    for module in (descent, scoring):
        monkeypatch.setattr(module, "default_memory", measure)
    monkeypatch.setattr(scoring, "make_plan", make_plan)
    return found


def run(run_dir: Path | None, stop: int = 0, engine: Any = "auto") -> None:
    def train(net: torch.nn.Module, step: fastbcd.Step) -> None:
        if step.number == stop:
            raise Killed
        with torch.no_grad():
            for p in net.parameters():
                p += 0.01 * torch.randn_like(p)

    net = thinned(make("resnet"))
    options = {"finetune": train, "run_dir": run_dir, "engine": engine}
    count = fastbcd.masks(net).count()
    fastbcd.bcd(net, images(40), count - 40, drc=10, rt=3, adt=-100.0, **options)


def outcome(run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    left_out = ("seconds", "digest")  # seconds differ, and digests are of seconds, too
    history = [{k: v for k, v in r.items() if k not in left_out} for r in records(run_dir)]
    return history, read_state(run_dir).tensors


def test_a_run_keeps_its_plans_when_free_memory_changes(machine, tmp_path) -> None:
    run(tmp_path / "quiet")
    quiet, machine.plans[:] = machine.plans[:], []
    machine.free = iter([FIRST, 50_000, 80_000, 110_000, 140_000, 170_000])
    with pytest.raises(Killed):
        run(tmp_path / "busy", stop=3)
    killed = len(machine.plans)
    run(tmp_path / "busy")
    assert machine.plans == quiet[:killed] + quiet[killed - 1 :]  # step 3 is made again
    (history, tensors), (others, theirs) = map(outcome, (tmp_path / "quiet", tmp_path / "busy"))
    assert history == others
    assert all(torch.equal(tensors[name], theirs[name]) for name in tensors)
    machine.plans.clear()
    run(None)  # with less memory, the plans are other ones
    assert {plan[1:3] for plan in machine.plans}.isdisjoint({plan[1:3] for plan in quiet})
    assert len({plan[3] for plan in machine.plans}) == 1


def test_another_device_or_an_engine_with_memory_goes_first(machine, tmp_path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, stop=2)
    for stop, whole, engine, expected in [
        (2, 200_000, "auto", 200_000),  # a smaller device
        (2, WHOLE, fastbcd.Engine(memory=90_000), 90_000),
        (3, WHOLE, "auto", FIRST),
    ]:
        machine.whole = whole
        machine.plans.clear()
        with pytest.raises(Killed):
            run(tmp_path, stop, engine)
        assert {plan[3] for plan in machine.plans} == {expected}
    assert read_start(tmp_path).start["memory"] == {"cpu": FIRST}
