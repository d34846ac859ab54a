"""PyTorch's spellings of normalisations; batch and instance norm compute statistics, then normalise by them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.rules.norm import unbiased
from hyper_parallel.errors import LayoutError, MixedTensorError
from hyper_parallel.platform.torch.ops.registry import aten, decomposition, kernel, spelling

spelling("layer_norm", F.layer_norm)
spelling(
    "layer_norm",
    torch.layer_norm,
    signature="x, normalized_shape, weight=None, bias=None, eps=1e-05, cudnn_enable=True",
)
spelling("native_layer_norm", aten.native_layer_norm.default)
spelling("rms_norm", F.rms_norm, torch.rms_norm)
spelling("group_norm", F.group_norm, canonical=True)  # F.group_norm refuses a shard of one value

kernel("native_layer_norm")(torch.native_layer_norm)


@kernel("layer_norm")
def _layer_norm(
    x: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-05,
    cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    del cudnn_enable
    return F.layer_norm(x, normalized_shape, weight, bias, eps)


@kernel("rms_norm")
def _rms_norm(x: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
    return F.rms_norm(x, normalized_shape, weight, eps)


@kernel("group_norm")
def _group_norm(x: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-05) -> Tensor:
    return torch.group_norm(x, num_groups, weight, bias, eps)


@kernel("channel_norm")
def _channel_norm(
    x: Tensor, mean: Tensor, var: Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-05
) -> Tensor:
    return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)


_STATISTICS = "x, weight, bias, running_mean, running_var"


@decomposition(torch.batch_norm, signature=f"{_STATISTICS}, training, momentum, eps, cudnn_enabled")
def _batch_norm(
    ops: Any, x: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any, training: bool, momentum: float,
    eps: float, **_: Any,
) -> Any:  # fmt: skip
    if not training:
        return ops.channel_norm(x, running_mean, running_var, weight, bias, eps)
    dims = [dim for dim in range(x.ndim) if dim != 1]
    if x.ndim < 2:
        msg = f"batch_norm: x needs samples and channels, got {list(x.shape)}"
        raise LayoutError(msg)
    if x.numel() == x.shape[1]:
        msg = f"Expected more than 1 value per channel when training, got input size {x.shape}"
        raise ValueError(msg)
    return _normalise(ops, x, dims, (running_mean, running_var), (weight, bias), momentum, eps)


@decomposition(torch.instance_norm, signature=f"{_STATISTICS}, use_input_stats, momentum, eps, cudnn_enabled")
def _instance_norm(
    ops: Any, x: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any, use_input_stats: bool,
    momentum: float, eps: float, **_: Any,
) -> Any:  # fmt: skip
    if not use_input_stats:
        return ops.channel_norm(x, running_mean, running_var, weight, bias, eps)
    if x.ndim < 3 or x.numel() == x.shape[0] * x.shape[1]:
        msg = f"Expected more than 1 spatial element when training, got input size {x.shape}"
        raise ValueError(msg)
    return _normalise(ops, x, [*range(2, x.ndim)], (running_mean, running_var), (weight, bias), momentum, eps)


def _normalise(
    ops: Any, x: Any, dims: list[int], running: tuple[Any, Any], affine: tuple[Any, Any], momentum: float, eps: float
) -> Any:
    """Normalise by the statistics of ``x`` over ``dims``, and move the running statistics towards them."""
    for name, statistic in zip(("running_mean", "running_var"), running, strict=True):
        if statistic is not None and not isinstance(statistic, DTensor):
            msg = (
                f"batch_norm: {name} is a plain tensor {list(statistic.shape)} and the input a DTensor; make it one "
                f"too: module.{name} = hyper_parallel.distribute_tensor(module.{name}, mesh, [Replicate()])"
            )
            raise MixedTensorError(msg)
    out, mean, var = ops.statistics_norm(x, dims, *affine, eps)
    with torch.no_grad():
        for statistic, current, scale in zip(running, (mean, var), (1.0, unbiased(x.shape, dims)), strict=True):
            if statistic is not None:
                per_channel = current.detach().mean([dim for dim in range(x.ndim) if dim != 1]) * scale
                statistic.copy_(statistic * (1.0 - momentum) + per_channel * momentum)
    return out


# -- weights given by direction and length -----------------------------------------------------------------------------


@decomposition("_weight_norm", signature="v, g, dim=0")
def _weight_norm(_ops: Any, v: Any, g: Any, dim: int) -> Any:
    """``v`` with the norms ``g`` along ``dim`` (-1: of all elements), as ``weight_norm`` computes weights."""
    rest = None if dim == -1 else [other for other in range(v.ndim) if other != dim % v.ndim]
    return v * (g / torch.linalg.vector_norm(v, 2, rest, keepdim=rest is not None))
