"""PyTorch's convolutions arrive as one operator overload.

Its functions resolve names of paddings, missing sizes and samples without a batch before that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.torch.ops.registry import aten, kernel, spelling

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
