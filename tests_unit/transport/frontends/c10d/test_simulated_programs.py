"""PyTorch's own parallel training runs on simulated ranks unmodified, and equals real processes bit for bit."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.errors import RankFailedError, UnsupportedOnBackend
from hyper_parallel.transport.serialization import pack
from hyper_parallel.verify import simulate

pytestmark = [pytest.mark.platforms("torch"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def model():
    """Two small transformer layers with odd sizes."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(6, 3, 10, dropout=0.0, batch_first=True, dtype=torch.float64) for _ in "ab"]
    return nn.Sequential(*layers)


def batch():
    """This rank's part of twelve sequences."""
    whole = torch.randn(12, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return whole.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else whole


def trained(network, parameters, steps=3, optimizer=None):
    """The weights after some steps, gathered whole."""
    optimizer = optimizer or torch.optim.AdamW(network.parameters(), 1e-2)
    for _ in range(steps):
        network(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole(x).detach().clone() for x in parameters()]


def whole(x):
    """All of a tensor that may be a DTensor."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def data_parallel():
    """DDP with several buckets, its gradients accumulated without communication first."""
    from torch.nn.parallel import DistributedDataParallel

    network = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    with network.no_sync():
        network(batch()).square().mean().backward()
    return trained(network, network.parameters)


def data_parallel_hook():
    """DDP with a hook in Python that returns a future."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    network = DistributedDataParallel(model(), find_unused_parameters=True)
    network.register_comm_hook(None, allreduce_hook)
    return trained(network, network.parameters)


def fully_sharded(reshard=True):
    """fully_shard of each layer and of the whole."""
    from torch.distributed.fsdp import fully_shard

    network = model()
    for layer in network:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(network, reshard_after_forward=reshard)
    return trained(network, network.parameters)


def kept_whole():
    """fully_shard that keeps the weights gathered after the forward."""
    return fully_sharded(reshard=False)


def tensor_parallel():
    """PyTorch's tensor parallelism of a layer's linear maps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    network = nn.Sequential(nn.Linear(6, 10, dtype=torch.float64), nn.GELU(), nn.Linear(10, 6, dtype=torch.float64))
    for index, x in enumerate(network.parameters()):
        nn.init.normal_(x, generator=torch.Generator().manual_seed(index))
    parallelize_module(network, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    data = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    network(data).square().sum().backward()
    return [whole(x.grad) for x in network.parameters()]


def sharded_optimizer():
    """DDP with an optimizer whose state is sharded."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    network = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.AdamW, lr=1e-2)
    weights = trained(network, network.parameters, optimizer=optimizer)
    optimizer.consolidate_state_dict(0)
    return weights


def pipeline():
    """A pipeline of one stage per rank, its micro-batches in the order 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layer = nn.Linear(6, 6, dtype=torch.float64)
    stage = PipelineStage(layer, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda y, target: (y - target).square().mean())
    data, losses = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9)), []
    last = {"target": torch.zeros_like(data), "losses": losses} if rank == size - 1 else {}
    schedule.step(*([data] if rank == 0 else []), **last)
    return [layer.weight.grad, *losses]


PROGRAMS = [
    data_parallel,
    data_parallel_hook,
    fully_sharded,
    kept_whole,
    tensor_parallel,
    sharded_optimizer,
    pipeline,
]


def run_all():
    """The results of every program, in turn."""
    import warnings

    warnings.simplefilter("ignore")
    return [[x.detach() for x in program()] for program in PROGRAMS]


_PROCESS = """
import sys
import torch, torch.distributed as dist
from hyper_parallel.transport.serialization import unpack
folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
with open(f"{folder}/program", "rb") as file:
    run = unpack(file.read())
torch.save(run(), f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


def on_gloo(folder):
    """The results of two processes of plain PyTorch, which this library neither starts nor watches."""
    (folder / "program").write_bytes(pack(run_all, run_all))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [subprocess.Popen([sys.executable, "-c", _PROCESS, folder, str(rank)], env=environment) for rank in (0, 1)]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.sweep
def test_programs_equal_real_processes(tmp_path):
    """DDP, fully_shard, DTensor, ZeRO and pipelining of two ranks give what two gloo processes give, bit for bit."""
    compared = 0
    for ours, theirs in zip(simulate(run_all, 2, "torch"), on_gloo(tmp_path), strict=True):
        for program, mine, other in zip(PROGRAMS, ours, theirs, strict=True):
            for x, y in zip(mine, other, strict=True):
                assert torch.equal(x, y), program.__name__
                compared += 1
    assert compared > 200


@pytest.mark.parametrize("program", [data_parallel_hook, fully_sharded, kept_whole, sharded_optimizer])
@pytest.mark.parametrize("world_size", [3, 4])
def test_programs_equal_one_device(program, world_size):
    """Training on three and four ranks follows training on one device."""
    network = model()
    expected = trained(network, network.parameters)
    for weights in simulate(program, world_size, "torch"):
        for x, y in zip(weights, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.untraced
def test_sharding_over_two_axes():
    """fully_shard over a mesh of replicas and shards, whose sub-groups reduce in turn."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        network = fully_shard(model(), mesh=mesh)
        return trained(network, network.parameters)

    network = model()
    expected = trained(network, network.parameters)
    for weights in simulate(body, 4, "torch"):
        for x, y in zip(weights, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_distributed_checkpoint(tmp_path):
    """DCP saves a sharded model on three ranks, and loads it on two."""
    from torch.distributed import checkpoint
    from torch.distributed.fsdp import fully_shard

    def saved():
        network = fully_shard(model())
        checkpoint.save({"model": network.state_dict()}, checkpoint_id=tmp_path / "saved")

    def loaded():
        network = fully_shard(model())
        for x in network.parameters():
            nn.init.zeros_(x)
        state = {"model": network.state_dict()}
        checkpoint.load(state, checkpoint_id=tmp_path / "saved")
        return [whole(x).detach() for x in network.parameters()]

    simulate(saved, 3, "torch")
    for weights in simulate(loaded, 2, "torch"):
        for x, y in zip(weights, model().parameters(), strict=True):
            assert torch.equal(x, y)


def test_saving_in_a_thread_is_refused(tmp_path):
    """dcp.async_save communicates in a thread of its own, which is refused; nothing is written by one rank alone."""
    from torch.distributed import checkpoint

    def body():
        checkpoint.async_save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "saved").result()

    with pytest.raises(RankFailedError) as caught:
        simulate(body, 2, "torch")
    causes, error = [], caught.value.__cause__
    while error is not None:
        causes.append(error)
        error = error.__cause__ or error.__context__
    assert any(isinstance(cause, UnsupportedOnBackend) for cause in causes), causes
    assert not (tmp_path / "saved" / ".metadata").exists()


@pytest.mark.untraced
def test_many_ranks_leave_no_threads():
    """Sixty-four ranks train with sharded weights; their threads and groups are gone afterwards."""
    from torch.distributed.fsdp import fully_shard

    def body():
        network = fully_shard(nn.Linear(65, 3))
        network(torch.ones(2, 65)).sum().backward()
        return whole(network.weight.grad)[0, 0].item()

    threads = threading.active_count()
    assert simulate(body, 64, "torch") == [2.0] * 64
    gc.collect()
    assert threading.active_count() == threads


def test_a_refusal_in_a_thread_fails_the_rank():
    """A thread's error ends that thread only; the rank fails too, since its program would have gone on otherwise."""

    def body():
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)), name="reducer")
        thread.start()
        thread.join()

    with pytest.raises(RankFailedError, match="thread 'reducer', which simulated rank 0 started, communicates: only "):
        simulate(body, 2, "torch")
