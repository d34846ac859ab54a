"""Pooling: samples and channels may be sharded, spatial dims are whole."""

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.placements import Shard

pytestmark = pytest.mark.platforms("torch")


FEW = {(2,): 5, (3,): 4, (4,): 2, (2, 2): 3}
ROW, PLANE, VOLUME = (5, 3, 8), (5, 3, 8, 7), (3, 2, 4, 4, 6)


def unpooled(pool, unpool, **options):
    """Max-pool, then unpool with the indices."""

    def run(x):
        result, indices = pool(x, 2, return_indices=True)
        return unpool(result, indices, 2, **options)

    return run


POOLING = {
    "avg 1d": (lambda x: F.avg_pool1d(x, 3, 2, 1), ROW),
    "avg 2d": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), PLANE),
    "avg 3d": (lambda x: F.avg_pool3d(x, 2), VOLUME),
    "max 1d": (lambda x: F.max_pool1d(x, 3, 2, 1), ROW),
    "max 2d": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), PLANE),
    "max 2d, the last window in the padding": (lambda x: F.max_pool2d(x, 2, 3, 1, ceil_mode=True), (4, 3, 5, 6)),
    "max 2d with places": (lambda x: F.max_pool2d(x, 2, dilation=2, return_indices=True), PLANE),
    "max 2d without samples": (lambda x: F.max_pool2d(x, 2), PLANE[1:]),
    "max 3d": (lambda x: F.max_pool3d(x, 2, return_indices=True), VOLUME),
    "adaptive avg 1d": (lambda x: F.adaptive_avg_pool1d(x, 3), ROW),
    "adaptive avg 2d": (lambda x: F.adaptive_avg_pool2d(x, (3, None)), PLANE),
    "adaptive avg 2d to one": (lambda x: F.adaptive_avg_pool2d(x, 1), PLANE),
    "adaptive avg 3d": (lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)), VOLUME),
    "adaptive max 1d": (lambda x: F.adaptive_max_pool1d(x, 3), ROW),
    "adaptive max 2d": (lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True), PLANE),
    "adaptive max 3d": (lambda x: F.adaptive_max_pool3d(x, 2), VOLUME),
    "lp 2d": (lambda x: F.lp_pool2d(x, 2, 2), PLANE),
    "fractional 2d": (
        lambda x, s: F.fractional_max_pool2d(x, 2, output_size=(3, 4), _random_samples=s.detach().sigmoid()),
        PLANE, (5, 3, 2),
    ),
    "fractional 3d": (
        lambda x, s: F.fractional_max_pool3d(x, 2, output_size=2, _random_samples=s.detach().sigmoid()),
        VOLUME, (3, 2, 3),
    ),
    "fractional 2d without samples": (
        lambda x, s: F.fractional_max_pool2d(x, 2, output_size=3, _random_samples=s.detach().sigmoid()),
        PLANE[1:], (1, 3, 2),
    ),
    "unpool 1d": (unpooled(F.max_pool1d, F.max_unpool1d), ROW),
    "unpool 2d": (unpooled(F.max_pool2d, F.max_unpool2d, output_size=PLANE[2:]), PLANE),
    "unpool 3d": (unpooled(F.max_pool3d, F.max_unpool3d), VOLUME),
}  # fmt: skip


@pytest.mark.parametrize("name", POOLING)
@pytest.mark.untraced
def test_pooling(holds, name):
    """Values, indices and gradients of pooling are the plain ones, in every number of dims."""
    holds(POOLING[name][0], *POOLING[name][1:], limits=FEW)


def test_no_samples_at_all(ranks):
    """Convolution and pooling of an empty batch give an empty batch."""

    def run(mesh):
        x = distribute_tensor(torch.ones(0, 3, 5, 4), mesh, [Shard(0)])
        return F.max_pool2d(F.conv2d(x, distribute_tensor(torch.ones(2, 3, 2, 2), mesh, [Shard(0)])), 2).shape

    assert ranks(2, run)[0] == (0, 2, 2, 1)


MISFITS = {
    "pooling": (
        lambda x: F.max_pool2d(x, 2), (4,),
        "max_pool2d(x=f64[4@tp]): x has 1 dims, at least 2 are needed",
    ),
    "adaptive pooling": (
        lambda x: F.adaptive_avg_pool3d(x, 2), (4, 3),
        "adaptive_avg_pool3d(x=f64[4@tp, 3]): x has 2 dims, at least 3 are needed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])
