"""The transports over real processes."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.transport_conformance import check_transport


@pytest.mark.usefixtures("on_processor")
def test_every_collective_equals_numpy(platform_name):
    """Every collective equals NumPy for every dtype, shape and rank order, on three processes."""
    results = launch(check_transport, 3, platform_name, (platform_name,))
    assert len(results) == 3
    assert all(len(arrays) > 100 for arrays in results)
    assert all(isinstance(array, np.ndarray) for arrays in results for array in arrays)
