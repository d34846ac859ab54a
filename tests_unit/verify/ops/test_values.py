"""Concrete samples: sizes for their letters, arrays for their operands."""

import numpy as np
import pytest

from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.rule import rule_names
from hyper_parallel.core.shard.sample import (
    Sample,
    between,
    booleans,
    complex_,
    dtype,
    exemption,
    indices,
    integers,
    nonfinite,
    ordered,
    real,
    sample,
    samples_of,
    shuffled,
    size,
)
from hyper_parallel.verify.ops.values import Slot, fill, size_choices

rules.load()


def filled(*args, sizes=None, integral=True, **kwargs):
    """Return a sample with float64 values."""
    return fill(Sample(args, kwargs), sizes or {}, "float64", 7, integral=integral, to_dtype=str.upper)


def test_every_rule_brings_samples():
    """Every rule has samples, or an exemption with a reason."""
    assert [name for name in rule_names() if not samples_of(name) and not exemption(name)] == []


def test_sizes_are_unequal_and_awkward():
    """No two letters have the same size; size 1, even, odd and small sizes all occur."""
    choices = size_choices(Sample((real("abc"), size("ab"))), 12)
    assert len(choices) == 12
    assert all(len(set(sizes.values())) == 3 for sizes in choices)
    seen = {value for sizes in choices for value in sizes.values()}
    assert {1, 2, 3, 4, 5, 6} <= seen


def test_a_sample_without_letters_has_one_choice():
    """A sample without letters has a single choice of sizes."""
    assert size_choices(Sample((real(4, 3),)), 12) == [{}]


@pytest.mark.parametrize("integral", [False, True])
def test_tables_that_are_searched_ascend(integral):
    """Operands that are searched are sorted, as the operators require; frameworks differ on unsorted ones."""
    (table,) = filled(ordered("an"), sizes={"a": 4, "n": 5}, integral=integral).arrays
    assert table.shape == (4, 5)
    assert (np.diff(table, axis=1) >= 0).all()
    looked_up = [
        candidate.args[op == "bucketize"] for op in ("bucketize", "searchsorted") for candidate in samples_of(op)
    ]
    assert {candidate.kind for candidate in looked_up} == {"ordered"}


def test_letters_and_numbers_make_shapes_and_arguments():
    """A letter has one size in every operand; sizes multiply; dtypes become the framework's."""
    example = filled(real("a1b", 2), (size("ab"), -1), sizes={"a": 5, "b": 3}, to=dtype("float32"))
    assert example.args == (Slot(0), (15, -1))
    assert example.kwargs == {"to": "FLOAT32"}
    assert example.arrays[0].shape == (5, 1, 3, 2)
    assert example.requires_grad == (True,)


KINDS = [
    (real("a"), "float64", lambda x: (x == x.round()).all() and abs(x).max() <= 4),
    (between(0.3, 3.0, "a"), "float64", lambda x: set(x) <= {1.0, 2.0, 3.0}),
    (nonfinite("a"), "float64", lambda x: np.isnan(x).any() and np.isinf(x).any()),
    (integers(-3, 2, "a"), "int64", lambda x: x.min() >= -3 and x.max() < 2),
    (indices("a", "a"), "int64", lambda x: x.min() >= 0 and x.max() < 40),
    (indices(3, "a"), "int64", lambda x: set(x) == {0, 1, 2}),
    (shuffled("a", "a"), "int64", lambda x: sorted(x) == list(range(40))),
    (booleans("a"), "bool", lambda x: x.any() and not x.all()),
    (complex_("a"), "complex128", lambda x: (x.imag != 0).any()),
]


@pytest.mark.parametrize("value, kind, holds", KINDS)
def test_kinds_of_operands(value, kind, holds):
    """Each kind of operand has the values that its name promises, with small integers for numbers."""
    (array,) = filled(value, sizes={"a": 40}).arrays
    assert array.dtype == kind
    assert holds(array)


def test_no_integers_where_none_fit():
    """A range without two integers is sampled with real numbers."""
    assert filled(between(0.1, 0.9, "a"), sizes={"a": 4}) is None
    (array,) = filled(between(0.1, 0.9, "a"), sizes={"a": 4}, integral=False).arrays
    assert ((array > 0.1) & (array < 0.9)).all()


def test_shuffled_along_a_dim():
    """No two indices along the dim are equal."""
    (array,) = filled(shuffled(9, "a", 4, dim=1), sizes={"a": 6}).arrays
    assert all(len(set(row)) == 4 for row in array)


def test_fixed_operands_have_no_gradient():
    """An operand that the frameworks do not differentiate is marked in the sample."""
    assert filled(real("a"), real("a").fixed, booleans("a"), sizes={"a": 3}).requires_grad == (True, False, False)


def test_operators_share_lines():
    """One line adds the call to each operator that it names."""
    sample("first_of_this_test second_of_this_test", real("a"), 2)
    assert samples_of("first_of_this_test") == samples_of("second_of_this_test") == (Sample((real("a"), 2)),)


def test_indices_that_are_too_many_to_be_unequal():
    """Too many unequal indices are refused with a message, and no library sample asks for them at any size."""
    with pytest.raises(ValueError, match="different indices") as caught:
        filled(shuffled(6, "a2"), sizes={"a": 8})
    assert str(caught.value) == "dim 0 needs 8 different indices, and there are only 6"
    for op in rule_names():
        for candidate in samples_of(op):
            if "shuffled" in repr(candidate):
                for sizes in size_choices(candidate, 60):
                    fill(candidate, sizes, "float64", 7, integral=True, to_dtype=str)
