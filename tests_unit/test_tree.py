"""Nested containers: leaves, paths, maps, and containers rebuilt in their own types."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from hyper_parallel._tree import (
    CONTAINERS,
    at_path,
    leaves,
    named_leaves,
    paths,
    rebuild,
    tree_map,
    tree_map_named,
    unflatten,
)


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


def test_leaves_come_in_order_and_mappings_are_leaves_unless_asked_for():
    """Sequences are containers by default, and mappings only if the caller lists them."""
    tree = [1, (2, [3]), {"a": 4, "b": [5]}]
    assert leaves(tree) == [1, 2, 3, {"a": 4, "b": [5]}]
    assert leaves(tree, CONTAINERS) == [1, 2, 3, 4, 5]
    assert (leaves("ab"), leaves(None), leaves([])) == (["ab"], [None], [])


def test_a_path_leads_to_its_leaf_and_names_it():
    """Each leaf is listed with the path and the expression that read it."""
    tree = {"a": [1, (2,)], "b": 3}
    leaf_of = dict(paths(tree, CONTAINERS))
    assert leaf_of == {("a", 0): 1, ("a", 1, 0): 2, ("b",): 3}
    assert all(at_path(tree, path) == leaf for path, leaf in leaf_of.items())
    assert list(named_leaves("x", tree, CONTAINERS)) == [("x['a'][0]", 1), ("x['a'][1][0]", 2), ("x['b']", 3)]
    assert list(named_leaves("x", 7)) == [("x", 7)]


@pytest.mark.parametrize(
    "tree",
    [
        [1, 2],
        (1, [2]),
        Pair(1, (2,)),
        {"a": 1},
        OrderedDict(b=1, a=[2]),
        defaultdict(list, a=1),
        MappingProxyType({"a": 1}),
    ],
)
def test_a_rebuilt_container_has_its_own_type(tree):
    """A map changes leaves only; lists, tuples, named tuples and mappings keep their types."""
    doubled = tree_map(lambda leaf: 2 * leaf, tree, CONTAINERS)
    assert type(doubled) is type(tree)
    assert leaves(doubled, CONTAINERS) == [2 * leaf for leaf in leaves(tree, CONTAINERS)]
    assert unflatten(tree, leaves(tree, CONTAINERS), CONTAINERS) == tree
    assert getattr(doubled, "default_factory", None) is getattr(tree, "default_factory", None)


def test_a_map_may_know_the_names_of_leaves():
    """A named map passes the expression that reads each leaf."""
    assert tree_map_named(lambda name, leaf: (name, leaf), "x", [1, (2,)]) == [("x[0]", 1), (("x[1][0]", 2),)]


def test_rebuilding_does_not_change_what_it_is_modelled_on():
    """Rebuilding a mapping does not change the mapping that it is modelled on."""
    model = OrderedDict(a=1)
    assert (rebuild(model, {"a": 2}), model) == (OrderedDict(a=2), OrderedDict(a=1))
