"""Finetune: the settings of a training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from fastbcd.runtime.settings import Settings, setting

OPTIMIZERS = ("sgd", "adam")
PRECISIONS = ("bf16", "fp16")


@dataclass(frozen=True)
class Finetune(Settings):
    """Settings of the fine-tuning; the defaults are the paper's for ResNet18.

    The learning rate falls from lr to 0 on a cosine over the epochs of each step. By default two
    runs on one GPU are the same where torch has deterministic algorithms.

    >>> Finetune(epochs=5, optimizer="adam", lr=3.5e-5).momentum
    0.9

    Any other optimizer comes from a function of the trained parameters and lr. What it sets as
    learning rate of a group then falls on the same cosine.

    >>> nesterov = lambda parameters, lr: torch.optim.SGD(parameters, lr, 0.9, nesterov=True)
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> settings = Finetune(epochs=1, optimizer=nesterov, padding=0)
    >>> fastbcd.Finetuner(net, data, settings).run(step=0)["epochs"]
    1.0
    """

    epochs: float = setting(
        20,
        "epochs of a step; 0.25 is a quarter of the train set, another one in each step",
        least=0,
    )
    lr: float = setting(1e-3, "learning rate at the start of a step", least=0)
    optimizer: str | Callable[[Any, float], Optimizer] = setting(
        "sgd",
        '"sgd"; "adam", which ignores the momentum; or a function (parameters, lr) -> Optimizer',
        choices=OPTIMIZERS,
    )
    momentum: float = setting(0.9, "momentum of SGD", least=0)
    weight_decay: float = setting(5e-4, "weight decay", least=0)
    clip: float = setting(
        0.0,
        "largest norm of the gradient, to which a longer one is scaled; 0: no limit",
        least=0,
    )
    batch_size: int = setting(128, "images of a batch, over all ranks", least=1)
    temperature: float = setting(4.0, "T of the distillation", above=0)
    distill: float = setting(
        1.0, "weight of the distillation, if there is a teacher", least=0
    )
    mismatch: float = setting(
        0.0,
        "β: adds β/2 · Σ over sites of the mean over the batch of ‖a/‖a‖ - t/‖t‖‖ to the loss, "
        "a the net's activations and t the teacher's, which then runs in every batch",
        least=0,
    )
    padding: int = setting(4, "padding of the random crops", least=0)
    flip: bool = setting(True, "flip images at random")
    augment: Callable[..., Any] | None = setting(
        None, "your own augmentation, see `ImageData.train_batches`"
    )
    compile: bool = setting(False, "torch.compile the forward and backward pass")
    amp: bool | str | None = setting(
        None,
        'True or "bf16": bfloat16 autocast; "fp16": float16, with the loss scaled so that '
        "gradients do not vanish, and without the batches whose gradients overflow; False: none; "
        "None: bfloat16 on CUDA, none on a CPU",
        choices=(None, True, False, *PRECISIONS),
    )
    fast: bool = setting(
        False,
        "let cuDNN choose its fastest algorithms, also ones that give other bits every time",
    )
    sync_batch_norm: bool = setting(
        False,
        "normalise over the batches of all ranks, on GPUs; otherwise over each rank's own part",
    )
    teacher_cache: int | None = setting(
        None,
        "bytes of host memory for the teacher's logits; None: half of what is free",
        least=0,
        recorded=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum >= 1:
            raise ValueError(f"momentum={self.momentum}; it must be below 1")
        if self.mismatch and self.compile:
            raise ValueError(
                f"mismatch={self.mismatch} needs compile=False: it reads activations"
            )
