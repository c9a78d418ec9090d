"""The part of Lightning that the docs use, for machines without it."""

from __future__ import annotations

from typing import Any

from torch import nn

LightningModule = nn.Module


class Trainer:
    def __init__(self, max_epochs: int, enable_progress_bar: bool) -> None:
        self.max_epochs = max_epochs

    def fit(self, module: Any, loader: Any) -> None:
        """Train in train mode with the module's own optimizer and loss."""
        optimizer = module.configure_optimizers()
        module.train()
        for _ in range(self.max_epochs):
            for index, batch in enumerate(loader):
                optimizer.zero_grad()
                module.training_step(batch, index).backward()
                optimizer.step()
