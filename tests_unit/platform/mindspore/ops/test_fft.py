"""Fourier transforms whose own kernels in MindSpore are wrong."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(7)
F32 = np.float32


def real(*shape):
    """Random numbers of both signs."""
    return RNG.standard_normal(shape).astype(F32)


@pytest.mark.parametrize("norm", [None, "backward", "ortho", "forward"])
def test_half_transforms_are_the_same_every_time(canonical, norm):
    """Hfft and ihfft equal NumPy's in every call, unlike MindSpore's own kernels."""
    x = real(4, 5).astype(np.float64)
    z = x + 1j * real(4, 5)
    for _ in range(3):
        assert np.allclose(canonical("hfft", z, norm=norm), np.fft.hfft(z, norm=norm), rtol=1e-13)
        assert np.allclose(canonical("ihfft", x, norm=norm), np.fft.ihfft(x, norm=norm), rtol=1e-13)
