"""Normalisations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel.core.shard.rule import Strategies, rule
from hyper_parallel.core.shard.sample import real, sample, size
from hyper_parallel.core.shard.signature import Labels, labelled_rows

if TYPE_CHECKING:
    from hyper_parallel.core.shard.call import OpCall


def _over_last(call: OpCall) -> tuple[Strategies, tuple[str, ...]]:
    x, sizes = call["x"], call["normalized_shape"]
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    if tuple(x.shape[x.ndim - len(sizes) :]) != sizes:
        msg = f"normalized_shape {list(sizes)} does not end x's shape {list(x.shape)}"
        raise ValueError(msg)
    for operand in call.operands[1:]:
        if operand.shape != sizes:
            msg = f"{operand.name} has shape {list(operand.shape)}, normalized_shape is {list(sizes)}"
            raise ValueError(msg)
    whole = tuple(f"h{dim}" for dim in range(len(sizes)))
    batch = tuple(f"b{dim}" for dim in range(x.ndim - len(sizes)))
    inputs = ((*batch, *whole), *(whole for _ in call.operands[1:]))
    rows = labelled_rows(Labels(inputs, ((*batch, *whole),), whole=frozenset(whole)))
    return Strategies(rows, (x.shape,)), batch


@rule("layer_norm", "x, normalized_shape, weight=None, bias=None, eps=1e-05")
def layer_norm(call: OpCall) -> Strategies:
    """``…[h], [h], [h] -> …[h]``."""
    return _over_last(call)[0]


@rule("rms_norm", "x, normalized_shape, weight=None, eps=None")
def rms_norm(call: OpCall) -> Strategies:
    """``…[h], [h] -> …[h]``."""
    return _over_last(call)[0]


@rule("native_layer_norm", "x, normalized_shape, weight, bias, eps")
def native_layer_norm(call: OpCall) -> Strategies:
    """``…[h], [h], [h] -> …[h], …1, …1``."""
    found, batch = _over_last(call)
    whole = tuple(f"h{dim}" for dim in range(call["x"].ndim - len(batch)))
    statistics = (*batch, *(None for _ in whole))
    inputs = ((*batch, *whole), *(whole for _ in call.operands[1:]))
    rows = labelled_rows(Labels(inputs, ((*batch, *whole), statistics, statistics), whole=frozenset(whole)))
    ((*shape,),) = found.outputs
    small = (*shape[: len(batch)], *(1 for _ in whole))
    return Strategies(rows, (tuple(shape), small, small), many=True)


@rule("group_norm", "x, num_groups, weight=None, bias=None, eps=1e-05")
def group_norm(call: OpCall) -> Strategies:
    """``n[c…], [c], [c] -> n[c…]``."""
    x = call["x"]
    names = ("n", *(f"c{dim}" for dim in range(1, x.ndim)))
    labels = Labels((names, *(("c1",) for _ in call.operands[1:])), (names,), whole=frozenset(names[1:]))
    return Strategies(labelled_rows(labels), (x.shape,))


sample("layer_norm", real("abh"), (size("h"),), real("h"), real("h"))
sample("layer_norm", real("agh"), (size("g"), size("h")), real("gh"))
sample("layer_norm", real("ah"), (size("h"),))
sample("native_layer_norm", real("abh"), (size("h"),), real("h"), real("h"), 1e-5)
sample("rms_norm", real("abh"), (size("h"),), real("h"), 1e-6)
sample("rms_norm", real("agh"), (size("g"), size("h")))
sample("group_norm", real("a", 4, "b"), 2, real(4), real(4))
sample("group_norm", real("a", 6, "bc"), 3)
