"""What a value may differ by."""

from __future__ import annotations

import numpy as np

from hyper_parallel.verify.program.bounds import largest


def test_the_largest_magnitude_is_that_of_finite_numbers():
    """Text, no numbers and infinities have no magnitude; complex numbers have their modulus."""
    assert largest(np.array(["text"])) == 0.0
    assert largest(np.zeros((0, 3))) == 0.0
    assert largest(np.array([1.0, -np.inf, -2.5])) == 2.5
    assert largest(np.array([3 + 4j])) == 5.0
