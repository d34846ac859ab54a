"""Reductions: a reduced dim may be sharded, leaving Partial, if that is exact for values and gradients.

For other reductions (products, norms, variances, floating-point max and min, where ties share a gradient) the reduced
dims must not be sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Partial, Shard
from hyper_parallel.core.shard.labels import Labels, labelled_rows, nonempty_row
from hyper_parallel.core.shard.rule import LocalCall, OpCall, Row, Rule, Strategies, decomposition, register_rule, rule
from hyper_parallel.core.shard.rules.pointwise import is_floating_dtype, partial_rows
from hyper_parallel.core.shard.sample import booleans, dtype, integers, nonfinite, real, sample
from hyper_parallel.errors import LayoutError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["reduced_dims", "reduced_labels"]

HALF_PRECISION_ITEMSIZE = 2  # bytes


def reduced_dims(dim: Any, ndim: int) -> tuple[int, ...]:
    """Return the dims that ``dim`` (None, int or sequence) names, counted from the left.

    Raises:
        ValueError: a dim does not exist, or is named twice.
    """
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if any(not -max(ndim, 1) <= dim_ < max(ndim, 1) for dim_ in dims):
        msg = f"dim {dim} does not exist in a tensor of {ndim} dims"
        raise ValueError(msg)
    normal = tuple(dim_ % max(ndim, 1) for dim_ in dims)
    if len(set(normal)) != len(normal):
        msg = f"dim {dim} names a dim twice"
        raise ValueError(msg)
    return tuple(dim_ for dim_ in normal if dim_ < ndim)


def reduced_labels(shape: Sequence[int], dims: Sequence[int], *, keepdim: bool) -> tuple[Any, Any, tuple[int, ...]]:
    """Labels of input and output, and the output's shape, of a reduction over ``dims``."""
    names = tuple(f"d{dim}" for dim in range(len(shape)))
    if keepdim:
        output = tuple(None if dim in dims else name for dim, name in enumerate(names))
        return names, output, tuple(1 if dim in dims else size for dim, size in enumerate(shape))
    kept = [dim for dim in range(len(shape)) if dim not in dims]
    return names, tuple(names[dim] for dim in kept), tuple(shape[dim] for dim in kept)


def _reduction(call: OpCall, reduce: str | None, *, joint: bool = False, outputs: int = 1) -> Strategies:
    """Strategies of a reduction over ``dim``: a sharded dim leaves Partial(``reduce``); None forbids sharding it."""
    x = call["x"]
    names, output, shape = reduced_labels(x.shape, reduced_dims(call["dim"], x.ndim), keepdim=bool(call["keepdim"]))
    labels = Labels((names,), (output,) * outputs, reduce, joint=(0,) if joint else ())
    return Strategies(labelled_rows(labels), (shape,) * outputs, many=outputs > 1)


# -- sums --------------------------------------------------------------------------------------------------------------


@rule("sum", "x, dim=None, keepdim=False, *, dtype=None")
def sum_(call: OpCall) -> Strategies:
    """``…d -> …``, linear: a sharded ``d`` leaves Partial(sum)."""
    return _reduction(call, "sum", joint=call["dtype"] is None or is_floating_dtype(call["dtype"]))


@rule("nansum", "x, dim=None, keepdim=False, *, dtype=None")
def nansum(call: OpCall) -> Strategies:
    """A sum that skips NaN: a sharded dim leaves Partial(sum), but a Partial operand is reduced first."""
    return _reduction(call, "sum")


@rule("count_nonzero", "x, dim=None", by_value=True)
def count_nonzero(call: OpCall) -> Strategies:
    """The number of nonzero elements: a sharded dim leaves Partial(sum)."""
    x = call["x"]
    names, output, shape = reduced_labels(x.shape, reduced_dims(call["dim"], x.ndim), keepdim=False)
    return Strategies(labelled_rows(Labels((names,), (output,))), (shape,))


@rule("mean", "x, dim=None, keepdim=False, *, dtype=None", by_dtype=True)
def mean(call: OpCall) -> Strategies:
    """A sharded dim leaves Partial(sum) of local means, weighted by their share of the global count.

    An integer mean is rounded, so the reduced dims of integers must not be sharded.
    """
    dtype = call["dtype"]
    divides = call["x"].floating if dtype is None else is_floating_dtype(dtype)
    strategies = _reduction(call, "sum" if divides else None, joint=divides)
    return Strategies(strategies.rows, strategies.outputs, _global_mean)


def _global_mean(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall | None:
    del outputs
    layout = targets[0]
    dims = reduced_dims(call["dim"], layout.ndim)
    if not any(layout.dim_axes[dim] for dim in dims):
        return None
    x, local_shape = call["x"], layout.local_shape
    count, local_count = math.prod([x.shape[dim] for dim in dims]), math.prod([local_shape[dim] for dim in dims])

    def run(platform: Any, args: dict[str, Any]) -> Any:
        if count and not local_count:
            return platform.local_op("sum")(**args)  # an empty shard has sum zero, but mean NaN
        result = platform.local_op("mean")(**args)
        if not count:
            return result  # NaN on every rank
        # In half precision ``result * local_count`` may overflow. Otherwise only integers are used as factors, because
        # MindSpore rounds other Python scalars to float32.
        return (
            result * (local_count / count)
            if platform.itemsize(result) <= HALF_PRECISION_ITEMSIZE
            else result * local_count / count
        )

    return LocalCall(run=run)


# -- booleans and integer extrema --------------------------------------------------------------------------------------


def _booleans(call: OpCall) -> Strategies:
    return _reduction(call, call.op)


register_rule(Rule("any", "x, dim=None, keepdim=False", _booleans))
register_rule(Rule("all", "x, dim=None, keepdim=False", _booleans))


def _extremum(call: OpCall) -> Strategies:
    """For integers, a sharded reduced dim leaves Partial. For floats, no reduced dim may be sharded.

    Elements that tie for the extremum share its gradient, so backward needs the complete dim.

    Without a gradient, a maximum of Partial(max) stays Partial, as does a minimum of Partial(min).
    """
    x = call["x"]
    strategies = _reduction(call, None)
    if str(x.dtype).lower().endswith("bool"):
        return strategies
    if x.floating:
        passing = () if x.needs_grad else partial_rows(1, (0,), (call.op[1:],))
        return Strategies((*strategies.rows, *passing), strategies.outputs)
    return Strategies((*strategies.rows, *_partial_extrema(call)), strategies.outputs)


def _partial_extrema(call: OpCall) -> Iterator[Row]:
    x, op = call["x"], call.op[1:]
    for dim in reduced_dims(call["dim"], x.ndim):
        yield Row((Shard(dim),), (Partial(op),), full=((0, dim),))
    yield Row((Partial(op),), (Partial(op),))


register_rule(Rule("amax", "x, dim=None, keepdim=False", _extremum, by_dtype=True))
register_rule(Rule("amin", "x, dim=None, keepdim=False", _extremum, by_dtype=True))


# -- unsharded dims ---------------------------------------------------------------------------------------------------


def _whole(call: OpCall) -> Strategies:
    return _reduction(call, None)


def _whole_pair(call: OpCall) -> Strategies:
    return _reduction(call, None, outputs=2)


_VAR = "x, dim=None, *, correction=1, keepdim=False"
for _name, _signature in {
    "prod": "x, dim=None, keepdim=False, *, dtype=None",
    "argmax": "x, dim=None, keepdim=False",
    "argmin": "x, dim=None, keepdim=False",
    "logsumexp": "x, dim, keepdim=False",
    "hash_tensor": "x, dim=None, *, keepdim=False, mode=0",
    "var": _VAR,
    "std": _VAR,
    "vector_norm": "x, ord=2, dim=None, keepdim=False, *, dtype=None",
}.items():
    register_rule(Rule(_name, _signature, _whole))
for _name, _signature in {
    "max_along": "x, dim, keepdim=False",
    "min_along": "x, dim, keepdim=False",
    "median_along": "x, dim, keepdim=False",
    "nanmedian_along": "x, dim, keepdim=False",
    "mode": "x, dim=-1, keepdim=False",
    "aminmax": "x, *, dim=None, keepdim=False",
    "var_mean": _VAR,
    "std_mean": _VAR,
}.items():
    register_rule(Rule(_name, _signature, _whole_pair))


@rule("extreme_all", "x, largest", by_dtype=True)
def extreme_all(call: OpCall) -> Strategies:
    """The largest or smallest of all elements; ``x`` must be replicated, or Partial of the same extremum."""
    x = call["x"]
    rows = labelled_rows(Labels(((None,) * x.ndim,), ((),), None))
    if not (x.floating and x.needs_grad) and not str(x.dtype).lower().endswith("bool"):
        rows = (*rows, *partial_rows(1, (0,), ("max" if call["largest"] else "min",)))
    return Strategies(rows, ((),))


@rule("median_all", "x, skip_nan=False")
def median_all(call: OpCall) -> Strategies:
    """The median of all elements; ``x`` must be replicated."""
    return Strategies(labelled_rows(Labels(((None,) * call["x"].ndim,), ((),), None)), ((),))


def _median(op: str) -> None:
    @decomposition(op, "x, dim=None, keepdim=False")
    def run(ops: Any, x: Any, dim: Any, keepdim: Any) -> Any:
        """The median of all elements, or along ``dim`` with its index."""
        if dim is None:
            return ops.median_all(x, op == "nanmedian")
        return (ops.nanmedian_along if op == "nanmedian" else ops.median_along)(x, dim, keepdim)


_median("median")
_median("nanmedian")


@decomposition("trace", "x")
def trace(ops: Any, x: Any) -> Any:
    """The sum of the diagonal of a matrix."""
    if x.ndim != 2:
        msg = f"trace: expected a matrix, x has {x.ndim} dims"
        raise LayoutError(msg)
    return ops.sum(ops.diagonal(x))


@decomposition("dist", "x, y, p=2")
def dist(ops: Any, x: Any, y: Any, p: Any) -> Any:
    """The p-norm of ``x - y``."""
    return ops.vector_norm(ops.sub(x, y), p)


@rule("renorm", "x, p, dim, maxnorm")
def renorm(call: OpCall) -> Strategies:
    """Slices along ``dim``, which may be sharded, are scaled by their norms; the other dims must not be sharded."""
    x = call["x"]
    (dim,) = reduced_dims(call["dim"], x.ndim)
    names = tuple(f"d{d}" for d in range(x.ndim))
    labels = Labels((names,), (names,), None, frozenset(names) - {f"d{dim}"})
    return Strategies(labelled_rows(labels), (x.shape,))


def _extreme(op: str) -> None:
    @decomposition(op, "x, dim=None, keepdim=False, *, y=None")
    def run(ops: Any, x: Any, dim: Any, keepdim: Any, y: Any) -> Any:
        """The extremum of all elements, along ``dim`` with its index, or of two tensors element by element."""
        if ops.platform.is_tensor(dim):
            y, dim = dim, None
        if y is not None:
            return (ops.maximum if op == "max" else ops.minimum)(x, y)
        if dim is None:
            return ops.extreme_all(x, op == "max")
        return (ops.max_along if op == "max" else ops.min_along)(x, dim, keepdim)


_extreme("max")
_extreme("min")


# -- along one dim that is kept ----------------------------------------------------------------------------------------


def _along(call: OpCall, *, linear: bool = False, outputs: int = 1) -> Strategies:
    x = call["x"]
    (dim,) = reduced_dims(call["dim"], x.ndim) or (None,)
    names = tuple(f"d{d}" for d in range(x.ndim))
    whole = frozenset({f"d{dim}"})
    labels = Labels((names,), (names,) * outputs, None, whole, joint=(0,) if linear else ())
    return Strategies(labelled_rows(labels), (x.shape,) * outputs, many=outputs > 1)


def _softmax_backward_strategies(call: OpCall) -> Strategies:
    """Strategies of an operator on a gradient and an output; neither may be sharded along ``dim``."""
    x = call["x"]
    names = tuple(f"d{d}" for d in range(x.ndim))
    whole = frozenset(f"d{d}" for d in reduced_dims(call["dim"], x.ndim))
    return Strategies(labelled_rows(Labels((names, names), (names,), None, whole)), (x.shape,))


def _cumulative(call: OpCall, outputs: int = 1) -> Strategies:
    """Strategies that exclude empty shards, whose backward graph would lack collectives that other ranks wait for."""
    strategies = _along(call, outputs=outputs)
    return replace(strategies, rows=tuple(map(nonempty_row, strategies.rows)))


def _cumulative_pair(call: OpCall) -> Strategies:
    return _cumulative(call, 2)


def _soft(call: OpCall) -> Strategies:
    x, dim = call["x"], call["dim"]
    if dim is None:  # deprecated default of the frameworks
        dim = 0 if x.ndim in {0, 1, 3} else 1
    names = tuple(f"d{d}" for d in range(x.ndim))
    labels = Labels((names,), (names,), None, frozenset({f"d{d}" for d in reduced_dims(dim, x.ndim)}))
    return Strategies(labelled_rows(labels), (x.shape,))


def _cumsum(call: OpCall) -> Strategies:
    return _along(call, linear=call["dtype"] is None)


register_rule(Rule("cumsum", "x, dim, *, dtype=None", _cumsum))
register_rule(Rule("cumprod", "x, dim, *, dtype=None", _cumulative))
register_rule(Rule("logcumsumexp", "x, dim", _cumulative))
register_rule(Rule("cummax", "x, dim", _cumulative_pair))
register_rule(Rule("cummin", "x, dim", _cumulative_pair))
register_rule(Rule("safe_softmax", "x, dim, dtype=None", _along))
register_rule(Rule("softmax_backward", "x, output, dim, input_dtype", _softmax_backward_strategies))
register_rule(Rule("log_softmax_backward", "x, output, dim, input_dtype", _softmax_backward_strategies))
for _name in ("softmax", "softmin", "log_softmax"):
    register_rule(Rule(_name, "x, dim, dtype=None", _soft))


# -- norms -------------------------------------------------------------------------------------------------------------


@decomposition("norm", "x, p='fro', dim=None, keepdim=False, dtype=None")
def norm(ops: Any, x: Any, p: Any, dim: Any, keepdim: Any, dtype: Any) -> Any:
    """``torch.norm``: a vector norm (such as the Frobenius norm), or the nuclear norm of matrices."""
    if p == "nuc":
        return ops.matrix_norm(x, p, (-2, -1) if dim is None else dim, keepdim, dtype=dtype)
    return ops.vector_norm(x, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


# -- samples -----------------------------------------------------------------------------------------------------------

_VALUES = "sum mean amax amin var std vector_norm prod"
sample(f"{_VALUES} nansum count_nonzero", real("ab"))
sample(f"{_VALUES} nansum count_nonzero argmax argmin logsumexp", real("abc"), dim=1)
sample("sum mean nansum amax amin var std logsumexp vector_norm count_nonzero", real("abc"), dim=(0, 2))
sample("sum mean nansum amax amin var std logsumexp vector_norm", real("abc"), dim=(0, -1), keepdim=True)
sample("sum mean prod", real("ab"), dim=0, dtype=dtype("float32"))
sample("sum amax amin prod count_nonzero", integers(-3, 4, "ab"), dim=0)
sample("sum amax amin", integers(-3, 4, "ab"))
sample("nansum", nonfinite("ab"), dim=0)
sample("any all", booleans("ab"), dim=1)
sample("any all", booleans("ab"), dim=0, keepdim=True)
sample("any all", booleans("ab"))
sample("argmax argmin", real("ab"))
sample("argmax argmin", integers(-2, 3, "ab"), dim=0, keepdim=True)
sample("max_along min_along median_along", real("abc"), 1)
sample("max_along min_along median_along", real("ab"), 0, True)
sample("extreme_all", real("ab"), True)
sample("extreme_all", real("ab"), False)
sample("max min", real("ab"))
sample("max min", real("ab"), 1)
sample("max min", real("ab"), y=real("b"))
sample("var std", real("ab"), correction=0)
sample("var_mean std_mean", real("abc"), 1)
sample("var_mean std_mean", real("abc"), (0, 2), correction=0, keepdim=True)
sample("vector_norm", real("ab"), 3, 1)
sample("vector_norm", real("ab"), float("inf"), 0)
sample("norm", real("ab"))
sample("norm", real("ab"), 1, 0)
sample("cumsum cumprod logcumsumexp softmax softmin log_softmax", real("abc"), 1)
sample("cumsum cumprod logcumsumexp softmax softmin log_softmax", real("ab"), -1)
sample("cumsum", real("ab"), 0, dtype=dtype("float32"))
sample("softmax log_softmax", real("ab"), 0, dtype=dtype("float32"))
sample("mode aminmax nanmedian_along", real("abc"), dim=1)
sample("mode nanmedian_along", integers(-2, 3, "ab"), 0, True)
sample("aminmax", real("ab"))
sample("aminmax", integers(-2, 3, "ab"), dim=0, keepdim=True)
sample("median nanmedian median_all", real("ab"))
sample("median nanmedian", real("ab"), 0)
sample("median_all", nonfinite("ab"), True)
sample("hash_tensor", integers(-9, 9, "ab"))
sample("hash_tensor", integers(-9, 9, "abc"), 1, keepdim=True)
sample("cummax cummin", real("abc"), 1)
sample("cummax cummin", integers(-2, 3, "ab"), 0)
sample("safe_softmax", real("abc"), 1)
sample("renorm", real("abc"), 2, 1, 0.5)
sample("trace", real("ab"))
sample("dist", real("ab"), real("b"), 3)
sample("softmax_backward log_softmax_backward", real("abc"), real("abc"), 1, dtype("float64"))
