"""The groups of MindSpore's world on a rank, as ``mindspore.communication`` and ``mint.distributed`` tell them."""

import pytest

from hyper_parallel.errors import CollectiveMismatchError, MeshError, UnsupportedOnBackend
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


def told():
    """What every question about the world and about groups answers on this rank."""
    import mindspore.communication as comm
    from mindspore.communication import _comm_helper
    from mindspore.mint import distributed as dist

    comm.init()
    answers = [comm.get_rank(), comm.get_group_size(), comm.get_local_rank(), comm.get_local_rank_size()]
    answers += [dist.get_rank(), dist.get_world_size(), dist.get_backend(), dist.is_initialized()]
    comm.create_group("pair", [0, 2])
    comm.create_group("pair", [0, 2])
    name = dist.new_group([2, 1])
    answers += [comm.get_world_rank_from_group_rank("pair", 1), comm.get_group_rank_from_world_rank(2, "pair")]
    answers += [comm.get_process_group_ranks("pair"), dist.get_process_group_ranks(name), comm.get_group_size("pair")]
    answers += [dist.get_global_rank(name, 0), dist.get_group_rank(name, 2), dist.new_group() == "hccl_world_group"]
    answers.append(comm.get_local_rank("pair") if comm.get_rank() in (0, 2) else None)
    comm.destroy_group("pair")
    comm.create_group("pair", [0, 1])
    answers.append(comm.get_process_group_ranks("pair"))
    answers += [_comm_helper._get_group_map() == {"pair": [0, 1], name: [1, 2]}, _comm_helper._wait_all_comm_init()]
    dist.destroy_process_group()
    answers.append(dist.is_initialized())
    comm.init("nccl")
    comm.release()
    answers.append(dist.is_initialized())
    dist.init_process_group(world_size=3)
    return [*answers, dist.is_initialized(), dist.is_available()]


def test_the_world_and_its_groups():
    """Ranks, sizes and translations of the world and of groups, also after groups and the world are destroyed."""
    for _ in range(2):
        for rank, answers in enumerate(simulate(told, 3, "mindspore")):
            local = {0: 0, 1: None, 2: 1}[rank]
            expected = [rank, 3, rank, 3, rank, 3, "hccl", True, 2, 1, [0, 2], [1, 2], 2, 1, 1, True, local, [0, 1]]
            assert answers == [*expected, True, True, False, False, True, True]


def refusals():
    """The errors of calls about groups that cannot be right."""
    import mindspore.communication as comm
    from mindspore import Tensor, mint

    dist = mint.distributed
    comm.create_group("others", [1, 2])

    def destroyed():
        dist.destroy_process_group()
        try:
            dist.all_reduce(Tensor([1.0]))
        finally:
            comm.init()

    calls = [
        lambda: comm.create_group("far", [0, 3]),
        lambda: comm.create_group("turned", [1, 0]),
        lambda: comm.get_group_size("nowhere"),
        lambda: comm.get_world_rank_from_group_rank("others", 2),
        lambda: comm.get_rank("others"),
        lambda: dist.all_reduce(Tensor([1.0]), group="others"),
        lambda: dist.reduce(Tensor([1.0]), 3),
        comm.get_comm_name,
        lambda: comm.management._comm_switch_nic([0], [True]),
        lambda: comm.init("gloo"),
        lambda: dist.init_process_group(world_size=4),
        lambda: dist.init_process_group(init_method="tcp://127.0.0.1:9", rank=2, world_size=3),
        lambda: dist.init_process_group(group_name="mine"),
        lambda: dist.TCPStore("127.0.0.1", 9, is_master=True),
        destroyed,
    ]
    errors = []
    if comm.get_rank() == 0:
        for call in calls:
            try:
                call()
            except Exception as error:  # noqa: BLE001, PERF203 - the types are compared
                errors.append((type(error), str(error)))
    return errors


def test_what_cannot_be_right_is_refused():
    """Each wrong or impossible call about groups raises one error that names it."""
    here = "is not supported on simulated or rehearsed ranks"
    assert simulate(refusals, 3, "mindspore")[0] == [
        (MeshError, "create_group('far', [0, 3]): ranks must lie in 0..2"),
        (
            MeshError,
            (
                "create_group('turned', [1, 0]): list the ranks in ascending order; for any other order, MindSpore "
                "numbers the members in two different ways, by the list and by the sorted list"
            ),
        ),
        (
            MeshError,
            "there is no group 'nowhere'; known are ['hccl_world_group', 'others']; create_group makes one",
        ),
        (MeshError, "group 'others' of ranks [1, 2] has no group rank 2; its ranks are 0..1"),
        (MeshError, "rank 0 is not a member of group 'others' of ranks [1, 2]"),
        (
            CollectiveMismatchError,
            "rank 0 calls a collective of group 'others' of ranks [1, 2], of which it is not a member",
        ),
        (CollectiveMismatchError, "reduce names rank 3, which is not a member of the world"),
        (
            UnsupportedOnBackend,
            f"get_comm_name {here}: it names a communicator of HCCL, which ranks here lack",
        ),
        (
            UnsupportedOnBackend,
            "MindSpore's comm_switch_nic has no meaning on ranks without devices: it asks for a communicator of HCCL",
        ),
        (ValueError, "init: backend_name is 'gloo'; it must be one of hccl, nccl, mccl, or None"),
        (MeshError, "init_process_group: world_size is 4, but this rank runs in a world where it is 3"),
        (MeshError, "init_process_group: rank is 2, but this rank runs in a world where it is 0"),
        (
            UnsupportedOnBackend,
            "init_process_group: group_name='mine' is not supported; the world's group keeps its usual name",
        ),
        (
            UnsupportedOnBackend,
            (
                f"TCPStore {here}: a rank that waits for a key would block the others; exchange objects with "
                "all_gather_object"
            ),
        ),
        (
            MeshError,
            "the process groups were destroyed; call mindspore.communication.init() before further collectives",
        ),
    ]


def test_a_thread_that_is_no_rank():
    """A collective outside of a rank's own thread has no world, and says so."""
    from hyper_parallel.transport.frontends.mindspore_comm.world import active_world, current_world

    assert active_world() is None
    with pytest.raises(MeshError) as caught:
        current_world()
    assert str(caught.value) == (
        "a collective was called in a thread that is not a rank; call collectives in the thread that runs the rank"
    )


def test_nothing_is_written_into_an_empty_tensor():
    """An empty result has no memory to write to."""
    import numpy as np
    from mindspore import Tensor

    from hyper_parallel.transport.frontends.mindspore_comm.host import write

    empty = Tensor(np.zeros((0, 3), np.float32))
    write(empty, np.zeros((0, 3), np.float32), "all_gather")
    assert empty.shape == (0, 3)
