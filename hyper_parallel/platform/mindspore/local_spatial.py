"""Convolution, pooling and what goes with them on plain MindSpore tensors, with canonical names and CPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops

from hyper_parallel.core.shard.rules.conv import spread

__all__ = ["LOCAL"]


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Tensor:
    del output_padding
    count = x.ndim - 2
    if transposed or count > 3:
        msg = "transposed convolutions are not served on MindSpore"
        raise NotImplementedError(msg)
    steps, pads, wide = (spread(one, count) for one in (stride, padding, dilation))
    if count == 1:
        x, weight = x.reshape((*x.shape[:2], 1, x.shape[2])), weight.reshape((*weight.shape[:2], 1, weight.shape[2]))
        steps, pads, wide = (1, *steps), (0, *pads), (1, *wide)
    if count == 3:
        out = ops.conv3d(x, weight, None, steps, "pad", pads, wide, groups)
    else:
        out = ops.conv2d(x, weight, None, steps, "pad", pads, wide, groups)
    if count == 1:
        out = out.reshape((*out.shape[:2], out.shape[3]))
    return out if bias is None else out + bias.reshape((-1, *(1,) * count))


def _stride(stride: Any, kernel: tuple[int, ...]) -> tuple[int, ...]:
    return kernel if stride in (None, (), []) else spread(stride, len(kernel))


def _average(count: int) -> Callable[..., Tensor]:
    def pool(
        x: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        """By the kernel for three dims."""
        kernel = spread(kernel_size, count)
        more, lead = (1,) * (3 - count), tuple(x.shape[: x.ndim - count])
        channels = (1, *lead)[-2:] if len(lead) < 2 else lead
        steps = (*more, *_stride(stride, kernel))
        pads = tuple(one for one in (*(0,) * len(more), *spread(padding, count)) for _ in range(2))
        wide = x.reshape((*channels, *more, *x.shape[x.ndim - count :]))
        out = ops.avg_pool3d(wide, (*more, *kernel), steps, pads, ceil_mode, count_include_pad, divisor_override or 0)
        return out.reshape((*lead, *out.shape[-count:]))

    return pool


def _maximum(func: Callable[..., Any], count: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def pool(
        x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> tuple[Tensor, Tensor]:
        kernel = spread(kernel_size, count)
        found = func(
            x, kernel, _stride(stride, kernel), spread(padding, count), spread(dilation, count),
            return_indices=True, ceil_mode=ceil_mode,
        )  # fmt: skip
        return found[0], ops.cast(found[1], mindspore.int64)

    return pool


def _pad(x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    for at, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = x.ndim - 1 - at
        cut = max(-before, 0), max(-after, 0)
        if any(cut):
            x = mint.narrow(x, dim, cut[0], x.shape[dim] - sum(cut))
        sides = [_block(x, dim, max(one, 0), value) for one in (before, after)]
        parts = [one for one in (sides[0], x, sides[1]) if one is not None]
        x = mint.cat(parts, dim) if len(parts) > 1 else x
    return x


def _block(x: Tensor, dim: int, size: int, value: float) -> Tensor | None:
    shape = tuple(size if at == dim else one for at, one in enumerate(x.shape))
    return ops.full(shape, value or 0, dtype=x.dtype) if size else None


def _prelu(x: Tensor, weight: Tensor) -> Tensor:
    """The weight as it broadcasts; the kernel takes one per channel."""
    return mint.where(x > 0, x, x * weight)


MODES = {0: "bilinear", 1: "nearest"}
PADDING = {0: "zeros", 1: "border", 2: "reflection"}

LOCAL: dict[str, Callable[..., Any]] = {
    "convolution": _convolution,
    "avg_pool2d": _average(2),
    "avg_pool3d": _average(3),
    "max_pool2d": _maximum(ops.max_pool2d, 2),
    "max_pool3d": _maximum(ops.max_pool3d, 3),
    "adaptive_avg_pool2d": lambda x, output_size: ops.adaptive_avg_pool2d(x, tuple(spread(output_size, 2))),
    "adaptive_avg_pool3d": lambda x, output_size: ops.adaptive_avg_pool3d(x, tuple(spread(output_size, 3))),
    "adaptive_max_pool2d": lambda x, output_size: ops.adaptive_max_pool2d(x, tuple(spread(output_size, 2)), True),
    "grid_sample": lambda x, grid, interpolation_mode=0, padding_mode=0, align_corners=False: ops.grid_sample(
        x, grid, MODES[interpolation_mode], PADDING[padding_mode], align_corners
    ),
    "im2col": lambda x, kernel_size, dilation, padding, stride: ops.unfold(
        x, spread(kernel_size, 2), spread(dilation, 2), spread(padding, 2), spread(stride, 2)
    ),
    "col2im": lambda x, output_size, kernel_size, dilation, padding, stride: ops.fold(
        x, Tensor(output_size, mindspore.int32), spread(kernel_size, 2), spread(dilation, 2), spread(padding, 2),
        spread(stride, 2),
    ),
    "upsample": lambda x, output_size: mint.nn.functional.interpolate(x, tuple(output_size)),
    "pad": _pad,
    "prelu": _prelu,
    "real": lambda x: ops.real(x) if x.is_complex() else x * 1,
    "imag": lambda x: ops.imag(x),
    "conj": lambda x: ops.conj(x) if x.is_complex() else x * 1,
    "view_as_real": lambda x: mint.cat([ops.real(x)[..., None], ops.imag(x)[..., None]], -1),
}  # fmt: skip
