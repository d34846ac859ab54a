"""Embedding look-ups of MindSpore, in complete tables and in row ranges of sharded ones."""

from __future__ import annotations

from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.ops.empty_shards import no_elements
from hyper_parallel.platform.mindspore.ops.index import Window, table_window
from hyper_parallel.platform.mindspore.ops.registry import kernel, spelling

__all__: list[str] = []

spelling(
    "embedding",
    "Embedding",
    signature="x, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False",
)


@kernel("embedding", empty_handled_with="window")
def _embedding(
    x: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    window: Window | None = None,
) -> Tensor:
    """Look up rows; padding rows get no gradient.

    With ``window``, ``weight`` has only these rows of the table, and the result is zero where another row is looked up.
    """
    if max_norm is not None or scale_grad_by_freq or sparse:
        msg = "embedding: max_norm, scale_grad_by_freq and sparse are not supported on MindSpore"
        raise NotImplementedError(msg)
    del norm_type
    padded = None if padding_idx is None else x == padding_idx % (window[2] if window else weight.shape[0])
    if window is None:
        return _without_gradient(ops.gather(weight, x, 0), padded)
    result = (*x.shape, *weight.shape[1:])
    if 0 in result:
        return no_elements(result, weight)
    table, local, inside = table_window(weight, 0, x, window)
    rows = _without_gradient(ops.gather(table, local, 0), padded)
    return rows.masked_fill(mint.logical_not(inside)[..., None], 0)


@kernel("lookup", empty_handled_with="window")
def _lookup(
    weight: Tensor,
    x: Tensor,
    padding_idx: int | None = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    window: Window | None = None,
) -> Tensor:
    padding = None if padding_idx is None or padding_idx < 0 else padding_idx
    return _embedding(x, weight, padding, None, 2.0, scale_grad_by_freq, sparse, window)


def _without_gradient(rows: Tensor, where: Tensor | None) -> Tensor:
    return rows if where is None else mint.where(where[..., None], ops.stop_gradient(rows), rows)
