"""Finetune: the settings of a training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fastbcd.runtime.validate import check_choice, check_number, check_whole

OPTIMIZERS = ("sgd", "adam", "muon")


@dataclass(frozen=True)
class Finetune:
    """Settings of the fine-tuning; the defaults are the paper's for ResNet18.

    Args:
        epochs, lr: the learning rate falls from lr to 0 on a cosine over the epochs of each step.
            epochs may be a fraction: 0.25 is a quarter of the train set, another one in each step.
        optimizer: "sgd"; "adam", which ignores `momentum`; or "muon", orthogonal steps relative to
            each weight's norm, whose lr (about 0.02) does not depend on the scale of the loss. It
            ignores `weight_decay`.
        momentum, weight_decay: of the optimizer.
        clip: the largest norm of the gradient of all weights; a longer gradient is scaled down to
            it. 0: no limit.
        batch_size: images of a batch, over all ranks.
        temperature, distill: T and the weight of the distillation, if there is a teacher.
        mismatch: β, adds β/2 · Σ over sites of the mean over the batch of ‖a/‖a‖ - t/‖t‖‖ to the
            loss, a the net's activations and t the teacher's. The teacher then runs in every batch.
        padding, flip: of random crops, and whether images are flipped at random.
        compile: torch.compile the forward and backward pass.
        amp: None: bfloat16 autocast on CUDA, none on a CPU. True or "bf16": bfloat16. "fp16":
            float16, with the loss scaled so that gradients do not vanish; batches whose gradients
            overflow are left out. False: none.
        fast: let cuDNN choose its fastest algorithms, also ones that give other bits every time.
            By default two runs on one GPU are the same where torch has deterministic algorithms.
        sync_batch_norm: normalise over the batches of all ranks, on GPUs. By default each rank
            normalises over its own part; running statistics are the mean over ranks either way.
        teacher_cache: bytes of host memory for the teacher's logits; None: half of what is free.

    >>> Finetune(epochs=5, optimizer="adam", lr=3.5e-5).momentum
    0.9
    """

    epochs: float = 20
    lr: float = 1e-3
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    clip: float = 0.0
    batch_size: int = 128
    temperature: float = 4.0
    distill: float = 1.0
    mismatch: float = 0.0
    padding: int = 4
    flip: bool = True
    compile: bool = False
    amp: bool | str | None = None
    fast: bool = False
    sync_batch_norm: bool = False
    teacher_cache: int | None = None

    def describe(self) -> dict[str, Any]:
        """What config.json records: the settings that can change the outcome."""
        # Runs begun before these existed lack them.
        later = {"fast": False, "sync_batch_norm": False, "mismatch": 0.0, "clip": 0.0}
        return {
            name: value for name, value in dataclasses.asdict(self).items()
            if name != "teacher_cache" and (name not in later or value != later[name])
        }  # fmt: skip

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        for name, least in (("batch_size", 1), ("padding", 0), ("teacher_cache", 0)):
            check_whole(name, getattr(self, name), least, optional=name == "teacher_cache")
        numbers = ("epochs", "lr", "momentum", "weight_decay", "clip", "temperature", "distill")
        for name in (*numbers, "mismatch"):
            check_number(name, getattr(self, name), 0)
        if self.momentum >= 1:
            raise ValueError(f"momentum={self.momentum}; it must be below 1")
        if self.temperature == 0:
            raise ValueError("temperature=0; it must be positive, the paper's is 4")
        if self.mismatch and self.compile:
            raise ValueError(f"mismatch={self.mismatch} needs compile=False: it reads activations")
        if self.amp not in ("bf16", "fp16") and not isinstance(self.amp, bool | None):  # 0 == False
            raise ValueError(f"amp={self.amp!r}; choose from None, True, False, bf16, fp16")
        for name in ("flip", "compile", "fast", "sync_batch_norm"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name}={value!r}; it must be True or False")
