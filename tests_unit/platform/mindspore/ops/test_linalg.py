"""Powers of matrices on MindSpore."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.platforms("mindspore")


def test_powers_of_matrices(kernel):
    """Negative matrix powers use the inverse, power 0 is the identity, and power 1 is a copy."""
    x = np.array([[2.0, 1.0], [0.0, 4.0]])
    for power in (-2, -1, 0, 1, 2, 5):
        assert np.allclose(kernel("matrix_power", x, power), np.linalg.matrix_power(x, power), rtol=1e-12)
