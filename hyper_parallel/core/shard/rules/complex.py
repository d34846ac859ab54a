"""Complex numbers: their parts, their conjugates, and a last dim of two that holds both parts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hyper_parallel.core.dtensor.placements import PARTIAL_OPS, Placement, Shard
from hyper_parallel.core.shard.rule import Row, Rule, Strategies, register_rule, rule
from hyper_parallel.core.shard.rules.pointwise import elementwise, pending
from hyper_parallel.core.shard.sample import complex_, real, sample, truth
from hyper_parallel.core.shard.signature import Labels, labelled_rows

if TYPE_CHECKING:
    from hyper_parallel.core.shard.call import OpCall

PAIR = 2


def _linear(call: OpCall) -> Strategies:
    """Parts of a sum are sums of parts."""
    return elementwise(call, joint=(0,))


def _same(call: OpCall) -> Strategies:
    """The same values, stored as they read."""
    return elementwise(call, extra=pending(1, (0,), PARTIAL_OPS))


for _name in ("conj", "real", "imag"):
    register_rule(Rule(_name, "x", _linear, view=True))
register_rule(Rule("conj_physical", "x", _linear))
for _name in ("resolve_conj", "resolve_neg"):
    register_rule(Rule(_name, "x", _same, view=True))


@rule("view_as_real", "x", view=True)
def view_as_real(call: OpCall) -> Strategies:
    """``… -> …[2]``, linear."""
    x = call["x"]
    names = tuple(f"d{dim}" for dim in range(x.ndim))
    labels = Labels((names,), ((*names, None),), None, joint=(0,))
    return Strategies(_filled(labels), ((*x.shape, PAIR),))


@rule("view_as_complex", "x", view=True)
def view_as_complex(call: OpCall) -> Strategies:
    """``…[2] -> …``, linear."""
    x = call["x"]
    if x.shape[-1:] != (PAIR,):
        msg = f"the last dim holds real and imaginary part, x is {list(x.shape)}"
        raise ValueError(msg)
    names = tuple(f"d{dim}" for dim in range(x.ndim - 1))
    labels = Labels(((*names, None),), (names,), None, joint=(0,))
    return Strategies(_filled(labels), (x.shape[:-1],))


def _filled(labels: Labels) -> tuple[Row, ...]:
    """No empty pieces: PyTorch asks them for strides, which nothing does not have (backward included)."""
    dims: dict[Placement, int] = {Shard(dim): dim for dim in range(len(labels.inputs[0]))}
    return tuple(
        replace(row, full=((0, dims[row.inputs[0]]),)) if row.inputs[0] in dims else row
        for row in labelled_rows(labels)
    )


# -- samples -----------------------------------------------------------------------------------------------------------

sample("conj conj_physical real imag view_as_real resolve_conj resolve_neg", complex_("ab"))
sample("conj conj_physical real resolve_conj resolve_neg", real("ab"))
sample("resolve_conj resolve_neg", truth("ab"))
sample("view_as_complex", real("ab2"))
