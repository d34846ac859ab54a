"""Causes of a loss that differs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hyper_parallel.verify.engine.losses import explain_loss


@pytest.mark.parametrize("expected, own", [(0.0, 1.0), (np.nan, 1.0), (2.0, np.inf)])
def test_numbers_that_no_size_explains(expected, own):
    """No ratio is taken to zero, and none of numbers that are not finite."""
    key = ("loss", "loss", 0, 0)
    runs = SimpleNamespace(
        bounds=SimpleNamespace(reference={key: SimpleNamespace(value=np.float64(expected))}),
        value=lambda _key, _rank: np.array(own),
        holders=lambda _key: [0, 1],
    )
    assert explain_loss(runs, key) is None
