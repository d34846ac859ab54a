"""Bins of values on MindSpore."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(7)
F32 = np.float32


def real(*shape):
    """Random numbers of both signs."""
    return RNG.standard_normal(shape).astype(F32)


def test_bins_depend_on_the_element_alone(canonical):
    """With unsorted edges the bin of an element does not depend on the other elements."""
    edges, x = np.array([0.4, -1.0, 2.0, 0.1, -0.3]), real(40).astype(np.float64)
    for right in (False, True):
        bins = canonical("bucketize", x, edges, right=right)
        assert bins.tolist() == [canonical("bucketize", x[at : at + 1], edges, right=right)[0] for at in range(40)]
        ordered = np.sort(edges)
        wanted = np.searchsorted(ordered, [*x, *ordered, np.nan], "right" if right else "left")
        assert (
            canonical("bucketize", np.array([*x, *ordered, np.nan]), ordered, right=right).tolist() == wanted.tolist()
        )
