"""Lookups in a row range of a table on MindSpore."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(7)
F32 = np.float32


def real(*shape):
    """Random numbers of both signs."""
    return RNG.standard_normal(shape).astype(F32)


def whole(high, *shape):
    """Integers below ``high``."""
    return RNG.integers(0, high, shape).astype(np.int64)


def test_rows_of_a_shard_of_a_table(kernel, refusal):
    """Rows outside the local part of a table give zeros; an index outside the whole table is an error."""
    table, none = real(2, 3), np.zeros((0, 3), F32)
    indices = np.array([0, 1, 2, 3])
    wanted = np.concatenate([np.zeros((1, 3), F32), table, np.zeros((1, 3), F32)])
    for name, args in {
        "index_select": (table, 0, indices),
        "gather": (table, 0, np.tile(indices[:, None], (1, 3))),
        "embedding": (indices, table),
    }.items():
        assert (kernel(name, *args, window=(1, 3, 4)) == wanted).all()
        empty = [none if arg is table else arg for arg in args]
        assert (kernel(name, *empty, window=(4, 4, 4)) == np.zeros((4, 3))).all()
        nowhere = [arg[:0] if isinstance(arg, np.ndarray) and arg.dtype == np.int64 else arg for arg in args]
        assert kernel(name, *nowhere, window=(1, 3, 4)).shape == (0, 3)
        beyond = [arg + 4 if isinstance(arg, np.ndarray) and arg.dtype == np.int64 else arg for arg in args]
        message = "index out of range: indices are 4 to 7, the dim has size 4"
        assert refusal(IndexError, name, *beyond, window=(1, 3, 4)) == message


def test_what_embedding_does_not_do_is_refused(refusal):
    """Embedding with max_norm or scale_grad_by_freq is refused on MindSpore."""
    message = "embedding: max_norm, scale_grad_by_freq and sparse are not supported on MindSpore"
    assert refusal(NotImplementedError, "embedding", whole(4, 2), real(4, 3), max_norm=1.0) == message
