"""Sorting on MindSpore."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.platforms("mindspore")


def test_orders_of_a_number(kernel):
    """Sorting a tensor without dims returns it."""
    for descending in (False, True):
        assert kernel("argsort", np.asarray(2.0, np.float32), -1, descending=descending) == 0
