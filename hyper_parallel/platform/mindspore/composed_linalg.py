"""MindSpore's linear algebra, transforms and resizing that are calls of canonical operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.primitives import composed, expect

__all__: list[str] = []


@composed("MatrixPower")
def _power(ops: Any, primitive: Any, x: Any, n: int | None = None) -> Any:
    return ops.matrix_power(x, primitive.n if n is None else n)


@composed("FFTShift")
def _shift(ops: Any, _: Any, x: Any, dim: Any = None) -> Any:
    """Half of each dim moves to its other end."""
    dims = _dims(x, dim)
    return ops.roll(x, tuple(x.shape[one] // 2 for one in dims), dims)


@composed("IFFTShift")
def _shift_back(ops: Any, _: Any, x: Any, dim: Any = None) -> Any:
    dims = _dims(x, dim)
    return ops.roll(x, tuple(-(x.shape[one] // 2) for one in dims), dims)


def _dims(x: Any, dim: Any) -> tuple[int, ...]:
    if dim is None:
        return tuple(range(x.ndim))
    return (dim,) if isinstance(dim, int) else tuple(dim)


@composed("UpsampleNearest1D", "UpsampleNearest2D", "UpsampleNearest3D")
def _nearest(ops: Any, _: Any, x: Any, size: Sequence[int] | None = None, scales: Sequence[float] | None = None) -> Any:
    """By a size, or by scales that give whole sizes: otherwise places would be counted by the scale."""
    if size is None:
        exact = [length * scale for length, scale in zip(x.shape[2:], scales or (), strict=True)]
        if any(one != int(one) for one in exact):
            shape = list(x.shape[2:])
            msg = f"interpolate: scale_factor {list(scales or ())} of {shape} gives no whole sizes; give size="
            raise UnsupportedOperatorError(msg)
        size = [int(one) for one in exact]
    return ops.upsample(x, tuple(size))


@composed("ResizeNearestNeighborV2")
def _resized(ops: Any, _: Any, x: Any, size: Any, align_corners: bool = False, half_pixel: bool = False) -> Any:
    expect("ResizeNearestNeighborV2", "align_corners", bool(align_corners), False)
    expect("ResizeNearestNeighborV2", "half_pixel_centers", bool(half_pixel), False)
    return ops.upsample(x, tuple(int(one) for one in size))
