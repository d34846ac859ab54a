"""What collectives of simulated ranks return: it can be waited for in every way, and tells errors again."""

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def test_every_way_of_waiting():
    """synchronize, block_current_stream and wait write the output; only a receive has a source."""

    def body():
        outputs = []
        for way in ["wait", "synchronize", "block_current_stream"]:
            x = torch.ones(1)
            work = dist.all_reduce(x, async_op=True)
            getattr(work, way)()
            assert work.exception() is None
            outputs.append(x.item())
        with pytest.raises(RuntimeError, match="only a receive has a source"):
            work.source_rank()
        return outputs

    assert simulate(body, 2, "torch") == [[2.0, 2.0, 2.0]] * 2


def test_an_error_is_told_on_every_wait():
    """A collective that failed says so whenever it is asked."""

    def body():
        work = dist.all_reduce(torch.ones(1 + dist.get_rank()), async_op=True)
        for _ in range(2):
            with pytest.raises(CollectiveMismatchError):
                work.wait()
        return work.is_success(), isinstance(work.exception(), CollectiveMismatchError)

    assert simulate(body, 2, "torch") == [(False, True)] * 2


def test_collectives_of_one_device_are_gathered():
    """A coalescing manager with a device returns one work for all collectives inside."""

    def body():
        x, y = torch.ones(1), torch.ones(2)
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            work = dist.group.WORLD.allreduce([x], dist.AllreduceOptions())
            dist.group.WORLD.broadcast([y.mul_(dist.get_rank() + 1)], 1)
        manager.wait()
        return x.item(), y.tolist(), work.is_completed()

    assert simulate(body, 2, "torch") == [(2.0, [2.0, 2.0], True)] * 2
