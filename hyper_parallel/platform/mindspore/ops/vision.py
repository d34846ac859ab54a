"""Padding, resizing and patches of images of MindSpore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.rules.conv import spread
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.ops.registry import decomposition, expect, kernel, number, replicated, spellings

__all__: list[str] = []

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
    """With zeros; a negative number cuts off."""
    return ops.pad(x, [size for sides in reversed(primitive.init_attrs["paddings"]) for size in sides], 0)


@decomposition("MirrorPad")
def _mirror_pad(ops: Any, primitive: Any, x: Any, pads: Any) -> Any:
    sides = pads.full_tensor() if isinstance(pads, DTensor) else pads
    return _repeating(ops, x, sides.asnumpy().tolist(), _MODES[primitive.init_attrs["mode"]])


@decomposition("UpsampleNearest1D", "UpsampleNearest2D", "UpsampleNearest3D")
def _nearest(ops: Any, _: Any, x: Any, size: Sequence[int] | None = None, scales: Sequence[float] | None = None) -> Any:
    """By a size, or by scales that give whole sizes: otherwise positions would be counted by the scale."""
    if size is None:
        exact = [length * scale for length, scale in zip(x.shape[2:], scales or (), strict=True)]
        if any(length != int(length) for length in exact):
            shape = list(x.shape[2:])
            msg = f"interpolate: scale_factor {list(scales or ())} of {shape} gives no whole sizes; give size="
            raise UnsupportedOperatorError(msg)
        size = [int(length) for length in exact]
    return ops.upsample(x, tuple(size))


@decomposition("ResizeNearestNeighborV2")
def _resized(ops: Any, _: Any, x: Any, size: Any, align_corners: bool = False, half_pixel: bool = False) -> Any:
    expect("ResizeNearestNeighborV2", "align_corners", bool(align_corners), False)
    expect("ResizeNearestNeighborV2", "half_pixel_centers", bool(half_pixel), False)
    return ops.upsample(x, tuple(int(length) for length in size))
