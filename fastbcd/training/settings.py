"""Finetune: the settings of a training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fastbcd.runtime.validate import check_choice, check_number, check_whole

OPTIMIZERS = ("sgd", "adam")


@dataclass(frozen=True)
class Finetune:
    """Settings of the fine-tuning; the defaults are the paper's for ResNet18.

    Args:
        epochs, lr: of one step; the learning rate falls from lr to 0 along a cosine.
        optimizer: "sgd", or "adam", which ignores momentum.
        momentum, weight_decay: of the optimizer.
        batch_size: images per batch, over all ranks.
        temperature, distill: T and the weight of the distillation, if there is a teacher.
        padding, flip: random crops of images with so many zeros around them, random flips.
        compile: torch.compile the forward and backward pass.
        amp: bfloat16 autocast; None: on CUDA only.
        teacher_cache: bytes for the teacher's logits; None: half the free memory.

    >>> Finetune(epochs=5, optimizer="adam", lr=3.5e-5).momentum
    0.9
    """

    epochs: int = 20
    lr: float = 1e-3
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 128
    temperature: float = 4.0
    distill: float = 1.0
    padding: int = 4
    flip: bool = True
    compile: bool = False
    amp: bool | None = None
    teacher_cache: int | None = None

    def describe(self) -> dict[str, Any]:
        """What config.json records: the settings that can change the outcome."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "teacher_cache"}

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        for name, least in (("epochs", 0), ("batch_size", 1), ("padding", 0), ("teacher_cache", 0)):
            check_whole(name, getattr(self, name), least, optional=name == "teacher_cache")
        for name in ("lr", "momentum", "weight_decay", "temperature", "distill"):
            check_number(name, getattr(self, name), 0)
        if self.momentum >= 1:
            raise ValueError(f"momentum={self.momentum}; it must be below 1")
        if self.temperature == 0:
            raise ValueError("temperature=0; it must be positive, the paper's is 4")
        for name in ("flip", "compile", "amp"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "amp" and value is None):
                raise TypeError(f"{name}={value!r}; it must be True or False")
