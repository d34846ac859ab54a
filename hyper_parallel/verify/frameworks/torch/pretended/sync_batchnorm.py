"""Computes ``nn.SyncBatchNorm`` on the CPU if the CPU stands in for a device; PyTorch has no CPU kernels for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce
from torch.nn import BatchNorm2d, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

__all__ = ["offer_sync_batchnorm"]


def offer_sync_batchnorm() -> None:
    """Let ``nn.SyncBatchNorm`` compute on the CPU, and ``DistributedDataParallel`` accept it there."""
    normalization: Any = SyncBatchNorm
    data_parallel: Any = DistributedDataParallel
    normalization.forward = _forward
    data_parallel._passing_sync_batchnorm_handle = _nothing  # noqa: SLF001 - PyTorch's function only rejects the CPU


def _nothing(*_: Any) -> None:
    pass


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the normalized input; in training, with mean and variance over the batches of all ranks in the group."""
    layer._check_input_dim(x)  # noqa: SLF001 - as the replaced method does
    layer._check_non_zero_input_channels(x)  # noqa: SLF001 - as above
    trains = layer.training or layer.running_mean is None
    if not trains or not dist.is_initialized() or dist.get_world_size(layer.process_group) == 1:
        plain: Any = BatchNorm2d.forward  # that of all batch norms
        normalized: torch.Tensor = plain(layer, x)
        return normalized
    group = layer.process_group or dist.group.WORLD
    wide = x if x.dtype == torch.float64 else x.float()
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    counted = torch.cat([wide.sum(dims), wide.new_tensor([x.numel() / x.shape[1]])])
    total = all_reduce(counted, group=group)
    count = total[-1].detach()
    mean = total[:-1] / count
    centred = wide - mean.view(shape)
    variance = all_reduce(centred.square().sum(dims), group=group) / count
    _track(layer, mean.detach(), variance.detach() * count / (count - 1))
    out = centred * (variance + layer.eps).rsqrt().view(shape)
    if layer.affine:
        out = out * layer.weight.view(shape) + layer.bias.view(shape)
    return out.to(x.dtype)


def _track(layer: Any, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Update the running mean and variance of a layer, if it has them, with those of a batch."""
    if not layer.training or not layer.track_running_stats:
        return
    with torch.no_grad():
        layer.num_batches_tracked.add_(1)
        share = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
        layer.running_var.lerp_(variance.to(layer.running_var.dtype), share)
