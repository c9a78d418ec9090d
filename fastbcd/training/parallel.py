"""Training on several ranks: averaged gradients, and batch norm over all of them."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from fastbcd.runtime import ranks


def averaged(model: nn.Module, unused: bool) -> nn.Module:
    """The model, with gradients averaged over the ranks; unused: it may not use all parameters."""
    if ranks.world() == 1:
        return model
    with warnings.catch_warnings():  # its new name does something else
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
        return DistributedDataParallel(
            model, broadcast_buffers=False, find_unused_parameters=unused
        )


def synchronised(model: nn.Module, net: nn.Module, device: torch.device) -> nn.Module:
    """The model, a rewritten copy of the net, with batch norm over the batches of all ranks."""
    if ranks.world() == 1:
        return model
    if device.type == "cpu" or model is net:
        raise ValueError(
            "sync_batch_norm=True; torch has it for GPUs only, and fastbcd for nets that it can "
            "trace: pass a net with nn.SyncBatchNorm, or sync_batch_norm=False"
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def smallest_batch(net: nn.Module) -> int:
    """The smallest batch: batch norm in train mode needs two samples on each rank."""
    norms = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    if any(norm.training or not net.training for norm in norms):
        return 2 * ranks.world()
    return 1


def agree_on_statistics(net: nn.Module) -> None:
    """Average the statistics of batch norm: each rank saw its own images. Frozen ones stay."""
    trained = (module for module in net.modules() if module.training)
    ranks.agree(
        buffer for module in trained for buffer in module.buffers(recurse=False)
    )
