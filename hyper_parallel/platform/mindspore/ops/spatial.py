"""MindSpore's operators for convolution, pooling, padding, resizing and image patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.rules.spatial import spread
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.ops.registry import decomposition, expect, kernel, number, replicated, spellings

__all__: list[str] = []


@kernel("convolution")
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
        msg = "transposed convolutions are not supported on MindSpore"
        raise NotImplementedError(msg)
    steps, pads, wide = (spread(option, count) for option in (stride, padding, dilation))
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


@decomposition("Conv1DExt", "Conv2DExt", "Conv3DExt")
def _convolution_of_batches(
    ops: Any, _: Any, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Any:  # fmt: skip
    """Return the convolution of a batch, or of a single sample without a batch dim."""
    single = len(x.shape) < len(weight.shape)
    x = ops.unsqueeze(x, 0) if single else x
    out = ops.convolution(x, weight, bias, stride, padding, dilation, False, 0, groups)
    return ops.squeeze(out, 0) if single else out


@decomposition("Conv2D", "Conv3D")
def _legacy_convolution(ops: Any, primitive: Any, x: Any, weight: Any) -> Any:
    """Return the convolution; options are attributes of the primitive, and paddings of two sides may differ."""
    count = len(x.shape) - 2
    expect(primitive.name, "mode", primitive.init_attrs.get("mode", 1), 1)
    expect(primitive.name, "data_format", primitive.init_attrs.get("data_format", "NCHW")[:2], "NC")
    stride, dilation = (tuple(primitive.attrs[name])[-count:] for name in ("stride" if count == 2 else "strides",
                        "dilation" if count == 2 else "dilations"))  # fmt: skip
    sides = _padding_sides(primitive, x.shape[2:], weight.shape[2:], stride, dilation)
    groups = primitive.attrs.get("group", primitive.attrs.get("groups", 1))
    if any(before != after for before, after in sides):
        x = ops.pad(x, [size for pair in reversed(sides) for size in pair])
        sides = [(0, 0)] * count
    return ops.convolution(x, weight, None, stride, tuple(before for before, _ in sides), dilation, False, 0, groups)


def _padding_sides(
    primitive: Any, sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the paddings before and after each dim."""
    mode = str(primitive.attrs.get("pad_mode", "valid")).lower()
    if mode == "valid":
        return [(0, 0)] * len(sizes)
    if mode == "same":
        needed = [
            max((-(-size // step) - 1) * step + wide * (window - 1) + 1 - size, 0)
            for size, window, step, wide in zip(sizes, kernel, stride, dilation, strict=True)
        ]
        return [(total // 2, total - total // 2) for total in needed]
    pads = tuple(primitive.attrs["pad"])
    return [(pads[2 * dim], pads[2 * dim + 1]) for dim in range(len(sizes))]


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
        """Return the average pool, computed by the kernel for three dims."""
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
    """Return the average pool over one dim, as a pool over two dims of which the first has size 1."""
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
    """Return the max pool and the indices, also without ``return_indices``."""
    del return_indices
    return tuple(ops.max_pool2d(x, kernel, stride or (), padding, dilation, ceil_mode))


@decomposition("MaxPoolWithArgmaxV2")
def _legacy_max_pool(ops: Any, primitive: Any, x: Any) -> Any:
    """Return the max pool and the indices; all options are attributes of the primitive."""
    attrs = primitive.attrs
    kernel, stride, pads, dilation = (
        tuple(attrs[name])[-2:] for name in ("kernel_size", "strides", "pads", "dilation")
    )
    return tuple(ops.max_pool2d(x, kernel, stride, pads, dilation, attrs["ceil_mode"]))


def _same(x: Any, kernel: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return paddings, last dim first, for which the result's size is the size over the stride, rounded up."""
    pads = []
    for size, width, step in zip(reversed(x.shape), reversed(kernel), reversed(stride), strict=False):
        missing = max((-(-size // step) - 1) * step + width - size, 0)
        pads += [missing // 2, missing - missing // 2]
    return pads


@decomposition("MaxPool3DWithArgmax")
def _max_pool_of_padded_layer(ops: Any, primitive: Any, x: Any) -> Any:
    """Return the max pool and indices; ``nn.MaxPool2d(pad_mode="pad")`` calls this on an input of depth one."""
    attrs = primitive.init_attrs
    sizes = {"ksize": 1, "strides": 1, "pads": 0, "dilation": 1}
    kernel, stride, pads, dilation = (spread(attrs.get(name, default), 3) for name, default in sizes.items())
    return tuple(ops.max_pool3d(x, kernel, stride, pads, dilation, attrs.get("ceil_mode", False)))


@decomposition("MaxPool", "AvgPool")
def _pool_of_layer(ops: Any, primitive: Any, x: Any, *repeated: Any) -> Any:
    """Return the pool of ``nn.MaxPool2d`` or ``nn.AvgPool2d``."""
    del repeated  # MindSpore passes the attributes as arguments, too
    attrs = primitive.init_attrs
    kernel, stride = (spread(attrs[name], 2)[-2:] for name in ("kernel_size", "strides"))
    if str(attrs["pad_mode"]).lower() == "same":
        pads = _same(x, kernel, stride)
        if primitive.name == "MaxPool":
            return ops.max_pool2d(ops.pad(x, pads, -math.inf), kernel, stride)[0]
        # Padding must not count: the average of ones, padded in the same way, is the share of elements inside.
        total, share = (ops.avg_pool2d(ops.pad(each, pads, 0), kernel, stride) for each in (x, ops.ones_like(x)))
        return ops.div(total, share)
    return ops.avg_pool2d(x, kernel, stride) if primitive.name == "AvgPool" else ops.max_pool2d(x, kernel, stride)[0]


@decomposition("AdaptiveAvgPool1D")
def _adaptive_average_pool_1d(ops: Any, _: Any, x: Any, size: Any) -> Any:
    return ops.squeeze(ops.adaptive_avg_pool2d(ops.unsqueeze(x, -2), (1, _first(size))), -2)


spellings("""
PixelShuffle pixel_shuffle  PixelUnshuffle pixel_unshuffle  ChannelShuffle channel_shuffle  GridSampler2D grid_sample
Im2ColExt im2col  Col2ImExt col2im
""")

# -- kernels -----------------------------------------------------------------------------------------------------------

INTERPOLATION = {0: "bilinear", 1: "nearest"}
PADDING = {0: "zeros", 1: "border", 2: "reflection"}

kernel("grid_sample")(
    lambda x, grid, interpolation_mode=0, padding_mode=0, align_corners=False: ops.grid_sample(
        x, grid, INTERPOLATION[interpolation_mode], PADDING[padding_mode], align_corners
    )
)
kernel("im2col")(
    lambda x, kernel_size, dilation, padding, stride: ops.unfold(
        x, spread(kernel_size, 2), spread(dilation, 2), spread(padding, 2), spread(stride, 2)
    )
)
kernel("col2im")(
    lambda x, output_size, kernel_size, dilation, padding, stride: ops.fold(
        x, Tensor(output_size, mindspore.int32), spread(kernel_size, 2), spread(dilation, 2), spread(padding, 2),
        spread(stride, 2),
    )
)  # fmt: skip
kernel("upsample")(lambda x, output_size: mint.nn.functional.interpolate(x, tuple(output_size)))


@kernel("pad")
def _pad(x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    for index, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = x.ndim - 1 - index
        cut = max(-before, 0), max(-after, 0)
        if any(cut):
            x = mint.narrow(x, dim, cut[0], x.shape[dim] - sum(cut))
        sides = [_block(x, dim, max(size, 0), value) for size in (before, after)]
        parts = [part for part in (sides[0], x, sides[1]) if part is not None]
        x = mint.cat(parts, dim) if len(parts) > 1 else x
    return x


def _block(x: Tensor, dim: int, size: int, value: float) -> Tensor | None:
    shape = tuple(size if axis == dim else own for axis, own in enumerate(x.shape))
    return ops.full(shape, value or 0, dtype=x.dtype) if size else None


# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("ConstantPadND", "PadV3")
def _pad_dims(ops: Any, primitive: Any, x: Any, pads: Any, value: Any = 0) -> Any:
    pads = pads.asnumpy().tolist() if isinstance(pads, Tensor) else list(pads)
    mode = "constant"
    if primitive is not None:
        expect("PadV3", "paddings_contiguous", primitive.init_attrs.get("paddings_contiguous"), True)
        mode = primitive.init_attrs.get("mode") or mode
    if mode == "constant":
        return ops.pad(x, pads, number(value) or 0)
    last_first = list(zip(pads[::2], pads[1::2], strict=True))
    return _repeating(ops, x, [*((0, 0),) * (len(x.shape) - len(last_first)), *reversed(last_first)], _MODES[mode])


_MODES: dict[str, Any] = {"edge": "edge", "reflect": "reflect", "circular": "wrap", "REFLECT": "reflect",
                          "SYMMETRIC": "symmetric"}  # fmt: skip


def _repeating(ops: Any, x: Any, pads: Sequence[tuple[int, int]], mode: Any) -> Any:
    """Return ``x`` padded with elements of its own: by reading, along each dim, the positions that are repeated."""
    for dim, (before, after) in enumerate(pads):
        if before or after:
            places = np.pad(np.arange(x.shape[dim]), (before, after), mode=mode)
            x = ops.index_select(x, dim, replicated(Tensor(places), x))
    return x


@decomposition("Pad")
def _legacy_pad(ops: Any, primitive: Any, x: Any) -> Any:
    """Pad with zeros; negative paddings remove elements."""
    return ops.pad(x, [size for sides in reversed(primitive.init_attrs["paddings"]) for size in sides], 0)


@decomposition("MirrorPad")
def _mirror_pad(ops: Any, primitive: Any, x: Any, pads: Any) -> Any:
    sides = pads.full_tensor() if isinstance(pads, DTensor) else pads
    return _repeating(ops, x, sides.asnumpy().tolist(), _MODES[primitive.init_attrs["mode"]])


@decomposition("UpsampleNearest1D", "UpsampleNearest2D", "UpsampleNearest3D")
def _nearest(ops: Any, _: Any, x: Any, size: Sequence[int] | None = None, scales: Sequence[float] | None = None) -> Any:
    """Upsample to ``size``, or by scales that give integer sizes.

    Other scales are rejected, because MindSpore then maps positions by the scale instead of by the sizes.
    """
    if size is None:
        exact = [length * scale for length, scale in zip(x.shape[2:], scales or (), strict=True)]
        if any(length != int(length) for length in exact):
            shape = list(x.shape[2:])
            msg = f"interpolate: scale_factor {list(scales or ())} of {shape} gives no integer sizes; pass size="
            raise UnsupportedOperatorError(msg)
        size = [int(length) for length in exact]
    return ops.upsample(x, tuple(size))


@decomposition("ResizeNearestNeighborV2")
def _resized(ops: Any, _: Any, x: Any, size: Any, align_corners: bool = False, half_pixel: bool = False) -> Any:
    expect("ResizeNearestNeighborV2", "align_corners", bool(align_corners), False)
    expect("ResizeNearestNeighborV2", "half_pixel_centers", bool(half_pixel), False)
    return ops.upsample(x, tuple(int(length) for length in size))
