"""PyTorch's padding, interpolation and reordering of pixels arrive as operator overloads."""

from __future__ import annotations

import torch
from torch import Tensor

from hyper_parallel.platform.torch.ops.registry import aten, kernel, spelling

spelling("pad", aten.constant_pad_nd.default)
for _mode in ("reflection", "replication"):
    for _dims in (1, 2, 3):
        spelling("pad", getattr(aten, f"{_mode}_pad{_dims}d").default, signature="x, pad")

for _name in ("upsample_nearest", "_upsample_nearest_exact"):
    for _dims in (1, 2, 3):
        spelling(
            "upsample",
            getattr(aten, f"{_name}{_dims}d").default,
            signature="x, output_size, scales_d=None, scales_h=None, scales_w=None",
        )
for _name in (
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa",
):  # fmt: skip
    if hasattr(aten, _name):  # the last is new
        spelling(
            "upsample",
            getattr(aten, _name).default,
            signature="x, output_size, align_corners, scales_d=None, scales_h=None, scales_w=None",
        )

spelling("grid_sample", aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
spelling("grid_sample", aten.cudnn_grid_sampler.default, signature="x, grid")
spelling("affine_grid", aten.affine_grid_generator.default)
spelling("im2col", aten.im2col.default)
spelling("col2im", aten.col2im.default)
spelling("pixel_shuffle", aten.pixel_shuffle.default)
spelling("pixel_unshuffle", aten.pixel_unshuffle.default)
spelling("channel_shuffle", aten.channel_shuffle.default, aten.native_channel_shuffle.default)


@kernel("affine_grid")
def _affine_grid(theta: Tensor, size: list[int], align_corners: bool = False) -> Tensor:
    return torch.affine_grid_generator(theta, size, align_corners)
