"""What can be trained: each check refuses settings, data, a net or a teacher, and says why."""

from __future__ import annotations

from torch import Tensor, nn

from fastbcd.data.arrays import are_indices
from fastbcd.data.images import ImageData
from fastbcd.masking.masks import masks
from fastbcd.runtime import ranks
from fastbcd.runtime.validate import check_whole
from fastbcd.scoring.accuracy import check_classes, first_outputs
from fastbcd.scoring.metric import Criterion, Loss, are_logits, describe
from fastbcd.training.settings import Finetune
from fastbcd.training.teacher import with_sites


def check_settings(settings: Finetune, data: ImageData, seed: int = 0) -> None:
    """Refuse settings that do not fit the data, or the number of ranks."""
    if not isinstance(settings, Finetune):
        raise TypeError(
            f"settings are {type(settings).__name__}; expected fastbcd.Finetune"
        )
    check_whole("seed", seed, 0, most=2**63 - 1)
    data.check_views(settings.padding, settings.flip)
    smallest = min(len(data), settings.batch_size)
    if smallest < ranks.world():
        raise ValueError(
            f"batch_size={settings.batch_size}, {len(data)} images: each of {ranks.world()} ranks "
            f"needs one of a batch"
        )


def check_trainable(
    net: nn.Module,
    data: ImageData,
    settings: Finetune,
    teacher: nn.Module | None = None,
    loss: Loss | None = None,
) -> None:
    """Refuse a net or a teacher that cannot be trained with."""
    check_loss(net, data, loss)
    if not any(p.requires_grad for p in net.parameters()):
        raise ValueError("the net has no parameter to train; net.requires_grad_()")
    if teacher is not None:
        check_separate(net, teacher)
        check_same_classes(net, data, teacher)
        if settings.mismatch:
            check_same_sites(net, data, teacher)


def check_loss(net: nn.Module, data: ImageData, loss: Loss | None) -> None:
    """Refuse a net whose outputs do not fit the loss, or the labels if that is cross-entropy."""
    if loss is None and are_indices(data.labels):
        check_classes(net, data, "the net")
        return
    outputs = first_outputs(net, data, "the net", 2)
    criterion = Criterion(loss=loss)
    criterion.check_targets(outputs, data.labels, "the net")
    criterion.losses(outputs, next(data.batches(2))[1])


def check_separate(net: nn.Module, teacher: nn.Module) -> None:
    """Refuse a teacher that training the net would change."""
    trained = set(net.parameters())
    shared = [
        name for name, parameter in teacher.named_parameters() if parameter in trained
    ]
    if shared or teacher is net:
        raise ValueError(
            f"the teacher shares {shared[:1]} with the net; it must stay fixed: copy.deepcopy(net)"
        )


def check_same_classes(net: nn.Module, data: ImageData, teacher: nn.Module) -> None:
    """Refuse a teacher whose outputs are not logits of the net's classes."""
    mine = first_outputs(net, data, "the net", 1)
    theirs = first_outputs(teacher, data, "the teacher", 1)
    if not (are_logits(mine, data.labels) and isinstance(theirs, Tensor)):
        raise ValueError(
            f"the teacher {type(teacher).__name__} cannot be distilled from: that needs logits "
            f"[B, classes, ...] and class indices [B, ...], but the net returns {describe(mine)} "
            f"beside targets {describe(data.labels)}, the teacher {describe(theirs)}; use "
            f"teacher=None"
        )
    if mine.shape[1:] != theirs.shape[1:]:
        raise ValueError(
            f"the teacher returns {describe(theirs)} and the net {describe(mine)}; give one with "
            f"the same classes"
        )


def check_same_sites(net: nn.Module, data: ImageData, teacher: nn.Module) -> None:
    """Refuse a teacher whose activations cannot be compared with the net's."""
    masks(net).check_same_sites(masks(with_sites(teacher, data)).sites, "the teacher")
