"""The terms of a batch's loss.

    CE(s, labels) + distill · T² · KL(softmax(t/T) ‖ softmax(s/T)) + β/2 · mismatch

s are the net's logits and t the teacher's; CE, or a loss of the user's, and KL are means over the
batch. Where the outputs are maps, they are means over the positions too. β is `Finetune.mismatch`,
and the mismatch that of training/mismatch.py.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fastbcd.scoring.metric import Loss
from fastbcd.training.mismatch import mismatch
from fastbcd.training.settings import Finetune
from fastbcd.training.teacher import Answer


def batch_loss(
    outputs: Any,
    labels: Tensor,
    *,
    answer: Answer | None,
    activations: list[Tensor],
    settings: Finetune,
    criterion: Loss | None = None,
) -> Tensor:
    """The loss of a batch, a tensor []; answer and activations: the teacher's and the net's.

    >>> batch_loss(torch.zeros(2, 3), torch.tensor([0, 1]), answer=None, activations=[],
    ...            settings=Finetune())
    tensor(1.0986)
    """
    loss = (criterion or F.cross_entropy)(outputs, labels).mean()
    if answer is None:
        return loss
    if settings.distill:
        loss = loss + distillation(
            outputs, answer.logits, settings.temperature, settings.distill
        )
    if settings.mismatch:
        loss = loss + settings.mismatch / 2 * mismatch(activations, answer.activations)
    return loss


def distillation(
    outputs: Tensor, logits: Tensor, temperature: float, weight: float
) -> Tensor:
    """weight · T² · KL(softmax(t/T) ‖ softmax(s/T)), the mean over samples and positions.

    >>> logits = torch.tensor([[1.0, 2.0]])
    >>> float(distillation(logits, logits, 4.0, 1.0))
    0.0
    """
    student = F.log_softmax(outputs / temperature, 1)
    target = F.log_softmax(logits / temperature, 1).to(student.dtype)
    divergence = F.kl_div(student, target, reduction="batchmean", log_target=True)
    return weight * temperature**2 / outputs[0, 0].numel() * divergence
