from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard.rule import Row
from hyper_parallel.core.shard.signature import Labels, broadcast_labels, labelled_rows

R, P, A, S0, S1 = Replicate(), Partial(), Partial("avg"), Shard(0), Shard(1)


def rows(**parts):
    """Rows of labels as pairs of inputs and outputs."""
    return [(row.inputs, row.outputs) for row in labelled_rows(Labels(**parts))]


def test_contracted_labels_leave_sums():
    """A label in the outputs runs through, one that is missing there leaves a sum, and what joins is pending too."""
    found = rows(inputs=(("b", "k"), ("n", "k"), ("n",)), outputs=(("b", "n"),), joins=(2,))
    assert found == [
        ((R, R, R), (R,)),
        ((S0, R, R), (S0,)),
        ((S1, S1, P), (P,)),
        ((R, S0, S0), (S1,)),
    ]


def test_linearity_is_declared():
    """Nothing passes summands unless each, joint or monotone says so."""
    plain = {"inputs": (("a",), ("a",)), "outputs": (("a",),), "reduce": None}
    assert rows(**plain) == [((R, R), (R,)), ((S0, S0), (S0,))]
    assert rows(**plain, joint=(0, 1))[2:] == [((P, P), (P,)), ((A, A), (A,))]
    assert rows(**plain, each=(0, 1))[2:] == [((P, R), (P,)), ((A, R), (A,)), ((R, P), (P,)), ((R, A), (A,))]
    assert rows(inputs=(("a",),), outputs=(("a",),), monotone=("max",))[2:] == [((Partial("max"),), (Partial("max"),))]


def test_whole_and_missing_labels_stay_whole():
    """A label in whole is never sharded, nor one that is reduced where nothing may stay pending."""
    assert rows(inputs=(("a", "b"),), outputs=(("a",),), whole=frozenset("a"), reduce=None) == [((R,), (R,))]


def test_rows_say_no_more_than_they_know():
    """Labelled rows carry no conditions on sizes."""
    assert labelled_rows(Labels((("a",),), (("a",),)))[1] == Row((S0,), (S0,))


def test_broadcasting():
    """Dims are aligned from the right; a stretched dim has no label, so it stays whole."""
    labels, output, shape = broadcast_labels([(5, 1, 3), (4, 1), ()])
    assert labels == (("d0", None, "d2"), ("d1", None), ())
    assert output == ("d0", "d1", "d2")
    assert shape == (5, 4, 3)


@pytest.mark.parametrize("shapes, shape", [(((0,), (1,)), (0,)), (((1,), (1,)), (1,)), (((2, 0), ()), (2, 0))])
def test_broadcasting_of_empty_and_single(shapes, shape):
    """Size 1 stretches to size 0 as well, and stays 1 among its like."""
    assert broadcast_labels(shapes)[2] == shape


def test_shapes_that_do_not_broadcast():
    """The error names every shape."""
    with pytest.raises(ValueError, match="broadcast") as caught:
        broadcast_labels([(2, 3), (4,)])
    assert str(caught.value) == "shapes [2, 3] and [4] do not broadcast"
