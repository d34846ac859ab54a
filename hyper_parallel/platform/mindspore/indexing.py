"""``x[index]`` and ``x[index] = value``, which MindSpore would do on the local tensor without asking.

The values of a mask decide the size of the result, so the mask is gathered and becomes positions.
"""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["normalised", "positions", "replicated"]


def normalised(x: Any, index: Any) -> tuple[Any, bool]:
    """The index with lists, arrays and masks turned into integer tensors, and whether it has tensors at all."""
    if type(index) in (int, slice) or index is None or index is Ellipsis:
        return index, False
    items = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(item, (Tensor, list, bool, np.ndarray)) for item in items):
        return index, False
    like = next(one for one in (x, *items) if isinstance(one, DTensor))
    found: list[Any] = []
    for item in items:
        one = replicated(Tensor(np.asarray(item)), like) if isinstance(item, (list, bool, np.ndarray)) else item
        if isinstance(one, Tensor) and one.dtype == mindspore.bool_:
            found.extend(positions(one, like))
        else:
            found.append(one)
    return tuple(found), True


def positions(mask: Any, like: DTensor) -> list[Any]:
    """Where ``mask`` is true, one replicated integer tensor per dim."""
    whole = mask.full_tensor() if isinstance(mask, DTensor) else mask
    return [replicated(Tensor(one.astype(np.int64)), like) for one in np.nonzero(whole.asnumpy())]


def replicated(plain: Tensor, like: DTensor) -> Any:
    """A DTensor that every rank of the mesh of ``like`` holds whole."""
    layout = Layout.of(like.device_mesh, ((),) * plain.ndim, (), tuple(plain.shape))
    return like._platform.wrap(plain, layout)
