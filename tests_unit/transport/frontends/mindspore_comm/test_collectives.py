"""What members of a collective of MindSpore's world must agree on, and the errors if they do not."""

import pytest

from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.transport.base import active_transport
from hyper_parallel.transport.simulated.processes import run_processes
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


def differing(kind):  # noqa: C901 - one branch per kind
    """Calls that differ between ranks 0 and 1, in a world that begins here: such processes outlive the failure."""
    from hyper_parallel.transport.frontends.mindspore_comm import begin

    transport = active_transport()
    begin(transport.rank, transport.world_size, transport.endpoint)
    from mindspore import Tensor, mint, ops
    from mindspore.communication import create_group, get_rank

    dist, rank = mint.distributed, get_rank()
    x = Tensor([1.0, 2.0, 3.0])
    if kind == "reduction":
        dist.all_reduce(x, ["sum", "max"][rank])
    elif kind == "operation":
        ops.AllReduce()(x) if rank else dist.all_gather([Tensor([0.0] * 3) for _ in range(2)], x)
    elif kind == "shape":
        ops.AllReduce()(x[: 3 - rank])
    elif kind == "root":
        dist.broadcast(x, rank)
    elif kind == "chunks":
        dist.all_to_all_single(Tensor([0.0] * 3), x, [1, 2], [1, 2])
    elif kind == "group":
        create_group("left", [0, 1])
        create_group("right", [0, 1])
        dist.all_reduce(x, group=["left", "right"][rank])
    elif kind == "absent":
        rank or dist.barrier()
    elif kind == "started":
        handle = dist.all_reduce(x if rank else x[:2], async_op=True)
        handle.wait()
    elif kind == "messages":
        dist.send(x, 1) if rank == 0 else dist.recv(Tensor([0.0] * 2), 0)
    elif kind == "waits":
        dist.recv(x, 1 - rank)
    elif kind == "lost":
        rank or dist.send(x, 1)


def backward():
    """A collective in the backward pass of one rank only."""
    import mindspore as ms
    from mindspore import Tensor, ops

    rank = active_transport().rank
    ms.grad(lambda y: (ops.AllReduce()(y) if rank else y).sum())(Tensor([1.0, 2.0]))


def failure(kind):
    """The cause, without the lines' numbers."""
    with pytest.raises(RankFailedError) as caught:  # noqa: PT012 - one of two
        if kind == "gradient":
            simulate(backward, 2, "mindspore")
        else:
            run_processes(differing, (kind,), 2, 60.0, start=None)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)
    lines = []
    for line in str(caught.value.__cause__).splitlines():
        start, at, path = line.partition(f" at {__file__}:")
        lines.append(f"{start} HERE" if at and path.isdigit() else line)
    return "\n".join(lines)


def test_mismatches_name_both_calls():
    """Each way in which two ranks can differ is an error at once, with what both called and where."""
    assert failure("reduction") == (
        "ranks 0 and 1 disagree about the reduction of collective 0 of ranks (0, 1):\n"
        "  rank 0: AllReduce(f32[3], sum) HERE\n  rank 1: AllReduce(f32[3], max) HERE"
    )
    assert failure("operation") == (
        "ranks 0 and 1 disagree about the operation of collective 0 of ranks (0, 1):\n"
        "  rank 0: AllGather(f32[3]) HERE\n  rank 1: AllReduce(f32[3], sum) HERE"
    )
    assert failure("shape") == (
        "ranks 0 and 1 disagree about the shape of collective 0 of ranks (0, 1):\n"
        "  rank 0: AllReduce(f32[3], sum) HERE\n  rank 1: AllReduce(f32[2], sum) HERE"
    )
    assert failure("root") == (
        "ranks 0 and 1 disagree about the root of collective 0 of ranks (0, 1):\n"
        "  rank 0: Broadcast(f32[3], root=0) HERE\n  rank 1: Broadcast(f32[3], root=1) HERE"
    )
    assert failure("chunks") == (
        "ranks 0 and 1 disagree about the chunk shapes of collective 0 of ranks (0, 1): "
        "rank 0 sends [2] to rank 1, which expects [1]\n"
        "  ranks 0, 1: AlltoAll(f32[1] f32[2], expects f32[1] f32[2]) HERE"
    )
    assert failure("started") == (
        "ranks 0 and 1 disagree about the shape of collective 0 of ranks (0, 1):\n"
        "  rank 0: AllReduce(f32[2], sum) HERE\n  rank 1: AllReduce(f32[3], sum) HERE"
    )
    assert failure("messages") == (
        "ranks 0 and 1 disagree about the shape of a message:\n"
        "  rank 0: send(f32[3], dst=1, tag=0) HERE\n  rank 1: recv(f32[2], src=0, tag=0) HERE"
    )


def test_deadlocks_and_absent_members_are_named():
    """Two groups of the same ranks, a member that never calls, a backward that one rank skips, waits in a circle."""
    assert failure("group") == (
        "deadlock, no rank can go on:\n"
        "  rank 0 waited in AllReduce(f32[3], sum) (collective 0 of ranks (0, 1) in group left) for ranks [1] HERE\n"
        "  rank 1 waited in AllReduce(f32[3], sum) (collective 0 of ranks (0, 1) in group right) for ranks [0] HERE"
    )
    assert failure("absent") == (
        "rank 1 returned without joining collective 0 of ranks (0, 1), in which others wait:\n  rank 0: Barrier() HERE"
    )
    assert failure("waits") == (
        "deadlock, no rank can go on:\n"
        "  rank 0 waited in recv(f32[3], src=1, tag=0) HERE\n  rank 1 waited in recv(f32[3], src=0, tag=0) HERE"
    )
    assert failure("lost") == (
        "messages were lost:\n  rank 0: send(f32[3], dst=1, tag=0) was never received; sent HERE"
    )
    assert failure("gradient") == (
        "rank 0 returned without joining collective 0 of ranks (0, 1), in which others wait:\n"
        "  rank 1: AllReduce(f32[2], sum) HERE"
    )
