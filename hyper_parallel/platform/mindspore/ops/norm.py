"""Normalizations of MindSpore.

Layer norm of float32 on CPU calls MindSpore's kernel; all others are composed of operators that every device has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops
from mindspore.ops.auto_generate import LayerNormGrad

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.entry import OpEntry, binder
from hyper_parallel.core.shard.rule import Rule, find_rule
from hyper_parallel.core.shard.rules.norm import unbiased
from hyper_parallel.errors import LayoutError, MixedTensorError
from hyper_parallel.platform.mindspore.ops.dims import MATRIX
from hyper_parallel.platform.mindspore.ops.empty_shards import empty_safe
from hyper_parallel.platform.mindspore.ops.kernels import HALF, requires_grad, single_precision
from hyper_parallel.platform.mindspore.ops.registry import (
    computes_on_cpu,
    decomposition,
    expect,
    kernel,
    unless_constant,
)
from hyper_parallel.platform.mindspore.versions import Function, pynative_executor

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
    begin = x.ndim - len(normalized_shape)
    if _has_native(x, weight, bias, normalized_shape):
        return _native(x, weight, bias, begin, eps)[0]
    return _affine(_standard(x, tuple(range(begin, x.ndim)), eps)[0], weight, bias, x.dtype)


@kernel("native_layer_norm")
def _native_layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised tensor, its mean and its reciprocal deviation, both in float32, as in MindSpore."""
    begin = x.ndim - len(normalized_shape)
    if _has_native(x, weight, bias, normalized_shape):
        out, mean, variance = _native(x, weight, bias, begin, eps)
        return out, mean, mint.rsqrt(variance + eps)
    out, *statistics = _standard(x, tuple(range(begin, x.ndim)), eps)
    mean, scale = (ops.cast(ops.stop_gradient(statistic), mindspore.float32) for statistic in statistics)
    return _affine(out, weight, bias, x.dtype), mean, scale


def _with_variance(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of :func:`_native_layer_norm`, with the variance instead of the reciprocal deviation."""
    begin = x.ndim - len(normalized_shape)
    if _has_native(x, weight, bias, normalized_shape):
        return _native(x, weight, bias, begin, eps)
    out, mean, _ = _native_layer_norm(x, normalized_shape, weight, bias, eps)
    wide = ops.stop_gradient(single_precision(x))
    dims = tuple(range(begin, x.ndim))
    centred = wide - mint.mean(wide, dims, True)
    return out, mean, ops.cast(mint.mean(centred * centred, dims, True), mindspore.float32)


def _has_native(x: Tensor, weight: Tensor | None, bias: Tensor | None, normalized_shape: Sequence[int]) -> bool:
    """Return whether MindSpore's layer norm kernel is correct for these operands.

    On CPU it computes float64 in float32 and means of float16 in float16, and does not support bfloat16. The NPU
    kernel, which returns other statistics, has never been run.
    """
    for operand in (x, weight, bias):
        # Comparing MindSpore's dtypes takes ten times as long as finding the same object.
        if operand is not None and operand.dtype is not SINGLE and operand.dtype != SINGLE:
            return False
    return bool(normalized_shape) and _on_cpu()


SINGLE = mindspore.float32


@cache
def _on_cpu() -> bool:
    """Cache ``computes_on_cpu()``: the device of a process does not change after its first operator."""
    return computes_on_cpu()


def _native(x: Tensor, weight: Tensor | None, bias: Tensor | None, begin: int, eps: float) -> Any:
    """Return the normalised tensor, its mean and its variance."""
    if pynative_executor.requires_grad() and any(
        operand is not None and requires_grad(operand) for operand in (x, weight, bias)
    ):
        return _NativeLayerNorm.apply(x, weight, bias, begin, eps)
    return _run(_FORWARD, x, *_or_constant(x, weight, bias, begin), begin, begin, eps)


def _or_constant(x: Tensor, weight: Tensor | None, bias: Tensor | None, begin: int) -> tuple[Tensor, Tensor]:
    """Return ones and zeros in place of a weight and a bias that are None."""
    return (
        mint.ones(tuple(x.shape[begin:]), dtype=x.dtype) if weight is None else weight,
        mint.zeros(tuple(x.shape[begin:]), dtype=x.dtype) if bias is None else bias,
    )


def _run(primitive: Any, *args: Any) -> Any:
    """Call a primitive with the attributes that its constructor and MindSpore's Python layer would add."""
    return pynative_executor.run_op_async(primitive, primitive.name, args)


_FORWARD, _BACKWARD = ops.LayerNorm(), LayerNormGrad()


class _NativeLayerNorm(Function):
    """Calls MindSpore's layer norm kernels for forward and backward.

    The backward kernel has no gradient itself, so a backward that is differentiated again uses composed operators.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, begin: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalised tensor, and its mean and variance, which are not differentiable."""
        gamma, beta = _or_constant(x, weight, bias, begin)
        out, mean, variance = _run(_FORWARD, x, gamma, beta, begin, begin, eps)
        ctx.save_for_backward(x, gamma, mean, variance)
        ctx.begin, ctx.eps, ctx.absent = begin, eps, (weight is None, bias is None)
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return out, mean, variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        x, gamma, mean, variance = ctx.saved_tensors
        if pynative_executor.requires_grad() or ctx.eps < BACKWARD_EPSILON:  # differentiated again, or inexact
            grads = _composed_gradients(x, gamma, grad, ctx.begin, ctx.eps)
        else:
            if ctx.eps > BACKWARD_EPSILON:
                variance = variance + (ctx.eps - BACKWARD_EPSILON)
            grads = _run(_BACKWARD, x, grad, variance, mean, gamma, ctx.begin, ctx.begin)
        dx, dweight, dbias = grads
        without_weight, without_bias = ctx.absent
        return dx, None if without_weight else dweight, None if without_bias else dbias, None, None


BACKWARD_EPSILON = 1e-7
"""Epsilon that the gradient kernel adds to the variance; Python cannot set it.

A larger epsilon is compensated by a larger variance. For a smaller one, about 1e-7 would be subtracted, which would
cancel all digits of a small variance.
"""


def _composed_gradients(
    x: Tensor, gamma: Tensor, grad: Tensor, begin: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias by differentiable operators; none of them is a view."""
    dims, rows = tuple(range(begin, x.ndim)), tuple(range(begin))
    normal, _, scale = _standard(x, dims, eps)
    wide = grad * gamma
    dx = scale * (wide - mint.mean(wide, dims, True) - normal * mint.mean(wide * normal, dims, True))
    by_weight = grad * normal
    return dx, mint.sum(by_weight, rows) if rows else by_weight, mint.sum(grad, rows) if rows else grad * 1


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
# Fused operators have kernels on NPU only. Here they are composed of operators that every device has, so that values
# and placements can be verified. The fused kernels are not called, and none of this has run on an NPU.


@decomposition("LayerNorm", with_dispatcher=True)
def _legacy_layer_norm(dispatcher: Any, primitive: Any, x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    """Return the normalised tensor, the mean and, as the primitive does, the variance (on NPU: 1 / the deviation)."""
    begin = rest[0] if rest else primitive.begin_norm_axis
    eps = rest[2] if len(rest) > MATRIX else getattr(primitive, "epsilon", 1e-7)
    shape = x.shape
    args = (x, shape[begin % len(shape) :], weight, bias, eps)
    return dispatcher.dispatch(_variance_entry(), args, {}) if _on_cpu() else dispatcher.ops.native_layer_norm(*args)


@cache
def _variance_entry() -> OpEntry:
    """The entry of :func:`_with_variance`, whose results have the layouts of ``native_layer_norm``."""
    rule = find_rule("native_layer_norm")
    assert isinstance(rule, Rule)
    local = empty_safe("LayerNorm", _with_variance)
    return OpEntry("LayerNorm", local, binder(rule.signature), rule, local)


@decomposition("LayerNormExt")
def _layer_norm_ext(
    ops: Any, _: Any, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Return the normalised tensor; None for the mean and the deviation, which no caller in MindSpore uses."""
    return ops.layer_norm(x, tuple(shape), unless_constant(weight, 1), unless_constant(bias, 0), eps), None, None


@decomposition("GroupNorm")
def _group_norm_ext(
    ops: Any, _: Any, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Return the normalised tensor; None for the mean and the deviation, which no caller in MindSpore uses."""
    return ops.group_norm(x, groups, unless_constant(weight, 1), unless_constant(bias, 0), eps), None, None


@decomposition("RmsNorm")
def _rms_norm_and_scale(ops: Any, _: Any, x: Any, gamma: Any, eps: float = 1e-6) -> Any:
    """Return the normalised tensor and the reciprocal root of its mean square, as MindSpore does."""
    return _by_mean_square(ops, x, gamma, eps)


@decomposition("AddRmsNorm")
def _add_rms_norm(ops: Any, _: Any, x: Any, y: Any, gamma: Any, eps: float = 1e-6) -> Any:
    """Return the normalised sum, the reciprocal root of its mean square, and the sum."""
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
    """Return the normalised sum, its mean and reciprocal deviation, and the sum."""
    del additional_out  # the sum is always returned
    total = ops.add(x, y)
    out, mean, scale = ops.native_layer_norm(total, tuple(gamma.shape), gamma, beta, eps)
    return out, mean, scale, total


# -- batch normalization: with running statistics, or in training with those of the global batch -----------------------


@decomposition("BatchNorm")
def _legacy_batch_norm(
    ops: Any, _: Any, x: Any, scale: Any, bias: Any, mean: Any, variance: Any, training: bool = False,
    eps: float = 1e-5, momentum: float = 0.1, layout: Any = 0,
) -> Any:  # fmt: skip
    """Return the normalised tensor; None for the four tensors that the kernel saves for its gradient."""
    expect("BatchNorm", "data_format", layout, 0)
    return _batch_norm(ops, x, (scale, bias), (mean, variance), training, momentum, eps), None, None, None, None


@decomposition("BatchNormExt")
def _batch_norm_ext(
    ops: Any, _: Any, x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    """Return the normalised tensor, for ``mint``; None for the two tensors that the kernel saves for its gradient."""
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
