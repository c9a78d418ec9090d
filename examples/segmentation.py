"""A network that marks pixels, judged by a metric and trained by a loss of its own.

python examples/segmentation.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastbcd


def squares(images: int) -> tuple[Tensor, Tensor]:
    """Noise with a bright square in each image, and the pixels of the squares."""
    targets = torch.zeros(images, 16, 16, dtype=torch.int64)
    for target, (row, column) in zip(
        targets, torch.randint(10, (images, 2)), strict=True
    ):
        target[row : row + 6, column : column + 6] = 1
    return torch.randn(images, 1, 16, 16) + 1.5 * targets.unsqueeze(1), targets


def overlap(outputs: Tensor, targets: Tensor) -> Tensor:
    """Intersection over union of the marked pixels, one value per image."""
    marked = outputs.argmax(1) == 1
    wanted = targets == 1
    return (marked & wanted).sum((1, 2)) / (marked | wanted).sum((1, 2)).clamp(min=1)


overlap.bounds = (0, 1)  # type: ignore[attr-defined]


def main(images: int = 400, budget: int = 500, epochs: int = 20) -> fastbcd.Run:
    """From 4,096 ReLUs to the budget."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 2, 1),
    )
    data = squares(images)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    run = fastbcd.linearize(
        model, data, budget, epochs=epochs, metric=overlap, padding=0, flip=False
    )
    print(run, f"{fastbcd.accuracy(run.model, data, metric=overlap):.1f} %")
    return run


if __name__ == "__main__":
    main()
