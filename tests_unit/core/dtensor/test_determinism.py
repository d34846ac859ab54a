"""The determinism switch: two runs are equal bit for bit."""

from __future__ import annotations

import pytest

import hyper_parallel as hp
from hyper_parallel.pytest_plugin.ranks import require_transport
from hyper_parallel.verify import launch, simulate
from hyper_parallel.verify.frameworks import harness_of

KINDS = ("data parallel", "tensor parallel", "sequence parallel")


def torch_run(kind, seed):
    """Train with dropout on this rank; return the bytes of losses, gradients and weights."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from hyper_parallel.platform.torch.rank_order import rank_order_hook

    hp.use_deterministic(seed)
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(5), torch.nn.Linear(5, 7), torch.nn.Dropout(0.3), torch.nn.GELU(), torch.nn.Linear(7, 5)
    )
    x = torch.randn(2 * size, 5, 5)
    if kind == "data parallel":
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, rank_order_hook)
        torch.manual_seed(seed + rank)
        x = x.chunk(size)[rank]
    else:
        mesh = hp.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        plan = {"1": hp.ColwiseParallel(use_local_output=False), "4": hp.RowwiseParallel()}
        if kind == "sequence parallel":
            plan["0"] = hp.SequenceParallel()
            plan["1"] = hp.ColwiseParallel(input_layouts=hp.Shard(1), use_local_output=False)
            x = hp.distribute_tensor(x, mesh, [hp.Shard(1)])
        model = hp.parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    values = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        values += [bytes_of(value) for value in (loss, *(weight.grad for weight in model.parameters()))]
        optimizer.step()
    return values + [bytes_of(weight) for weight in model.parameters()]


def bytes_of(value):
    """The bytes of this rank's part of a tensor."""
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.detach().contiguous().numpy().tobytes()


def mindspore_run(kind, seed):
    """Train with dropout on this rank, MindSpore's ways; return the bytes of losses, gradients and weights."""
    import mindspore as ms
    from mindspore import nn, ops

    hp.use_deterministic(seed)
    size = hp.get_platform().transport().world_size
    model = nn.SequentialCell(nn.LayerNorm((5,)), nn.Dense(5, 7), nn.Dropout(p=0.3), nn.Dense(7, 5))
    mesh = hp.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    x = ms.ops.StandardNormal(seed=seed + 1)((2 * size, 5, 5))
    if kind == "data parallel":
        model = hp.distribute_module(model, mesh)
        x = hp.distribute_tensor(x, mesh, [hp.Shard(0)])
    else:
        plan = {"1": hp.ColwiseParallel(use_local_output=False), "3": hp.RowwiseParallel()}
        if kind == "sequence parallel":
            plan["0"] = hp.SequenceParallel()
            plan["1"] = hp.ColwiseParallel(input_layouts=hp.Shard(1), use_local_output=False)
            x = hp.distribute_tensor(x, mesh, [hp.Shard(1)])
        model = hp.parallelize_module(model, mesh, plan)
    weights = model.trainable_params()
    optimizer = nn.AdamWeightDecay(weights, 1e-2)
    step = hp.value_and_grad(lambda: ops.square(model(x)).mean(), None, weights)
    values = []
    for _ in range(3):
        loss, gradients = step()
        values += [host_bytes(value) for value in (loss, *gradients)]
        optimizer(tuple(gradients))
    return values + [host_bytes(weight) for weight in weights]


def host_bytes(value):
    """The bytes of this rank's part of a MindSpore tensor."""
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.asnumpy().tobytes()


RUNS = {"torch": torch_run, "mindspore": mindspore_run}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_are_equal(platform_name, kind, size):
    """Losses, gradients and weights of all ranks are equal bit for bit, and other ones with another seed."""
    first, second, other = (simulate(RUNS[platform_name], size, platform_name, (kind, seed)) for seed in (3, 3, 4))
    assert first == second
    assert all(ours[0] != others[0] and ours[-1] != others[-1] for ours, others in zip(first, other, strict=True))


def every_kind(run, seed):
    """The runs of all kinds, one after the other, on this rank; in one thread, as the last bits depend on threads."""
    with harness_of(hp.get_platform()).single_threaded():
        return [run(kind, seed) for kind in KINDS]


@pytest.mark.sweep
def test_two_runs_of_processes_are_equal_and_as_simulated(platform_name):
    """Three real processes compute the same bits twice, and simulated ranks the same."""
    require_transport(platform_name)
    arguments = (every_kind, 3, platform_name, (RUNS[platform_name], 5))
    assert launch(*arguments) == launch(*arguments) == simulate(*arguments)


@pytest.mark.parametrize(
    "seed, error, message",
    [
        (-1, ValueError, "use_deterministic: seed is -1; it must be from 0 to 4294967295"),
        (2**32, ValueError, "use_deterministic: seed is 4294967296; it must be from 0 to 4294967295"),
        (True, TypeError, "use_deterministic: seed must be an int, got bool"),
        (1.0, TypeError, "use_deterministic: seed must be an int, got float"),
    ],
)
def test_a_wrong_seed_is_refused(seed, error, message):
    """A seed that a generator would not take is refused before anything is set."""
    with pytest.raises(error) as raised:
        hp.use_deterministic(seed)
    assert str(raised.value) == message
