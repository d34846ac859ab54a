"""MindSpore's convolutions, poolings and paddings, which carry their options in many ways, as canonical ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor

from hyper_parallel.core.shard.rules.conv import spread
from hyper_parallel.platform.mindspore.primitives import composed, expect

__all__: list[str] = []


# -- convolution -------------------------------------------------------------------------------------------------------


@composed("Conv1DExt", "Conv2DExt", "Conv3DExt")
def _convolution(
    ops: Any, _: Any, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Any:  # fmt: skip
    """Samples may lack; then there is one."""
    lone = len(x.shape) < len(weight.shape)
    x = ops.unsqueeze(x, 0) if lone else x
    out = ops.convolution(x, weight, bias, stride, padding, dilation, False, 0, groups)
    return ops.squeeze(out, 0) if lone else out


@composed("Conv2D", "Conv3D")
def _legacy_convolution(ops: Any, primitive: Any, x: Any, weight: Any) -> Any:
    """Kernels slide by the attributes of the primitive, whose paddings may differ from side to side."""
    count = len(x.shape) - 2
    expect(primitive.name, "mode", primitive.init_attrs.get("mode", 1), 1)
    expect(primitive.name, "data_format", primitive.init_attrs.get("data_format", "NCHW")[:2], "NC")
    stride, dilation = (tuple(primitive.attrs[name])[-count:] for name in ("stride" if count == 2 else "strides",
                        "dilation" if count == 2 else "dilations"))  # fmt: skip
    sides = _sides(primitive, x.shape[2:], weight.shape[2:], stride, dilation)
    groups = primitive.attrs.get("group", primitive.attrs.get("groups", 1))
    if any(before != after for before, after in sides):
        x = ops.pad(x, [one for pair in reversed(sides) for one in pair])
        sides = [(0, 0)] * count
    return ops.convolution(
        x, weight, None, stride, tuple(before for before, _ in sides), dilation, False, 0, groups
    )  # fmt: skip


def _sides(
    primitive: Any, sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Padding before and after each dim."""
    mode = str(primitive.attrs.get("pad_mode", "valid")).lower()
    if mode == "valid":
        return [(0, 0)] * len(sizes)
    if mode == "same":
        needed = [
            max((-(-size // step) - 1) * step + wide * (window - 1) + 1 - size, 0)
            for size, window, step, wide in zip(sizes, kernel, stride, dilation, strict=True)
        ]
        return [(one // 2, one - one // 2) for one in needed]
    given = tuple(primitive.attrs["pad"])
    return [(given[2 * at], given[2 * at + 1]) for at in range(len(sizes))]


# -- pooling -----------------------------------------------------------------------------------------------------------


@composed("AvgPool2D", "AvgPool3DExt")
def _average(
    ops: Any, _: Any, x: Any, kernel: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: Any = None,
) -> Any:  # fmt: skip
    pool = ops.avg_pool2d if len(x.shape) < 5 and _flat(x, kernel) else ops.avg_pool3d
    return pool(x, kernel, stride or (), padding, ceil_mode, count_include_pad, divisor_override)


def _flat(x: Any, kernel: Any) -> bool:
    return not (isinstance(kernel, (list, tuple)) and len(kernel) == 3) and len(x.shape) < 5


@composed("AvgPool1D")
def _average_line(
    ops: Any, _: Any, x: Any, kernel: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Any:  # fmt: skip
    """By two dims, the first of size 1."""
    size, step, pad = (_one(value) for value in (kernel, stride if stride is not None else kernel, padding))
    out = ops.avg_pool2d(ops.unsqueeze(x, -2), (1, size), (1, step), (0, pad), ceil_mode, count_include_pad)
    return ops.squeeze(out, -2)


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) else value


@composed("AvgPool3D")
def _legacy_average(ops: Any, primitive: Any, x: Any) -> Any:
    attrs = primitive.attrs
    mode = str(attrs["pad_mode"]).lower()
    pads = _symmetric(attrs["pad"]) if mode == "pad" else (0, 0, 0)
    if mode != "pad":
        expect("AvgPool3D", "pad_mode", mode, "valid")
    kernel, stride = (spread(attrs[name], 3)[-3:] for name in ("kernel_size", "strides"))
    divisor = attrs["divisor_override"] or None
    return ops.avg_pool3d(x, kernel, stride, pads, attrs["ceil_mode"], attrs["count_include_pad"], divisor)


def _symmetric(pads: Sequence[int]) -> tuple[int, ...]:
    sides = spread(pads, 6)
    expect("pooling", "paddings of both sides", sides[::2], sides[1::2])
    return sides[::2]


@composed("FuncMaxPool2D")
def _maximum(
    ops: Any, _: Any, x: Any, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    """With the places, whether they are asked for or not."""
    del return_indices
    return tuple(ops.max_pool2d(x, kernel, stride or (), padding, dilation, ceil_mode))


@composed("MaxPoolWithArgmaxV2")
def _legacy_maximum(ops: Any, primitive: Any, x: Any) -> Any:
    """With the places."""
    attrs = primitive.attrs
    kernel, stride, pads, dilation = (
        tuple(attrs[name])[-2:] for name in ("kernel_size", "strides", "pads", "dilation")
    )
    return tuple(ops.max_pool2d(x, kernel, stride, pads, dilation, attrs["ceil_mode"]))


@composed("MaxPool", "AvgPool")
def _layer_pool(ops: Any, primitive: Any, x: Any, *given: Any) -> Any:
    """Behind ``nn.MaxPool2d`` and ``nn.AvgPool2d``."""
    del given  # the attributes once more
    attrs = primitive.init_attrs
    expect(primitive.name, "pad_mode", str(attrs["pad_mode"]).lower(), "valid")
    kernel, stride = (spread(attrs[name], 2)[-2:] for name in ("kernel_size", "strides"))
    return ops.avg_pool2d(x, kernel, stride) if primitive.name == "AvgPool" else ops.max_pool2d(x, kernel, stride)[0]


@composed("AdaptiveAvgPool1D")
def _adaptive_line(ops: Any, _: Any, x: Any, size: Any) -> Any:
    return ops.squeeze(ops.adaptive_avg_pool2d(ops.unsqueeze(x, -2), (1, _one(size))), -2)


# -- padding and normalisation -----------------------------------------------------------------------------------------


@composed("ConstantPadND", "PadV3")
def _pad(ops: Any, primitive: Any, x: Any, pads: Any, value: Any = 0) -> Any:
    if primitive is not None:
        expect("PadV3", "mode", primitive.init_attrs.get("mode"), "constant")
        expect("PadV3", "paddings_contiguous", primitive.init_attrs.get("paddings_contiguous"), True)
    pads = pads.asnumpy().tolist() if isinstance(pads, Tensor) else list(pads)
    number = value.asnumpy().item() if isinstance(value, Tensor) else value
    return ops.pad(x, pads, number or 0)
