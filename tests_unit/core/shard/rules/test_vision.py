"""Padding, interpolation, grids, windows as columns and shuffles: samples and channels may be sharded."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.errors import LayoutError

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
        with pytest.raises(ValueError, match=r"no \d by \d blocks"):
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
        "channel_shuffle: 3 channels do not make 2 groups",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])
