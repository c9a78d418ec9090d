"""A segmentation task on made-up shapes: which pixels belong to a square, which to a bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastbcd

NO_VIEWS: dict[str, Any] = {"padding": 0, "flip": False}  # crops would not move the targets


def shapes(n: int = 32, size: int = 12) -> tuple[Tensor, Tensor]:
    """Images float [n, 1, size, size] and maps int64 [n, size, size]: 0 ground, 1 square, 2 bar."""
    generator = torch.Generator().manual_seed(0)
    maps = torch.zeros(n, size, size, dtype=torch.int64)
    for one, place in zip(maps, torch.randint(1, size - 5, (n, 4), generator=generator).tolist(),
                          strict=True):  # fmt: skip
        top, left, row, start = place
        one[top : top + 4, left : left + 4] = 1
        one[row, start : start + 5] = 2
    return (maps + 0.3 * torch.randn(maps.shape, generator=generator))[:, None], maps


def small_net() -> nn.Module:
    """Logits [B, 3, H, W]; 2 sites; the same every time."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1),
    )  # fmt: skip
    return fastbcd.convert(plain, torch.zeros(2, 1, 12, 12))


def pixel_accuracy(logits: Tensor, maps: Tensor) -> Tensor:
    """The share of pixels that are right, [B]."""
    return (logits.argmax(1) == maps).double().mean((1, 2))


pixel_accuracy.bounds = (0.0, 1.0)  # type: ignore[attr-defined]


def pixel_loss(logits: Tensor, maps: Tensor) -> Tensor:
    """Cross-entropy with a weight for the rarer classes, [B]."""
    weight = torch.tensor([0.5, 1.0, 1.5], dtype=logits.dtype)
    return nn.functional.cross_entropy(logits, maps, weight, reduction="none").mean((1, 2))


def segmentation_run(run_dir: Path | None, **options: Any) -> fastbcd.Run:
    """Four steps, each fine-tuned for an epoch, with a teacher."""
    data, teacher = shapes(), small_net().requires_grad_(False)
    settings: dict[str, Any] = {
        "budget": 552, "drc": 150, "rt": 3, "adt": 1.0, "test": shapes(8), "teacher": teacher,
        "metric": pixel_accuracy, "loss": pixel_loss, "proposal": "saliency", "run_dir": run_dir,
        "finetune": fastbcd.Finetune(epochs=1, batch_size=16, lr=0.05, **NO_VIEWS),
    }  # fmt: skip
    return fastbcd.bcd(small_net(), data, **{**settings, **options})
