"""PyTorch's host operations, and its real transport in a world of one (several ranks: verify/test_launch.py)."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from hyper_parallel.errors import MeshError
from hyper_parallel.transport.base import Parts, ReductionError, use_transport
from workshop.conformance.transport import check_transport

pytestmark = pytest.mark.platforms("torch")


@pytest.fixture(name="alone")
def _alone(tmp_path):
    """The transport of a gloo world of one."""
    import torch.distributed as dist

    from hyper_parallel.transport.real.c10d import start_gloo

    yield start_gloo(0, 1, f"file://{tmp_path / 'store'}")
    dist.destroy_process_group()


def test_world_of_one_passes_the_conformance_suite(alone):
    """A real world of one gives what numpy gives, for every dtype and shape."""
    with use_transport(alone):
        assert check_transport("torch")


def test_groups_are_built_once(alone):
    """A group is built on first use and the same one afterwards; the world's is the default group."""
    import torch.distributed as dist

    assert alone.group((0,)) is alone.group((0,)) is dist.group.WORLD
    assert alone.ranks_of(alone.group((0,))) == alone.ranks_of(None) == (0,)
    assert alone.backend == "gloo"


def test_groups_are_kept_and_dropped(alone):
    """A group built with options or elsewhere is used for its ranks until it is dropped, and is refused afterwards."""
    import datetime as dt

    import torch.distributed as dist

    built = alone.build_group((0,), timeout=dt.timedelta(seconds=30))
    assert built is not dist.group.WORLD
    assert alone.known_group((0,)) is alone.group((0,)) is built
    elsewhere = dist.new_group([0])
    alone.adopt(elsewhere)
    assert alone.known_group((0,)) is elsewhere
    alone.drop(built)
    assert alone.known_group((0,)) is elsewhere
    alone.drop(elsewhere)
    assert alone.known_group((0,)) is None
    for gone, known in ((elsewhere, []), ("nonsense", [])):
        with pytest.raises(MeshError) as caught:
            alone.ranks_of(gone)
        assert str(caught.value) == (
            f"{gone!r} is not a group of this world, or was destroyed; known are the groups of ranks {known}; "
            "create_group builds one"
        )
    assert alone.build_group((0,)) is elsewhere  # gloo's are kept for the next that asks: see drop()
    assert alone.group((0,)) is elsewhere
    alone.drop(elsewhere)
    assert alone.group((0,)) is dist.group.WORLD
    alone.drop(dist.group.WORLD)
    assert alone.known_group((0,)) is None
    assert alone.group((0,)) is dist.group.WORLD


def test_a_closed_world_is_left(tmp_path):
    """After close() there is no process group, and another world can be joined."""
    import torch.distributed as dist

    from hyper_parallel.transport.real.c10d import start_world

    for name in ("first", "second"):
        transport = start_world("cpu", 0, 1, f"file://{tmp_path / name}")
        assert dist.is_initialized()
        transport.close()
        assert not dist.is_initialized()


def test_a_run_starts_with_float32():
    """What an earlier run in this process left as default dtype does not reach the next."""
    import torch

    from hyper_parallel.transport.real.c10d import seed_rank

    torch.set_default_dtype(torch.float64)
    try:
        seed_rank()
        assert torch.get_default_dtype() is torch.float32
        first = torch.rand(3)
        seed_rank()
        assert torch.equal(torch.rand(3), first)
    finally:
        torch.set_default_dtype(torch.float32)


def test_shapes_must_be_right(alone):
    """A shape that is not the tensor's own is refused."""
    import torch

    with pytest.raises(RuntimeError, match="to itself, but its shapes are"):
        alone.all_gather(torch.ones(2), (0,), [(3,)])


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "max", "min", "all", "any"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_folds_equal_numpy(op, dtype):
    """PyTorch folds floats to the same bits as numpy."""
    import torch

    from hyper_parallel.transport.host.numpy_ops import NumpyOps
    from hyper_parallel.transport.real.c10d import TorchOps

    parts = [np.random.default_rng(i).standard_normal((3, 5)).astype(dtype) for i in range(3)]
    got = TorchOps().reduce([torch.from_numpy(part) for part in parts], op)
    assert got.numpy().tobytes() == NumpyOps().reduce(parts, op).tobytes()


def test_fold_is_outside_any_gradient():
    """Reducing tensors that require a gradient gives a plain tensor and leaves them as they are."""
    import torch

    from hyper_parallel.transport.real.c10d import reduce_in_order

    x = torch.ones(2, requires_grad=True)
    total = reduce_in_order([x, x * 2], "sum")
    assert (total.requires_grad, total.tolist(), x.tolist()) == (False, [3, 3], [1, 1])
    with pytest.raises(ReductionError):
        reduce_in_order([torch.ones(2, dtype=torch.int32)], "avg")


def test_state_is_generator_and_default_dtype():
    """What a rank owns of the process: the default generator and the default dtype."""
    import torch

    from hyper_parallel.transport.real.c10d import TorchOps

    ops = TorchOps()
    state = ops.save_state()
    first = torch.rand(3)
    torch.set_default_dtype(torch.float64)
    ops.restore_state(state)
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(torch.rand(3), first)


def changes_of_a_rank():
    """What a rank may change of its process: name, how, and how the value is read."""
    import torch
    from torch.nn.utils import parametrize

    def seed_numpy():
        np.random.seed(5)  # noqa: NPY002 - the state that programs have

    def words_of_numpy():
        return np.random.get_state()[1].tolist()  # noqa: NPY002 - as above

    def enter_cached():
        parametrize._cache_enabled = 1

    return {
        "generator": (lambda: torch.manual_seed(5), torch.initial_seed),
        "dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
        "python": (lambda: random.seed(5), random.getstate),
        "numpy": (seed_numpy, words_of_numpy),
        "environment": (lambda: os.environ.update(CHANGED_BY_A_RANK="1"), lambda: os.environ.get("CHANGED_BY_A_RANK")),
        "switch": (lambda: torch.use_deterministic_algorithms(True), torch.are_deterministic_algorithms_enabled),
        "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
        "cached": (enter_cached, lambda: parametrize._cache_enabled),
    }


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    "name", ["generator", "dtype", "python", "numpy", "environment", "switch", "anomaly", "cached", ""]
)
def test_a_rank_that_goes_on_finds_what_it_left(name, known):
    """What another rank has changed of the process is put back, whether or not that rank's state is handed over."""
    from hyper_parallel.transport.real.c10d import TorchOps

    ops, changes = TorchOps(), changes_of_a_rank()
    own = ops.save_state()
    before = {each: read() for each, (_, read) in changes.items()}
    try:
        if name:
            changes[name][0]()
            assert changes[name][1]() != before[name]
        other = ops.save_state()
        changed = {each: read() for each, (_, read) in changes.items()}
        ops.restore_state(own, other if known else None)
        assert {each: read() for each, (_, read) in changes.items()} == before
        back = ops.save_state()
        ops.restore_state(other, back if known else None)
        assert {each: read() for each, (_, read) in changes.items()} == changed
    finally:
        ops.restore_state(own)


def test_a_state_that_has_not_changed_is_the_same_object():
    """By that a hand-over sees what it may leave alone: dtype, generators of Python and NumPy, and the process."""
    from hyper_parallel.transport.real.c10d import TorchOps

    first, second = (TorchOps().save_state() for _ in range(2))
    assert [one is other for one, other in zip(first[2:], second[2:], strict=True)] == [True, True, True]


def test_host_round_trip_keeps_bfloat16():
    """bfloat16 and conjugated tensors survive the way to numpy and back."""
    import torch

    from hyper_parallel.transport.real.c10d import from_host, to_host

    for x in (torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.bfloat16)):
        assert torch.equal(from_host(to_host(x)), x)
    z = torch.tensor([1 + 2j]).conj()
    assert torch.equal(from_host(to_host(z)), z)


def test_views_and_conjugates_travel(alone):
    """Strided, conjugated and empty inputs are sent with the values that they show."""
    import torch

    x = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(alone.broadcast(x, 0, (0,)), x)
    z = torch.tensor([1 + 2j]).conj()
    assert torch.equal(alone.all_to_all(z, (0,), Parts.of([(1,)]), Parts.of([(1,)])), z)
    assert alone.recv(torch.empty(0), 0).shape == (0,)
    alone.send(torch.empty(0), 0)


WORLDS = """
import sys
import torch
import torch.distributed as dist
from hyper_parallel import DTensor, Replicate, Shard, init_device_mesh
from hyper_parallel.platform.select import get_torch_platform

rank, store = int(sys.argv[1]), sys.argv[2]
for number, mine in enumerate((rank, 1 - rank)):
    dist.init_process_group("gloo", init_method=f"file://{store}{number}", rank=mine, world_size=2)
    transport = get_torch_platform().transport()
    assert transport is get_torch_platform().transport()
    mesh = init_device_mesh("cpu", (2,))
    whole = DTensor.from_local(torch.full((1,), float(mine)), mesh, [Shard(0)]).full_tensor()
    print(transport.rank, transport.world_size, whole.tolist())
    dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"file://{store}alone{rank}", rank=0, world_size=1)
print(get_torch_platform().transport().world_size)
dist.destroy_process_group()
"""


def test_another_world_has_another_transport(tmp_path):
    """After leaving the default group and joining another, the transport has the new rank, world and groups."""
    command = [sys.executable, "-c", WORLDS]
    runs = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [run.communicate(timeout=300)[0].splitlines() for run in runs]
    outputs = [[line for line in lines if not line.startswith("[Gloo]")] for lines in outputs]  # as PyTorch 2.10 writes
    assert [run.returncode for run in runs] == [0, 0]
    assert outputs == [
        ["0 2 [0.0, 1.0]", "1 2 [0.0, 1.0]", "1"],
        ["1 2 [0.0, 1.0]", "0 2 [0.0, 1.0]", "1"],
    ]


@pytest.fixture(name="devices")
def _devices(tmp_path, monkeypatch):
    """A world of NPUs whose engine moves nothing, and the list of the devices that it chose."""
    import types

    import torch
    import torch.distributed as dist

    from hyper_parallel.transport.real.c10d import transport as world

    chosen = []
    devices = types.SimpleNamespace(set_device=chosen.append, is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setattr(torch, "npu", devices, raising=False)
    monkeypatch.setitem(world._ENGINES, "npu", "fake")
    yield world.start_world("npu", 1, 2, f"file://{tmp_path / 'store'}"), chosen
    dist.destroy_process_group()


def test_a_rank_takes_its_device_and_its_engine(devices):
    """Rank i takes device i and the device's engine, which carries messages as they are, but no empty ones."""
    import torch

    transport, chosen = devices
    assert (chosen, transport.backend, transport.rank, transport.world_size) == ([1], "fake", 1, 2)
    x = torch.ones(2, 3)
    for tensor in (x, x[:0]):
        transport.send(tensor, 0)
        assert transport.start("send", tensor, 0).wait() is None
        for got in (transport.recv(tensor, 0), transport.start("recv", tensor, 0).wait()):
            assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype)
    transport.barrier((0, 1))
    assert transport.all_gather_object("mine", (0, 1))[1] == "mine"
    group = transport.build_group((0, 1))
    transport.drop(group)  # an accelerator's is destroyed
    with pytest.raises(MeshError, match="is not a group of this world, or was destroyed"):
        transport.ranks_of(group)


def test_a_world_that_cannot_be_reached_says_why():
    """A port that is in use, and ranks that do not meet in time, are errors with the fix."""
    import datetime as dt
    import socket

    from hyper_parallel.errors import RendezvousError
    from hyper_parallel.transport.real.c10d import join_world

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"the rendezvous port {port} is in use"):
            join_world(backend="gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    address = f"tcp://127.0.0.1:{port}"
    second = dt.timedelta(seconds=1)
    with pytest.raises(
        RendezvousError, match=rf"rank 1 on host .* connect to \(127.0.0.1, {port}\). start rank 0 there"
    ):
        join_world(backend="gloo", init_method=address, rank=1, world_size=2, timeout=second)
    with pytest.raises(RendezvousError, match=r"rank 0 on host .* 1/2 clients joined. start the others"):
        join_world(backend="gloo", init_method=address, rank=0, world_size=2, timeout=second)


def test_started_twice_is_claimed_in_turn(alone):
    """Members claim their started collectives in turn and read earlier claims; the store keeps none of them."""
    assert alone.claim("all_reduce", (0,)) == []
    assert alone.claim("barrier", (0,)) == []


def test_a_foreign_group_is_identified_by_its_name(alone):
    """A foreign group is identified by its name; the world's group needs no name."""
    import torch.distributed as dist

    assert alone.build_of((0,)) == ""
    elsewhere = dist.new_group([0])
    assert alone.build_of((0,), elsewhere) == f"named {elsewhere.group_name!r}"


@pytest.mark.parametrize(
    "text, fix",
    [
        ("Timed out after 2 seconds: 1/2 clients joined.", "start the others, and look at their output"),
        ("The client socket has timed out while trying to connect to (host, 1).", "start rank 0 there, and check"),
        ("Timeout waiting for a key.", "a rank that had joined stopped responding"),
    ],
)
def test_a_rank_that_did_not_meet_the_others_says_what_to_do(monkeypatch, text, fix):
    """The fix follows from what the store says; other errors of the network are PyTorch's own."""
    import torch.distributed as dist

    from hyper_parallel.errors import RendezvousError
    from hyper_parallel.transport.real.c10d.transport import join_world

    def refuse(**arguments):
        raise dist.DistNetworkError(arguments["backend"])

    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(RendezvousError, match=fix):
        join_world(backend=text, rank=0)
    with pytest.raises(dist.DistNetworkError, match="another error"):
        join_world(backend="another error", rank=0)
