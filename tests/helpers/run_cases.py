"""A small run with real fine-tuning, and what two such runs must have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fastbcd
from fastbcd.runs.directory import read_state
from fastbcd.training.settings import Finetune


def small_net() -> nn.Module:
    """28×28 images, 10 classes, 98 ReLUs; with batch norm and dropout, the same every time."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 2, 5, 4, 2), nn.BatchNorm2d(2), fastbcd.MaskedReLU((2, 7, 7)), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(98, 10),
    )  # fmt: skip


def small_run(run_dir: Path | None, **options: Any) -> fastbcd.Run:
    """Five steps, each fine-tuned for an epoch."""
    data = fastbcd.load("fashion-mnist-mini").first(48)
    settings: dict[str, Any] = {
        "budget": 8, "drc": 20, "rt": 3, "adt": 1.0, "test": data.first(20),
        "finetune": Finetune(epochs=1, batch_size=16, lr=0.05), "run_dir": run_dir,
    }  # fmt: skip
    return fastbcd.bcd(small_net(), data, **{**settings, **options})


def contents(run_dir: Path) -> tuple[Any, Any]:
    """What two runs must have in common: the state's tensors and the history without seconds."""
    state = read_state(run_dir)
    tensors = {name: t.tolist() for name, t in sorted(state.tensors.items())}
    assert records(run_dir) == state.history
    return tensors, [{**record, "seconds": None} for record in state.history]


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The history as its file has it."""
    return [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]


def nudge(net: nn.Module, step: fastbcd.Step) -> None:
    """A training that takes no time; torch's generator is seeded by the step."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
