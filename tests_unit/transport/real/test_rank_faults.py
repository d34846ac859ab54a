"""The table of faults, over real processes: a rank that is killed, stopped or raises; its parent, ports, the disk."""

import contextlib
import json
import multiprocessing
import multiprocessing.util
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from hyper_parallel.transport.atomic_files import atomic_write_text
from hyper_parallel.transport.checks.flight_recorder import FOLDER_VARIABLE
from hyper_parallel.transport.checks.flight_trace import read_flight
from hyper_parallel.transport.processes import python_command, search_path
from hyper_parallel.transport.real.launched_processes import close_launched_teams, run_launched
from hyper_parallel.transport.serialization import pack
from hyper_parallel.transport.simulated.rank_pool import LEDGER_VARIABLE

pytestmark = [pytest.mark.platforms("torch"), pytest.mark.fault]


def gone(pid):
    """Whether a process has ended; one that nobody has waited for yet counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition):
    """Return once the condition holds; the limit is for a machine that has stopped."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """A folder into which ranks write their process numbers: after the test no rank is left, and none of its files."""
    close_launched_teams()
    monkeypatch.delenv(LEDGER_VARIABLE, raising=False)
    files, pids = tmp_path / "files", tmp_path / "pids"
    files.mkdir()
    pids.mkdir()
    multiprocessing.util.get_temp_dir()  # of this process, for its sockets, whose paths must be short
    monkeypatch.setattr(tempfile, "tempdir", str(files))
    yield pids
    close_launched_teams()
    started = [int(path.name) for path in pids.iterdir()]
    assert started
    wait_until(lambda: all(map(gone, started)))
    assert [path.name for path in files.iterdir() if not path.name.startswith("pymp-")] == []
    assert not {child.pid for child in multiprocessing.active_children()} & set(started)


def _hit(fault):
    """What happens to rank 1."""
    if fault == "raise":
        raise ValueError("boom")
    os.kill(os.getpid(), getattr(signal, fault))


def _train(fault, place, pids, folder):
    """A step of training on three ranks, with a fault of rank 1 at a place; returns nothing."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    (Path(pids) / str(os.getpid())).touch()

    def here(name):
        if rank == 1 and name == place:
            _hit(fault)

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            here("forward")
            ctx.set_materialize_grads(True)
            dist.all_reduce(x := x.clone())
            return x

        @staticmethod
        def backward(ctx, grad):
            here("backward")
            assert ctx.saved_tensors == ()
            dist.all_reduce(grad := grad.clone())
            return grad

    weight = torch.full((3,), 1.0 + rank, requires_grad=True)
    weight.register_hook(lambda _: here("hook"))
    here("before")
    dist.all_reduce(torch.ones(1))
    here("after")
    started = dist.all_reduce(torch.ones(1), async_op=True)
    here("in")
    started.wait()
    Sum.apply(weight * 2).sum().backward()
    if place == "checkpoint":
        _save(folder, lambda: here(place))
    if place == "sharded checkpoint":
        _save_shards(folder, lambda: here(place))
    dist.barrier()


def _save(folder, while_writing):
    """Save two checkpoints, the second with a fault in its write."""
    import torch
    import torch.distributed.checkpoint as dcp

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            done = super().write_data(plan, planner)
            while_writing()
            return done

    dcp.save({"weight": torch.arange(5.0)}, storage_writer=dcp.FileSystemWriter(f"{folder}/1"))
    dcp.save({"weight": torch.zeros(5)}, storage_writer=Writer(f"{folder}/2"))


def _save_shards(folder, while_writing):
    """Save two checkpoints of shards into one folder, the second with a fault once this rank has written."""
    import torch

    from hyper_parallel import Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.core.checkpoint import folder as folders, save

    mesh, plain = init_device_mesh("cpu", (3,)), folders.DataFile.write

    def write(self, parts):
        written = plain(self, parts)
        while_writing()
        return written

    save({"weight": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])}, f"{folder}/shards")
    folders.DataFile.write = write
    save({"weight": distribute_tensor(torch.zeros(5), mesh, [Shard(0)])}, f"{folder}/shards")


PLACES = ["before", "in", "after", "forward", "backward", "hook", "checkpoint", "sharded checkpoint"]
FAULTS = ["SIGKILL", "SIGSTOP", "raise"]
EVERYDAY = [("SIGKILL", "checkpoint"), ("SIGKILL", "sharded checkpoint"), ("SIGSTOP", "in"), ("raise", "backward")]
"""A place of each fault, and both kinds of checkpoint; the others are among the sweeps."""


CASES = [
    pytest.param(fault, place, marks=[] if (fault, place) in EVERYDAY else [pytest.mark.sweep], id=f"{fault}-{place}")
    for fault in FAULTS
    for place in PLACES
]


@pytest.mark.parametrize("fault, place", CASES)
def test_a_fault_of_a_rank_ends_the_world(nothing_left, tmp_path, fault, place):
    """All ranks end within the limit, the report names rank 1 and the calls, and the last checkpoint loads."""
    text = _failed(fault, place, nothing_left, tmp_path)
    first = text.splitlines()[0]
    shared = (fault, place) == ("raise", "checkpoint")  # PyTorch tells all ranks, with the rank that raised
    if fault == "SIGSTOP":
        assert "did not finish within" in first
    elif shared:
        assert first == "ranks 0, 1, 2 of 3 failed", text
        assert "CheckpointException ranks:dict_keys([1])" in text
        assert "ValueError: boom" in text
    else:
        assert first == "rank 1 of 3 failed", text
        expected = (
            "rank 1 died of SIGKILL; it was not in a communication call" if fault == "SIGKILL" else "ValueError: boom"
        )
        assert expected in text
    if fault == "SIGKILL" and place != "before":
        last = "; last in " if place == "sharded checkpoint" else "; last in dist."
        assert last in text
        assert f" at {__file__}:" in text.split(last)[1].splitlines()[0]
    assert shared or ("--- rank 0: " in text and "--- rank 2: " in text)
    if place == "checkpoint":
        assert not (tmp_path / "2" / ".metadata").exists()
        assert _loaded(tmp_path / "1") == [0.0, 1.0, 2.0, 3.0, 4.0]
    if place == "sharded checkpoint":
        assert _loaded_shards(tmp_path / "shards") == [0.0, 1.0, 2.0, 3.0, 4.0]


def _failed(fault, place, pids, folder):
    """The report of the world with this fault; a stopped rank gets the time that it needs to reach the fault."""
    limit = 5.0 if fault == "SIGSTOP" else 120.0
    while True:
        arguments = (fault, place, str(pids), str(folder))
        text = str(run_launched(pack((_train, arguments), _train), 3, "torch", limit).failure)
        if fault != "SIGSTOP" or "--- rank 1: was running in\n(the process is stopped)" in text:
            return text
        limit *= 2
        assert limit < 300, text
        shutil.rmtree(folder / "1", ignore_errors=True)
        shutil.rmtree(folder / "2", ignore_errors=True)
        shutil.rmtree(folder / "shards", ignore_errors=True)


def _loaded_shards(folder):
    """The tensor of the checkpoint of shards, read by one process."""
    import torch

    from hyper_parallel.core.checkpoint import load

    state = {"weight": torch.full((5,), -1.0)}
    load(state, folder)
    return state["weight"].tolist()


def _loaded(folder):
    """The tensor of a checkpoint, read by one process."""
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"weight": torch.zeros(5)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state["weight"].tolist()


_PARENT = """
import sys
from pathlib import Path

from hyper_parallel.transport.real.launched_processes import run_launched
from hyper_parallel.transport.serialization import pack

def body(moment, folder):
    import time
    import torch
    import torch.distributed as dist
    from hyper_parallel import Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.core.checkpoint import folder as folders, save

    if moment == "checkpoint":
        mesh = init_device_mesh("cpu", (2,))
        save({"weight": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])}, f"{folder}/shards")
        folders.DataFile.write = lambda self, parts: (Path(folder, str(dist.get_rank())).touch(), time.sleep(600))
        save({"weight": distribute_tensor(torch.zeros(5), mesh, [Shard(0)])}, f"{folder}/shards")
    if moment in ("forward", "backward"):
        class Stays(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return stay(x) if moment == "forward" else x * 2

            @staticmethod
            def backward(ctx, gradient):
                return stay(gradient)

        def stay(_):
            Path(folder, str(dist.get_rank())).touch()
            time.sleep(600)

        Stays.apply(torch.ones(3, requires_grad=True)).sum().backward()
    dist.barrier()
    Path(folder, str(dist.get_rank())).touch()
    if dist.get_rank():
        dist.barrier()
    time.sleep(600)

run_launched(pack((body, tuple(sys.argv[1:])), body), 2, "torch", 600.0)
"""


COMPUTING = ["forward", "backward"]


def marked(mark):
    """Numbers of the running processes that have a text in their environment, as those that a process starts have."""
    numbers = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes() and not gone(int(path.parent.name)):
                numbers.append(int(path.parent.name))
    return numbers


@pytest.mark.parametrize(
    "moment",
    ["collective", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("start", "checkpoint", *COMPUTING))],
)
def test_ranks_end_with_their_parent(tmp_path, monkeypatch, moment):
    """A parent that is killed leaves no process behind; the earlier checkpoint loads, and ranks write their last calls.

    It is killed while ranks start, while one computes and one waits in a collective, while they write a checkpoint, or
    while they are in forward or in backward.
    """
    monkeypatch.delenv(LEDGER_VARIABLE, raising=False)
    script, folder, mark = tmp_path / "parent.py", tmp_path / "ranks", uuid.uuid4().hex
    folder.mkdir()
    script.write_text(_PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path()), "HP_TEST_MARK": mark}
    environment[FOLDER_VARIABLE] = str(tmp_path / "flight")
    parent = subprocess.Popen([sys.executable, str(script), moment, str(folder)], env=environment)

    def reached():
        return len(marked(mark)) > 1 if moment == "start" else {"0", "1"} <= {path.name for path in folder.iterdir()}

    try:
        wait_until(lambda: reached() or parent.poll() is not None)
        assert parent.poll() is None
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not marked(mark))
    if moment == "checkpoint":
        assert _loaded_shards(folder / "shards") == [0.0, 1.0, 2.0, 3.0, 4.0]
    if moment == "collective":
        flight = read_flight(tmp_path / "flight")
        last = {rank: record["calls"][-1] for rank, record in flight.records.items()}
        assert {rank: (call["operation"], call["sequence"]) for rank, call in last.items()} == {
            0: ("dist.barrier", 0),
            1: ("dist.barrier", 1),
        }
        assert flight.records[0]["doing"] == "was running when the process that had started it ended"


def test_a_taken_port_stops_nobody(nothing_left):
    """Warm ranks meet through a file, so the port that the environment names may be taken."""

    def body(pids):
        import torch.distributed as dist

        (Path(pids) / str(os.getpid())).touch()
        objects = [None, None]
        dist.all_gather_object(objects, dist.get_rank())
        return objects

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MASTER_PORT", port)
            patch.setenv("MASTER_ADDR", "127.0.0.1")
            done = run_launched(pack((body, (str(nothing_left),)), body), 2, "torch", 120.0)
    assert done.failure is None, str(done.failure)
    assert done.results == [[0, 1]] * 2


def test_a_full_disk_leaves_the_earlier_file(tmp_path):
    """A file of ours that does not fit is an error; the earlier one is whole, and no part is left beside it."""
    path = tmp_path / "report.json"
    atomic_write_text(path, json.dumps({"run": 1}))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            atomic_write_text(path, json.dumps({"run": "2" * 100_000}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert json.loads(path.read_text()) == {"run": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


_SCRIPT = """
import json, os, pathlib, signal, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

folder, dies = pathlib.Path(sys.argv[1]), sys.argv[2] == "dies"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# torchrun's store outlives a restart, and gloo would find the addresses of the processes before it.
agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
attempt = dist.PrefixStore("attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"], agent)
dist.init_process_group("gloo", store=attempt, rank=rank, world_size=size)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
last = max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=-1)
if last >= 0:
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder / str(last))
    model.load_state_dict(state["model"])
for step in range(last + 1, 5):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dies and step == 3 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / str(step))
    (folder / f"{step}.{rank}.loss").write_text(json.dumps([loss.item(), os.environ["TORCHELASTIC_RESTART_COUNT"]]))
dist.barrier()
os._exit(0)  # PyTorch's threads may abort a process that leaves by itself
"""


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_restart_by_torchrun_continues_with_equal_losses(tmp_path, ranks):
    """A killed rank is restarted with the others from the last checkpoint, and every loss is equal bit for bit."""
    script, losses = tmp_path / "train.py", {}
    script.write_text(_SCRIPT)
    for how in ("lives", "dies"):
        folder = tmp_path / how
        folder.mkdir()
        command = python_command(
            "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1",
            "--monitor-interval=0.1", str(script), str(folder), how,
        )  # fmt: skip
        ran = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        losses[how] = {path.name: json.loads(path.read_text()) for path in folder.glob("*.loss")}
    assert sorted(losses["lives"]) == sorted(f"{step}.{rank}.loss" for step in range(5) for rank in range(ranks))
    assert {name: loss for name, (loss, _) in losses["dies"].items()} == {
        name: loss for name, (loss, _) in losses["lives"].items()
    }
    restarts = [losses["dies"][f"{step}.1.loss"][1] for step in range(5)]
    assert restarts == ["0", "0", "0", "1", "1"]
