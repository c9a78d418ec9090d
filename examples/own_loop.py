"""Your own training loop around each step of the search.

python examples/own_loop.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fastbcd


def small_net() -> nn.Module:
    """Two convolutions for images of 1×28×28: 7,840 ReLUs."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 14 * 14, 10),
    )


def train_one_epoch(net: nn.Module, loader: DataLoader) -> None:
    """Any optimizer, schedule, loss and logging."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net.train()
    for images, labels in loader:
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(images: int = 2_000, budget: int = 1_000) -> nn.Module:
    """Train, then remove 15 % of the ReLUs in each step and train again."""
    data = fastbcd.load("fashion-mnist-mini", "train").first(images)
    pixels = torch.cat([batch for batch, _ in data.batches(256)])
    loader = DataLoader(TensorDataset(pixels, data.labels), 64, shuffle=True)
    net = fastbcd.convert(small_net(), pixels[:2])
    train_one_epoch(net, loader)
    for step in fastbcd.steps(
        net, data, budget, drc=fastbcd.Fraction(0.15), rt=5, run_dir="runs/own-loop"
    ):
        train_one_epoch(net, loader)
        print(step)
    return net


if __name__ == "__main__":
    main()
