"""A ResNet18 of torchvision, trained on CIFAR-10, from its weights file to 15,000 ReLUs.

    python examples/cifar10_resnet18.py weights.pth data/cifar10

The folder is that of torchvision's CIFAR10. Killed at any time, the same command resumes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torchvision
from torch import nn

import fastbcd


def cifar_resnet18() -> nn.Module:
    """ResNet18 with the first layer that is usual for images of 32×32."""
    model = torchvision.models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def main(
    weights: str,
    train: fastbcd.ImageData,
    test: fastbcd.ImageData,
    budget: int = 15_000,
    epochs: int = 60,
) -> fastbcd.Run:
    """Remove ReLUs and write a page with figures."""
    model = cifar_resnet18()
    model.load_state_dict(torch.load(weights, weights_only=True))
    folder = Path("runs/cifar10")
    run = fastbcd.linearize(
        model, train, budget, epochs=epochs, test=test, run_dir=folder
    )
    print(run)
    print(fastbcd.report.write([folder], folder / "report"))
    return run


if __name__ == "__main__":
    _, file, root = sys.argv
    main(
        file,
        fastbcd.load("cifar10", "train", root=root),
        fastbcd.load("cifar10", "test", root=root),
    )
