"""Packing and unpacking of equal parts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hyper_parallel.core.dtensor.rows import GatheredRows, ScatteredRows
from hyper_parallel.platform.select import platform_named

SHAPES = [(3,), (2, 3), (1, 5), (2, 1, 3), (2, 2, 1), (3, 2, 2), (0, 2)]
CASES = [(shape, dim, count) for shape in SHAPES for dim, count in itertools.product(range(len(shape)), (1, 2, 3))]


def test_parts_are_split_and_joined(platform_name):
    """Rows are the parts along the dim, contiguous, and joining them gives the whole back, for every dim."""
    platform, random = platform_named(platform_name), np.random.default_rng(3)
    for shape, dim, count in CASES:
        parts = [random.standard_normal(shape).astype(np.float32) for _ in range(count)]
        whole = np.concatenate(parts, dim)
        rows = ScatteredRows.of([shape] * count, dim).split(platform.from_numpy(whole), platform)
        assert rows.is_contiguous(), (shape, dim, count)
        np.testing.assert_array_equal(platform.tensor_to_numpy(rows), np.stack(parts), err_msg=f"{shape} {dim}")
        joined = GatheredRows.of([shape] * count, dim).joined(rows, platform)
        assert joined.is_contiguous(), (shape, dim, count)
        np.testing.assert_array_equal(platform.tensor_to_numpy(joined), whole, err_msg=f"{shape} {dim}")


@pytest.mark.platforms("torch")
def test_parts_that_lie_together_are_not_copied():
    """Along a first dim, and along any dim after dims of size one, rows share the memory of the whole."""
    import torch

    platform = platform_named("torch")
    for shape, dim in (((2, 3), 0), ((1, 2, 3), 1)):
        whole = torch.randn([size * (3 if d == dim else 1) for d, size in enumerate(shape)])
        rows = ScatteredRows.of([shape] * 3, dim).split(whole, platform)
        assert rows.data_ptr() == whole.data_ptr()
        assert GatheredRows.of([shape] * 3, dim).joined(rows, platform).data_ptr() == whole.data_ptr()


@pytest.mark.platforms("torch")
def test_a_strided_whole_is_split():
    """A whole that is not a contiguous tensor, or has the bit of a negated view, is split by its values."""
    import torch

    platform = platform_named("torch")
    negated = torch.randn(4, 6, dtype=torch.complex64).conj().imag
    for whole in (torch.randn(6, 4).t(), negated):
        for dim in (0, 1):
            rows = ScatteredRows.of([tuple(whole.chunk(2, dim)[0].shape)] * 2, dim).split(whole, platform)
            assert not rows.is_neg()
            assert torch.equal(rows, torch.stack(whole.chunk(2, dim)).resolve_neg())


def test_uneven_parts_are_padded_once(platform_name):
    """Parts that get shorter at the end are split and joined with padding to the size of the first."""
    platform, random = platform_named(platform_name), np.random.default_rng(4)
    for sizes in ((2, 1), (3, 3, 1), (2, 1, 0), (1, 0, 0), (2, 2, 0, 0)):
        for dim in (0, 1, 2):
            shapes = [tuple(size if d == dim else 2 + d for d in range(3)) for size in sizes]
            parts = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
            rows = GatheredRows.of(shapes, dim)
            padded = [platform.tensor_to_numpy(rows.padded(platform.from_numpy(part), platform)) for part in parts]
            assert {part.shape for part in padded} == {shapes[0]}
            joined = rows.joined(platform.from_numpy(np.stack(padded)), platform)
            assert joined.is_contiguous()
            np.testing.assert_array_equal(platform.tensor_to_numpy(joined), np.concatenate(parts, dim))
            split = ScatteredRows.of(shapes, dim).split(platform.from_numpy(np.concatenate(parts, dim)), platform)
            np.testing.assert_array_equal(platform.tensor_to_numpy(split), np.stack(padded))


def test_other_parts_are_no_rows():
    """Parts that are shorter before the end are neither gathered nor scattered as rows."""
    assert GatheredRows.of([(1, 3), (2, 3)], 0) is None
    assert GatheredRows.of([(2,), (1,), (1,)], 0) is None
    assert GatheredRows.of([(2,), (0,), (2,)], 0) is None
    assert ScatteredRows.of([(2,), (0,), (2,)], 0) is None
