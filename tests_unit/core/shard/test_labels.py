"""Labelled dims become rows, from objects and from text."""

from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard.labels import Labels, broadcast_labels, labelled_rows, pattern
from hyper_parallel.core.shard.rule import OpCall, Operand, Row, whole
from hyper_parallel.verify.simulate import simulate

R, P, A, S0, S1 = Replicate(), Partial(), Partial("avg"), Shard(0), Shard(1)


def rows(**parts):
    """Rows of labels as pairs of inputs and outputs."""
    return [(row.inputs, row.outputs) for row in labelled_rows(Labels(**parts))]


def rows_of(strategies):
    """Rows of strategies as pairs of inputs and outputs."""
    return [(row.inputs, row.outputs) for row in strategies.rows]


def test_contracted_labels_leave_sums():
    """A label in the outputs stays sharded; one missing there leaves a partial sum, which `joins` operands join."""
    strategies = rows(inputs=(("b", "k"), ("n", "k"), ("n",)), outputs=(("b", "n"),), joins=(2,))
    assert strategies == [
        ((R, R, R), (R,)),
        ((S0, R, R), (S0,)),
        ((S1, S1, P), (P,)),
        ((R, S0, S0), (S1,)),
    ]


def test_linearity_is_declared():
    """Partial values pass only where each, joint or monotone declares it."""
    plain = {"inputs": (("a",), ("a",)), "outputs": (("a",),), "reduce": None}
    assert rows(**plain) == [((R, R), (R,)), ((S0, S0), (S0,))]
    assert rows(**plain, joint=(0, 1))[2:] == [((P, P), (P,)), ((A, A), (A,))]
    assert rows(**plain, each=(0, 1))[2:] == [((P, R), (P,)), ((A, R), (A,)), ((R, P), (P,)), ((R, A), (A,))]
    assert rows(inputs=(("a",),), outputs=(("a",),), monotone=("max",))[2:] == [((Partial("max"),), (Partial("max"),))]


def test_whole_and_missing_labels_stay_whole():
    """A label in whole is never sharded, nor is a reduced one without a reduction."""
    assert rows(inputs=(("a", "b"),), outputs=(("a",),), whole=frozenset("a"), reduce=None) == [((R,), (R,))]


def test_rows_say_no_more_than_they_know():
    """Labelled rows carry no conditions on sizes."""
    assert labelled_rows(Labels((("a",),), (("a",),)))[1] == Row((S0,), (S0,))


def test_broadcasting():
    """Dims are aligned from the right; a stretched dim has no label, so it is not sharded."""
    labels, output, shape = broadcast_labels([(5, 1, 3), (4, 1), ()])
    assert labels == (("d0", None, "d2"), ("d1", None), ())
    assert output == ("d0", "d1", "d2")
    assert shape == (5, 4, 3)


@pytest.mark.parametrize("shapes, shape", [(((0,), (1,)), (0,)), (((1,), (1,)), (1,)), (((2, 0), ()), (2, 0))])
def test_broadcasting_of_empty_and_single(shapes, shape):
    """Size 1 broadcasts to size 0, and stays 1 among sizes of 1."""
    assert broadcast_labels(shapes)[2] == shape


def test_shapes_that_do_not_broadcast():
    """Shapes that do not broadcast raise an error that names all of them."""
    with pytest.raises(ValueError, match="broadcast") as caught:
        broadcast_labels([(2, 3), (4,)])
    assert str(caught.value) == "shapes [2, 3] and [4] do not broadcast"


def call_of(**shapes):
    """A call of replicated operands with these shapes."""
    mesh = simulate(lambda: init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), 1)[0]
    operands = tuple(Operand(name, Layout.of(mesh, ((),) * len(shape), (), shape)) for name, shape in shapes.items())
    return OpCall("op", mesh, operands, {})


def test_leading_dims_run_through_and_brackets_stay_whole():
    """Leading dims broadcast; a dim without brackets may be sharded at any position."""
    strategies = pattern(call_of(x=(4, 2, 3), tau=(1, 5)), "x ...[m][n], tau ...k -> ...[m]k", each=("tau",))
    assert strategies.outputs == ((4, 2, 5),)
    assert rows_of(strategies) == [
        ((R, R), (R,)),
        ((S0, R), (S0,)),
        ((R, S1), (Shard(2),)),
        ((R, P), (P,)),
        ((R, A), (A,)),
    ]


def test_sizes_of_new_dims_are_given_or_computed():
    """A dim that only outputs have gets its size from a number, or from the operands' sizes."""
    sizes = {"k": lambda known: min(known["m"], known["n"]), "two": 2}
    strategies = pattern(call_of(x=(4, 2, 3)), "x ...[m][n] -> ...[k], ...[two][k]", sizes)
    assert (strategies.outputs, strategies.many) == (((4, 2), (4, 2, 2)), True)


def test_an_output_without_a_label_must_be_empty():
    """An output that lacks a sharded dim would differ between ranks, unless it holds nothing."""
    empty = pattern(call_of(x=(4, 3)), "x ...[m] -> ...[m], [none]", {"none": 0})
    other = pattern(call_of(x=(4, 3)), "x ...[m] -> ...[m], [one]", {"one": 1})
    assert rows_of(empty) == [((R,), (R, R)), ((S0,), (S0, R))]
    assert rows_of(other) == [((R,), (R, R))]


def test_empty_shards_can_be_excluded():
    """``full`` requires that no rank's shard is empty."""
    strategies = pattern(call_of(x=(4, 3), y=(4, 2)), "x ...[m], y ...[n] -> ...", full=True)
    assert [row.full for row in strategies.rows] == [(), ((0, 0), (1, 0))]


def test_an_operand_that_was_not_given_drops_out():
    """The terms of missing operands are dropped, since terms are found by operand names."""
    assert rows_of(pattern(call_of(x=(4, 3)), "x ...[m], tol ... -> ...")) == [((R,), (R,)), ((S0,), (S0,))]


@pytest.mark.parametrize(
    "shapes, message",
    [
        ({"x": (3,)}, "x has 1 dims, it needs at least 2"),
        ({"x": (3, 4)}, "x [3, 4] does not match: dim n has size 3 elsewhere"),
        ({"x": (3, 3), "y": (3, 3)}, "y has 2 dims, it needs 1"),
    ],
)
def test_operands_that_do_not_fit_are_named(shapes, message):
    """The error for an operand that does not fit names it and the mismatch."""
    with pytest.raises(ValueError, match=r".") as caught:
        pattern(call_of(**shapes), "x ...[n][n], y [n] -> ...")
    assert str(caught.value) == message


def test_a_whole_operator_promises_nothing_about_its_results():
    """The only row of `whole` has replicated operands and no outputs, which are wrapped as they are returned."""
    strategies = whole(call_of(x=(4, 3), y=(2,)))
    assert (rows_of(strategies), strategies.outputs, strategies.open) == ([((R, R), ())], (), True)
