"""Convolutions of MindSpore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, ops

from hyper_parallel.core.shard.rules.conv import spread
from hyper_parallel.platform.mindspore.ops.registry import decomposition, expect, kernel

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
        msg = "transposed convolutions are not served on MindSpore"
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
    """Without a dim of samples there is one sample."""
    single = len(x.shape) < len(weight.shape)
    x = ops.unsqueeze(x, 0) if single else x
    out = ops.convolution(x, weight, bias, stride, padding, dilation, False, 0, groups)
    return ops.squeeze(out, 0) if single else out


@decomposition("Conv2D", "Conv3D")
def _legacy_convolution(ops: Any, primitive: Any, x: Any, weight: Any) -> Any:
    """Options are attributes of the primitive; padding may differ from side to side."""
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
    """Padding before and after each dim."""
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
