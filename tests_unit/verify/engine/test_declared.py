"""The language of declared placements."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.engine.axes import Axes
from hyper_parallel.verify.engine.declared import Declaration, declaration_of, parse_declaration
from hyper_parallel.verify.engine.placement import declared_placement
from hyper_parallel.verify.frameworks.contract.records import Group, RankRecords, Run


def axes(mesh):
    """Return the axes of a run on ``mesh``."""
    return Axes(Run([RankRecords(rank) for rank in range(int(np.prod(list(mesh.values()))))]), mesh)


@pytest.mark.parametrize(
    "words, expected",
    [
        ("replica", Declaration()),
        ("local", Declaration(local=True, words="local")),
        ("shard(0) over tp", Declaration(((0, ("tp",)),), words="shard(0) over tp")),
        ("shard(-1) over dp, tp", Declaration(((-1, ("dp", "tp")),), words="shard(-1) over dp, tp")),
        ("pending sum over tp", Declaration(pending=("tp",), words="pending sum over tp")),
        (
            "shard(1) over dp and pending sum over tp",
            Declaration(((1, ("dp",)),), ("tp",), words="shard(1) over dp and pending sum over tp"),
        ),
    ],
)
def test_words_are_read(words, expected):
    """Each form of the language gives its declaration."""
    assert parse_declaration(words, ("dp", "tp")) == expected


@pytest.mark.parametrize("words", ["sharded", "shard 0 over tp", "replica and local", ""])
def test_other_words_are_refused(words):
    """What is not of the language is refused with the forms that are."""
    with pytest.raises(ValueError, match=r"the declaration .* cannot be read") as error:
        parse_declaration(words, ("tp",))
    assert str(error.value).endswith(
        "write 'replica', 'shard(0) over tp', 'pending sum over tp', 'local', or shards and sums joined by ' and '"
    )


def test_an_axis_must_exist():
    """An axis that the program does not have is named with those that it has."""
    with pytest.raises(ValueError, match="names axis") as error:
        parse_declaration("shard(0) over ep", ("dp", "tp"))
    assert str(error.value) == "the declaration 'shard(0) over ep' names axis 'ep'; the program has dp, tp"


def test_words_are_read_before_the_axes_are_known():
    """Without axes, any name will do; what is not of the language is refused all the same."""
    assert parse_declaration("shard(0) over ep", None).shards == ((0, ("ep",)),)
    with pytest.raises(ValueError, match="the declaration 'replicate' cannot be read"):
        parse_declaration("replicate", None)


def test_the_first_pattern_counts():
    """A pattern matches the name, or the kind and the name."""
    declared = {"output a*": Declaration(words="1"), "a.*": Declaration(words="2"), "*": Declaration(words="3")}
    assert declaration_of("output", "a.b", declared).words == "1"
    assert declaration_of("weight", "a.b", declared).words == "2"
    assert declaration_of("weight", "b", declared).words == "3"
    assert declaration_of("weight", "b", {}) is None


def test_declared_parts_lie_in_the_order_of_the_ranks():
    """Uneven parts follow each other along the axis, the first of several axes the slowest."""
    mesh = axes({"dp": 2, "tp": 3})
    sizes = [2, 1, 1, 0, 3, 2]
    shapes = {rank: (size, 4) for rank, size in enumerate(sizes)}
    both = parse_declaration("shard(0) over dp, tp", ("dp", "tp"))
    assert np.asarray(declared_placement(both, 4, shapes, (9, 4), mesh).positions)[:, 0].tolist() == [16, 20, 24]
    rows = {0: (2, 4), 1: (1, 4), 2: (1, 4)}
    one = parse_declaration("shard(0) over tp and pending sum over dp", ("dp", "tp"))
    placement = declared_placement(one, 1, rows, (4, 4), mesh)
    assert np.asarray(placement.positions)[:, 0].tolist() == [8]
    assert placement.pending == ((1, 4),)
    assert not declared_placement(parse_declaration("local", ()), 1, rows, (4, 4), mesh).compared
    for dim in (2, -3):
        missing = parse_declaration(f"shard({dim}) over tp", ("dp", "tp"))
        with pytest.raises(ValueError, match="does not fit") as error:
            declared_placement(missing, 1, rows, (4, 4), mesh)
        assert str(error.value) == (f"the declaration 'shard({dim}) over tp' does not fit: the value has 2 dims")
    with pytest.raises(ValueError, match="does not fit") as error:
        declared_placement(one, 1, rows, (5, 4), mesh)
    assert str(error.value) == (
        "the declaration 'shard(0) over tp and pending sum over dp' does not fit: ranks [0, 1, 2] have [2, 1, 1] rows "
        "in dim 0, the reference 5"
    )


def test_axes_come_from_the_mesh_and_the_groups():
    """Recorded groups that the mesh does not have are axes of their own; overlapping ones become several."""
    mesh = axes({"dp": 2, "tp": 3})
    assert mesh.groups == {"dp": ((0, 3), (1, 4), (2, 5)), "tp": ((0, 1, 2), (3, 4, 5)), "world": ((0, 1, 2, 3, 4, 5),)}
    assert (mesh.group_of("dp", 4), mesh.sizes()) == ((1, 4), {"dp": 2, "tp": 3, "world": 6})
    groups = [Group("tp", (0, 1)), Group("ring", (1, 2)), Group("ring", (2, 3)), Group("alone", (2,))]
    run = Run([RankRecords(rank, [], [group for group in groups if rank in group.ranks]) for rank in range(4)])
    found = Axes(run)
    assert found.groups == {
        "tp": ((0, 1),), "ring": ((1, 2),), "ring#2": ((2, 3),), "world": ((0, 1, 2, 3),)
    }  # fmt: skip
    assert found.group_of("tp", 3) == (3,)
    assert ("tp and ring", ((0, 1, 2),)) in list(found.sets())
    with pytest.raises(ValueError, match="the mesh") as error:
        Axes(run, {"dp": 2, "tp": 3})
    assert str(error.value) == "the mesh dp=2 x tp=3 has 6 ranks, the program ran on 4"
