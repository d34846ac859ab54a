"""Reading by index: dims that the index does not touch may be sharded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Partial, Placement, Shard
from hyper_parallel.core.shard.labels import Labels, broadcast_labels, labelled_rows
from hyper_parallel.core.shard.rule import (
    LocalCall,
    OpCall,
    Operand,
    R,
    Row,
    Strategies,
    decomposition,
    replicated_row,
    rule,
)
from hyper_parallel.core.shard.rules.dims import normalize_dim
from hyper_parallel.core.shard.sample import indices, real, sample, size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hyper_parallel.core.dtensor.layout import Layout


__all__ = ["IndexResult", "lookup", "parse_index", "shared_dims", "unshared_dims", "window"]


@dataclass
class IndexResult:
    """Result of parsing ``x[index]``: which dims remain and which must not be sharded.

    Attributes:
        shape: sizes of the result.
        dims: per dim of the result the label it carries, or None.
        touched: dims of ``x`` that must not be sharded.
        indices: labels per index tensor.
    """

    shape: tuple[int, ...] = ()
    dims: tuple[str | None, ...] = ()
    touched: set[int] = field(default_factory=set)
    indices: list[tuple[str | None, ...]] = field(default_factory=list)


def parse_index(x: Operand, index: Any) -> IndexResult:
    """Parse an index of numbers, slices, None, Ellipsis and integer tensors; masks are converted to these before.

    Raises:
        ValueError: the index does not match the tensor, or has an unsupported type.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > x.ndim:
        msg = f"{used} indices for a tensor of {x.ndim} dims"
        raise ValueError(msg)
    if Ellipsis in [item for item in items if not isinstance(item, Operand)]:
        start = next(position for position, item in enumerate(items) if item is Ellipsis)
        items[start : start + 1] = [slice(None)] * (x.ndim - used)
    else:
        items += [slice(None)] * (x.ndim - used)
    return _walk(x, items)


def _walk(x: Operand, items: list[Any]) -> IndexResult:
    picked, dim = IndexResult(), 0
    sizes: list[int] = []
    dims: list[str | None] = []
    tensors: list[tuple[int, Operand]] = []
    for item in items:
        if item is None:
            sizes.append(1)
            dims.append(None)
            continue
        size = x.shape[dim]
        if isinstance(item, Operand):
            tensors.append((len(sizes), item))
            picked.touched.add(dim)
        elif isinstance(item, slice):
            length = len(range(*item.indices(size)))
            whole = length == size and (item.step or 1) == 1
            sizes.append(length)
            dims.append(f"d{dim}" if whole else None)
            if not whole:
                picked.touched.add(dim)
        elif isinstance(item, int) and not isinstance(item, bool):
            if not -size <= item < size:
                msg = f"index {item} does not exist in dim {dim} of {list(x.shape)}"
                raise ValueError(msg)
            picked.touched.add(dim)
        else:
            msg = f"index {item!r}: only numbers, slices, None, Ellipsis and integer or boolean tensors are supported"
            raise ValueError(msg)  # noqa: TRY004 - dispatch adds the call to ValueErrors
        dim += 1
    if tensors:
        _insert(picked, sizes, dims, tensors)
    picked.shape, picked.dims = tuple(sizes), tuple(dims)
    return picked


def _insert(picked: IndexResult, sizes: list[int], dims: list[str | None], tensors: list[tuple[int, Operand]]) -> None:
    inputs, output, shape = broadcast_labels([operand.shape for _, operand in tensors], "i")
    picked.indices.extend(inputs)
    positions = {position for position, _ in tensors}
    # As in NumPy: the result dims of adjacent index tensors stay in place, those of separated ones come first.
    start = positions.pop() if len(positions) == 1 else 0
    sizes[start:start] = shape
    dims[start:start] = output


def _getitem(call: OpCall) -> Strategies:
    """Dims that the index does not touch and the dims of index tensors may be sharded; linear in ``x``."""
    x = call["x"]
    picked = parse_index(x, call["index"])
    names = tuple(f"d{dim}" for dim in range(x.ndim))
    labels = Labels(
        (names, *picked.indices), (picked.dims,), whole=frozenset(names[dim] for dim in picked.touched), each=(0,)
    )
    rows = list(labelled_rows(labels))
    rest = (R,) * (len(call.operands) - 1)
    rows.extend(Row((Partial(op), *rest), (Partial(op),)) for op in ("max", "min"))
    return Strategies(tuple(rows), (picked.shape,))


rule("getitem", "x, index", view=True)(_getitem)
rule("index", "x, index")(_getitem)


Names = tuple[str | None, ...]


def lookup(rows: tuple[Row, ...], table: int, dim: int, operands: int) -> tuple[Row, ...]:
    """Return ``rows`` and a row for a table sharded along the looked-up dim, which leaves Partial(sum)."""
    inputs: list[Placement] = [R] * operands
    inputs[table] = Shard(dim)
    return (*rows, Row(tuple(inputs), (Partial("sum"),)))


def window(layout: Layout, dim: int) -> dict[str, Any]:
    """Argument ``window`` of a look-up in a sharded dim: this rank's range of indices, and the global size."""
    return {"window": (*layout.local_box()[dim], layout.shape[dim])} if layout.dim_axes[dim] else {}  # type: ignore[index]


def shared_dims(shape: Sequence[int], others: Sequence[Sequence[int]], dim: int, own: str) -> Names:
    """Labels of an operand's dims: ``own`` for ``dim``, a common label for dims of equal size in all operands."""
    return tuple(
        own if d == dim else f"d{d}" if all(other[d] == size for other in others) else f"{own}{d}"
        for d, size in enumerate(shape)
    )


@rule("gather", "x, dim, index, *, sparse_grad=False", by_dtype=True)
def gather(call: OpCall) -> Strategies:
    """``…k…, …i… -> …i…``: dims other than ``dim`` are sharded in the same way; a sharded ``k`` leaves Partial(sum)."""
    x, index = call["x"], call["index"]
    dim = normalize_dim(call["dim"], x.ndim)
    if x.ndim != index.ndim:
        if max(x.ndim, index.ndim) > 1 and 0 not in index.shape:
            msg = f"x has {x.ndim} dims, index has {index.ndim}"
            raise ValueError(msg)
        return Strategies((replicated_row(2),), (index.shape,))
    shapes = (x.shape, index.shape)
    whole = unshared_dims(shapes, dim, "x")
    names = shared_dims(index.shape, shapes, dim, "i")
    labels = Labels((shared_dims(x.shape, shapes, dim, "x"), names), (names,), whole=frozenset(whole), each=(0,))
    rows = labelled_rows(labels)
    if x.floating and not call["sparse_grad"] and x.ndim:
        rows = lookup(rows, 0, dim, 2)
    return Strategies(rows, (index.shape,), _windowed(dim))


def unshared_dims(shapes: Sequence[Sequence[int]], dim: int, table: str) -> set[str]:
    """Labels that must not be sharded: ``table``, and dims other than ``dim`` in which the operands' sizes differ."""
    unequal = [d for d in range(len(shapes[0])) if d != dim and len({shape[d] for shape in shapes}) > 1]
    return {table, *(f"{own}{d}" for d in unequal for own in "xis")}


@rule("index_select", "x, dim, index", by_dtype=True)
def index_select(call: OpCall) -> Strategies:
    """``…k…, i -> …i…``: the other dims may be sharded; a sharded ``k`` leaves Partial(sum)."""
    x, index = call["x"], call["index"]
    dim = normalize_dim(call["dim"], x.ndim)
    if index.ndim > 1:
        msg = f"index has {index.ndim} dims, it needs at most 1"
        raise ValueError(msg)
    if not x.ndim:
        return Strategies((replicated_row(2),), ((),))
    names = tuple("x" if d == dim else f"d{d}" for d in range(x.ndim))
    (count,) = index.shape or (1,)
    out = (*names[:dim], "i" if index.ndim else None, *names[dim + 1 :])
    rows = labelled_rows(Labels((names, ("i",) * index.ndim), (out,), whole=frozenset({"x"}), each=(0,)))
    if x.floating:
        rows = lookup(rows, 0, dim, 2)
    return Strategies(rows, ((*x.shape[:dim], count, *x.shape[dim + 1 :]),), _windowed(dim))


def _windowed(dim: int) -> Callable[[OpCall, tuple[Layout, ...], tuple[Layout, ...]], LocalCall | None]:
    """Return the function that makes the local call of a look-up along ``dim``, with this rank's window of a table."""

    def local(_: OpCall, targets: tuple[Layout, ...], __: tuple[Layout, ...]) -> LocalCall | None:
        arguments = window(targets[0], dim) if targets[0].ndim else {}
        return LocalCall(arguments) if arguments else None

    return local


@decomposition("take_along_dim", "x, indices, dim=None")
def take_along_dim(ops: Any, x: Any, indices: Any, dim: int | None) -> Any:
    """``gather``, with dims other than ``dim`` broadcast."""
    if dim is None:
        return ops.take(x, ops.view(indices, (-1,)))
    left, right = tuple(x.shape), tuple(indices.shape)
    if len(left) != len(right):
        msg = f"take_along_dim: x has {len(left)} dims, indices have {len(right)}"
        raise ValueError(msg)
    axis = normalize_dim(dim, len(left))
    indices = ops.add(indices, ops.mul(ops.lt(indices, 0), left[axis]))  # gather does not accept negative indices
    common = [max(pair) if 0 not in pair else 0 for pair in zip(left, right, strict=True)]
    wide = [(*common[:axis], sizes[axis], *common[axis + 1 :]) for sizes in (left, right)]
    return ops.gather(ops.expand(x, wide[0]), axis, ops.expand(indices, wide[1]))


@rule("one_hot", "x, num_classes=-1")
def one_hot(call: OpCall) -> Strategies:
    """All dims of ``x`` may be sharded; the new one is not."""
    x, count = call["x"], call["num_classes"]
    if count < 1:
        msg = f"num_classes is {count}; give a positive number: the size of the result must not depend on values"
        raise ValueError(msg)
    names = tuple(f"d{dim}" for dim in range(x.ndim))
    return Strategies(labelled_rows(Labels((names,), ((*names, None),), reduce=None)), ((*x.shape, count),))


# -- by flat index -----------------------------------------------------------------------------------------------------


@rule("take", "x, index")
def take(call: OpCall) -> Strategies:
    """Elements of the flattened ``x``, which must not be sharded; the dims of ``index`` may be sharded."""
    x, index = call["x"], call["index"]
    names = tuple(f"i{dim}" for dim in range(index.ndim))
    return Strategies(labelled_rows(Labels(((None,) * x.ndim, names), (names,), each=(0,))), (index.shape,))


# -- samples -----------------------------------------------------------------------------------------------------------

sample("getitem", real(4, "bc"), (slice(1, 3), None, 0))
sample("getitem", real("abc"), (Ellipsis, -1))
sample("getitem", real("abc"), (slice(None), None, slice(None, None, 2)))
sample("getitem", real("ab"), 0)
sample("index", real("abc"), (indices("a", "i"),))
sample("index", real("abc"), (slice(None), indices("b", "ij")))
sample("index", real("abc"), (indices("a", "i"), indices("b", "i")))
sample("index", real("abc"), (indices("a", "i"), slice(None), indices("c", "i")))
sample("index", real("abc"), (indices("a", "i1"), indices("b", "j")))
sample("gather", real("ab"), 0, indices("a", "ib"))
sample("gather", real("ab"), 1, indices("b", "ai"))
sample("gather", real("a", 6, "c"), 0, indices("a", "i", 4, "c"))
sample("index_select", real("abc"), 1, indices("b", "i"))
sample("index_select", real("ab"), 0, indices("a", "i"))
sample("take_along_dim", real("ab"), indices("b", "ai"), 1)
sample("take_along_dim", real("ab"), indices("b", "1i"), 1)
sample("take_along_dim", real("ab"), indices("ab", "i"))
sample("one_hot", indices(5, "ab"), 5)
sample("one_hot", indices("k", "a"), size("k"))
sample("take", real("ab"), indices("ab", "ij"))
