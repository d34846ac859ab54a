"""Convolutions: samples and channels may be sharded, windows are whole."""

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import LayoutError, MixedTensorError

pytestmark = pytest.mark.platforms("torch")


FEW = {(2,): 8, (3,): 4, (4,): 3, (2, 2): 3}
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
    holds(CONVOLUTIONS[name][0], *CONVOLUTIONS[name][1:], limits=FEW)


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
    """A wrong number of channels and a weight that is no DTensor are refused with the expected ones."""

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


MISFITS = {
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


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])
