"""Every simulated rank of PyTorch finds torch.distributed initialised, and nothing of it is left after the run."""

import os
import re
import sys

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.errors import RankFailedError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def test_every_rank_finds_the_world_initialised():
    """Rank, world size, backend and torchrun's environment are those of the simulated rank."""

    def body():
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
        dist.barrier()
        environment = [os.environ[name] for name in names]
        return dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_backend(), environment

    expected = [(True, rank, 3, "gloo", [str(rank), str(rank), "3", "127.0.0.1"]) for rank in range(3)]
    assert simulate(body, 3, "torch") == expected


@pytest.mark.parametrize("arguments", [{}, {"backend": "gloo"}, {"backend": "nccl", "init_method": "tcp://host:1"}])
def test_a_program_may_initialise_and_destroy_its_world(arguments):
    """init_process_group and destroy_process_group work inside a rank, any number of times, from any import."""
    from torch.distributed import init_process_group

    def body():
        for _ in range(2):
            init_process_group(**arguments)
            x = torch.ones(1)
            dist.all_reduce(x)
            assert x.item() == dist.get_world_size()
            with pytest.raises(ValueError, match="twice"):
                init_process_group(**arguments)
            dist.destroy_process_group()
            assert not dist.is_initialized()

    simulate(body, 2, "torch")


def test_initialising_with_another_rank_is_refused():
    """A rank or world size that is not the simulation's is an error that says where to find them."""

    def body():
        dist.init_process_group("gloo", rank=0, world_size=2)

    message = (
        "init_process_group('env://', rank=0, world_size=2) on simulated rank 0 of 3: rank and world size must be "
        "those of the simulation; RANK and WORLD_SIZE in the environment hold them"
    )
    with pytest.raises(RankFailedError, match=re.escape(message)):
        simulate(body, 3, "torch")


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_after_a_run(fails):
    """Environment, exception hook, switches and torch.distributed are as before, also after a failure."""
    before = dict(os.environ), sys.excepthook, dist.is_initialized()

    def body():
        dist.init_process_group()
        os.environ["LEFT"] = "1"
        torch.use_deterministic_algorithms(mode=True)
        dist.new_group([0])
        assert not fails

    if fails:
        with pytest.raises(RankFailedError):
            simulate(body, 2, "torch")
    else:
        simulate(body, 2, "torch")
    assert (dict(os.environ), sys.excepthook, dist.is_initialized()) == before
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError):
        torch._C._distributed_c10d._resolve_process_group("0")


def test_groups_must_be_created_alike():
    """Ranks that create different groups are told so, with both lines."""

    def body():
        dist.new_group([0, 1] if dist.get_rank() < 2 else [1, 2])

    with pytest.raises(RankFailedError) as caught:
        simulate(body, 3, "torch")
    assert (
        "rank 2 disagrees with ranks 0, 1 about the ranks of collective 0 of ranks (0, 1, 2) in group new_group"
        in str(caught.value)
    )


def test_groups_of_equal_ranks_are_different_groups():
    """Each has its own order of collectives."""

    def body():
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        x, y = torch.tensor([1.0]), torch.tensor([10.0])
        works = [(x, first), (y, second)]
        handles = [dist.all_reduce(t, group=g, async_op=True) for t, g in (works if dist.get_rank() else works[::-1])]
        for handle in handles:
            handle.wait()
        return x.item(), y.item()

    assert simulate(body, 2, "torch") == [(2.0, 20.0)] * 2
