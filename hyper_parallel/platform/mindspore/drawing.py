"""Random numbers as MindSpore tensors, made block after block in the dtype that is wanted."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops

from hyper_parallel.core.dtensor.sampling import LocalSample

__all__ = ["constant", "drawn"]

_ROUNDED_ALIKE = (mindspore.float32, mindspore.float64)


def drawn(numbers: LocalSample, dtype: Any) -> Tensor:
    """The numbers, each rounded to ``dtype`` as MindSpore casts."""
    found = np.empty(numbers.rows, mindspore.dtype_to_nptype(dtype))
    for rows, columns, values in numbers.blocks():
        found[rows, columns] = values if dtype in _ROUNDED_ALIKE else _cast(values, dtype)
    return Tensor.from_numpy(found.reshape(numbers.shape))


def constant(value: float, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """``value``, rounded as MindSpore casts, in ``shape``."""
    return Tensor.from_numpy(np.full(shape, _cast(np.array([value], np.float64), dtype)))


def _cast(values: Any, dtype: Any) -> Any:
    return ops.cast(Tensor.from_numpy(np.array(values, order="C")), dtype).asnumpy()
