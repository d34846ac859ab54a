"""Sorting, searching and counting; a sorted dim must not be sharded, the others may be sharded."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.placements import Partial, Shard
from hyper_parallel.core.shard.labels import Labels, labelled_rows, nonempty
from hyper_parallel.core.shard.rule import (
    OpCall,
    Operand,
    R,
    Row,
    Rule,
    Strategies,
    decomposition,
    register_rule,
    replicated_row,
    rule,
    whole,
)
from hyper_parallel.core.shard.rules.dims import normalize_dim
from hyper_parallel.core.shard.rules.reduce import reduced_labels
from hyper_parallel.core.shard.sample import between, booleans, integers, ordered, real, sample


def _sorting_strategies(call: OpCall, length: int | None, *, keepdim: bool = True) -> Strategies:
    """Strategies of values and indices along ``dim``, which has ``length`` elements afterwards (None: as before)."""
    x = call["x"]
    dim = normalize_dim(call["dim"], x.ndim)
    names = tuple(f"d{d}" for d in range(x.ndim))
    kept = [d for d in range(x.ndim) if keepdim or d != dim]
    shape = tuple(x.shape[d] if d != dim or length is None else length for d in kept)
    out = tuple(names[d] for d in kept)
    count = 1 if call.op == "argsort" else 2
    labels = Labels((names,), (out,) * count, None, whole=frozenset({f"d{dim}"}))
    return Strategies(labelled_rows(labels), (shape,) * count, many=count > 1)


def _sorted(call: OpCall) -> Strategies:
    return _sorting_strategies(call, None)


for _name in ("sort", "argsort"):
    register_rule(Rule(_name, "x, dim=-1, descending=False, stable=False", _sorted))


@decomposition("msort", "x")
def msort(ops: Any, x: Any) -> Any:
    """``sort`` along the first dim, without the indices."""
    return ops.sort(x, 0)[0]


@rule("topk", "x, k, dim=-1, largest=True, sorted=True")
def topk(call: OpCall) -> Strategies:
    """The ``k`` largest or smallest elements along ``dim``, which must not be sharded."""
    return _sorting_strategies(call, call["k"])


@rule("kthvalue", "x, k, dim=-1, keepdim=False")
def kthvalue(call: OpCall) -> Strategies:
    """The ``k``-th smallest element along ``dim``, which must not be sharded."""
    return _sorting_strategies(call, 1, keepdim=bool(call["keepdim"]))


def _quantile(call: OpCall) -> Strategies:
    """Quantiles over dims that must not be sharded; several quantiles add a leading dim."""
    x, q, dim = call["x"], call["q"], call["dim"]
    dims = tuple(range(x.ndim)) if dim is None else (normalize_dim(dim, x.ndim),)
    names, out, shape = reduced_labels(x.shape, dims, keepdim=bool(call["keepdim"]))
    leading = q.shape if isinstance(q, Operand) else ()
    inputs = (names, (None,) * len(leading)) if isinstance(q, Operand) else (names,)
    labels = Labels(inputs, ((*(None,) * len(leading), *out),), None)
    return Strategies(nonempty(labelled_rows(labels)), ((*leading, *shape),))


for _name in ("quantile", "nanquantile"):
    register_rule(Rule(_name, "x, q, dim=None, keepdim=False, *, interpolation='linear'", _quantile))


# -- sizes that depend on values ---------------------------------------------------------------------------------------

for _name, _signature in {
    "unique": "x, sorted=True, return_inverse=False, return_counts=False, dim=None",
    "unique_consecutive": "x, return_inverse=False, return_counts=False, dim=None",
    "counts_to_index": "repeats, *, output_size=None",
}.items():
    register_rule(Rule(_name, _signature, whole))


@rule("nonzero_static", "x, *, size, fill_value=-1")
def nonzero_static(call: OpCall) -> Strategies:
    """The first ``size`` indices of nonzero elements; ``x`` must be replicated."""
    return Strategies((Row((R,), (R,)),), ((call["size"], call["x"].ndim),))


# -- samples -----------------------------------------------------------------------------------------------------------

sample("sort", real("abc"), 1)
sample("sort", real("ab"), 0, True)
sample("sort argsort", integers(0, 4, "ab"), stable=True)
sample("argsort", real("ab").fixed, 0)
sample("msort", real("ab"))
sample("topk", real("a", 7), 3)
sample("topk", real(5, "b"), 2, 0, largest=False)
sample("kthvalue", real("a", 7), 3)
sample("kthvalue", real(5, "b"), 2, 0, keepdim=True)
sample("quantile nanquantile", real("ab"), 0.3, 1)
sample("quantile nanquantile", real("ab"), 0.5, interpolation="lower")
sample("quantile", real("ab"), between(0.1, 0.9, "q").fixed, 0, keepdim=True)
sample("unique", integers(0, 5, "ab"))
sample("unique", integers(0, 3, "ab"), return_inverse=True, return_counts=True)
sample("unique unique_consecutive", integers(0, 2, "a2"), dim=0)
sample("unique_consecutive", integers(0, 2, "n"), return_counts=True)
sample("counts_to_index", integers(0, 4, "n"))
sample("nonzero_static", booleans("ab"), size=5)


Dims = tuple[str | None, ...]


def _looked_up(call: OpCall, value: str) -> Strategies:
    """The dims of ``value`` may be sharded; the tensors that it is searched in must not be sharded."""
    x = call[value]
    shape = x.shape if isinstance(x, Operand) else ()
    names: Dims = tuple(f"d{dim}" for dim in range(len(shape)))
    inputs = tuple(names if operand is x else (None,) * operand.ndim for operand in call.operands)
    return Strategies(labelled_rows(Labels(inputs, (names,), None)), (shape,))


@rule("bucketize", "x, boundaries, *, out_int32=False, right=False")
def bucketize(call: OpCall) -> Strategies:
    """Any dim of ``x`` may be sharded; ``boundaries`` must be replicated."""
    return _looked_up(call, "x")


@rule("isin", "x, y, *, assume_unique=False, invert=False")
def isin(call: OpCall) -> Strategies:
    """Any dim of ``x`` may be sharded; ``y`` must be replicated."""
    return _looked_up(call, "x")


@rule("searchsorted", "table, x, *, out_int32=False, right=False, side=None, sorter=None")
def searchsorted(call: OpCall) -> Strategies:
    """Any dim of ``x`` may be sharded; the last dim of ``table`` and ``sorter`` must not be sharded."""
    table, x, sorter = call["table"], call["x"], call["sorter"]
    if table.ndim <= 1 or not isinstance(x, Operand):
        return _looked_up(call, "x")
    if x.shape[:-1] != table.shape[:-1]:
        msg = f"table {list(table.shape)} and x {list(x.shape)} must agree in all dims but the last"
        raise ValueError(msg)
    rows: Dims = tuple(f"d{dim}" for dim in range(x.ndim - 1))
    inputs = tuple(
        (*rows, "m") if operand is x else (*rows, None) for operand in (table, x, sorter) if operand is not None
    )
    return Strategies(labelled_rows(Labels(inputs, ((*rows, "m"),), None)), (x.shape,))


# -- histograms --------------------------------------------------------------------------------------------------------


@rule("histc", "x, bins=100, min=0, max=0")
def histc(call: OpCall) -> Strategies:
    """``… -> [bins]``: ``x`` may be sharded if ``min`` and ``max`` are given, and then leaves Partial(sum)."""
    x = call["x"]
    has_range = call["min"] != call["max"]
    sharded = tuple(Row((Shard(dim),), (Partial("sum"),)) for dim in range(x.ndim)) if has_range else ()
    return Strategies((replicated_row(1), *sharded), ((call["bins"],),))


@rule("histogram", "x, bins, *, range=None, weight=None, density=False")
def histogram(call: OpCall) -> Strategies:
    """Counts per bin and the edges of the bins; all operands must be replicated."""
    bins = call["bins"]
    edges = bins.shape[0] if isinstance(bins, Operand) else bins + 1
    return Strategies((replicated_row(len(call.operands), 2),), ((edges - 1,), (edges,)), many=True)


@rule("histogramdd_edges", "x, bins, *, range=None, weight=None, density=False")
def histogramdd_edges(call: OpCall) -> Strategies:
    """The edges of the bins of each column; all operands must be replicated."""
    shapes = tuple((count + 1,) for count in call["bins"])
    return Strategies((replicated_row(len(call.operands), len(shapes)),), shapes, many=True)


@rule("histogramdd_counts", "x, bins, *, range=None, weight=None, density=False")
def histogramdd_counts(call: OpCall) -> Strategies:
    """Counts in all bins of all columns; all operands must be replicated."""
    shape = tuple(
        bins_of_column.shape[0] - 1 if isinstance(bins_of_column, Operand) else bins_of_column
        for bins_of_column in call["bins"]
    )
    return Strategies((replicated_row(len(call.operands)),), (shape,))


@rule("bincount_to", "x, weights, count")
def bincount_to(call: OpCall) -> Strategies:
    """``n, n -> [count]``: a sharded ``n`` leaves Partial(sum) of counts, or of weights."""
    inputs: tuple[Dims, ...] = (("n",),) * len(call.operands)
    each = (1,) if len(inputs) > 1 else ()
    return Strategies(labelled_rows(Labels(inputs, ((None,),), each=each)), ((call["count"],),))


@decomposition("bincount", "x, weights=None, minlength=0")
def bincount(ops: Any, x: Any, weights: Any, minlength: int) -> Any:
    """``bincount_to`` with as many bins as the largest value needs; finding that value reduces ``x``."""
    largest = int(ops.amax(x)) if x.shape[0] else -1
    weights = weights if x.shape[0] else None  # PyTorch returns integer counts for an empty x
    return ops.bincount_to(x, weights, max(largest + 1, minlength))


# -- samples -----------------------------------------------------------------------------------------------------------

_TABLE = ordered("n").fixed
sample("bucketize", real("ab").fixed, _TABLE)
sample("bucketize", real("ab").fixed, _TABLE, right=True)
sample("searchsorted", _TABLE, real("ab").fixed)
sample("searchsorted", ordered("an").fixed, real("am").fixed, side="right")
sample("isin", integers(0, 5, "ab"), integers(0, 9, "n"))
sample("isin", real("ab").fixed, real("n").fixed, invert=True)
sample("isin", integers(0, 5, "ab"), 3)
sample("histc", real("ab").fixed, 4, -1, 1)
sample("histc", real("ab").fixed, 3)
sample("histogram", real("ab").fixed, 4)
sample("histogram", real("ab").fixed, 4, range=(-1.0, 1.0), weight=between(0.3, 2.0, "ab").fixed, density=True)
sample("histogramdd_edges histogramdd_counts", real("a2").fixed, [3, 4])
sample("bincount_to", integers(0, 5, "n"), None, 7)
sample("bincount_to", integers(0, 5, "n"), real("n").fixed, 5)
sample("bincount", integers(0, 5, "n"))
sample("bincount", integers(0, 5, "n"), real("n").fixed, 9)
