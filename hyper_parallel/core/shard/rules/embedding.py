"""Embeddings: look-ups in a table that may be sharded by rows or by columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.core.shard.labels import Labels, labelled_rows, nonempty_rows
from hyper_parallel.core.shard.rule import LocalCall, OpCall, Row, Strategies, rule
from hyper_parallel.core.shard.rules.index import lookup, window
from hyper_parallel.core.shard.sample import indices, real, sample

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout


@rule(
    "embedding",
    "x, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False",
)
def embedding(call: OpCall) -> Strategies:
    """``…, vh -> …h``; a sharded ``v`` leaves Partial(sum): a rank contributes zeros for ids outside its rows."""
    x, weight = call["x"], call["weight"]
    if weight.ndim != 2:
        msg = f"weight has {weight.ndim} dims, it must have 2"
        raise ValueError(msg)
    padding = call["padding_idx"]
    if padding is not None and not -weight.shape[0] <= padding < weight.shape[0]:
        msg = f"padding_idx {padding} is out of range for a table of {weight.shape[0]} rows"
        raise ValueError(msg)
    _only_whole(call)
    ids = tuple(f"b{dim}" for dim in range(x.ndim))
    labels = Labels((ids, ("v", "h")), ((*ids, "h"),), whole=frozenset({"v"}), each=(1,))
    rows = _rows_for_sparse_gradient(call, lookup(labelled_rows(labels), 1, 0, 2))
    return Strategies(rows, ((*x.shape, weight.shape[1]),), _local)


def _rows_for_sparse_gradient(call: OpCall, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows in which every rank has all ids: a sparse gradient covers this rank's ids and is not reduced."""
    if not call["sparse"]:
        return rows
    if not call["x"].layout.is_replicated:
        msg = "a sparse gradient is not summed over ranks, so every rank needs all ids: x = x.redistribute()"
        raise ValueError(msg)
    ids = [operand.name for operand in call.operands].index("x")
    return tuple(row for row in rows if row.inputs[ids] == Replicate())


def _only_whole(call: OpCall, *more: str) -> None:
    for name in ("max_norm", "scale_grad_by_freq", *more):
        if call[name] not in (None, False) and not all(operand.layout.is_replicated for operand in call.operands):
            msg = (
                f"{name} needs the complete table, so the operands must be replicated: "
                "x = x.redistribute(); weight = weight.redistribute()"
            )
            raise ValueError(msg)


def _local(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall | None:
    del outputs
    arguments, padding = window(targets[1], 0), call["padding_idx"]
    if not arguments:
        return None
    return LocalCall({**arguments, "padding_idx": None if padding is None else padding % call["weight"].shape[0]})


@rule("lookup", "weight, x, padding_idx=-1, scale_grad_by_freq=False, sparse=False")
def aten_embedding(call: OpCall) -> Strategies:
    """``aten.embedding``: the table comes first, and a negative ``padding_idx`` means none."""
    weight, x = call["weight"], call["x"]
    _only_whole(call)
    ids = tuple(f"b{dim}" for dim in range(x.ndim))
    labels = Labels((("v", "h"), ids), ((*ids, "h"),), whole=frozenset({"v"}), each=(0,))
    rows = _rows_for_sparse_gradient(call, lookup(labelled_rows(labels), 0, 0, 2))

    def local(_: OpCall, targets: tuple[Layout, ...], __: tuple[Layout, ...]) -> LocalCall:
        padding = call["padding_idx"]
        return LocalCall({**window(targets[0], 0), "padding_idx": None if padding < 0 else padding})

    return Strategies(rows, ((*x.shape, weight.shape[1]),), local)


@rule(
    "embedding_bag",
    "x, weight, offsets=None, max_norm=None, norm_type=2, scale_grad_by_freq=False, mode='mean', sparse=False, "
    "per_sample_weights=None, include_last_offset=False, padding_idx=None",
)
def embedding_bag(call: OpCall) -> Strategies:
    """``n[i], [v]h, n[i] -> nh``: bags may be sharded if each is a row of ``x``, but not if offsets delimit them."""
    x, weight, offsets = (call[name] for name in ("x", "weight", "offsets"))
    if weight.ndim != 2 or x.ndim != (2 if offsets is None else 1):
        msg = f"x has {x.ndim} dims and weight {weight.ndim}: bags are rows of a matrix, or a vector and offsets"
        raise ValueError(msg)
    _only_whole(call, "sparse")
    ids = ("n", None) if offsets is None else (None,)
    names = {"x": ids, "weight": (None, "h"), "offsets": (None,), "per_sample_weights": ids}
    inputs = tuple(names[operand.name] for operand in call.operands)
    linear = [name for name in ("weight", "per_sample_weights") if call["mode"] != "max" and call[name] is not None]
    each = tuple(call.index_of(name) for name in linear)
    count = x.shape[0] if offsets is None else offsets.shape[0] - bool(call["include_last_offset"])
    labels = Labels(inputs, ((ids[0], "h"),), each=each)  # type: ignore[arg-type] # these are operands
    return Strategies(nonempty_rows(labels), ((count, weight.shape[1]),))


sample("embedding", indices("v", "ab"), real("vh"))
sample("embedding", indices("v", "a"), real("vh"))
sample("embedding", indices(7, "ab"), real(7, "h"), 2)
sample("embedding", indices(7, "a"), real(7, "h"), -1)
sample("lookup", real("vh"), indices("v", "ab"))
sample("lookup", real(7, "h"), indices(7, "ab"), 2)


sample("embedding_bag", indices("v", "ni"), real("vh"))
sample("embedding_bag", indices("v", "ni"), real("vh"), mode="sum")
sample("embedding_bag", indices("v", "ni"), real("vh"), mode="max")
