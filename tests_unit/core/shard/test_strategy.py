from __future__ import annotations

import math

import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard.rule import OpCall, Operand, Row, Strategies
from hyper_parallel.core.shard.strategy import choose, move_cost

MESH = DeviceMesh.abstract("cpu", (2, 3), tuple(range(6)), ("dp", "tp"))
R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def call_of(*placed):
    """A call whose operands are pairs of placements and shape."""
    operands = [Operand(f"x{n}", Layout.place(MESH, places, shape)) for n, (places, shape) in enumerate(placed)]
    return OpCall("op", MESH, tuple(operands), {})


def same(*rows, shape=(12, 12), **conditions):
    """Strategies of an operator with one operand, whose output has its layout."""
    return Strategies(tuple(Row((placement,), (placement,), **conditions) for placement in rows), (shape,))


def test_operands_stay_where_they_are_if_a_row_allows():
    """Along each axis a row that moves nothing is chosen."""
    choice = choose(call_of(([S0, S1], (12, 12))), same(R, S0, S1))
    assert choice.targets[0].placements == choice.outputs[0].placements == (S0, S1)
    assert choice.varying == ((),)


@pytest.mark.parametrize("order", [("dp", "tp"), ("tp", "dp")])
def test_the_order_of_shards_is_kept(order):
    """Two axes that split one dim split the output in the operand's order, so nothing moves."""
    layout = Layout.place(MESH, (order, None), (12, 12))
    choice = choose(OpCall("op", MESH, (Operand("x", layout),), {}), same(R, S0))
    assert choice.targets[0] is layout
    assert choice.outputs[0] is layout


def test_the_cheaper_operand_moves():
    """Of two operands in different shards the smaller one is redistributed."""
    rows = (Row((R, R), (R,)), Row((S0, S0), (S0,)), Row((S1, S1), (S1,)))
    call = call_of(([R, S0], (12, 12)), ([R, S1], (12, 12)))
    strategies = Strategies(rows, ((12, 12),))
    assert choose(call, strategies).outputs[0].placements == (R, S0)
    broadcast = Strategies((Row((R, R), (R,)), Row((S0, R), (S0,)), Row((R, S0), (S0,))), ((12, 12),))
    assert choose(call_of(([R, S0], (12, 12)), ([R, S0], (2,))), broadcast).targets[0].placements == (R, S0)


def test_whole_operands_vary_where_another_differs():
    """An operand that is replicated while another is sharded or partial varies on that axis only."""
    rows = (Row((R, R), (R,)), Row((S0, R), (S0,)), Row((P, R), (P,)))
    call = call_of(([S0, P], (12, 12)), ([R, R], (12,)))
    assert choose(call, Strategies(rows, ((12, 12),))).varying == ((), (0, 1))


@pytest.mark.parametrize("conditions, size, placement", [
    ({"even": ((0, 0),)}, 12, S0), ({"even": ((0, 0),)}, 5, R),
    ({"full": ((0, 0),)}, 5, S0), ({"full": ((0, 0),)}, 4, R), ({"full": ((0, 0),)}, 0, R),
    ({"sizes": ((0, 0, 6),)}, 12, S0), ({"sizes": ((0, 0, 4),)}, 12, R),
])  # fmt: skip
def test_conditions_on_sizes(conditions, size, placement):
    """A row whose sizes do not divide, or that would leave a rank empty, is not taken."""
    rows = (Row((R,), (R,)), Row((S0,), (S0,), **conditions))
    call = call_of(([R, S0], (size, 2)))
    assert choose(call, Strategies(rows, ((size, 2),))).outputs[0].placements == (R, placement)


def test_conditions_count_what_other_axes_cut():
    """A dim must divide by the product of all axes that shard it."""
    rows = (Row((R,), (R,)), Row((S0,), (S0,), even=((0, 0),)))
    layout = Layout.place(MESH, [S0, S0], (4, 2))
    choice = choose(OpCall("op", MESH, (Operand("x", layout),), {}), Strategies(rows, ((4, 2),)))
    assert choice.outputs[0].placements == (S0, R)


def test_what_is_written_never_moves():
    """An in-place call keeps its first operand's layout, order included, or has no strategy."""
    call = call_of(([R, S0], (12, 12)))
    assert choose(call, same(R, S1), in_place=True) is None
    assert choose(call, same(R, S0), in_place=True).outputs[0] is call.operands[0].layout
    wider = Strategies((Row((R,), (R,)), Row((S0,), (S0,))), ((2, 12, 12),))
    assert choose(call, wider, in_place=True) is None


@pytest.mark.parametrize("now, wanted, cost", [
    (S0, S0, 0), (R, S0, 0), (R, P, 0), (P, Partial("avg"), math.inf), (P, S0, 9), (Partial("max"), S0, 18),
    (P, R, 18), (S0, R, 9), (S0, S1, 2.25), (S0, P, 9),
])  # fmt: skip
def test_costs(now, wanted, cost):
    """Costs are elements received by one rank; one partial reduction cannot become another."""
    assert move_cost(now, wanted, 12, 4) == cost
