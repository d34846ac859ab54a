"""Reductions: a sharded dim that is reduced leaves a reduction pending."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard.rule import Strategies, rule
from hyper_parallel.core.shard.signature import Labels, labelled_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.shard.call import OpCall

__all__ = ["reduced_dims", "reduced_labels"]


def reduced_dims(dim: Any, ndim: int) -> tuple[int, ...]:
    """Normalised dims that ``dim`` (None, int or sequence) names.

    Raises:
        ValueError: a dim that does not exist, or one named twice.
    """
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if any(not -max(ndim, 1) <= one < max(ndim, 1) for one in dims):
        msg = f"dim {dim} does not exist in a tensor of {ndim} dims"
        raise ValueError(msg)
    found = tuple(one % max(ndim, 1) for one in dims)
    if len(set(found)) != len(found):
        msg = f"dim {dim} names a dim twice"
        raise ValueError(msg)
    return found


def reduced_labels(shape: Sequence[int], dims: Sequence[int], *, keepdim: bool) -> tuple[Any, Any, tuple[int, ...]]:
    """Labels of input and output, and the output's shape, of a reduction over ``dims``."""
    names = tuple(f"d{dim}" for dim in range(len(shape)))
    if keepdim:
        output = tuple(None if dim in dims else name for dim, name in enumerate(names))
        return names, output, tuple(1 if dim in dims else size for dim, size in enumerate(shape))
    kept = [dim for dim in range(len(shape)) if dim not in dims]
    return names, tuple(names[dim] for dim in kept), tuple(shape[dim] for dim in kept)


@rule("sum", "x, dim=None, keepdim=False, *, dtype=None")
def sum_(call: OpCall) -> Strategies:
    """``…d -> …``, linear."""
    x = call["x"]
    names, output, shape = reduced_labels(x.shape, reduced_dims(call["dim"], x.ndim), keepdim=call["keepdim"])
    return Strategies(labelled_rows(Labels((names,), (output,), joint=(0,))), (shape,))
