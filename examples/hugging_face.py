"""A ResNet of transformers: its output keeps `.logits`, and `labels=` gives a loss.

    pip install transformers && python examples/hugging_face.py

For your own model: ResNetForImageClassification.from_pretrained("microsoft/resnet-18").
"""

from __future__ import annotations

import torch
from transformers import ResNetConfig, ResNetForImageClassification

import fastbcd


def small_resnet() -> ResNetForImageClassification:
    """A narrow ResNet with random weights for images of 1×28×28."""
    config = ResNetConfig(
        num_channels=1,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=10,
    )
    return ResNetForImageClassification(config)


def main(images: int = 2_000, budget: int = 500, epochs: int = 4) -> fastbcd.Run:
    """Train, remove ReLUs, and call the result as transformers does."""
    train = fastbcd.load("fashion-mnist-mini", "train").first(images)
    test = fastbcd.load("fashion-mnist-mini", "test").first(images)
    example = torch.zeros(1, 1, 28, 28)
    net = fastbcd.convert(small_resnet(), example, maxpool="average")
    fastbcd.train(net, train, epochs=epochs, batch_size=64)
    run = fastbcd.linearize(net, train, budget, epochs=epochs, test=test, lr=0.01)
    output = run.model(pixel_values=example, labels=torch.tensor([3]))
    print(run, output.logits.shape, f"loss {output.loss:.3f}", sep="\n")
    return run


if __name__ == "__main__":
    main()
