"""Tensors of one value; ``ops.full`` makes integers of all values, drops imaginary parts and knows no bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops

__all__ = ["filled"]

_BY_KIND = {
    "b": mindspore.bool_,
    "i": mindspore.int64,
    "u": mindspore.int64,
    "f": mindspore.float32,
    "c": mindspore.complex64,
}
_COMPLEX = {mindspore.complex64: np.complex64, mindspore.complex128: np.complex128}
_FLOATING = (mindspore.float16, mindspore.float32, mindspore.float64, mindspore.bfloat16)


def filled(size: Sequence[int], value: Any, dtype: Any = None) -> Any:
    """``value`` everywhere; of the dtype that Python's numbers have if none is said: bool, int64, float32, complex64.

    Raises:
        ValueError: ``dtype`` has no such value.
    """
    if isinstance(value, Tensor):
        return ops.full(tuple(size), value, dtype=value.dtype if dtype is None else dtype)
    dtype = _BY_KIND[np.asarray(value).dtype.kind] if dtype is None else dtype
    if dtype in _COMPLEX:
        return Tensor.from_numpy(np.full(tuple(size), value, _COMPLEX[dtype]))
    lost = np.iscomplexobj(value) or not (np.isfinite(value) or dtype in _FLOATING or dtype == mindspore.bool_)
    if lost:
        msg = f"full: {value} is no {dtype}; give a dtype that has it"
        raise ValueError(msg)
    if dtype == mindspore.bfloat16:
        return ops.full(tuple(size), value, dtype=mindspore.float32).astype(dtype)
    return ops.full(tuple(size), value, dtype=dtype)
