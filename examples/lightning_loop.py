"""A Trainer of Lightning fits the network in each step.

pip install lightning && python examples/lightning_loop.py
"""

from __future__ import annotations

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fastbcd


class Classifier(lightning.LightningModule):
    """An ordinary LightningModule around the converted network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW for all weights."""
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3)


def main(images: int = 2_000, budget: int = 10_000) -> nn.Module:
    """Halve the ReLUs again and again, with one epoch after each step."""
    data = fastbcd.load("fashion-mnist-mini", "train").first(images)
    pixels = torch.cat([batch for batch, _ in data.batches(256)])
    loader = DataLoader(TensorDataset(pixels, data.labels), 64, shuffle=True)
    net = fastbcd.models.resnet20(10, image_size=28, in_channels=1, width=8, blocks=1)
    for step in fastbcd.steps(net, data, budget, drc=fastbcd.Fraction(0.5), rt=3):
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(Classifier(net), loader)
        print(step)
    return net


if __name__ == "__main__":
    main()
