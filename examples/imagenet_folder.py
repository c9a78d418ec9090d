"""Images of a folder, as ImageNet has them: packed once, then mapped, in constant memory.

    python examples/imagenet_folder.py imagenet/train imagenet/val

The folders have one folder per class. 1.28 million images of 3×224×224 take 193 GB on disk.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torchvision
from torch import nn
from torchvision.transforms import v2

import fastbcd

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def packed(folder: str, size: int) -> fastbcd.ImageData:
    """The images of a folder as bytes in one mapped file beside it."""
    path = Path(f"{folder}-packed-{size}")
    if not path.exists():
        steps = [v2.PILToTensor(), v2.Resize(size), v2.CenterCrop(size)]
        images = torchvision.datasets.ImageFolder(folder, v2.Compose(steps))
        fastbcd.pack(images, path, mean=MEAN, std=STD)
    return fastbcd.ImageData.open(path)


def main(
    train_folder: str,
    test_folder: str,
    model: nn.Module | None = None,
    budget: int = 500_000,
    epochs: int = 10,
    size: int = 224,
) -> fastbcd.Run:
    """Remove the ReLUs of a ResNet18 with the weights of torchvision."""
    model = model or torchvision.models.resnet18(weights="DEFAULT")
    train = packed(train_folder, size)
    test = packed(test_folder, size)
    run = fastbcd.linearize(
        model, train, budget, epochs=epochs, test=test, samples=min(10_000, len(train))
    )
    print(run)
    return run


if __name__ == "__main__":
    main(*sys.argv[1:])
