"""A script's ranks are forked processes: the same bits as threads, and every package's globals are a rank's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import pytest

from hyper_parallel.errors import RankFailedError
from hyper_parallel.verify import verify_program
from hyper_parallel.verify.bugs.registry import find_bugs
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.framework import imported_packages
from hyper_parallel.verify.program.isolation import run_folder
from hyper_parallel.verify.program.printed import WRITTEN, written_lines
from hyper_parallel.verify.program.process_ranks import run_in_process
from hyper_parallel.verify.program.program import find_program
from hyper_parallel.verify.program.worlds import World, run_world
from hyper_parallel.verify.simulate import simulate_forked

pytestmark = pytest.mark.platforms("torch")

EXAMPLES = Path(__file__).parents[3] / "examples"

_PRINTED = "printed lines"  # a warning is printed once in each process

ACCUMULATED = """
import decimal  # stands for an installed package with state of its class, as accelerate has

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
if not hasattr(decimal, "STATE"):
    decimal.STATE = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(5, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    rows = torch.randn(7, 5).tensor_split(dist.get_world_size())[decimal.STATE]
    loss = model(rows).square().sum() * dist.get_world_size()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
POOL = """
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
model = nn.parallel.DistributedDataParallel(nn.Linear(5, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ThreadPoolExecutor(1) as pool:
    for batch in torch.randn(2, 6, 5):
        part = pool.submit(lambda: batch.chunk(mesh.size())[mesh.get_local_rank()]).result()
        model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
SHARDED_LOSS = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 12))
parallelize_module(model, mesh, {"2": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    x, y = torch.randn(5, 6), torch.randint(0, 12, (5,))
    with loss_parallel():
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WORKERS = """
import argparse
import multiprocessing
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="some/where")
os.makedirs(parser.parse_args().out, exist_ok=True)
os.chdir(parser.parse_args().out)  # as Hydra does
torch.manual_seed(0)
for _ in DataLoader(TensorDataset(torch.ones(4)), num_workers=2):  # before there are ranks
    pass
with multiprocessing.Pool(2) as pool:
    assert pool.map(abs, [-1, 2]) == [1, 2]
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(5, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for (batch,) in DataLoader(TensorDataset(torch.randn(12, 5)), batch_size=6, num_workers=1):
    model(batch.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), "weights.pt")
"""


def same(one, other):
    """Whether two values of records are equal bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        one, other = ({key: value for key, value in each.items() if key != _PRINTED} for each in (one, other))
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return one == other


@pytest.mark.parametrize(
    # One script every day; sharded ranks and those of tensor parallelism send the same kinds of messages.
    "case",
    [
        pytest.param(("data_parallel", 3, ["--batch", "18"]), marks=pytest.mark.sweep),
        pytest.param(("sharded", 4, []), marks=pytest.mark.sweep),
        ("tensor_parallel", 2, []),
    ],
)
def test_scripts_leave_the_same_bits_as_threads(case):
    """Every record, group and note of the examples, on several ranks and on one."""
    name, world_size, arguments = case
    program = find_program(str(EXAMPLES / f"{name}.py"), arguments, "FILE")
    world = World(world_size, "torch", mesh=(("dp", world_size),), output="nothing")
    threads = dataclasses.replace(world, launch="threads")
    for forked, threaded in ((world, threads), (world.alone("nothing"), threads.alone("nothing"))):
        assert same(run_world(program, forked).ranks, run_world(program, threaded).ranks)


@pytest.mark.sweep
@pytest.mark.parametrize("bug", find_bugs("torch"), ids=lambda bug: bug.name)
def test_the_corpus_leaves_the_same_bits_as_threads(bug):
    """Each program with a documented bug, broken and fixed: the same records, or the same error."""
    mesh = tuple(bug.mesh.items())
    for broken in (True, False):
        program = find_program(bug.program(broken=broken), [], "FILE")
        world = World(bug.world_size, "torch", "threads", mesh, output="nothing")
        assert same(_outcome(_forked, program, world), _outcome(_threaded, program, world))


def _forked(program, world):
    with run_folder() as folder:
        arguments = (program, world.mesh, world.limits, None, world.output, None, folder, True, gettempdir())
        ranks = simulate_forked(run_in_process, world.size, arguments, timeout=world.timeout)
        ranks[0].notes[WRITTEN] = written_lines(folder)
        return ranks


def _threaded(program, world):
    return run_world(program, world).ranks


def _outcome(run, program, world):
    try:
        return run(program, world)
    except RankFailedError as error:
        return str(error.__cause__)


@pytest.mark.parametrize("source", [ACCUMULATED, POOL, SHARDED_LOSS, WORKERS], ids=["state", "pool", "loss", "workers"])
def test_programs_whose_ranks_must_be_processes_are_equal(source, tmp_path):
    """State of packages, a pool of threads, a table that PyTorch patches, and processes in a folder of the script's."""
    path = tmp_path / "train.py"
    path.write_text(source)
    report = verify_program(str(path), 2)
    assert report.equal, report.text()
    assert not Path("some").exists()  # the folder that the script made is one of the run


def test_a_child_that_goes_on_as_a_rank_is_refused(tmp_path):
    """A script that forks, and whose child trains on, is named with its line."""
    path = tmp_path / "train.py"
    path.write_text("import os\nimport torch\nos.fork()\ntorch.nn.Linear(2, 2)(torch.ones(2))\n")
    with pytest.raises(InputError) as caught:
        verify_program(str(path), 2)
    assert str(caught.value) == (
        f"{path}: {path} forks at {path}:3, and the child goes on with the program as a rank of its own; end it there "
        "with os._exit(0), or start processes with subprocess or multiprocessing"
    )


def test_a_script_that_dies_is_refused_with_its_signal(tmp_path, monkeypatch):
    """A crash in native code ends one process, and not the one that verifies."""
    monkeypatch.delenv("HP_RANK_LEDGER", raising=False)  # a rank that is killed on purpose leaves no coverage
    path = tmp_path / "train.py"
    path.write_text("import os, signal\nimport torch\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    with pytest.raises(InputError, match="rank 0 died of SIGSEGV"):
        verify_program(str(path), 2)


def test_installed_packages_are_found_by_reading(tmp_path):
    """Imports of the script and of files beside it, anywhere in them; neither the standard library nor own files."""
    (tmp_path / "train.py").write_text("import os, torch.nn\nimport helper\nfrom . import other\nimport missing_one\n")
    (tmp_path / "helper.py").write_text("def late():\n    from numpy.random import default_rng\n    import helper\n")
    assert imported_packages(tmp_path / "train.py") == [
        "numpy.random",
        "numpy.random.default_rng",
        "torch.nn",
    ]
