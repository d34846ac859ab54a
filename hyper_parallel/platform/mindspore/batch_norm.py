"""Batch normalization of MindSpore: by given statistics, or in training by those of the whole batch, over all ranks."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.rules.norm import unbiased
from hyper_parallel.errors import LayoutError, MixedTensorError
from hyper_parallel.platform.mindspore.primitives import composed, expect

__all__: list[str] = []


@composed("BatchNorm")
def _primitive(
    ops: Any, _: Any, x: Any, scale: Any, bias: Any, mean: Any, variance: Any, training: bool = False,
    eps: float = 1e-5, momentum: float = 0.1, layout: Any = 0,
) -> Any:  # fmt: skip
    """What follows the result are the kernel's own notes for its derivative."""
    expect("BatchNorm", "data_format", layout, 0)
    return _normal(ops, x, (scale, bias), (mean, variance), training, momentum, eps), None, None, None, None


@composed("BatchNormExt")
def _function(
    ops: Any, _: Any, x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    """The same, with notes of its own."""
    return _normal(ops, x, (weight, bias), (running_mean, running_var), training, momentum, eps), None, None


def _normal(
    ops: Any, x: Any, affine: tuple[Any, Any], running: tuple[Any, Any], training: bool, momentum: float, eps: float
) -> Any:
    if not training:
        return _by_given(ops, x, affine, running, eps)
    for name, held in zip(("the running mean", "the running variance"), running, strict=True):
        if held is not None and not isinstance(held, DTensor):
            msg = (
                f"batch_norm: {name} is a plain tensor {list(held.shape)} and the input a DTensor; distribute the "
                "module's parameters too: hyper_parallel.distribute_module(module, mesh)"
            )
            raise MixedTensorError(msg)
    dims = [dim for dim in range(x.ndim) if dim != 1]
    if x.ndim < 2 or x.numel() == x.shape[1]:
        msg = f"batch_norm: training needs more than one value per channel, got {list(x.shape)}"
        raise LayoutError(msg)
    out, mean, var = ops.statistics_norm(x, dims, *affine, eps)
    for held, found, factor in zip(running, (mean, var), (1.0, unbiased(x.shape, dims)), strict=True):
        if held is not None:
            share = ops.mul(ops.mean(ops.detach(found), dims, False), factor * momentum)
            held.set_data(ops.add(ops.mul(ops.detach(held), 1.0 - momentum), share))
    return out


def _by_given(ops: Any, x: Any, affine: tuple[Any, Any], running: tuple[Any, Any], eps: float) -> Any:
    shape = (-1, *(1,) * (len(x.shape) - 2))
    # Statistics get no gradient.
    mean, variance = (ops.view(ops.detach(one), shape) for one in running)
    out = ops.mul(ops.sub(x, mean), ops.rsqrt(ops.add(variance, eps)))
    scale, bias = (None if one is None else ops.view(one, shape) for one in affine)
    out = out if scale is None else ops.mul(out, scale)
    return out if bias is None else ops.add(out, bias)
