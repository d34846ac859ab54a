"""Fourier transforms whose own kernels in MindSpore are wrong."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(7)
F32 = np.float32
NORMS = ("backward", "ortho", "forward")


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


@pytest.mark.parametrize("name", ["fft", "ifft", "fft2", "ifftn", "rfft", "irfft", "hfft", "ihfft"])
def test_norms_are_those_of_the_caller(name):
    """A norm that MindSpore's Python layer passes by number is the one that was asked for."""
    from mindspore import Tensor, ops

    x = real(4, 5) if name in {"rfft", "ihfft"} else real(4, 5) + 1j * real(4, 5)

    def on_rank():
        distributed = distribute_tensor(Tensor(x), init_device_mesh("cpu", (2,)), [Shard(0)])
        return [getattr(ops, name)(distributed, norm=norm).full_tensor().asnumpy() for norm in NORMS]

    wanted = [getattr(np.fft, name)(x, norm=norm) for norm in NORMS]
    for results in simulate(on_rank, 2, "mindspore"):
        for actual, expected in zip(results, wanted, strict=True):
            assert np.allclose(actual, expected, atol=1e-5)
