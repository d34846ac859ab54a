"""Every simulated rank of PyTorch finds torch.distributed initialised, and nothing of it is left after the run."""

import gc
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d
from torch.utils.weak import TensorWeakRef

from hyper_parallel.errors import MeshError, RankFailedError
from hyper_parallel.transport.frontends.c10d.installation import INSTALLATION
from hyper_parallel.transport.frontends.c10d.rank_groups import RankGroups, enter_rank
from hyper_parallel.transport.frontends.c10d.simulated_world import _emptied_queue
from hyper_parallel.transport.host.torch.ops import TorchOps
from hyper_parallel.transport.simulated.endpoint import RankAbortedError
from hyper_parallel.transport.simulated.transport import SimulatedTransport
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


def test_a_run_drops_code_that_was_compiled_before(monkeypatch):
    """Ranks would run that code, in which the world outside is a constant; a compiler that is not there has none."""
    dropped = []
    compiler = SimpleNamespace(reset_code_caches=lambda: dropped.append("code"))
    monkeypatch.setitem(sys.modules, "torch._dynamo", compiler)
    with INSTALLATION.run():
        assert dropped == ["code"]
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    with INSTALLATION.run():
        assert dropped == ["code"]


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
    before = dict(os.environ), sys.excepthook, dist.is_initialized(), threading.Thread.start

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
    assert (dict(os.environ), sys.excepthook, dist.is_initialized(), threading.Thread.start) == before
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


def test_split_groups():
    """split_group makes groups of the parent's group ranks; every member gets its own, and others none."""

    def body():
        halves = dist.split_group(split_ranks=[[0, 1], [3, 2]])
        ends = dist.split_group(split_ranks=[[0, 3]], group_desc="ends")
        pair = dist.split_group(parent_pg=halves, split_ranks=[[1]])
        x = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(x, group=halves)
        named = None if ends is None else (ends.group_desc, dist.get_process_group_ranks(ends))
        return x.item(), named, None if pair is None else pair.size()

    ends = ("ends", [0, 3])
    assert simulate(body, 4, "torch") == [(3.0, ends, None), (3.0, None, 1), (7.0, None, None), (7.0, ends, 1)]


@pytest.mark.parametrize("splits", [None, [[0, 0]], [[2]]])
def test_a_split_that_cannot_be_is_refused(splits):
    """Lists that repeat a rank, name one that the parent lacks, or are missing, are errors."""
    message = f"split_group: split_ranks is {splits}; it must list group ranks below 2, each once, in at least one list"
    with pytest.raises(RankFailedError, match=re.escape(message)):
        simulate(lambda: dist.split_group(split_ranks=splits), 2, "torch")


def test_the_worlds_group_of_an_import_works_on_every_rank():
    """A default argument that a module keeps from its import on one rank works on all, and after the run."""
    kept = []

    def body():
        kept.append(dist.group.WORLD)
        x = torch.ones(1)
        dist.all_reduce(x, group=kept[0])
        return x.item()

    assert simulate(body, 3, "torch") == [3.0] * 3
    assert simulate(body, 2, "torch") == [2.0] * 2
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.get_rank(kept[0])


def test_a_group_describes_itself():
    """Name, description, devices and text of a group; a name can be taken once."""

    def body():
        group = dist.new_group([0, 1], group_desc="pair")
        assert (group.group_name, group.group_desc, group.name()) == ("1", "pair", "simulated")
        assert torch.device("cpu") in group._device_types
        assert group._get_backend(torch.device("cpu")) is group
        group.set_timeout(None)
        with pytest.raises(ValueError, match="the group name '1' is taken; choose another"):
            dist.distributed_c10d._new_process_group_helper(2, 0, [0, 1], "gloo", None, "1")
        return repr(group), repr(dist.group.WORLD)

    first = ("SimulatedProcessGroup('1', rank 0 of ranks [0, 1])", "WorldGroup('0', rank 0 of ranks [0, 1])")
    assert simulate(body, 2, "torch")[0] == first


def test_a_real_world_is_left_alone(tmp_path):
    """A process with a real world of its own simulates, and uses its world again afterwards."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        own = dist.group.WORLD

        def body():
            assert dist.group.WORLD is not own
            dist.init_process_group()
            dist.destroy_process_group()
            return dist.is_initialized()

        assert simulate(body, 2, "torch") == [False, False]
        assert dist.group.WORLD is own
        x = _functional_collectives.all_reduce(torch.ones(1), "sum", own)
        assert x.tolist() == [1.0]
    finally:
        dist.destroy_process_group()


VIEW = """
import gc
import sys
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

def view():
    distribute_tensor(torch.ones(5, 2), init_device_mesh("cpu", (1,)), [Shard(0)]).T
    torch._C._clear_DTensor_sharding_propagator_cache()

distributed.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
for _ in range(3):
    view()
gc.collect()
print("kept", sum(issubclass(type(value), DeviceMesh) for value in gc.get_objects()))
distributed.destroy_process_group()
"""


def test_nothing_grows_from_run_to_run(tmp_path):
    """Threads, groups and meshes of earlier runs are gone, but those that PyTorch's own DTensor never frees.

    Until 2.12, that is the mesh of each view, without this library, too.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    def body():
        mesh = init_device_mesh("cpu", (3,))
        tensor = distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)])
        return (tensor @ tensor.T).full_tensor().sum().item()

    def alive():
        gc.collect()
        kept = [value for value in gc.get_objects() if issubclass(type(value), dist.ProcessGroup | DeviceMesh)]
        return len(kept), threading.active_count()

    simulate(body, 3, "torch")
    before = alive()
    for _ in range(5):
        simulate(body, 3, "torch")
    after = alive()
    if after != before:
        command = [sys.executable, "-c", VIEW, f"file://{tmp_path}/store"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert output.splitlines()[-1] == "kept 3"
        before = before[0] + 5 * 3, before[1]
    assert after == before


def test_a_simulation_inside_a_rank():
    """A rank may simulate a world of its own, and goes on in its own afterwards."""

    def inner():
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    def body():
        inside = simulate(inner, 3, "torch")
        return inside, inner(), dist.get_world_size()

    assert simulate(body, 2, "torch") == [([3.0] * 3, 2.0, 2)] * 2


def test_a_group_cannot_grow():
    """merge_remote_group is refused by name."""
    message = "merge_remote_group on simulated ranks: the world of a simulation cannot grow; use a larger world_size"
    with pytest.raises(RankFailedError, match=message):
        simulate(lambda: dist.group.WORLD.merge_remote_group(None, 3), 2, "torch")


def test_a_rank_that_outlives_its_run_leaves_the_process_alone(tmp_path):
    """A thread that was given up after a time limit cannot destroy or use the process's own world when it goes on."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    own, entered, go_on, refused = dist.group.WORLD, threading.Event(), threading.Event(), []
    groups = RankGroups(SimulatedTransport(0, 1, TorchOps(), None), dist.HashStore())

    def rank():
        enter_rank(groups)
        with INSTALLATION.rank():
            entered.set()
            go_on.wait()
            for ask in [dist.destroy_process_group, dist.get_rank, lambda: dist.new_group([0])]:
                with pytest.raises(RankAbortedError):
                    ask()
                refused.append(ask)

    thread = threading.Thread(target=rank)
    try:
        with INSTALLATION.run():
            thread.start()
            entered.wait()
        groups.close()
        go_on.set()
        thread.join()
        assert len(refused) == 3
        assert dist.group.WORLD is own
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_a_group_has_a_name_and_a_description():
    """Groups answer PyTorch's C++ code as they answer Python; outside of their ranks they refuse."""
    groups = []

    def body():
        group = dist.new_group([0, 1], group_desc="pair")
        groups.append(dist.group.WORLD)
        return group.group_desc, group.getGroupDesc(), group.getGroupName() == group.group_name

    assert simulate(body, 2, "torch") == [("pair", "pair", True)] * 2
    with pytest.raises(MeshError) as caught:
        _ = groups[0].transport
    assert str(caught.value) == (
        "the world's group of a simulation is used outside of its ranks, or by a thread that is not a rank"
    )


def test_a_group_with_a_tag_is_made_once():
    """PyTorch looks a tagged group up before it makes another; a name can be given once."""

    def body():
        tagged = [distributed_c10d._new_group_with_tag([0, 1], pg_tag="tp") for _ in range(2)]
        return tagged[0] is tagged[1], dist.get_world_size(tagged[1])

    assert simulate(body, 2, "torch") == [(True, 2)] * 2


def test_a_mesh_of_a_checkpoint_belongs_to_the_rank_that_reads_it(tmp_path):
    """A DTensor that another world has saved is copied into one of this world, as over real processes."""

    def body(folder, saves):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        path = folder / str(torch.distributed.get_rank())
        if saves:
            hash(mesh)  # is kept, and must not be read back
            torch.save(distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]), path)
            return None
        read = torch.load(path)
        assert read.device_mesh == mesh
        assert hash(read.device_mesh) == hash(mesh)
        return distribute_tensor(torch.zeros(5), mesh, [Shard(0)]).copy_(read).full_tensor().tolist()

    simulate(body, 2, "torch", (tmp_path, True))
    assert simulate(body, 2, "torch", (tmp_path, False)) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


def test_a_backward_that_raised_leaves_no_tensors_in_the_queue_of_its_thread():
    """They would be freed when the thread ends, which may be while the interpreter does."""
    held = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, grad):
            held.append(TensorWeakRef(passed := grad * 2))
            return passed

    class Failing(Noted):
        @staticmethod
        def backward(*_):
            raise ValueError("it fails")

    x = torch.ones(3, requires_grad=True)
    with _emptied_queue():
        waiting = x * 2
        failing = Failing.apply(x)
        with pytest.raises(ValueError, match="it fails"):
            (failing + Noted.apply(waiting)).sum().backward()
        assert held[0]() is not None  # autograd has not come to the node of the product
    assert held[0]() is None
    assert x.grad is None
