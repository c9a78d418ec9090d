"""MobileNetV2 has ReLU6, which cannot be masked: they become ReLUs, and the net is trained.

    python examples/mobilenet.py

EfficientNet and others with SiLU, GELU or Hardswish take smooth="relu" in the same way.
"""

from __future__ import annotations

import torch
import torchvision

import fastbcd


def main(images: int = 1_000, budget: int = 5_000, epochs: int = 4) -> fastbcd.Run:
    """Exchange, train, remove. With your own weights use a small lr in `train`."""
    train = fastbcd.load("fashion-mnist-mini", "train").first(images)
    model = torchvision.models.mobilenet_v2(num_classes=10, width_mult=0.25)
    model.features[0][0] = torch.nn.Conv2d(1, 8, 3, padding=1, bias=False)
    net = fastbcd.convert(model, torch.zeros(2, 1, 28, 28), relu6="relu")
    print(net.conversion_report)
    fastbcd.train(net, train, epochs=epochs, batch_size=64, lr=0.05)
    run = fastbcd.linearize(net, train, budget, epochs=epochs)
    print(run)
    return run


if __name__ == "__main__":
    main()
