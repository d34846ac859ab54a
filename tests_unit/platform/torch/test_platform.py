"""Worlds that launchers describe in the environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from hyper_parallel import get_torch_platform, init_device_mesh
from hyper_parallel.transport.processes import python_command
from hyper_parallel.transport.work import Work

pytestmark = pytest.mark.platforms("torch")

# It ends with _exit: PyTorch's gloo sometimes aborts a process that ends normally on a busy machine, plain or not.
_TUTORIAL = """
import os
import sys
from pathlib import Path

import torch
from torch import nn

from hyper_parallel import ColwiseParallel, RowwiseParallel, init_device_mesh, parallelize_module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


torch.manual_seed(3)
mesh = init_device_mesh("cpu", (int(sys.argv[1]),), mesh_dim_names=("tp",))
plain, model = Block(), Block()
model.load_state_dict(plain.state_dict())
model = parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
steps = [(net, torch.optim.AdamW(net.parameters(), lr=0.25, foreach=True)) for net in (plain, model)]
for _ in range(3):
    x, cotangent = torch.randn(4, 5), torch.randn(4, 3)
    outputs = []
    for net, optimizer in steps:
        outputs.append(net(x))
        outputs[-1].backward(cotangent)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(outputs[0], outputs[1])
for name, parameter in model.named_parameters():
    torch.testing.assert_close(parameter.full_tensor(), dict(plain.named_parameters())[name])
shape = tuple(model.up.weight.to_local().shape)
Path(sys.argv[2], f"rank{mesh.rank}").write_text(f"of {mesh.size()}: shard of up is {shape}")
torch.distributed.destroy_process_group()
os._exit(0)
"""


@pytest.mark.parametrize("ranks, rows", [pytest.param(2, (4, 3), marks=pytest.mark.sweep), (3, (3, 3, 1))])
def test_init_device_mesh_joins_torchruns_world(tmp_path, ranks, rows):
    """A script without init_process_group, as tutorials have it, trains on torchrun's ranks as on one device."""
    script = tmp_path / "tutorial.py"
    script.write_text(_TUTORIAL)
    command = python_command("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    ended = subprocess.run(
        [*command, script, str(ranks), tmp_path],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    for rank in range(ranks):
        assert (tmp_path / f"rank{rank}").read_text() == f"of {ranks}: shard of up is ({rows[rank]}, 5)"


_UNJOINED = """
import os
import sys
from pathlib import Path
import torch
from hyper_parallel import DeviceMesh, get_platform, init_device_mesh

platform = get_platform()
lines = [f"rank {platform.get_rank()} of {platform.get_world_size()}, joined: {platform.has_world()}"]
for call in (
    lambda: platform.all_reduce(torch.ones(2)),
    platform.barrier,
    lambda: init_device_mesh("cpu", (1,)),
):
    try:
        call()
    except ValueError as error:
        lines.append(f"{type(error).__name__}: {error}")
mesh = DeviceMesh("cpu", [1, 0])
lines.append(f"joined: {platform.has_world()}, {platform.all_reduce(torch.tensor(mesh.get_local_rank())).item()}")
Path(sys.argv[1], os.environ["RANK"]).write_text(chr(10).join(lines))
"""


@pytest.mark.sweep
def test_a_launched_rank_that_has_not_joined_is_no_world_of_one(tmp_path):
    """Rank and world size are the launcher's; communication is refused until a mesh has joined the world."""
    script = tmp_path / "unjoined.py"
    script.write_text(_UNJOINED)
    command = python_command("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = subprocess.run(
        [*command, script, tmp_path],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        refused = (
            f"WorldNotJoinedError: a launcher started this process as rank {rank} of 2 (RANK, WORLD_SIZE), and it has "
            "not joined their world: make the mesh with init_device_mesh, or call get_platform().init_process_group(), "
            "first"
        )
        assert (tmp_path / str(rank)).read_text().splitlines() == [
            f"rank {rank} of 2, joined: False",
            refused,
            refused,
            "MeshError: init_device_mesh: mesh_shape (1,) needs 1 ranks, the world has 2",
            "joined: True, 1",
        ]


def test_nothing_is_joined_without_a_launcher(monkeypatch):
    """A process that no launcher started, or alone, stays a world of one."""
    platform = get_torch_platform()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    platform.join_launched_world("cpu")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    platform.join_launched_world("cpu")
    assert not platform.has_world()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("initialized, chosen", [(False, [3]), (True, [])])
def test_the_launchers_device_is_chosen_once(monkeypatch, initialized, chosen):
    """LOCAL_RANK numbers the device of a process, unless it uses one already; without LOCAL_RANK none is chosen."""
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    platform = get_torch_platform()
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    platform._choose_device("cuda")
    assert calls == []
    monkeypatch.setenv("LOCAL_RANK", "3")
    platform._choose_device("cuda")
    assert calls == chosen


_LEFT = """
import os
from pathlib import Path
import torch
from hyper_parallel import get_platform

get_platform().init_process_group("gloo")
get_platform().all_reduce(torch.ones(2))
torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
get_platform().destroy_process_group()
threads = {Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")}
assert not [name for name in threads if "gloo" in name], threads
"""


@pytest.mark.sweep
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="[no-tool] threads are listed by Linux only")
def test_a_world_that_was_left_has_no_threads(tmp_path):
    """Threads of gloo end with the world, also if an optimizer was made in it; later they could abort the process."""
    script = tmp_path / "left.py"
    script.write_text(_LEFT)
    ended = subprocess.run(
        [*python_command("torch.distributed.run", "--standalone", "--nproc-per-node", "2"), script],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


def test_a_world_of_one_has_groups_of_meshes():
    """Outside of simulations and launchers, the group of a mesh is that of the only rank."""
    group = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)).get_group("dp")
    assert get_torch_platform().get_process_group_ranks(group) == [0]


def started():
    """A leaf, a tensor on its graph whose values arrive at the first wait, and the list of waits."""
    import torch

    from hyper_parallel.platform.torch.platform import async_tensor

    leaf, waits = torch.zeros(2, 3, requires_grad=True), []
    output = leaf * 1

    def arrive():
        waits.append(1)
        output.detach().fill_(7)

    return leaf, async_tensor(output, Work("all_to_all", arrive)), waits


def test_metadata_does_not_wait():
    """Reading metadata does not wait for the values."""
    _, x, waits = started()
    assert (tuple(x.shape), x.dtype.is_floating_point, x.requires_grad, x.size(0), x.ndim) == ((2, 3), True, True, 2, 2)
    assert waits == []


@pytest.mark.parametrize(
    "use",
    [
        lambda x: (x + 1) - 1,
        lambda x: x.reshape(3, 2),
        lambda x: x[0],
        lambda x: __import__("torch").cat([x, x]),
        lambda x: __import__("torch").nn.functional.relu(x) + 0,
        lambda x: x.detach().numpy() * 1,
        lambda x: x.to_sparse().to_dense(),
    ],
)
def test_the_first_use_waits_once(use):
    """The first operation waits and gives a plain tensor of the values; later ones do not wait."""
    import torch

    _, x, waits = started()
    values = use(x)
    assert type(values) is torch.Tensor or not isinstance(values, torch.Tensor)
    assert (values == 7).all()
    use(x)
    assert waits == [1]


def test_gradients_pass():
    """Gradients pass from a waiting tensor to the collective's input."""
    leaf, x, _ = started()
    (x * 3).sum().backward()
    assert leaf.grad.unique().tolist() == [3]


def test_functions_of_the_user_wait():
    """A custom autograd function waits for the values of its arguments."""
    import torch

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # noqa: ARG004 - the signature is PyTorch's
            """Twice."""
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # noqa: ARG004 - the same
            """Twice."""
            return grad * 2

    leaf, x, waits = started()
    out = Double.apply(x)
    assert out.detach().unique().tolist() == [14]
    out.sum().backward()
    assert waits == [1]
    assert leaf.grad.unique().tolist() == [2]
