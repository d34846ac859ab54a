"""Normalisation over trailing dims, groups of channels, or a whole sharded batch, on PyTorch."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import LayoutError, MixedTensorError
from hyper_parallel.verify.checker.function import check_function

pytestmark = pytest.mark.platforms("torch")


LAYER_NORMS = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (4, 5, 6), (6,), (6,)),
    "layer_norm of two dims": (lambda x: F.layer_norm(x, (5, 6)), (4, 5, 6)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w, 1e-6), (4, 5, 6), (6,)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (3, 4, 5), (4,), (4,)),
    "operator": (lambda x, w, b: torch.native_layer_norm(x, (6,), w, b, 1e-5)[0], (4, 6), (6,), (6,)),
}


@pytest.mark.parametrize("name", LAYER_NORMS)
def test_layer_norms(holds, name):
    """Normalised dims are gathered, the others stay sharded, and weights get their full gradient."""
    holds(LAYER_NORMS[name][0], *LAYER_NORMS[name][1:])


POSITIVE = np.random.default_rng(1).uniform(0.5, 2.0, 3)
FEW = {(2,): 12, (3,): 6, (4,): 4, (2, 2): 4}


def running(norm, **options):
    """The output and the updated running statistics."""

    def fn(x, mean, var, *affine):
        mean, var = mean.detach().clone(), var.detach().clone()
        out = norm(x, mean, var, *affine, momentum=0.3, **options)
        return out, mean, var

    return fn


BATCH_NORMS = {
    "batch": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (5, 3, 4), (3,), (3,)),
    "batch of vectors": (lambda x: F.batch_norm(x, None, None, training=True, eps=0.1), (5, 3)),
    "batch, running": (running(F.batch_norm, training=True), (5, 3, 4, 2), (3,), POSITIVE, (3,), (3,)),
    "batch, known": (
        lambda x, m, v, w, b: F.batch_norm(x, m.detach(), v.detach(), w, b), (5, 3, 4), (3,), POSITIVE, (3,), (3,),
    ),
    "instance": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (5, 3, 4, 2), (3,), (3,)),
    "instance, running": (running(F.instance_norm), (5, 3, 4, 2), (3,), POSITIVE),
    "instance, known": (
        lambda x, m, v: F.instance_norm(x, m.detach(), v.detach(), use_input_stats=False), (5, 3, 4), (3,), POSITIVE,
    ),
    "group": (lambda x, w, b: F.group_norm(x, 4, w, b), (5, 12, 3), (12,), (12,)),
    "group of three": (lambda x, w: F.group_norm(x, 3, w), (5, 6, 4), (6,)),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCH_NORMS)
@pytest.mark.untraced
def test_batch_norms(holds, name):
    """Output, running statistics and all gradients are those of the whole batch, uneven and empty shards included."""
    holds(BATCH_NORMS[name][0], *BATCH_NORMS[name][1:], limits=FEW)


MODULES = {
    "BatchNorm1d": (lambda: torch.nn.BatchNorm1d(3), (5, 3)),
    "BatchNorm2d, cumulative": (lambda: torch.nn.BatchNorm2d(3, momentum=None), (5, 3, 4, 2)),
    "InstanceNorm2d": (lambda: torch.nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (5, 3, 4, 2)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_twice(name):
    """Buffers of modules count two steps as one device does, the number of batches included."""
    make, shape = MODULES[name]
    module = make().double()
    names = [parameter for parameter, _ in module.named_parameters()]

    def run(x, *parameters):
        buffers = {buffer: value.clone() for buffer, value in module.named_buffers()}
        if hasattr(x, "placements"):
            whole = [Replicate()] * x.device_mesh.ndim
            buffers = {buffer: distribute_tensor(value, x.device_mesh, whole) for buffer, value in buffers.items()}
        arguments = {**dict(zip(names, parameters, strict=True)), **buffers}
        twin = copy.deepcopy(module)
        outs = [functional_call(twin, arguments, (scale * x,)) for scale in (1.0, 3.0)]
        return [*outs, *buffers.values()]

    arrays = [
        np.random.default_rng(3).standard_normal(shape),
        *(parameter.detach().numpy() for parameter in module.parameters()),
    ]
    weights = [[(Replicate(),), (Shard(0),)] for _ in names]
    for world in (2, 4):
        placements = [(Shard(0),), (Shard(1),), (Replicate(),), (Partial(),)]
        report = check_function(run, arrays, (world,), platform="torch", placements=[placements, *weights])
        assert report.ok, report.wrong[:3]
        assert not report.rejected, report.rejected[:1]


def test_a_sharded_batch_exchanges_two_numbers_per_channel(ranks):
    """Batch statistics cost one all-reduce each for mean and variance, never the samples; known ones cost nothing."""

    def run(mesh):
        x = distribute_tensor(torch.randn(4, 3, 5, 5), mesh, [Shard(0)])
        mean, var = (distribute_tensor(torch.ones(3), mesh, [Replicate()]) for _ in range(2))
        with record_events() as log:
            F.batch_norm(x, None, None, training=True)
        with record_events() as known:
            F.batch_norm(x, mean, var)
        return [(event.op, event.argument, event.collective, event.bytes) for event in log], known.collectives()

    assert ranks(2, run)[0] == (
        [("batch_norm", "mean", "all_reduce", 12), ("batch_norm", "variance", "all_reduce", 12)],
        [],
    )


def test_half_precision_keeps_its_type(ranks):
    """Statistics of bfloat16 are taken in float32, the output is bfloat16 again, as on one device."""

    def run(mesh):
        whole = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        result = F.batch_norm(distribute_tensor(whole, mesh, [Shard(0)]), None, None, training=True).full_tensor()
        return result, F.batch_norm(whole, None, None, training=True)

    result, wanted = ranks(2, run)[0]
    assert result.dtype == wanted.dtype == torch.bfloat16
    assert torch.allclose(result.float(), wanted.float(), rtol=0.01, atol=0.01)


def test_what_is_refused(ranks):
    """One value per channel, plain buffers, and weights of a wrong size are refused."""

    def run(mesh):
        x = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])
        with pytest.raises(ValueError, match=r"Expected more than 1 value per channel when training"):
            F.batch_norm(x[:1], None, None, training=True)
        with pytest.raises(ValueError, match=r"Expected more than 1 value per channel when training"):
            torch.batch_norm(x[:1], None, None, None, None, True, 0.1, 1e-5, False)
        with pytest.raises(LayoutError, match=r"batch_norm: x needs samples and channels, got \[4\]"):
            torch.batch_norm(x[:, 0], None, None, None, None, True, 0.1, 1e-5, False)
        with pytest.raises(ValueError, match=r"Expected more than 1 spatial element when training"):
            torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-5, False)
        with pytest.raises(MixedTensorError) as plain:
            F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True)
        with pytest.raises(LayoutError) as sizes:
            F.batch_norm(x, *(distribute_tensor(torch.ones(4), mesh, [Replicate()]) for _ in range(2)))
        with pytest.raises(LayoutError) as groups:
            F.group_norm(x, 3, distribute_tensor(torch.ones(2), mesh, [Replicate()]))
        return [str(caught.value) for caught in (plain, sizes, groups)]

    assert ranks(2, run)[0] == [
        (
            "batch_norm: running_mean is a plain tensor [3] and the input a DTensor; make it one too: "
            "module.running_mean = hyper_parallel.distribute_tensor(module.running_mean, mesh, [Replicate()])"
        ),
        (
            "channel_norm(x=f32[4@tp, 3], mean=f32[4], var=f32[4]): "
            "x needs samples and channels, the others one number per channel: x [4, 3], mean [4], var [4]"
        ),
        (
            "group_norm(x=f32[4@tp, 3], weight=f32[2]): "
            "x needs samples and channels, the others one number per channel: x [4, 3], weight [2]"
        ),
    ]


MISFITS = {
    "layer_norm": (
        lambda x: F.layer_norm(x, (4,)), (4, 3),
        "layer_norm(x=f64[4@tp, 3]): normalized_shape [4] is not the end of x's shape [4, 3]",
    ),
    "layer_norm's weight": (
        lambda x, w: F.layer_norm(x, (3,), w), (4, 3), (4,),
        "layer_norm(x=f64[4@tp, 3], weight=f64[4@tp]): weight has shape [4], normalized_shape is [3]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])
