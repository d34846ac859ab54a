"""Real ranks over gloo under HCCL's name and rules, and ranks that share devices."""

from __future__ import annotations

import pytest

from hyper_parallel.transport.frontends.c10d.engine_rules import ENGINES
from hyper_parallel.transport.processes import ENGINE_VARIABLE
from hyper_parallel.transport.real.c10d.staged_group import STAGED, StagedGroup, register_engine
from hyper_parallel.transport.real.launched_processes import run_launched
from hyper_parallel.transport.serialization import pack
from workshop.conformance.transport import check_transport

pytestmark = pytest.mark.platforms("torch")

_SECONDS = 100.0


def _launched(monkeypatch, function, world_size, *arguments):
    monkeypatch.setenv(ENGINE_VARIABLE, "hccl")
    return run_launched(pack((function, arguments), function), world_size, "torch", _SECONDS)


def _every_collective():
    from hyper_parallel.transport.base import active_transport

    return active_transport().backend, len(check_transport("torch", exact=False))


def test_the_library_passes_the_rules_of_hccl(monkeypatch):
    """Every collective of the transport, every dtype, shape and rank order is what HCCL takes, and equals NumPy."""
    run = _launched(monkeypatch, _every_collective, 3)
    assert run.failure is None, run.failure
    assert [backend for backend, _ in run.results] == ["hccl"] * 3
    assert all(count > 1000 for _, count in run.results)


def _started_barrier():
    from hyper_parallel.platform.select import platform_named

    handle = platform_named("torch").barrier(async_op=True)
    return platform_named("torch").get_backend(), handle.wait()


def test_a_barrier_is_started_where_the_engine_has_no_device(monkeypatch):
    """In a rehearsal of HCCL on CPU a barrier that is started takes a tensor of the host: there is no npu."""
    run = _launched(monkeypatch, _started_barrier, 2)
    assert run.failure is None, run.failure
    assert run.results == [("hccl", None)] * 2


def _seeded(fault):
    import torch

    from hyper_parallel.transport.base import active_transport
    from hyper_parallel.transport.real.c10d import row_collectives

    transport, plain = active_transport(), row_collectives.C10dRows._buffers
    x = torch.ones(3, 4).t() if fault == "strides" else torch.ones(3, dtype=torch.complex64)
    row_collectives.C10dRows._buffers = lambda _, sent, received: (sent, received)
    try:
        transport.all_gather_rows(x, (0, 1), (tuple(x.shape),) * 2)
    finally:
        row_collectives.C10dRows._buffers = plain


@pytest.mark.parametrize(
    "fault, found",
    [
        (
            "strides",
            "float32[4, 3] with strides [1, 4] is not contiguous",
        ),
        ("dtype", "complex64[2, 3] has a dtype that it does not carry"),
    ],
)
def test_a_fault_seeded_into_the_transport_is_found(monkeypatch, fault, found):
    """Were the library to hand over strided buffers or other dtypes, the rehearsal would say so."""
    run = _launched(monkeypatch, _seeded, 2, fault)
    assert f"_allgather_base: hccl would refuse this call: {found}" in str(run.failure)


@pytest.mark.parametrize(
    "device, fix",
    [
        ("npu", "torch_npu is not installed: install"),
        ("cuda", "(PyTorch .* was built without CUDA: install|the driver shows no device: look at)"),
    ],
)
def test_a_device_that_pytorch_does_not_see_is_refused(device, fix, tmp_path, monkeypatch):
    """Ranks are not started on a device that is not there, nor on CPU in its place."""
    import torch

    from hyper_parallel.errors import UnsupportedOnBackend
    from hyper_parallel.transport.real.c10d import start_world

    monkeypatch.delattr(torch, "npu", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedOnBackend, match=rf"^device {device}: PyTorch sees no such device; {fix}"):
        start_world(device, 0, 1, f"file://{tmp_path / 'store'}")


@pytest.mark.parametrize("count, engine", [(1, "staged"), (2, "nccl")])
def test_ranks_that_outnumber_the_devices_share_them(count, engine, monkeypatch):
    """One rank per device uses the device's engine; more ranks than devices go over gloo, on the device by number."""
    import torch

    from hyper_parallel.transport.real.c10d import transport

    joined, devices = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(transport, "join_world", lambda **arguments: joined.append(arguments))
    monkeypatch.setattr(transport, "C10dTransport", lambda **_: None)
    transport.start_world("cuda", 1, 2, "env://")
    assert joined == [{"backend": engine, "init_method": "env://", "rank": 1, "world_size": 2}]
    assert devices == [1 % count]


@pytest.fixture(name="group")
def _group():
    import datetime as dt

    import torch.distributed as dist

    return StagedGroup(dist.HashStore(), 0, 1, dt.timedelta(seconds=30), None)


def test_a_group_tells_its_name(group):
    """PyTorch's questions about a group are answered."""
    import torch

    group._set_group_name("several")
    group._set_group_desc("a group")
    group._set_sequence_number_for_group()
    assert (group.group_name, group.getGroupName()) == ("several", "several")
    assert (group.group_desc, group.getGroupDesc()) == ("a group", "a group")
    assert group.getBackendName() == STAGED
    assert group._get_backend(torch.device("cpu")) is group
    group.barrier().wait()


def test_tensors_of_a_device_travel_through_copies(group, monkeypatch):
    """What is not in host memory is copied there and back, in lists as well; a message's source is left as it is."""
    import torch

    from hyper_parallel.transport.real.c10d import staged_group

    monkeypatch.setattr(staged_group, "_HOST", "none: every tensor counts as a device's")
    x, places = torch.arange(3.0), [torch.zeros(3)]
    assert group.allgather([places], [x]).result()[0] is places[0]
    whole = torch.zeros(1, 3)
    group.all_gather_single(whole, x).wait()
    work = group.allreduce([x])
    work.wait()
    assert torch.equal(places[0], x)
    assert torch.equal(whole[0], x)
    assert work.is_completed()


def _lists_of_unequal_sizes(later):
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    places = [torch.empty(rank + 1, other, dtype=torch.int64) for other in ranks]
    sent = [torch.full((other + 1, rank), 10 * rank + other) for other in ranks]
    work = dist.all_to_all(places, sent, async_op=later)
    if work is not None:
        work.wait()
    return [place.tolist() for place in places]


@pytest.mark.parametrize("later", [False, True])
def test_lists_of_unequal_sizes_are_exchanged(monkeypatch, later):
    """Each rank gets what the others have for it, in its shapes, also where gloo takes no lists (PyTorch 2.10)."""
    run = _launched(monkeypatch, _lists_of_unequal_sizes, 3, later)
    assert run.failure is None, run.failure
    assert run.results == [
        [[[10 * other + rank] * other for _ in range(rank + 1)] for other in range(3)] for rank in range(3)
    ]


def test_lists_keep_their_strides_and_the_rules(group):
    """A place of any stride is filled, one on a graph as well; the rehearsed engine refuses strides."""
    import torch

    from hyper_parallel.errors import UnsupportedOnBackend

    x, place = torch.arange(6.0).view(2, 3), torch.zeros(3, 2, requires_grad=True).t()
    work = group.alltoall([place], [x])
    assert work.result() == [place]
    assert torch.equal(place, x)
    group._rules = ENGINES["hccl"]
    with pytest.raises(UnsupportedOnBackend) as caught:
        group.alltoall([place], [x])
    assert str(caught.value) == (
        "alltoall: hccl would refuse this call: float32[2, 3] with strides [1, 2] is not contiguous; call "
        ".contiguous() first, and copy a received buffer back"
    )


def test_an_engine_is_registered_once():
    """Asking again gives the same name; the real NCCL cannot be rehearsed under its own name."""
    assert register_engine(None) == register_engine(None) == STAGED
    with pytest.raises(ValueError, match=r"^nccl cannot be rehearsed over gloo: PyTorch has an engine of this name"):
        register_engine(ENGINES["nccl"])
