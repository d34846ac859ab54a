"""Fourier transforms: transformed dims are gathered, the others may be sharded."""

import numpy as np
import pytest
import torch
from torch import fft

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Partial, Shard

pytestmark = pytest.mark.platforms("torch")


COMPLEX = np.random.default_rng(5).standard_normal((3, 4, 5, 2)).view(np.complex128)[..., 0]
REAL = np.random.default_rng(6).standard_normal((3, 4, 5))
TRANSFORMS = {
    "fft": (fft.fft, REAL),
    "fft of complex": (fft.fft, COMPLEX),
    "ifft": (lambda x: fft.ifft(x, norm="ortho"), COMPLEX),
    "fft of more points": (lambda x: fft.fft(x, 7, dim=1), REAL),
    "fft of fewer points": (lambda x: fft.fft(x, n=2, dim=0), COMPLEX),
    "rfft": (fft.rfft, REAL),
    "rfft of even points": (lambda x: fft.rfft(x, dim=1), REAL),
    "irfft": (fft.irfft, COMPLEX),
    "irfft of odd points": (lambda x: fft.irfft(x, 5), COMPLEX),
    "hfft": (lambda x: fft.hfft(x, dim=0), COMPLEX),
    "ihfft": (fft.ihfft, REAL),
    "fft2": (fft.fft2, REAL),
    "ifft2": (lambda x: fft.ifft2(x, dim=(0, 2)), COMPLEX),
    "rfft2": (lambda x: fft.rfft2(x, s=(6, 3)), REAL),
    "irfft2": (fft.irfft2, COMPLEX),
    "fftn": (fft.fftn, REAL),
    "fftn of some dims": (lambda x: fft.fftn(x, s=(3, -1)), REAL),
    "ifftn": (lambda x: fft.ifftn(x, dim=(1,)), COMPLEX),
    "rfftn": (lambda x: fft.rfftn(x, dim=(2, 0)), REAL),
    "irfftn": (lambda x: fft.irfftn(x, dim=(0, 1)), COMPLEX),
    "hfft2": (fft.hfft2, COMPLEX),
    "ihfftn": (fft.ihfftn, REAL),
    "fftn of no dims": (lambda x: fft.fftn(x, dim=()), COMPLEX),
    "fftshift": (fft.fftshift, REAL),
    "ifftshift": (lambda x: fft.ifftshift(x, dim=1), COMPLEX),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(holds, name):
    """Spectra and gradients do not depend on layouts, for even and odd numbers of points."""
    holds(*TRANSFORMS[name])


def test_short_time_transforms(holds):
    """Short-time transforms of sharded signals and their inverses have the plain values."""

    def there(x, window):
        return torch.stft(x, 6, 2, window=window, return_complex=True)

    def and_back(x, window):
        return torch.istft(there(x, window), 6, 2, window=window)

    window = np.hanning(8)[1:-1]
    holds(there, (3, 19), window, limits={(2,): 10, (3,): 5})
    holds(and_back, (3, 19), window, limits={(2,): 10, (3,): 5})


def test_other_dims_stay_sharded(ranks):
    """A transform along a whole dim moves nothing, and partial values stay partial."""

    def run(mesh):
        x = DTensor.from_local(torch.ones(2, 5), mesh, [Shard(0)])
        y = DTensor.from_local(torch.ones(2, 5), mesh, [Partial()])
        with record_events() as events:
            result = fft.rfft(x), fft.rfft(y)
        return len(events), [tensor.placements for tensor in result]

    assert ranks(2, run) == [(0, [(Shard(0),), (Partial("sum"),)])] * 2


MISFITS = {
    "transform of nothing": (
        lambda x: torch.fft.fft(x, 0), (4, 3),
        "fft(x=f64[4@tp, 3]): a transform over dims [1] of [4, 3] has no elements",
    ),
    "transform of a number": (torch.fft.fft, (), "fft(x=f64[]): x needs at least 1 dim"),
    "transform of other dims": (
        lambda x: torch.fft.fftn(x, s=(2, 3), dim=(0,)), (4, 3),
        "fftn(x=f64[4@tp, 3]): s [2, 3] and dims [0] must have the same length",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])
