"""Signatures as text."""

from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard.call import OpCall, Operand
from hyper_parallel.core.shard.pattern import pattern
from hyper_parallel.core.shard.rule import whole
from hyper_parallel.verify.simulate import simulate

R, P, A, S0, S1 = Replicate(), Partial(), Partial("avg"), Shard(0), Shard(1)


def call_of(**shapes):
    """A call of replicated operands with these shapes."""
    mesh = simulate(lambda: init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), 1)[0]
    operands = tuple(Operand(name, Layout.of(mesh, ((),) * len(shape), (), shape)) for name, shape in shapes.items())
    return OpCall("op", mesh, operands, {})


def rows(found):
    """Rows as pairs of inputs and outputs."""
    return [(row.inputs, row.outputs) for row in found.rows]


def test_leading_dims_run_through_and_brackets_stay_whole():
    """Leading dims broadcast; a bare letter may be sharded wherever it stands."""
    found = pattern(call_of(x=(4, 2, 3), tau=(1, 5)), "x ...[m][n], tau ...k -> ...[m]k", each=("tau",))
    assert found.outputs == ((4, 2, 5),)
    assert rows(found) == [
        ((R, R), (R,)),
        ((S0, R), (S0,)),
        ((R, S1), (Shard(2),)),
        ((R, P), (P,)),
        ((R, A), (A,)),
    ]


def test_sizes_of_new_dims_are_given_or_computed():
    """A dim that only outputs have gets its size from a number, or from the operands' sizes."""
    sizes = {"k": lambda known: min(known["m"], known["n"]), "two": 2}
    found = pattern(call_of(x=(4, 2, 3)), "x ...[m][n] -> ...[k], ...[two][k]", sizes)
    assert (found.outputs, found.many) == (((4, 2), (4, 2, 2)), True)


def test_an_output_without_a_label_must_be_empty():
    """An output that lacks a sharded dim would differ between ranks, unless it holds nothing."""
    empty = pattern(call_of(x=(4, 3)), "x ...[m] -> ...[m], [none]", {"none": 0})
    other = pattern(call_of(x=(4, 3)), "x ...[m] -> ...[m], [one]", {"one": 1})
    assert rows(empty) == [((R,), (R, R)), ((S0,), (S0, R))]
    assert rows(other) == [((R,), (R, R))]


def test_empty_pieces_can_be_excluded():
    """``full`` asks that no rank's piece is empty."""
    found = pattern(call_of(x=(4, 3), y=(4, 2)), "x ...[m], y ...[n] -> ...", full=True)
    assert [row.full for row in found.rows] == [(), ((0, 0), (1, 0))]


def test_an_operand_that_was_not_given_drops_out():
    """Terms are found by the operands' names."""
    assert rows(pattern(call_of(x=(4, 3)), "x ...[m], tol ... -> ...")) == [((R,), (R,)), ((S0,), (S0,))]


@pytest.mark.parametrize(
    "shapes, message",
    [
        ({"x": (3,)}, "x has 1 dims, it needs at least 2"),
        ({"x": (3, 4)}, "x [3, 4] does not fit: dim n is 3 elsewhere"),
        ({"x": (3, 3), "y": (3, 3)}, "y has 2 dims, it needs 1"),
    ],
)
def test_operands_that_do_not_fit_are_named(shapes, message):
    """The message says which operand, and what it lacks."""
    with pytest.raises(ValueError, match=r".") as caught:
        pattern(call_of(**shapes), "x ...[n][n], y [n] -> ...")
    assert str(caught.value) == message


def test_a_whole_operator_promises_nothing_about_its_results():
    """Its only row has whole operands and no outputs: those are wrapped as they come."""
    found = whole(call_of(x=(4, 3), y=(2,)))
    assert (rows(found), found.outputs, found.open) == ([((R, R), ())], (), True)
