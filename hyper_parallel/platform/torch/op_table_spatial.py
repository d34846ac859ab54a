"""PyTorch's operators of images and sequences: convolution, pooling, padding, interpolation, distances.

Their functions have rules where they become one operator each: what they make of padding names, of missing sizes or of
samples without a batch is PyTorch's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.core.shard.entry import OpEntry
from hyper_parallel.platform.torch.op_line import Line
from hyper_parallel.platform.torch.op_table_pointwise import routed
from hyper_parallel.platform.torch.opened import opened

__all__ = ["FUNCTIONS", "LOCAL", "OVERLOADS", "add_routes"]

aten = torch.ops.aten

POOLING = [
    Line("avg_pool2d", (aten.avg_pool2d.default,)),
    Line("avg_pool3d", (aten.avg_pool3d.default,)),
    Line("max_pool2d", (aten.max_pool2d_with_indices.default,)),
    Line("max_pool3d", (aten.max_pool3d_with_indices.default,)),
    Line("adaptive_avg_pool2d", (aten._adaptive_avg_pool2d.default,)),  # noqa: SLF001 - an operator's name
    Line("adaptive_avg_pool3d", (aten._adaptive_avg_pool3d.default,)),  # noqa: SLF001
    Line("adaptive_max_pool2d", (aten.adaptive_max_pool2d.default,)),
    Line("adaptive_max_pool3d", (aten.adaptive_max_pool3d.default,)),
    Line("fractional_max_pool2d", (aten.fractional_max_pool2d.default,)),
    Line("fractional_max_pool3d", (aten.fractional_max_pool3d.default,)),
    Line("max_unpool2d", (aten.max_unpool2d.default,)),
    Line("max_unpool3d", (aten.max_unpool3d.default,)),
]

PADS = tuple(
    getattr(aten, f"{kind}_pad{count}d").default for kind in ("reflection", "replication") for count in (1, 2, 3)
)
EXACT = "x, output_size, scales_d=None, scales_h=None, scales_w=None"
ALIGNED = "x, output_size, align_corners, scales_d=None, scales_h=None, scales_w=None"
NEAREST = tuple(
    getattr(aten, f"{name}{count}d").default
    for name in ("upsample_nearest", "_upsample_nearest_exact")
    for count in (1, 2, 3)
)
SMOOTH = (
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa",
)  # fmt: skip

RESIZING = [
    Line("pad", (aten.constant_pad_nd.default,)),
    Line("pad", PADS, "x, pad"),
    Line("upsample", NEAREST, EXACT),
    Line("upsample", tuple(getattr(aten, name).default for name in SMOOTH if hasattr(aten, name)), ALIGNED),
    Line("grid_sample", (aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)),
    Line("grid_sample", (aten.cudnn_grid_sampler.default,), "x, grid"),
    Line("affine_grid", (aten.affine_grid_generator.default,)),
    Line("im2col", (aten.im2col.default,)),
    Line("col2im", (aten.col2im.default,)),
    Line("pixel_shuffle", (aten.pixel_shuffle.default,)),
    Line("pixel_unshuffle", (aten.pixel_unshuffle.default,)),
    Line("channel_shuffle", (aten.channel_shuffle.default, aten.native_channel_shuffle.default)),
]

OVERLOADS = [
    Line("convolution", (aten.convolution.default,)),
    Line("conv_tbc", (aten.conv_tbc.default,)),
    *POOLING,
    *RESIZING,
    Line("pdist", (aten._pdist_forward.default,), canonical=True),  # noqa: SLF001 - an operator's name
]

FUNCTIONS = [
    Line("pairwise_distance", (F.pairwise_distance, torch.pairwise_distance)),
]


LOCAL: dict[str, Callable[..., Any]] = {
    "convolution": lambda x, weight, bias, stride, padding, dilation, transposed, output_padding, groups: (
        torch.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    ),
    "conv_tbc": lambda x, weight, bias, pad=0: torch.conv_tbc(x, weight, bias, pad),
    "affine_grid": lambda theta, size, align_corners=False: torch.affine_grid_generator(theta, size, align_corners),
    "pdist": lambda x, p=2.0: F.pdist(x.contiguous(), p),
}


def _fractional(pool: Any, count: int, *, pair: bool) -> Callable[..., Any]:
    """Windows drawn by the library's generator, unless the caller says where they are."""

    def run(
        ops: Any, x: Any, kernel_size: Any, output_size: Any, output_ratio: Any, return_indices: bool,
        _random_samples: Any,
    ) -> Any:  # fmt: skip
        del ops
        samples = _random_samples
        if samples is None:
            batch = x.shape[0] if x.ndim > count + 1 else 1
            samples = x.detach().new_empty((batch, x.shape[-count - 1], count)).uniform_()
        found = opened(pool)(x, kernel_size, output_size, output_ratio, True, samples)  # type: ignore[misc] # in Python
        return found if pair or return_indices else found[0]

    return run


def add_routes(table: dict[Any, OpEntry]) -> None:
    """Add what draws before it pools."""
    signature = "x, kernel_size, output_size=None, output_ratio=None, return_indices=False, _random_samples=None"
    for count in (2, 3):
        pool = getattr(F, f"fractional_max_pool{count}d_with_indices")
        routed(table, pool, signature, _fractional(pool, count, pair=True))
        single = getattr(F, f"fractional_max_pool{count}d")
        routed(table, single, signature, _fractional(pool, count, pair=False))
