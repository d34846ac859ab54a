"""Describes ATen functions that read or write by index as primitives; ``primitive_table`` describes the others.

Which elements of an indexed dim are read or written depends on values of an operand, so the label of an indexed dim
must not be split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hyper_parallel.verify.frameworks.contract.primitives import Primitive
from hyper_parallel.verify.frameworks.contract.sizes import Size
from hyper_parallel.verify.frameworks.torch.primitive_labels import (
    Describe,
    Labels,
    argument,
    broadcast,
    shape_of,
    size_of,
)

__all__ = ["INDEXED", "SCATTERED"]

INDEXED: dict[str, Describe] = {}
"""Functions that return the description, by name of the ATen function."""
SCATTERED = ("scatter_add", "scatter", "scatter_reduce", "index_add", "index_copy", "index_fill", "index_reduce")
_PARTS = ("slice_scatter", "select_scatter", "diagonal_scatter")
_LOOKED_UP = ("bucketize", "searchsorted")


def _of(*names: str) -> Callable[[Describe], Describe]:
    def declare(run: Describe) -> Describe:
        INDEXED.update(dict.fromkeys(names, run))
        return run

    return declare


@_of("embedding", "index_select")
def _looked_up(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del kwargs, operands, index
    dim = 0 if name == "embedding" else args[1] % len(shapes[0])
    ids = tuple(100 + at for at in range(len(shapes[1])))
    source = tuple(range(len(shapes[0])))
    out = (*source[:dim], *ids, *source[dim + 1 :])
    if len(out) != len(shape):
        raise LookupError("dims that were not understood")
    return Primitive((source, ids), out, whole=frozenset({dim}), each=(0,), moves=True)


@_of("embedding_dense_backward")
def _summed_rows(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del name, kwargs, operands, shape, index
    if args[4]:
        raise LookupError("gradients divided by counts")
    ids = tuple(100 + at for at in range(len(shapes[1])))
    padding = (size_of(args[3]),) if isinstance(args[3], torch.fx.Node) else ()  # the row whose gradient is zero
    return Primitive(((*ids, 1), ids), (0, 1), whole=frozenset({0}), reduce="sum", each=(0,), values=padding)


@_of("gather")
def _gathered(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del name, kwargs, operands, index
    dim = args[1] % len(shape)
    own = dim + 100
    source = tuple(label if label != dim else own for label in range(len(shape)))
    if any(shapes[0][at] != shape[at] for at in range(len(shape)) if at != dim):
        raise LookupError("an index of fewer rows")
    labels = tuple(range(len(shape)))
    return Primitive((source, labels), labels, whole=frozenset({own}), each=(0,), moves=True)


@_of("take")
def _taken(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del name, args, kwargs, operands, index
    source, ids = tuple(range(100, 100 + len(shapes[0]))), tuple(range(len(shape)))
    return Primitive((source, ids), ids, whole=frozenset(source), each=(0,), moves=True)


@_of("index", "index_put")
def _indexed(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    """Describe reads and writes by index tensors.

    In the result, the broadcast dims of the indices replace the indexed dims if these are adjacent, else they come
    first.
    """
    del kwargs, index
    ids = [dim for dim, each in enumerate(args[1]) if each is not None]
    indices = operands[1 : 1 + len(ids)]
    if any(each.dtype in {torch.bool, torch.uint8} for each in indices):
        raise LookupError("a mask as index")
    labels = tuple(range(len(shapes[0])))
    common = max((shape_of(each) for each in indices), key=len)
    sizes = list(common)
    for each in indices:
        for at, size in enumerate(reversed(shape_of(each)), 1):
            sizes[-at] = size if sizes[-at] == Size(1) else sizes[-at]
    first = ids[0] if ids == list(range(ids[0], ids[0] + len(ids))) else 0
    of_indices = tuple(100 + at for at in range(len(sizes)))
    rest = [dim for dim in labels if dim not in ids]
    part = (*rest[:first], *of_indices, *rest[first:])
    part_shape = tuple(sizes[label - 100] if label >= 100 else shapes[0][label] for label in part)
    inputs = [tuple(None if at is None else of_indices[at] for at in broadcast(shape_of(each), sizes))
              for each in indices]  # fmt: skip
    if name == "index":
        if part_shape != shape:
            raise LookupError("dims that were not understood")
        return Primitive((labels, *inputs), part, whole=frozenset(ids), each=(0,), moves=True)
    value = tuple(None if at is None else part[at] for at in broadcast(shapes[-1], part_shape))
    return _written((labels, *inputs, value), of_indices, ids, adds=len(args) > 3 and bool(args[3]))


def _written(inputs: tuple[Labels, ...], ids: Sequence[int], dims: Sequence[int], *, adds: bool) -> Primitive:
    """Return the description of a write of the last operand into the first, at indices along ``dims``.

    Args:
        inputs: labels of the operands; the result has the labels of the first operand.
        ids: labels of the written values.
        dims: labels that are written to.
        adds: whether values are added to the first operand, so that each rank can add its shard of the values.
    """
    whole = frozenset(dims) if adds else frozenset((*dims, *ids))
    return Primitive(inputs, inputs[0], whole=whole, reduce="sum" if adds else "", joint=(0, len(inputs) - 1))


@_of("put")
def _put(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del name, kwargs, operands, index
    labels, ids = tuple(range(len(shape))), tuple(100 + at for at in range(len(shapes[1])))
    if shapes[1] != shapes[2]:
        raise LookupError("an index of other sizes")
    return _written((labels, ids, ids), ids, labels, adds=len(args) > 3 and bool(args[3]))


@_of(*SCATTERED)
def _scattered(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del index
    dim = args[1] % max(len(shape), 1)
    labels = tuple(range(len(shape)))
    source = tuple(label if label != dim else dim + 100 for label in labels)
    ids = source if name.startswith("scatter") else (dim + 100,)
    terms = [ids, *(source if shapes[2] else () for _ in shapes[2:])]
    if not shape or any(len(each) != len(term) for each, term in zip(shapes[1:], terms, strict=True)):
        raise LookupError("dims that were not understood")
    if any(size != shape[label] for each, term in zip(shapes[1:], terms, strict=True)
           for size, label in zip(each, term, strict=True) if label < 100):  # fmt: skip
        raise LookupError("an index of fewer rows")
    adds = name in {"scatter_add", "index_add"}
    does = _written((labels, *terms), (dim + 100,), (dim,), adds=adds)
    if name in {"scatter_reduce", "index_reduce"} or "reduce" in kwargs or len(args) > 4:
        return replace(does, joint=())
    if len(operands) == 2:  # a scalar is written
        return replace(does, joint=(0,) if argument(args, kwargs, 3, "value", 1) == 0 else ())
    return does


@_of(*_PARTS)
def _replaced(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    """Describe a write of a tensor into a slice of a tensor, as ``slice_scatter`` does."""
    del operands, index
    ndim = len(shape)
    labels = tuple(range(ndim))
    if name == "diagonal_scatter":
        pair = [argument(args, kwargs, 3 + at, f"dim{at + 1}", at) % ndim for at in (0, 1)]
        dims, part = pair, (*(label for label in labels if label not in pair), 100)
    else:
        dims = [argument(args, kwargs, 2, "dim", 0) % ndim]
        rest = tuple(label if label not in dims else 100 for label in labels)
        part = rest if name == "slice_scatter" else tuple(label for label in rest if label != 100)
    if any(shape[label] != size for label, size in zip(part, shapes[1], strict=True) if label != 100):
        raise LookupError("a part of other sizes")
    return _written((labels, part), (100,), dims, adds=False)


@_of(*_LOOKED_UP)
def _located(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    """Describe a search of values in sorted tables, as ``searchsorted`` does: in one table, or in one per row."""
    del args, kwargs, index
    if len(operands) != 2:
        raise LookupError("no table, or one that is not sorted")
    value, table = (0, 1) if name == "bucketize" else (1, 0)
    labels = tuple(range(len(shape)))
    rows = () if len(shapes[table]) == 1 else labels[:-1]
    if shapes[value] != shape or any(shapes[table][dim] != shape[dim] for dim in rows):
        raise LookupError("dims that were not understood")
    inputs = {value: labels, table: (*rows, 100)}
    return Primitive((inputs[0], inputs[1]), labels, whole=frozenset({100}))


@_of("histc")
def _counted(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del name, operands, shape, index
    labels = tuple(range(len(shapes[0])))
    low, high = (argument(args, kwargs, 2 + at, key, 0) for at, key in enumerate(("min", "max")))
    if low == high:  # the range is computed from the values
        return Primitive((labels,), (100,), whole=frozenset((*labels, 100)))
    return Primitive((labels,), (100,), whole=frozenset({100}), reduce="sum")
