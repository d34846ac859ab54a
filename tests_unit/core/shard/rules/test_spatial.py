"""Padding, interpolation, grids, windows as columns and shuffles: samples and channels may be sharded."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import LayoutError, MixedTensorError

pytestmark = pytest.mark.platforms("torch")


FEW = {(2,): 5, (3,): 4, (4,): 2, (2, 2): 3}
ROW, PLANE, VOLUME = (5, 3, 8), (5, 3, 8, 7), (3, 2, 4, 4, 6)
PADDING = {
    f"{mode} of {count}": (
        lambda x, mode=mode, count=count: F.pad(x, (1, 2, 2, 1, 1, 0)[: 2 * count], mode=mode),
        shape,
    )
    for mode in ("constant", "reflect", "replicate", "circular")
    for count, shape in ((1, ROW), (2, PLANE), (3, VOLUME))
}
RESIZING = {
    **PADDING,
    "a number, and a cut": (lambda x: F.pad(x, (1, -1, 0, 2), value=2.5), (5, 3, 4)),
    "every dim": (lambda x: F.pad(x, (1, 0, 1, 1)), (5, 3)),
    "linear": (lambda x: F.interpolate(x, size=9, mode="linear", align_corners=True), ROW),
    "nearest": (lambda x: F.interpolate(x, scale_factor=1.7), (5, 3, 4, 5)),
    "nearest-exact": (lambda x: F.interpolate(x, size=(7, 3), mode="nearest-exact"), (5, 3, 4, 5)),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"), (5, 3, 4, 5)),
    "bilinear without aliases": (
        lambda x: F.interpolate(x, size=(3, 4), mode="bilinear", antialias=True), (5, 3, 7, 6),
    ),
    "bicubic": (lambda x: F.interpolate(x, size=(7, 3), mode="bicubic"), (5, 3, 4, 5)),
    "trilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (3, 2, 2, 3, 4)),
    "area": (lambda x: F.interpolate(x, size=(7, 3), mode="area"), (5, 3, 4, 5)),
    "grid": (lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), (3, 2, 4, 5), (3, 5, 3, 2)),
    "cubic grid": (
        lambda x, g: F.grid_sample(x, g.tanh(), mode="bicubic", align_corners=False), (3, 2, 4, 5), (3, 5, 3, 2),
    ),
    "grid in a volume": (
        lambda x, g: F.grid_sample(x, g.tanh(), padding_mode="reflection", align_corners=True),
        (3, 2, 4, 5, 3), (3, 5, 3, 2, 3),
    ),
    "affine grid": (lambda t: F.affine_grid(t, (5, 3, 4, 6), align_corners=False), (5, 2, 3)),
    "affine grid of a volume": (lambda t: F.affine_grid(t, (5, 3, 4, 6, 2), align_corners=True), (5, 3, 4)),
    "unfold": (lambda x: F.unfold(x, (2, 3), padding=1, stride=2), (5, 3, 6, 7)),
    "unfold without samples": (lambda x: F.unfold(x, (2, 3)), (3, 6, 7)),
    "fold": (lambda x: F.fold(x, (4, 5), (2, 2)), (5, 8, 12)),
    "fold without samples": (lambda x: F.fold(x, (4, 5), (2, 2)), (8, 12)),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), (3, 8, 3, 5)),
    "pixel unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (3, 2, 6, 4)),
    "channel shuffle": (lambda x: F.channel_shuffle(x, 3), (5, 6, 3, 4)),
    "responses": (lambda x: F.local_response_norm(x, 3), (5, 4, 3, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", RESIZING)
@pytest.mark.untraced
def test_resizing(holds, name):
    """Padding, interpolation, grids, unfolding and shuffles have the plain values and gradients in every mode."""
    holds(RESIZING[name][0], *RESIZING[name][1:], limits=FEW)


def test_sharded_samples_and_channels_cost_nothing(ranks):
    """Pooling, padding and interpolation of sharded samples or channels communicate nothing, forward or backward."""

    def run(mesh):
        seen = []
        for dim in (0, 1):
            x = distribute_tensor(torch.randn(4, 6, 8, 8), mesh, [Shard(dim)]).requires_grad_()
            with record_events() as log:
                out = F.interpolate(F.pad(F.max_pool2d(x, 2), (1, 1, 1, 1), mode="reflect"), scale_factor=2)
                out.backward(torch.ones_like(out))
            seen.append((out.placements, log.collectives()))
        return seen

    assert ranks(2, run)[0] == [((Shard(0),), []), ((Shard(1),), [])]


REFUSED = {
    "grid": (
        lambda x: F.grid_sample(x, x[:2, :2].movedim(1, 3), align_corners=False),
        "grid has shape [2, 4, 5, 2]; x of [4, 3, 4, 5] needs [4, …, 2]",
    ),
    "unpool": (
        lambda x: F.max_unpool2d(x, (x[..., :2] * 0).long(), 2),
        "indices have shape [4, 3, 4, 2], x has [4, 3, 4, 5]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(ranks, name):
    """Two shapes that do not fit are an error that names both."""
    fn, words = REFUSED[name]

    def run(mesh):
        with pytest.raises(LayoutError) as caught:
            fn(distribute_tensor(torch.from_numpy(np.ones((4, 3, 4, 5))), mesh, [Shard(0)]))
        return str(caught.value)

    assert ranks(2, run)[0].endswith(words)


@pytest.mark.parametrize("fn", [lambda x: F.pixel_shuffle(x, 2), lambda x: F.pixel_unshuffle(x, 3)])
def test_blocks_that_do_not_divide_are_refused(ranks, fn):
    """Channels or spatial sizes that are not whole blocks are refused."""

    def run(mesh):
        with pytest.raises(ValueError, match=r"are not divisible into blocks of \d by \d"):
            fn(distribute_tensor(torch.ones(4, 3, 4, 5), mesh, [Shard(0)]))

    ranks(2, run)


aten = torch.ops.aten
MISFITS = {
    "padding": (
        lambda x: aten.constant_pad_nd(x, [1]), (4, 3),
        "pad(x=f64[4@tp, 3]): pad [1] needs two numbers per dim, from the last of 2 dims on",
    ),
    "channel_shuffle": (
        lambda x: F.channel_shuffle(x, 2), (4, 3, 2, 2),
        "channel_shuffle: 3 channels are not divisible into 2 groups",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])


POOL_ROW, POOL_PLANE, POOL_VOLUME = (5, 3, 8), (5, 3, 8, 7), (3, 2, 4, 4, 6)


def unpooled(pool, unpool, **options):
    """Max-pool, then unpool with the indices."""

    def run(x):
        result, indices = pool(x, 2, return_indices=True)
        return unpool(result, indices, 2, **options)

    return run


POOLING = {
    "avg 1d": (lambda x: F.avg_pool1d(x, 3, 2, 1), POOL_ROW),
    "avg 2d": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), POOL_PLANE),
    "avg 3d": (lambda x: F.avg_pool3d(x, 2), POOL_VOLUME),
    "max 1d": (lambda x: F.max_pool1d(x, 3, 2, 1), POOL_ROW),
    "max 2d": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), POOL_PLANE),
    "max 2d, the last window in the padding": (lambda x: F.max_pool2d(x, 2, 3, 1, ceil_mode=True), (4, 3, 5, 6)),
    "max 2d with places": (lambda x: F.max_pool2d(x, 2, dilation=2, return_indices=True), POOL_PLANE),
    "max 2d without samples": (lambda x: F.max_pool2d(x, 2), POOL_PLANE[1:]),
    "max 3d": (lambda x: F.max_pool3d(x, 2, return_indices=True), POOL_VOLUME),
    "adaptive avg 1d": (lambda x: F.adaptive_avg_pool1d(x, 3), POOL_ROW),
    "adaptive avg 2d": (lambda x: F.adaptive_avg_pool2d(x, (3, None)), POOL_PLANE),
    "adaptive avg 2d to one": (lambda x: F.adaptive_avg_pool2d(x, 1), POOL_PLANE),
    "adaptive avg 3d": (lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)), POOL_VOLUME),
    "adaptive max 1d": (lambda x: F.adaptive_max_pool1d(x, 3), POOL_ROW),
    "adaptive max 2d": (lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True), POOL_PLANE),
    "adaptive max 3d": (lambda x: F.adaptive_max_pool3d(x, 2), POOL_VOLUME),
    "lp 2d": (lambda x: F.lp_pool2d(x, 2, 2), POOL_PLANE),
    "fractional 2d": (
        lambda x, s: F.fractional_max_pool2d(x, 2, output_size=(3, 4), _random_samples=s.detach().sigmoid()),
        POOL_PLANE, (5, 3, 2),
    ),
    "fractional 3d": (
        lambda x, s: F.fractional_max_pool3d(x, 2, output_size=2, _random_samples=s.detach().sigmoid()),
        POOL_VOLUME, (3, 2, 3),
    ),
    "fractional 2d without samples": (
        lambda x, s: F.fractional_max_pool2d(x, 2, output_size=3, _random_samples=s.detach().sigmoid()),
        POOL_PLANE[1:], (1, 3, 2),
    ),
    "unpool 1d": (unpooled(F.max_pool1d, F.max_unpool1d), POOL_ROW),
    "unpool 2d": (unpooled(F.max_pool2d, F.max_unpool2d, output_size=POOL_PLANE[2:]), POOL_PLANE),
    "unpool 3d": (unpooled(F.max_pool3d, F.max_unpool3d), POOL_VOLUME),
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


POOL_MISFITS = {
    "pooling": (
        lambda x: F.max_pool2d(x, 2), (4,),
        "max_pool2d(x=f64[4@tp]): x has 1 dims, at least 2 are needed",
    ),
    "adaptive pooling": (
        lambda x: F.adaptive_avg_pool3d(x, 2), (4, 3),
        "adaptive_avg_pool3d(x=f64[4@tp, 3]): x has 2 dims, at least 3 are needed",
    ),
}  # fmt: skip


CONV_FEW = {(2,): 8, (3,): 4, (4,): 3, (2, 2): 3}
CONVOLUTIONS = {
    "1d": (lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), (5, 3, 7), (4, 3, 3), (4,)),
    "2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (5, 3, 6, 7), (4, 3, 3, 2), (4,)),
    "3d": (F.conv3d, (3, 2, 4, 5, 4), (5, 2, 2, 3, 2), (5,)),
    "same": (lambda x, w: F.conv2d(x, w, padding="same", dilation=2), (5, 3, 6, 7), (4, 3, 3, 2)),
    "no samples": (F.conv2d, (3, 6, 7), (4, 3, 3, 2), (4,)),
    "groups": (lambda x, w, b: F.conv2d(x, w, b, groups=4), (3, 8, 4, 5), (12, 2, 3, 2), (12,)),
    "odd groups": (lambda x, w: F.conv2d(x, w, groups=3), (2, 6, 4, 5), (3, 2, 3, 2)),
    "channel by channel": (lambda x, w, b: F.conv2d(x, w, b, groups=4), (3, 4, 6, 5), (4, 1, 3, 2), (4,)),
    "transposed 1d": (
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2, output_padding=1), (5, 3, 7), (3, 4, 3), (4,),
    ),
    "transposed 2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, groups=2), (3, 4, 5, 6), (4, 3, 3, 2), (6,),
    ),
    "transposed 3d": (F.conv_transpose3d, (3, 2, 3, 4, 2), (2, 3, 2, 2, 2)),
    "time first": (lambda x, w, b: F.conv_tbc(x, w, b, 1), (7, 5, 3), (3, 3, 4), (4,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.untraced
def test_convolutions(holds, name):
    """Values and the gradients of input, weight and bias are the plain ones, uneven and empty shards included."""
    holds(CONVOLUTIONS[name][0], *CONVOLUTIONS[name][1:], limits=CONV_FEW)


def test_what_a_convolution_costs(ranks):
    """Sharded samples, output channels and whole groups cost nothing forward; input channels give partial sums."""

    def run(mesh):
        def convolve(x, w, b, groups=1):
            tensors = [
                distribute_tensor(torch.randn(*shape), mesh, [placement])
                for shape, placement in zip(((4, 6, 5, 5), (8, 6 // groups, 3, 3), (8,)), (x, w, b), strict=True)
            ]
            with record_events() as log:
                out = F.conv2d(*tensors, groups=groups)
            return out.placements, log.collectives()

        whole = Replicate()
        return [
            convolve(Shard(0), whole, whole),
            convolve(whole, Shard(0), Shard(0)),
            convolve(Shard(1), Shard(1), Partial()),
            convolve(Shard(1), Shard(0), Shard(0), groups=2),
        ]

    assert ranks(2, run)[0] == [
        ((Shard(0),), []),
        ((Shard(1),), []),
        ((Partial(),), []),
        ((Shard(1),), []),
    ]


def test_a_convolution_that_does_not_fit_is_refused(ranks):
    """A wrong number of channels and a weight that is not a DTensor are refused with the expected ones."""

    def run(mesh):
        x = distribute_tensor(torch.randn(4, 3, 5, 5), mesh, [Shard(0)])
        with pytest.raises(LayoutError) as caught:
            F.conv2d(x, distribute_tensor(torch.randn(4, 2, 3, 3), mesh, [Replicate()]))
        with pytest.raises(MixedTensorError, match=r"argument weight is a plain tensor \[4, 3, 3, 3\]"):
            F.conv2d(x, torch.randn(4, 3, 3, 3))
        return str(caught.value)

    assert ranks(2, run)[0] == (
        "convolution(x=f32[4@tp, 3, 5, 5], weight=f32[4, 2, 3, 3]): "
        "x has 3 channels, weight [4, 2, 3, 3] with 1 group(s) needs 2"
    )


CONV_MISFITS = {
    "convolution of images": (
        F.conv2d, (4, 3, 5, 5), (2, 3, 3),
        ("convolution(x=f64[4@tp, 3, 5, 5], weight=f64[2@tp, 3, 3]): x has 4 dims and weight 3; both need the "
        "same number of dims, at least 3"),
    ),
    "convolution of channels": (
        F.conv2d, (4, 3, 5, 5), (2, 2, 3, 3),
        ("convolution(x=f64[4@tp, 3, 5, 5], weight=f64[2@tp, 2, 3, 3]): x has 3 channels, weight [2, 2, 3, 3] with 1 "
        "group(s) needs 2"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POOL_MISFITS)
def test_a_pooling_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*POOL_MISFITS[name])


@pytest.mark.parametrize("name", CONV_MISFITS)
def test_a_convolution_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*CONV_MISFITS[name])
