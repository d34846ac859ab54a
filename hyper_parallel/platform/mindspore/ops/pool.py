"""Poolings of MindSpore, which carry their options in many ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, ops

from hyper_parallel.core.shard.rules.conv import spread
from hyper_parallel.platform.mindspore.ops.registry import decomposition, expect, kernel, spellings

__all__: list[str] = []

spellings("""
AdaptiveAvgPool2D adaptive_avg_pool2d  AdaptiveAvgPool2DExt adaptive_avg_pool2d
AdaptiveAvgPool3D adaptive_avg_pool3d  AdaptiveAvgPool3DExt adaptive_avg_pool3d
AdaptiveMaxPool2D adaptive_max_pool2d
""")

# -- kernels -----------------------------------------------------------------------------------------------------------


def _stride(stride: Any, kernel_size: tuple[int, ...]) -> tuple[int, ...]:
    return kernel_size if stride in (None, (), []) else spread(stride, len(kernel_size))


def _average(count: int) -> Callable[..., Tensor]:
    def compute(
        x: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        """By the kernel for three dims."""
        sizes = spread(kernel_size, count)
        more, lead = (1,) * (3 - count), tuple(x.shape[: x.ndim - count])
        channels = (1, *lead)[-2:] if len(lead) < 2 else lead
        steps = (*more, *_stride(stride, sizes))
        pads = tuple(pad for pad in (*(0,) * len(more), *spread(padding, count)) for _ in range(2))
        wide = x.reshape((*channels, *more, *x.shape[x.ndim - count :]))
        out = ops.avg_pool3d(wide, (*more, *sizes), steps, pads, ceil_mode, count_include_pad, divisor_override or 0)
        return out.reshape((*lead, *out.shape[-count:]))

    return compute


def _maximum(func: Callable[..., Any], count: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def compute(
        x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> tuple[Tensor, Tensor]:
        sizes = spread(kernel_size, count)
        values, indices = func(
            x, sizes, _stride(stride, sizes), spread(padding, count), spread(dilation, count),
            return_indices=True, ceil_mode=ceil_mode,
        )  # fmt: skip
        return values, ops.cast(indices, mindspore.int64)

    return compute


kernel("avg_pool2d")(_average(2))
kernel("avg_pool3d")(_average(3))
kernel("max_pool2d")(_maximum(ops.max_pool2d, 2))
kernel("max_pool3d")(_maximum(ops.max_pool3d, 3))
kernel("adaptive_avg_pool2d")(lambda x, output_size: ops.adaptive_avg_pool2d(x, tuple(spread(output_size, 2))))
kernel("adaptive_avg_pool3d")(lambda x, output_size: ops.adaptive_avg_pool3d(x, tuple(spread(output_size, 3))))
kernel("adaptive_max_pool2d")(lambda x, output_size: ops.adaptive_max_pool2d(x, tuple(spread(output_size, 2)), True))

# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("AvgPool2D", "AvgPool3DExt")
def _average_pool(
    ops: Any, _: Any, x: Any, kernel: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: Any = None,
) -> Any:  # fmt: skip
    pool = ops.avg_pool2d if len(x.shape) < 5 and _two_dims(x, kernel) else ops.avg_pool3d
    return pool(x, kernel, stride or (), padding, ceil_mode, count_include_pad, divisor_override)


def _two_dims(x: Any, kernel: Any) -> bool:
    return not (isinstance(kernel, (list, tuple)) and len(kernel) == 3) and len(x.shape) < 5


@decomposition("AvgPool1D")
def _average_pool_1d(
    ops: Any, _: Any, x: Any, kernel: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Any:  # fmt: skip
    """By two dims, the first of size 1."""
    size, step, pad = (_first(value) for value in (kernel, stride if stride is not None else kernel, padding))
    out = ops.avg_pool2d(ops.unsqueeze(x, -2), (1, size), (1, step), (0, pad), ceil_mode, count_include_pad)
    return ops.squeeze(out, -2)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) else value


@decomposition("AvgPool3D")
def _legacy_average_pool(ops: Any, primitive: Any, x: Any) -> Any:
    attrs = primitive.attrs
    mode = str(attrs["pad_mode"]).lower()
    pads = _symmetric(attrs["pad"]) if mode == "pad" else (0, 0, 0)
    kernel, stride = (spread(attrs[name], 3)[-3:] for name in ("kernel_size", "strides"))
    if mode == "same":
        expect("AvgPool3D", "count_include_pad", attrs["count_include_pad"], True)
        x = ops.pad(x, _same(x, kernel, stride), 0)
    divisor = attrs["divisor_override"] or None
    return ops.avg_pool3d(x, kernel, stride, pads, attrs["ceil_mode"], attrs["count_include_pad"], divisor)


def _symmetric(pads: Sequence[int]) -> tuple[int, ...]:
    sides = spread(pads, 6)
    expect("pooling", "paddings of both sides", sides[::2], sides[1::2])
    return sides[::2]


@decomposition("FuncMaxPool2D")
def _max_pool(
    ops: Any, _: Any, x: Any, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    """With the indices, whether they are asked for or not."""
    del return_indices
    return tuple(ops.max_pool2d(x, kernel, stride or (), padding, dilation, ceil_mode))


@decomposition("MaxPoolWithArgmaxV2")
def _legacy_max_pool(ops: Any, primitive: Any, x: Any) -> Any:
    """With the indices."""
    attrs = primitive.attrs
    kernel, stride, pads, dilation = (
        tuple(attrs[name])[-2:] for name in ("kernel_size", "strides", "pads", "dilation")
    )
    return tuple(ops.max_pool2d(x, kernel, stride, pads, dilation, attrs["ceil_mode"]))


def _same(x: Any, kernel: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Paddings for as many results as there are strides in ``x``, those of the last dim first."""
    pads = []
    for size, width, step in zip(reversed(x.shape), reversed(kernel), reversed(stride), strict=False):
        missing = max((-(-size // step) - 1) * step + width - size, 0)
        pads += [missing // 2, missing - missing // 2]
    return pads


@decomposition("MaxPool3DWithArgmax")
def _max_pool_of_padded_layer(ops: Any, primitive: Any, x: Any) -> Any:
    """Behind ``nn.MaxPool2d(pad_mode="pad")``, which gives its input a depth of one."""
    attrs = primitive.init_attrs
    sizes = {"ksize": 1, "strides": 1, "pads": 0, "dilation": 1}
    kernel, stride, pads, dilation = (spread(attrs.get(name, default), 3) for name, default in sizes.items())
    return tuple(ops.max_pool3d(x, kernel, stride, pads, dilation, attrs.get("ceil_mode", False)))


@decomposition("MaxPool", "AvgPool")
def _pool_of_layer(ops: Any, primitive: Any, x: Any, *repeated: Any) -> Any:
    """Behind ``nn.MaxPool2d`` and ``nn.AvgPool2d``."""
    del repeated  # the attributes once more
    attrs = primitive.init_attrs
    kernel, stride = (spread(attrs[name], 2)[-2:] for name in ("kernel_size", "strides"))
    if str(attrs["pad_mode"]).lower() == "same":
        pads = _same(x, kernel, stride)
        if primitive.name == "MaxPool":
            return ops.max_pool2d(ops.pad(x, pads, -math.inf), kernel, stride)[0]
        # Only elements inside count: of zeros and ones padded alike, the averages have the same divisor.
        total, share = (ops.avg_pool2d(ops.pad(each, pads, 0), kernel, stride) for each in (x, ops.ones_like(x)))
        return ops.div(total, share)
    return ops.avg_pool2d(x, kernel, stride) if primitive.name == "AvgPool" else ops.max_pool2d(x, kernel, stride)[0]


@decomposition("AdaptiveAvgPool1D")
def _adaptive_average_pool_1d(ops: Any, _: Any, x: Any, size: Any) -> Any:
    return ops.squeeze(ops.adaptive_avg_pool2d(ops.unsqueeze(x, -2), (1, _first(size))), -2)
