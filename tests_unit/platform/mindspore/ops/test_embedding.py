"""Lookups in a row range of a table on MindSpore."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(7)
F32 = np.float32


def real(*shape):
    """Numbers of either sign."""
    return RNG.standard_normal(shape).astype(F32)


def whole(high, *shape):
    """Integers below ``high``."""
    return RNG.integers(0, high, shape).astype(np.int64)


def test_rows_of_a_part_of_a_table(kernel, refusal):
    """Of rows 1 to 2 of a table of 4, others contribute nothing, a part without rows too, and no index gives no row."""
    table, none = real(2, 3), np.zeros((0, 3), F32)
    places = np.array([0, 1, 2, 3])
    wanted = np.concatenate([np.zeros((1, 3), F32), table, np.zeros((1, 3), F32)])
    for name, args in {
        "index_select": (table, 0, places),
        "gather": (table, 0, np.tile(places[:, None], (1, 3))),
        "embedding": (places, table),
    }.items():
        assert (kernel(name, *args, window=(1, 3, 4)) == wanted).all()
        empty = [none if one is table else one for one in args]
        assert (kernel(name, *empty, window=(4, 4, 4)) == np.zeros((4, 3))).all()
        nowhere = [one[:0] if isinstance(one, np.ndarray) and one.dtype == np.int64 else one for one in args]
        assert kernel(name, *nowhere, window=(1, 3, 4)).shape == (0, 3)
        beyond = [one + 4 if isinstance(one, np.ndarray) and one.dtype == np.int64 else one for one in args]
        said = "index out of range: indices are 4 to 7, the dim has size 4"
        assert refusal(IndexError, name, *beyond, window=(1, 3, 4)) == said


def test_what_embedding_does_not_do_is_refused(refusal):
    """Rows of bounded norm and gradients by frequency are PyTorch's."""
    said = "embedding: max_norm, scale_grad_by_freq and sparse are not served on MindSpore"
    assert refusal(NotImplementedError, "embedding", whole(4, 2), real(4, 3), max_norm=1.0) == said
