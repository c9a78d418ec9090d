"""What torch's SyncBatchNorm computes on GPUs, in plain torch: it then runs on CPUs, over gloo."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastbcd.graph import fuse


def _channels(t: Tensor, x: Tensor) -> Tensor:
    return t.view(1, -1, *(1,) * (x.ndim - 2))


def _sum(t: Tensor) -> Tensor:
    return t.sum([d for d in range(t.ndim) if d != 1])


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    n = x.numel() / x.shape[1]
    mean = _sum(x) / n
    return mean, (_sum((x - _channels(mean, x)) ** 2) / n + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    x: Tensor, means: Tensor, invstds: Tensor, running_mean: Any, running_var: Any, momentum: float,
    eps: float, counts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    share, n = (counts / counts.sum())[:, None], counts.sum()
    mean = (share * means).sum(0)
    var = (share * (invstds**-2 - eps + (means - mean) ** 2)).sum(0)
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(var * n / (n - 1), momentum)
    return mean, (var + eps).rsqrt()


def batch_norm_elemt(x: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, eps: float):
    scale = invstd * weight
    return x * _channels(scale, x) + _channels(bias - mean * scale, x)


def batch_norm_backward_reduce(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, *_: Any):
    sum_dy, sum_dy_xmu = _sum(dy), _sum(dy * (x - _channels(mean, x)))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy


def batch_norm_backward_elemt(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, sum_dy: Tensor,
    sum_dy_xmu: Tensor, counts: Tensor,
) -> Tensor:  # fmt: skip
    n = counts.sum()
    along = _channels(invstd**2 * sum_dy_xmu / n, x) * (x - _channels(mean, x))
    return (dy - _channels(sum_dy / n, x) - along) * _channels(invstd * weight, x)


def on_cpus() -> None:
    """In this process from now on; nets are fused as for a GPU, where batch norm is torch's."""
    for function in (
        batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt,
        batch_norm_backward_reduce, batch_norm_backward_elemt,
    ):  # fmt: skip
        setattr(torch, function.__name__, function)
    plain = nn.SyncBatchNorm.forward

    def forward(self: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        # The name of a device that it accepts.
        with mock.patch.object(torch._C, "_get_privateuse1_backend_name", return_value="cpu"):
            return plain(self, x)

    nn.SyncBatchNorm.forward = forward
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None  # a check of devices
    fuse.faster_as_one = lambda *_: False
