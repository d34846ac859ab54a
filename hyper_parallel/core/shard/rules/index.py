"""Reading and writing by index: dims that the index leaves alone may be sharded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Partial
from hyper_parallel.core.shard.call import Operand
from hyper_parallel.core.shard.rule import R, Row, Strategies, rule
from hyper_parallel.core.shard.sample import Sample, real, sample, sample_call, shuffled, whole
from hyper_parallel.core.shard.signature import Labels, broadcast_labels, labelled_rows

if TYPE_CHECKING:
    from hyper_parallel.core.shard.call import OpCall

__all__ = ["Picked", "pick"]


@dataclass
class Picked:
    """What ``x[index]`` reads.

    Attributes:
        shape: sizes of the result.
        dims: per dim of the result the label it carries, or None.
        touched: dims of ``x`` that must be whole.
        indices: labels per index tensor.
    """

    shape: tuple[int, ...] = ()
    dims: tuple[str | None, ...] = ()
    touched: set[int] = field(default_factory=set)
    indices: list[tuple[str | None, ...]] = field(default_factory=list)


def pick(x: Operand, index: Any) -> Picked:
    """Read an index of numbers, slices, None, Ellipsis and integer tensors (boolean ones were turned into those).

    Raises:
        ValueError: the index does not fit, or is of another kind.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > x.ndim:
        msg = f"{used} indices for a tensor of {x.ndim} dims"
        raise ValueError(msg)
    if Ellipsis in [item for item in items if not isinstance(item, Operand)]:
        at = next(place for place, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (x.ndim - used)
    else:
        items += [slice(None)] * (x.ndim - used)
    return _walk(x, items)


def _walk(x: Operand, items: list[Any]) -> Picked:
    found, dim = Picked(), 0
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
            found.touched.add(dim)
        elif isinstance(item, slice):
            length = len(range(*item.indices(size)))
            whole = length == size and (item.step or 1) == 1
            sizes.append(length)
            dims.append(f"d{dim}" if whole else None)
            if not whole:
                found.touched.add(dim)
        elif isinstance(item, int) and not isinstance(item, bool):
            if not -size <= item < size:
                msg = f"index {item} does not exist in dim {dim} of {list(x.shape)}"
                raise ValueError(msg)
            found.touched.add(dim)
        else:
            msg = f"index {item!r}: only numbers, slices, None, Ellipsis and integer or boolean tensors are supported"
            raise ValueError(msg)  # noqa: TRY004 - dispatch reports ValueErrors with the call
        dim += 1
    if tensors:
        _insert(found, sizes, dims, tensors)
    found.shape, found.dims = tuple(sizes), tuple(dims)
    return found


def _insert(found: Picked, sizes: list[int], dims: list[str | None], tensors: list[tuple[int, Operand]]) -> None:
    inputs, output, shape = broadcast_labels([one.shape for _, one in tensors], "i")
    found.indices.extend(inputs)
    places = {place for place, _ in tensors}
    # Tensors side by side put their dims where they stand; apart, in front.
    at = places.pop() if len(places) == 1 else 0
    sizes[at:at] = shape
    dims[at:at] = output


def _getitem(call: OpCall) -> Strategies:
    """Untouched dims and the dims of index tensors run through; linear in ``x``."""
    x = call["x"]
    picked = pick(x, call["index"])
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


@rule("setitem", "x, index, value")
def setitem(call: OpCall) -> Strategies:
    """Untouched dims of ``x`` run with those of ``value``, which broadcasts; touched dims are whole."""
    x, value = call["x"], call["value"]
    picked = pick(x, call["index"])
    names = tuple(f"d{dim}" for dim in range(x.ndim))
    inputs: list[tuple[str | None, ...]] = [names, *([(None,) * len(dims) for dims in picked.indices])]
    joint: tuple[int, ...] = ()
    if isinstance(value, Operand):
        inputs.append(_value_dims(value, picked))
        if value.floating == x.floating:
            joint = (0, len(inputs) - 1)
    labels = Labels(tuple(inputs), (names,), whole=frozenset(names[dim] for dim in picked.touched), joint=joint)
    return Strategies(labelled_rows(labels), (x.shape,))


@rule("index_put", "x, indices, values, accumulate=False")
def index_put(call: OpCall) -> Strategies:
    """As ``setitem`` in a copy; accumulating, it is linear in both and takes its indices in any order."""
    x, values = call["x"], call["values"]
    picked = pick(x, tuple(slice(None) if one is None else one for one in call["indices"]))
    names = tuple(f"d{dim}" for dim in range(x.ndim))
    inputs = (names, *((None,) * len(dims) for dims in picked.indices), _value_dims(values, picked))
    joint = (0, len(inputs) - 1) if values.floating == x.floating else ()
    labels = Labels(inputs, (names,), None, frozenset(names[dim] for dim in picked.touched), joint=joint)
    return Strategies(labelled_rows(labels), (x.shape,))


def _value_dims(value: Operand, picked: Picked) -> tuple[str | None, ...]:
    shape = list(value.shape)
    extra = max(len(shape) - len(picked.shape), 0)
    missing = max(len(picked.shape) - len(shape), 0)
    tail = picked.shape[missing:]
    if any(size != 1 for size in shape[:extra]) or any(
        size not in (1, wanted) for size, wanted in zip(shape[extra:], tail, strict=True)
    ):
        msg = f"value {shape} does not broadcast to {list(picked.shape)}"
        raise ValueError(msg)
    kept = [
        name if size == wanted and name is not None and name.startswith("d") else None
        for size, wanted, name in zip(shape[extra:], tail, picked.dims[missing:], strict=True)
    ]
    return (*(None,) * extra, *kept)


sample("getitem", real(4, "bc"), (slice(1, 3), None, 0))
sample("getitem", real("abc"), (Ellipsis, -1))
sample("getitem", real("abc"), (slice(None), None, slice(None, None, 2)))
sample("getitem", real("ab"), 0)
sample("index", real("abc"), (whole("a", "i"),))
sample("index", real("abc"), (slice(None), whole("b", "ij")))
sample("index", real("abc"), (whole("a", "i"), whole("b", "i")))
sample("index", real("abc"), (whole("a", "i"), slice(None), whole("c", "i")))
sample("index", real("abc"), (whole("a", "i1"), whole("b", "j")))
sample_call("setitem", Sample((real(4, "bc"), (slice(1, 3),), real("c")), writes=True))
sample_call("setitem", Sample((real(4, "bc"), (slice(1, 3),), real(2, "bc")), writes=True))
sample_call("setitem", Sample((real("ab"), (slice(None), 0), 1.5), writes=True))
sample_call("setitem", Sample((real("abc"), (0,), real("b1")), writes=True))
sample_call("setitem", Sample((real("abc"), (shuffled("a", 1),), real("bc")), writes=True))
sample("index_put", real("ab"), (shuffled("a", "1"),), real("1b"))
sample("index_put", real("ab"), (None, whole("b", "i")), real("ai"), accumulate=True)
