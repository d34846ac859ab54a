"""Sorting: the sorted dim must be whole, the others may be sharded."""

from __future__ import annotations

from typing import Any

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
    rule,
    whole,
)
from hyper_parallel.core.shard.rules.dims import normalize_dim
from hyper_parallel.core.shard.rules.reduce import reduced_labels
from hyper_parallel.core.shard.sample import between, booleans, integers, real, sample


def _sorting_strategies(call: OpCall, length: int | None, *, keepdim: bool = True) -> Strategies:
    """Strategies of values and indices along ``dim``, which has ``length`` elements afterwards (None: unchanged)."""
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
    """The ``k`` largest or smallest elements along ``dim``, which must be whole."""
    return _sorting_strategies(call, call["k"])


@rule("kthvalue", "x, k, dim=-1, keepdim=False")
def kthvalue(call: OpCall) -> Strategies:
    """The ``k``-th smallest element along ``dim``, which must be whole."""
    return _sorting_strategies(call, 1, keepdim=bool(call["keepdim"]))


def _quantile(call: OpCall) -> Strategies:
    """Quantiles over dims that must be whole; several quantiles add a leading dim."""
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
    """The first ``size`` indices of nonzero elements; ``x`` must be whole."""
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
