"""PyTorch's convolution, pooling, padding, interpolation and reordering of pixels; some arrive as overloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.torch.ops.python_api import unwrapped
from hyper_parallel.platform.torch.ops.registry import aten, decomposition, kernel, spelling

spelling("convolution", aten.convolution.default)
spelling("conv_tbc", aten.conv_tbc.default)


@kernel("convolution")
def _convolution(
    x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Tensor:  # fmt: skip
    return torch.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


@kernel("conv_tbc")
def _conv_tbc(x: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Tensor:
    return torch.conv_tbc(x, weight, bias, pad)


spelling("avg_pool2d", aten.avg_pool2d.default)
spelling("avg_pool3d", aten.avg_pool3d.default)
spelling("max_pool2d", aten.max_pool2d_with_indices.default)
spelling("max_pool3d", aten.max_pool3d_with_indices.default)
spelling("adaptive_avg_pool2d", aten._adaptive_avg_pool2d.default)
spelling("adaptive_avg_pool3d", aten._adaptive_avg_pool3d.default)
spelling("adaptive_max_pool2d", aten.adaptive_max_pool2d.default)
spelling("adaptive_max_pool3d", aten.adaptive_max_pool3d.default)
spelling("fractional_max_pool2d", aten.fractional_max_pool2d.default)
spelling("fractional_max_pool3d", aten.fractional_max_pool3d.default)
spelling("max_unpool2d", aten.max_unpool2d.default)
spelling("max_unpool3d", aten.max_unpool3d.default)


def _fractional(call: Callable[..., Any], dims: int, *, pair: bool) -> None:
    """Sample the windows of ``call`` from the library's generator, unless the caller gives them."""
    with_indices = getattr(F, f"fractional_max_pool{dims}d_with_indices")
    signature = "x, kernel_size, output_size=None, output_ratio=None, return_indices=False, _random_samples=None"

    @decomposition(call, signature=signature)
    def run(
        _ops: Any, x: Any, kernel_size: Any, output_size: Any, output_ratio: Any, return_indices: bool,
        _random_samples: Any,
    ) -> Any:  # fmt: skip
        samples = _random_samples
        if samples is None:
            batch = x.shape[0] if x.ndim > dims + 1 else 1
            samples = x.detach().new_empty((batch, x.shape[-dims - 1], dims)).uniform_()
        pool = unwrapped(with_indices)
        result = pool(x, kernel_size, output_size, output_ratio, True, samples)  # type: ignore[misc] # it is in Python
        return result if pair or return_indices else result[0]


_fractional(F.fractional_max_pool2d, 2, pair=False)
_fractional(F.fractional_max_pool2d_with_indices, 2, pair=True)
_fractional(F.fractional_max_pool3d, 3, pair=False)
_fractional(F.fractional_max_pool3d_with_indices, 3, pair=True)


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
    if hasattr(aten, _name):  # older versions lack the last
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
