"""Normalizations of MindSpore, composed of kernels that CPU has too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.rules.norm import unbiased
from hyper_parallel.errors import LayoutError, MixedTensorError
from hyper_parallel.platform.mindspore.ops.dims import MATRIX
from hyper_parallel.platform.mindspore.ops.kernels import HALF, single_precision
from hyper_parallel.platform.mindspore.ops.registry import decomposition, expect, kernel, unless_constant

__all__: list[str] = []

# -- kernels -----------------------------------------------------------------------------------------------------------

EPSILON = {
    mindspore.bfloat16: 2.0**-7,
    mindspore.float16: 2.0**-10,
    mindspore.float32: 2.0**-23,
    mindspore.float64: 2.0**-52,
}


@kernel("layer_norm")
def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    # The kernel behind mint's is missing on CPU, the older one knows no float64.
    return _affine(_standard(x, tuple(range(x.ndim - len(normalized_shape), x.ndim)), eps)[0], weight, bias, x.dtype)


@kernel("native_layer_norm")
def _native_layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics are float32 whatever the input is, as MindSpore's are."""
    out, *statistics = _standard(x, tuple(range(x.ndim - len(normalized_shape), x.ndim)), eps)
    mean, scale = (ops.cast(ops.stop_gradient(statistic), mindspore.float32) for statistic in statistics)
    return _affine(out, weight, bias, x.dtype), mean, scale


def _standard(x: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``x`` normalised, its mean and its reciprocal deviation, all of the wide dtype."""
    x = single_precision(x)
    mean = mint.mean(x, dims, True)
    centred = x - mean
    scale = mint.rsqrt(mint.mean(centred * centred, dims, True) + eps)
    return centred * scale, mean, scale


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: Any) -> Tensor:
    """Return ``x * weight + bias`` rounded once, to ``dtype``."""
    x = x if weight is None else x * ops.cast(weight, x.dtype)
    x = x if bias is None else x + ops.cast(bias, x.dtype)
    return ops.cast(x, dtype)


@kernel("rms_norm")
def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    small = EPSILON[x.dtype] if eps is None else eps
    wide = single_precision(x)
    return _affine(wide * mint.rsqrt(mint.mean(wide * wide, dims, True) + small), weight, None, x.dtype)


@kernel("group_norm")
def _group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    groups = x.reshape((x.shape[0], num_groups, -1))
    out = _standard(groups, (-1,), eps)[0].reshape(x.shape)
    per_channel = (-1,) + (1,) * (x.ndim - 2)
    return _affine(
        out,
        None if weight is None else weight.reshape(per_channel),
        None if bias is None else bias.reshape(per_channel),
        x.dtype,
    )


# -- decompositions ----------------------------------------------------------------------------------------------------
# Fused ones have kernels on NPU only. What they compute there is composed here of operators that every device has, so
# that values and placements can be verified; they have never run on a device, and their kernels are not called.


@decomposition("LayerNorm")
def _legacy_layer_norm(ops: Any, primitive: Any, x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    """Return the normalised tensor, the mean and the deviation, as the primitive does."""
    begin = rest[0] if rest else primitive.begin_norm_axis
    eps = rest[2] if len(rest) > MATRIX else getattr(primitive, "epsilon", 1e-7)
    return ops.native_layer_norm(x, tuple(x.shape[begin % len(x.shape) :]), weight, bias, eps)


@decomposition("LayerNormExt")
def _layer_norm_ext(
    ops: Any, _: Any, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Behind ``mint.nn.functional.layer_norm``; with the mean and the deviation."""
    weight, bias = unless_constant(weight, 1), unless_constant(bias, 0)
    if weight is None or bias is None:
        return ops.layer_norm(x, tuple(shape), weight, bias, eps), None, None
    return ops.native_layer_norm(x, tuple(shape), weight, bias, eps)


@decomposition("GroupNorm")
def _group_norm_ext(
    ops: Any, _: Any, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """The mean and the deviation, which no caller in MindSpore uses, are not computed."""
    return ops.group_norm(x, groups, unless_constant(weight, 1), unless_constant(bias, 0), eps), None, None


@decomposition("RmsNorm")
def _rms_norm_and_scale(ops: Any, _: Any, x: Any, gamma: Any, eps: float = 1e-6) -> Any:
    """With the reciprocal root of the mean square, as MindSpore returns it."""
    return _by_mean_square(ops, x, gamma, eps)


@decomposition("AddRmsNorm")
def _add_rms_norm(ops: Any, _: Any, x: Any, y: Any, gamma: Any, eps: float = 1e-6) -> Any:
    """With the reciprocal root of the mean square, and the sum."""
    total = ops.add(x, y)
    return *_by_mean_square(ops, total, gamma, eps), total


def _by_mean_square(ops: Any, x: Any, gamma: Any, eps: float) -> tuple[Any, Any]:
    """Return ``x`` normalised, and the reciprocal root of its mean square; squares of half precision are float32."""
    half = x.dtype in HALF
    wide = ops.cast(x, dtype=mindspore.float32) if half else x
    scale = ops.rsqrt(ops.add(ops.mean(ops.square(wide), tuple(range(-len(gamma.shape), 0)), True), eps))
    out = ops.mul(ops.mul(wide, scale), gamma)
    return ops.cast(out, dtype=x.dtype) if half else out, scale


@decomposition("AddLayerNormV2")
def _add_layer_norm(
    ops: Any, _: Any, x: Any, y: Any, gamma: Any, beta: Any, eps: float = 1e-5, additional_out: bool = False
) -> Any:
    """With mean, reciprocal deviation, and the sum."""
    del additional_out  # the sum is returned whether it is asked for or not
    total = ops.add(x, y)
    out, mean, scale = ops.native_layer_norm(total, tuple(gamma.shape), gamma, beta, eps)
    return out, mean, scale, total


# -- batch normalization: by fixed statistics, or in training by those of the whole batch, over all ranks --------------


@decomposition("BatchNorm")
def _legacy_batch_norm(
    ops: Any, _: Any, x: Any, scale: Any, bias: Any, mean: Any, variance: Any, training: bool = False,
    eps: float = 1e-5, momentum: float = 0.1, layout: Any = 0,
) -> Any:  # fmt: skip
    """With what the kernel keeps for its derivative, which nothing here needs."""
    expect("BatchNorm", "data_format", layout, 0)
    return _batch_norm(ops, x, (scale, bias), (mean, variance), training, momentum, eps), None, None, None, None


@decomposition("BatchNormExt")
def _batch_norm_ext(
    ops: Any, _: Any, x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    """The same for ``mint``, which keeps less."""
    return _batch_norm(ops, x, (weight, bias), (running_mean, running_var), training, momentum, eps), None, None


def _batch_norm(
    ops: Any, x: Any, affine: tuple[Any, Any], running: tuple[Any, Any], training: bool, momentum: float, eps: float
) -> Any:
    if not training:
        return _by_fixed_statistics(ops, x, affine, running, eps)
    for name, statistic in zip(("the running mean", "the running variance"), running, strict=True):
        if statistic is not None and not isinstance(statistic, DTensor):
            msg = (
                f"batch_norm: {name} is a plain tensor {list(statistic.shape)} and the input a DTensor; distribute the "
                "module's parameters too: hyper_parallel.distribute_module(module, mesh)"
            )
            raise MixedTensorError(msg)
    dims = [dim for dim in range(x.ndim) if dim != 1]
    if x.ndim < 2 or x.numel() == x.shape[1]:
        msg = f"batch_norm: training needs more than one value per channel, got {list(x.shape)}"
        raise LayoutError(msg)
    out, mean, var = ops.statistics_norm(x, dims, *affine, eps)
    for statistic, batch, factor in zip(running, (mean, var), (1.0, unbiased(x.shape, dims)), strict=True):
        if statistic is not None:
            share = ops.mul(ops.mean(ops.detach(batch), dims, False), factor * momentum)
            statistic.set_data(ops.add(ops.mul(ops.detach(statistic), 1.0 - momentum), share))
    return out


def _by_fixed_statistics(ops: Any, x: Any, affine: tuple[Any, Any], running: tuple[Any, Any], eps: float) -> Any:
    shape = (-1, *(1,) * (len(x.shape) - 2))
    # Statistics get no gradient.
    mean, variance = (ops.view(ops.detach(statistic), shape) for statistic in running)
    out = ops.mul(ops.sub(x, mean), ops.rsqrt(ops.add(variance, eps)))
    scale, bias = (None if factor is None else ops.view(factor, shape) for factor in affine)
    out = out if scale is None else ops.mul(out, scale)
    return out if bias is None else ops.add(out, bias)
