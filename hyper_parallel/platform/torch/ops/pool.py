"""PyTorch's pooling arrives as operator overloads; fractional pooling samples its windows first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from hyper_parallel.platform.torch.ops.python_api import unwrapped
from hyper_parallel.platform.torch.ops.registry import aten, decomposition, spelling

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
