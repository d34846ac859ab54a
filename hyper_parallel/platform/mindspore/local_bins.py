"""Order, bins and distances on plain MindSpore tensors; places without gradient are found on the host.

MindSpore's own kernels for places on CPU are few, and that of ``searchsorted`` remembers sizes of earlier calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.local_index import scatter_add

__all__ = ["LOCAL"]


def _side(right: bool, side: str | None = None) -> str:
    return side or ("right" if right else "left")


def _places(edges: Any, values: Any, side: str) -> Any:
    """A bisection per element: NumPy's goes on from its neighbour's, which shows where the edges are in no order."""
    low, high = np.zeros(values.shape, np.int64), np.full(values.shape, len(edges))
    while (low < high).any():
        middle = (low + high) // 2
        there = edges[np.minimum(middle, len(edges) - 1)]
        beyond = (low < high) & ~(there >= values if side == "left" else there > values)
        low, high = np.where(beyond, middle + 1, low), np.where(beyond, high, np.minimum(middle, high))
    return low


def _bucketize(x: Tensor, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Tensor:
    edges = boundaries.asnumpy() if isinstance(boundaries, Tensor) else np.asarray(boundaries)
    found = _places(edges, x.asnumpy(), _side(right))
    return Tensor(np.asarray(found, np.int32 if out_int32 else np.int64))


def _searchsorted(
    table: Tensor,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    rows = table.asnumpy()
    if sorter is not None:
        rows = np.take_along_axis(rows, sorter.asnumpy(), -1)
    values = x.asnumpy() if isinstance(x, Tensor) else np.asarray(x, rows.dtype)
    kind = np.int32 if out_int32 else np.int64
    if rows.ndim == 1:
        return Tensor(np.asarray(_places(rows, values, _side(right, side)), kind))
    found = np.empty(values.shape, kind)
    for place in np.ndindex(values.shape[:-1]):
        found[place] = _places(rows[place], values[place], _side(right, side))
    return Tensor(found)


def _bincount_to(x: Tensor, weights: Tensor | None, count: int) -> Tensor:
    values = x.asnumpy()
    if weights is None:
        return Tensor(np.bincount(values, minlength=count).astype(np.int64))
    return scatter_add(mint.zeros((count,), dtype=weights.dtype), 0, x, weights)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002 - canonical names
    values = x.asnumpy()
    low, high = (min, max) if min != max or not values.size else (values.min(), values.max())
    low, high = (low - 1, high + 1) if low == high else (low, high)
    inside = values[(values >= low) & (values <= high)]
    # As the kernels do it: the place by division, in the dtype of the values.
    places = np.minimum(((inside - low) / (high - low) * bins).astype(np.int64), bins - 1)
    return Tensor(np.bincount(places.reshape(-1), minlength=bins).astype(values.dtype))


def _cumulative(accumulate: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """The last place wins a tie; gradients go where the values came from."""
        values = x.asnumpy()
        best = accumulate(values, axis=dim)
        where = np.arange(values.shape[dim]).reshape(
            [-1 if at == dim % values.ndim else 1 for at in range(values.ndim)]
        )
        places = np.maximum.accumulate(np.where(values == best, where, 0), axis=dim).astype(np.int64)
        found = Tensor(places)
        return mint.gather(x, dim, found), found

    return run


def _median_all(x: Tensor, skip_nan: bool = False) -> Tensor:
    values = x.asnumpy().reshape(-1)
    order = np.argsort(values, kind="stable")  # what is no number comes last
    missing = int(np.isnan(values).sum())
    count = values.size - missing if skip_nan else values.size
    place = order[-1] if missing and (not skip_nan or not count) else order[(count - 1) // 2]
    return ops.gather(x.reshape((-1,)), Tensor(int(place), mindspore.int64), 0)


def _nanmedian_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values = x.asnumpy()
    order = np.argsort(values, axis=dim, kind="stable")
    known = (~np.isnan(values)).sum(axis=dim, keepdims=True)
    places = Tensor(np.take_along_axis(order, np.maximum((known - 1) // 2, 0), dim).astype(np.int64))
    found = mint.gather(x, dim, places)
    if keepdim:
        return found, places
    shape = tuple(size for at, size in enumerate(x.shape) if at != dim % x.ndim)
    return found.reshape(shape), places.reshape(shape)


def _block_diag(tensors: Sequence[Tensor]) -> Tensor:
    blocks = [one.reshape((1,) * (2 - one.ndim) + tuple(one.shape)) for one in tensors]
    width, start, rows = sum(one.shape[1] for one in blocks), 0, []
    for one in blocks:
        count, own = one.shape
        sides = [mint.zeros((count, start), dtype=one.dtype), one]
        sides.append(mint.zeros((count, width - start - own), dtype=one.dtype))
        rows.append(mint.cat([side for side in sides if side.shape[1]] or [one], 1))
        start += own
    return mint.cat(rows, 0)


def _aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = tuple(range(x.ndim)) if dim is None else (dim,)
    return mint.amin(x, dims, keepdim), mint.amax(x, dims, keepdim)


LOCAL: dict[str, Callable[..., Any]] = {
    "bucketize": _bucketize,
    "searchsorted": _searchsorted,
    "bincount_to": _bincount_to,
    "histc": _histc,
    "cummax": _cumulative(np.maximum.accumulate),
    "cummin": _cumulative(np.minimum.accumulate),
    "median_all": _median_all,
    "nanmedian_along": _nanmedian_along,
    "aminmax": _aminmax,
    "block_diag": _block_diag,
    "cdist": lambda x, y, p=2.0, compute_mode=None: ops.cdist(x, y, float(p)),  # noqa: ARG005 - canonical
}
