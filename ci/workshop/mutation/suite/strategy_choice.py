"""Scenarios of choosing: the conditions that rows state on sizes, and the order in which axes cut a dim they share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Partial, Placement, Shard
from hyper_parallel.core.shard.rule import LayoutOptions, OpCall, Operand, Ref, Row, Strategies
from hyper_parallel.core.shard.strategy import cheapest, choose, combine, move_cost
from hyper_parallel.verify.ops.claims import mesh_of
from workshop.mutation.suite.fixture import S0, Fixture, P, R

__all__ = ["axes_keep_their_order", "moves_have_prices", "options_are_compared", "rows_state_conditions",
           "writes_stay_where_they_are"]  # fmt: skip

_MESH = (2, 3)
_WHOLE, _CUT = Row((R,), (R,)), Row((S0,), (S0,))
_EVEN, _FULL = Row((S0,), (S0,), even=((0, 0),)), Row((S0,), (S0,), full=((0, 0),))
_Case = tuple[int, Row, Row, bool]


def _of_size(other: int) -> Row:
    return Row((S0,), (S0,), sizes=((0, 0, other),))


def _after(*parts: int) -> Row:
    return Row((S0,), (S0,), cut=((0, 0, *parts),))


# The size, a row for the axis of two ranks, one for the axis of three, and whether that may be.
_CASES: tuple[_Case, ...] = (
    (6, _EVEN, _WHOLE, True), (7, _EVEN, _WHOLE, False), (9, _WHOLE, _EVEN, True), (8, _WHOLE, _EVEN, False),
    (12, _EVEN, _EVEN, True), (8, _EVEN, _EVEN, False), (10, _EVEN, _EVEN, False), (9, _CUT, _EVEN, False),
    (2, _FULL, _WHOLE, True), (1, _FULL, _WHOLE, False), (0, _FULL, _WHOLE, False), (3, _FULL, _WHOLE, True),
    (3, _WHOLE, _FULL, True), (5, _WHOLE, _FULL, True), (4, _WHOLE, _FULL, False), (2, _WHOLE, _FULL, False),
    (7, _WHOLE, _FULL, True), (6, _CUT, _FULL, True), (7, _CUT, _FULL, False), (10, _CUT, _FULL, False),
    (0, _CUT, _FULL, False), (12, _FULL, _FULL, True), (8, _FULL, _FULL, False), (1, _CUT, _FULL, False),
    (5, _WHOLE, _of_size(9), True), (5, _WHOLE, _of_size(8), False), (5, _CUT, _of_size(12), True),
    (5, _CUT, _of_size(9), False), (5, _CUT, _of_size(10), False), (5, _of_size(4), _WHOLE, True),
    (5, _CUT, _after(2), True), (5, _WHOLE, _after(2), False), (5, _WHOLE, _after(1), True),
    (5, _CUT, _after(1), False), (5, _CUT, _after(2, 6), True), (5, _CUT, _after(2, 8), False),
    (5, _CUT, _after(1, 12), True),
    (5, _CUT, _after(1, 9), False), (5, _WHOLE, _after(2, 6), False), (5, _WHOLE, _after(1, 9), True),
    (5, _WHOLE, _after(3, 9), False), (5, _CUT, _after(1, 5), False),
)  # fmt: skip


def rows_state_conditions(_: Fixture) -> None:
    """A row is taken on an axis only where sizes, and what axes before it cut, are as it asks; an operand at a time."""
    mesh = mesh_of(_MESH)
    for size, first, second, wanted in _CASES:
        layout = Layout.place(mesh, [R, R], (size,))
        call = OpCall("probe", mesh, (Operand("x", layout),), {"x": Ref(0)})
        choice = combine(call, Strategies((first, second), ((size,),)), (first, second), (0, 1))
        assert (choice is not None) == wanted, (size, first, second)
    several = Row((S0, S0), (S0,), even=((0, 0), (1, 0)), full=((0, 0), (1, 0)), sizes=((0, 0, 6), (1, 0, 6)))
    for sizes, wanted in (((6, 6), True), ((6, 7), False), ((7, 6), False)):
        call = _call([Layout.place(mesh, [R, R], (size,)) for size in sizes])
        picked = (several, Row((R, R), (R,)))
        assert (combine(call, Strategies(picked, ((6,),)), picked, (0, 1)) is not None) == wanted
    for condition in (((0, 0, 1), (1, 0, 2)), ((1, 0, 2), (0, 0, 1))):
        strict = Row((S0, S0), (S0,), cut=condition)
        call = _call([Layout.place(mesh, [R, R], (6,))] * 2)
        assert combine(call, Strategies((strict,), ((6,),)), (strict, strict), (0, 1)) is None


def _call(layouts: Sequence[Layout]) -> OpCall:
    names = ("x", "y")
    operands = tuple(Operand(name, layout) for name, layout in zip(names, layouts, strict=True))
    return OpCall("probe", layouts[0].mesh, operands, {name: Ref(index) for index, name in enumerate(names)})


def moves_have_prices(_: Fixture) -> None:
    """Elements that one of three ranks receives to change the placement of twelve, and of a row all operands'."""
    most, mean, s1 = Partial("max"), Partial("avg"), Shard(1)
    wanted: tuple[tuple[Placement, Placement, float], ...] = (
        (R, R, 0), (S0, S0, 0), (P, P, 0), (R, S0, 0), (R, P, 0), (P, most, math.inf), (P, S0, 8), (mean, S0, 8),
        (most, S0, 16), (P, R, 16), (mean, R, 16), (most, R, 16), (S0, R, 8), (S0, s1, 8 / 3), (S0, P, 8),
    )  # fmt: skip
    for now, then, price in wanted:
        assert math.isclose(move_cost(now, then, 12, 3), price), (now, then)


def axes_keep_their_order(_: Fixture) -> None:
    """Of operands that axes cut together the largest keeps its order; where one is written, that one does."""
    mesh = mesh_of(_MESH)
    strategies = Strategies((Row((S0, S0), (S0,)), Row((R, R), (R,))), ((12, 5),))
    orders = [((1, 0), ()), ((0, 1), ())]
    for (first, second), (left, right) in itertools.product(itertools.permutations(orders), ((5, 50), (50, 5), (5, 5))):
        x, y = (Layout.of(mesh, order, (), (12, size)) for order, size in ((first, left), (second, right)))
        sized = Strategies(strategies.rows, ((12, left),))
        free, kept = choose(_call([x, y]), sized), choose(_call([x, y]), sized, in_place=True)
        assert free is not None
        assert kept is not None
        assert kept.targets[0] is kept.outputs[0] is x
        largest = 0 if left > right else 1
        assert free.targets[largest] is (x, y)[largest]
        assert free.targets[0].dim_axes == free.targets[1].dim_axes == free.outputs[0].dim_axes
    alone = Layout.of(mesh, ((1,), (0,)), (), (12, 5))
    choice = choose(_call([alone, Layout.of(mesh, ((1, 0), ()), (), (12, 5))]), strategies)
    assert choice is not None
    assert choice.targets[0].dim_axes[0] in ((1, 0), (1,), (0, 1), ())


def writes_stay_where_they_are(_: Fixture) -> None:
    """In place there is a choice only if the first operand and the result stay what and where the first one is."""
    mesh = mesh_of(_MESH)
    rows = (Row((R, R), (R,)), Row((S0, S0), (S0,)), Row((P, P), (P,)), Row((S0, R), (P,)))
    places = list(itertools.product((R, S0, P), repeat=2))
    for left, right in itertools.product(places, repeat=2):
        x, y = (Layout.place(mesh, placements, (12, 5)) for placements in (left, right))
        kept = choose(_call([x, y]), Strategies(rows, ((12, 5),)), in_place=True)
        assert kept is not None
        assert kept.targets[0] is kept.outputs[0] is x
    x, y = Layout.place(mesh, [S0, S0], (12, 5)), Layout.place(mesh, [R, R], (12, 5))
    for row in (Row((S0, R), (P,)), Row((R, S0), (S0,)), Row((R, R), (R,))):
        assert choose(_call([x, y]), Strategies((row,), ((12, 5),)), in_place=True) is None
    grown = Strategies((Row((S0, R), (S0,)),), ((12, 6),))
    assert choose(_call([x, y]), grown, in_place=True) is None
    assert choose(_call([x, y]), grown) is not None


def options_are_compared(_: Fixture) -> None:
    """Of options in whole layouts the cheapest is taken, computed or as given; where both cost nothing, fewer moves."""
    mesh = mesh_of(_MESH)
    whole, rows = (Layout.place(mesh, [placement, R], (12,)) for placement in (R, S0))
    stay, go = ((whole, whole), (whole,), None), ((rows, whole), (rows,), None)
    for options in ((stay, go), (go, stay)):
        assert cheapest(_call([whole, whole]), LayoutOptions(options)).targets == (whole, whole)
    for cost, wanted in ((5.0, rows), (7.0, whole)):  # the other option receives six elements
        listed = LayoutOptions((((rows, rows), (rows,), cost), ((whole, rows), (whole,), None)))
        assert cheapest(_call([rows, rows]), listed).targets[0] is wanted
