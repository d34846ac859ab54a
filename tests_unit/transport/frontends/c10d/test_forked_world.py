"""Simulated ranks of PyTorch that are processes: order, checks and results of threads, without shared globals."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.transport.failures import WorldFailedError
from hyper_parallel.transport.frontends.c10d.forked_world import run_forked
from hyper_parallel.transport.frontends.c10d.shared_payloads import SharedFiles, pack, unpack
from hyper_parallel.transport.processes import process_state
from hyper_parallel.verify import simulate
from hyper_parallel.verify.simulate import simulate_forked

pytestmark = pytest.mark.platforms("torch")

STATE = []


def forked(fn, world_size, *args, timeout=100.0):
    """Run a function on forked ranks; no memory and no process of theirs is left."""
    try:
        return run_forked(fn, args, world_size, timeout)
    finally:
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank-")]
        assert _shared() == []


def _shared():
    memory = Path("/dev/shm")  # noqa: S108 - files in it are memory
    return list(memory.glob(f"hyper_parallel_shared_{os.getpid()}_*"))


def everything():
    """Each kind of call, on tensors that are small, large, empty, of zero dims and of two bytes."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    draws = torch.Generator().manual_seed(rank)
    found = [float(torch.rand(())), os.environ["RANK"], dist.get_backend()]
    single, half = torch.float32, torch.bfloat16
    for shape, dtype in (((3,), single), ((70, 300), single), ((0, 2), torch.int64), ((), half)):
        x = torch.randn(shape, generator=draws).to(dtype)
        total = x.clone()
        dist.all_reduce(total)
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        found += [total, *parts, x]
    rows = torch.arange(rank + 2.0)
    if rank == 0:
        dist.send(torch.randn(200, 100, generator=draws), world - 1, tag=3)
    elif rank == world - 1:
        found.append(torch.empty(200, 100))
        dist.recv(found[-1], None, tag=3)
    ends = dist.new_group([0, world - 1])
    if rank in (0, world - 1):
        dist.broadcast(total, 0, group=ends)
    objects = [None] * world
    dist.all_gather_object(objects, rows)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("key", "value")
    found += [total, *objects, store.get("key"), store.add("count", 1) > 0]
    dist.barrier()
    return found


def bits(value):
    """A value as bits."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.reshape(-1).view(torch.uint8).tolist()
    return [bits(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_results_are_those_of_threads(world_size):
    """Each kind of call gives the same bits on processes as on threads."""
    torch.manual_seed(7)
    expected = bits(simulate(everything, world_size, "torch"))
    torch.manual_seed(7)
    assert bits(forked(everything, world_size)) == expected


def test_globals_are_each_ranks_own_and_gone_with_the_run():
    """Modules are not shared, between ranks or with the next run, and processes end."""

    def body():
        import collections

        collections.SEEN = [*getattr(collections, "SEEN", ()), dist.get_rank()]
        return collections.SEEN, os.getpid()

    first, second = forked(body, 3), forked(body, 2)
    assert [seen for seen, _ in first + second] == [[0], [1], [2], [0], [1]]
    processes = [process for _, process in first + second]
    assert len({*processes, os.getpid()}) == 6
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_threads_of_a_rank_are_that_rank():
    """Threads find groups, meshes and the rank's random state, and may communicate while the rank waits for them."""

    def body():
        from torch.distributed.device_mesh import init_device_mesh

        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))

        def inside():
            x = torch.rand(2)
            dist.all_reduce(x, group=mesh.get_group())
            return mesh.get_local_rank(), x

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(inside).result()

    found = forked(body, 3)
    expected = torch.zeros(2)
    for rank in range(3):
        expected += torch.rand(2, generator=torch.Generator().manual_seed(rank))
    assert [rank for rank, _ in found] == [0, 1, 2]
    for _, total in found:
        torch.testing.assert_close(total, expected)


def test_two_threads_that_communicate_at_once_are_refused():
    """The order of two threads is not known, so a second one that communicates meanwhile is an error, by its name."""

    def second():
        time.sleep(0.2)
        dist.barrier()

    def body():
        dist.barrier()
        if dist.get_rank() == 1:
            thread = threading.Thread(target=second, name="second")
            thread.start()
        dist.barrier()
        if dist.get_rank() == 0:
            time.sleep(0.8)
        else:
            thread.join()

    with pytest.raises(WorldFailedError) as caught:
        forked(body, 2)
    assert str(caught.value.failures[1]) == (
        "thread 'second' communicates while another thread of its simulated rank does: their order is not "
        "defined; communicate in one thread (dcp.save instead of dcp.async_save)"
    )


def unequal():
    """Ranks disagree about a shape."""
    dist.all_reduce(torch.ones(3 + dist.get_rank()))


def raising():
    """One rank raises while the other waits."""
    if dist.get_rank() == 1:
        raise KeyError("of rank 1")
    dist.barrier()


def deadlock():
    """Both ranks receive first."""
    dist.recv(torch.empty(2), 1 - dist.get_rank())


def lost():
    """A message is never received."""
    if dist.get_rank() == 0:
        dist.isend(torch.ones(2), 1)


def forsaken():
    """A key of the store is never set."""
    if dist.get_rank() == 0:
        dist.distributed_c10d._get_default_store().wait(["never"])


@pytest.mark.parametrize("body", [unequal, raising, deadlock, lost, forsaken], ids=lambda body: body.__name__)
def test_errors_are_those_of_threads(body):
    """Mismatches, exceptions, deadlocks and lost messages have the same text, with the program's lines."""
    with pytest.raises(WorldFailedError) as threads:
        simulate(body, 2, "torch")
    with pytest.raises(WorldFailedError) as processes:
        forked(body, 2)
    assert type(processes.value.__cause__) is type(threads.value.__cause__)
    if isinstance(threads.value.__cause__, CollectiveMismatchError):
        assert str(processes.value.__cause__) == str(threads.value.__cause__)
    assert processes.value.failures.keys() == threads.value.failures.keys()
    assert "test_forked_world.py" in str(processes.value)


def test_a_rank_that_dies_is_named_with_its_signal(monkeypatch):
    """A process that is killed ends the others."""
    monkeypatch.delenv("HP_RANK_LEDGER", raising=False)  # a rank that is killed on purpose leaves no coverage

    def body():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankFailedError) as caught:
        forked(body, 3)
    assert str(caught.value.failures[1]) == "rank 1 died of SIGKILL"


def test_a_rank_that_hangs_is_ended_and_its_stack_shown(tmp_path):
    """After the time limit no process is left, and the report has the line that ran."""

    def body(folder):
        Path(folder, str(dist.get_rank())).write_text(str(os.getpid()))
        while dist.get_rank() == 1:
            time.sleep(0.01)
        dist.barrier()

    with pytest.raises(WorldFailedError, match="rank 1 of 2 did not finish within 12 s") as caught:
        forked(body, 2, str(tmp_path), timeout=12.0)
    assert "in body" in caught.value.activities[1]
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_packages_are_imported_before_the_ranks_are_unless_they_ask_for_one(tmp_path, monkeypatch):
    """A package is imported once, in the process that ranks are forked from; one that reads RANK, in each rank."""
    (tmp_path / "quiet_package.py").write_text("import os\nPROCESS = os.getpid()\n")
    (tmp_path / "asking_package.py").write_text("import os\nPROCESS, RANK = os.getpid(), os.environ.get('RANK')\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def body():
        import asking_package
        import quiet_package

        return quiet_package.PROCESS, os.getpid() == asking_package.PROCESS, asking_package.RANK

    found = simulate_forked(
        body, 2, (), timeout=100.0, packages=["quiet_package.PROCESS", "asking_package.RANK", "asking_package"]
    )
    assert [(own, rank) for _, own, rank in found] == [(True, "0"), (True, "1")]
    assert len({process for process, _, _ in found}) == 1


def test_what_packages_that_ask_for_a_rank_import_is_imported_before_the_ranks(tmp_path, monkeypatch):
    """One that reads RANK, and one that imports it, belong to each rank; what they import of others is imported once.

    Also a package that is found to ask only after another one is left out.
    """
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text("")
    (tmp_path / "heavy" / "part.py").write_text("import os\nPROCESS = os.getpid()\n")
    (tmp_path / "asking_core.py").write_text(
        "import heavy.part\nimport os\nRANK, MASTER = os.environ.get('RANK'), 'MASTER_ADDR' in os.environ\n"
    )
    (tmp_path / "early.py").write_text("import asking_core\nRANK = asking_core.RANK\n")
    (tmp_path / "late.py").write_text("import os\nimport early\nimport second\nPROCESS = os.getpid()\n")
    (tmp_path / "second.py").write_text("import asking_core\nRANK = asking_core.RANK\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def body():
        import late

        part = late.early.asking_core.heavy.part
        return late.early.RANK, late.second.RANK, os.getpid() == late.PROCESS, part.PROCESS

    packages = ["asking_core", "early", "late"]
    for _ in range(2):
        found = simulate_forked(body, 2, (), timeout=100.0, packages=packages)
        assert [values[:3] for values in found] == [("0", "0", True), ("1", "1", True)]
        assert len({process for *_, process in found}) == 1


def test_processes_with_the_packages_of_earlier_programs_end(tmp_path, monkeypatch):
    """Memory does not grow with the number of programs: two processes with imported packages stay, and work again."""
    names = [f"package_{letter}" for letter in "abcd"]
    for name in names:
        (tmp_path / f"{name}.py").write_text("import os\nPROCESS = os.getpid()\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def process_of(name):
        body = lambda: __import__(name).PROCESS  # noqa: E731 - travels by value
        first, second = simulate_forked(body, 2, (), timeout=100.0, packages=[name])
        assert first == second
        return first

    processes = [process_of(name) for name in names]
    assert len(set(processes)) == 4
    assert process_of(names[3]) == processes[3]
    deadline = time.monotonic() + 60
    while any(process_state(process) not in {"", "Z"} for process in processes[:2]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [process_state(process) in {"", "Z"} for process in processes] == [True, True, False, False]
    assert process_of(names[0]) not in processes


def test_a_function_that_a_package_compiles_belongs_to_each_rank(tmp_path, monkeypatch):
    """A package that is imported before the ranks may have compiled functions: each process compiles its own."""
    text = "import torch\nimport torch.distributed as dist\n\n@torch.compile(backend='eager')\n"
    (tmp_path / "compiling_package.py").write_text(f"{text}def scaled(x):\n    return x * (1 + dist.get_rank())\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def body():
        import compiling_package

        return compiling_package.scaled(torch.ones(2)).tolist()

    found = simulate_forked(body, 2, (), timeout=100.0, packages=["compiling_package"])
    assert found == [[1.0, 1.0], [2.0, 2.0]]


def test_what_ranks_print_is_printed_here(capsys):
    """Text of ``print`` comes to this process's stream."""
    forked(lambda: print(f"rank {dist.get_rank()}"), 2)  # noqa: T201 - under test
    assert sorted(capsys.readouterr().out.split("\n")) == ["", "rank 0", "rank 1"]


def test_large_payloads_are_files_until_everybody_has_mapped_them(tmp_path):
    """Writing to a received tensor changes no other receiver's; the file goes with the last of them."""
    large, small = torch.arange(20_000.0).reshape(100, 200), torch.tensor(3, dtype=torch.int16)
    packed = pack([large, small, "text", torch.empty(0, 4)], str(tmp_path))
    files = SharedFiles()
    files.sent([packed, packed])
    first, second = unpack(packed), unpack(packed)
    first[0].zero_()
    assert torch.equal(second[0], large)
    assert (second[1], second[2], second[3].shape) == (small, "text", (0, 4))
    files.mapped([packed])
    assert Path(packed.path).exists()
    files.mapped([packed])
    assert list(tmp_path.iterdir()) == []
    large.untyped_storage().resize_(0)  # which the program may
    strided = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(unpack(pack(strided, str(tmp_path))), strided)
