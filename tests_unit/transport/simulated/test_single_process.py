"""One rank of a world of any size: results have the right shapes, and other ranks' data are refused."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hyper_parallel.errors import CollectiveMismatchError, UnsupportedOnBackend
from hyper_parallel.transport.base import Parts
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, MessageFingerprint, Site
from hyper_parallel.transport.host.numpy_ops import NumpyOps
from hyper_parallel.transport.simulated.endpoint import Contribution
from hyper_parallel.transport.simulated.single_process import FakeTransport, SingleTransport, _Alone
from hyper_parallel.transport.simulated.transport import SimulatedTransport

RANKS = (2, 0, 1)


def test_every_collective_is_a_copy():
    """Alone, every collective returns the rank's own data in fresh memory."""
    t, x = SingleTransport(NumpyOps()), np.arange(3.0)
    results = [
        t.all_reduce(x, "avg", (0,)),
        *t.all_gather(x, (0,), [(3,)]),
        t.reduce_scatter([x], "prod", (0,)),
        t.all_to_all(x, (0,), Parts.of([(3,)]), Parts.of([(3,)])),
        t.broadcast(x, 0, (0,)),
        t.all_gather_rows(x, (0,), ((3,),))[0],
        t.reduce_scatter_rows(x[None], "avg", (0,), ((3,),)),
        t.all_to_all_rows(x[None], (0,), ((3,),), ((3,),))[0],
    ]
    x[:] = 0
    assert [result.tolist() for result in results] == [[0, 1, 2]] * 8
    assert t.all_gather_object("a", (0,)) == ["a"]
    t.barrier((0,))
    assert (t.rank, t.world_size, t.backend) == (0, 1, "single")
    assert t.build_group((0,), timeout=1) is t.group((0,))
    assert t.claim("what it does", (0,)) == []


def test_operations_that_need_another_rank_are_refused():
    """Operations that need another rank are refused."""
    site = Site(("a.py", 1))
    barrier = Contribution(CollectiveFingerprint("barrier", (0, 1), (), site), [])
    for use in (
        lambda: _Alone().exchange(barrier),
        lambda: _Alone().start(barrier),
        lambda: _Alone().send(MessageFingerprint(0, 1, 0, (), site), None),
        lambda: _Alone().receive(MessageFingerprint(1, 0, 0, (), site)),
    ):
        with pytest.raises(CollectiveMismatchError, match="one rank"):
            use()
    with pytest.raises(CollectiveMismatchError) as caught:
        _Alone().wait(7)
    assert str(caught.value) == "ticket 7 does not exist"


def test_a_started_collective_has_its_result():
    """A started collective has its result, which later writes to the operand do not change."""
    t, x = SingleTransport(NumpyOps()), np.arange(3.0)
    pending = t.start("all_reduce", x, "sum", (0,))
    x[:] = 9
    assert pending.wait().tolist() == [0, 1, 2]


@pytest.fixture
def transport():
    """Rank 0 of four thousand."""
    return FakeTransport(4000, NumpyOps(), lambda like, shape: np.zeros(shape, like.dtype))


def test_results_have_the_right_shapes_and_share_no_memory(transport):
    """This rank's part is correct, the others' are zeros, and results share no memory with operands."""
    x, whole = np.ones((2, 3), np.float32), tuple(range(4000))
    for result in (transport.all_reduce(x, "sum", whole), transport.broadcast(x, 2, RANKS)):
        assert result.tolist() == x.tolist()
        assert result is not x
    gathered = transport.all_gather(x, RANKS, [(1, 3), (2, 3), (0, 3)])
    assert [(part.shape, float(part.sum())) for part in gathered] == [((1, 3), 0.0), ((2, 3), 6.0), ((0, 3), 0.0)]
    chunks = [x[:1], x, x[:0]]
    assert transport.reduce_scatter(chunks, "max", RANKS).tolist() == x.tolist()
    sends, expects = Parts.of([(1, 3), (2, 3), (0, 3)]), Parts.of([(5,), (2, 3), (4, 1)])
    received = transport.all_to_all(np.concatenate([x[:1], x * 2]), RANKS, sends, expects)
    assert (received.tolist(), received.dtype.name) == ([0] * 5 + [2] * 6 + [0] * 4, "float32")
    rows = np.arange(6, dtype=np.float32).reshape(3, 2) + 1
    shapes = ((2,),) * 3
    assert transport.all_gather_rows(rows[0], RANKS, shapes).tolist() == [[0, 0], [1, 2], [0, 0]]
    assert transport.all_to_all_rows(rows, RANKS, shapes, shapes).tolist() == [[0, 0], [3, 4], [0, 0]]
    assert transport.reduce_scatter_rows(rows, "sum", RANKS, shapes).tolist() == [3, 4]
    transport.send(x, 3999)
    assert isinstance(transport, SimulatedTransport)


def test_data_of_other_ranks_are_refused(transport):
    """Objects, messages and handles of other ranks are refused, not made up."""
    x = np.ones(3, np.float32)
    text = (
        "recv(f32[3], src=1, tag=0): only the other ranks know its result, but this fake world has none; run the "
        "program in a simulated world"
    )
    with pytest.raises(UnsupportedOnBackend, match=re.escape(text.partition(":")[2])):
        transport.recv(x, 1)
    with pytest.raises(UnsupportedOnBackend, match="all_gather_object"):
        transport.all_gather_object("mine", RANKS)
    with pytest.raises(UnsupportedOnBackend, match="only the other ranks know"):
        transport._endpoint.wait(1)
    assert transport.all_gather_object("alone", (0,)) == ["alone"]


def test_the_ends_of_a_world(transport):
    """Any rank can be the one that exists; what it starts is complete at once, of its own data and zeros."""
    x = np.ones(3, np.float32)
    assert transport.start("all_reduce", x, "sum", RANKS).wait().tolist() == [1, 1, 1]
    last = FakeTransport(4000, NumpyOps(), lambda like, shape: np.zeros(shape, like.dtype), 3999)
    parts = last.start("all_gather", x, (0, 3999), [(2,), (3,)]).wait()
    assert [part.tolist() for part in parts] == [[0, 0], [1, 1, 1]]
    with pytest.raises(UnsupportedOnBackend, match="only the other ranks know"):
        transport._endpoint.start(transport._all_reduce(x, "sum", RANKS).contribution)


def test_a_wrong_call_is_still_one(transport):
    """Arguments are checked as in any world."""
    with pytest.raises(CollectiveMismatchError, match="of which it is not a member"):
        transport.all_reduce(np.ones(3), "sum", (1, 2))
    with pytest.raises(CollectiveMismatchError, match="must be distinct and lie in"):
        transport.all_reduce(np.ones(3), "sum", (0, 4000))
    text = "{} over 3 ranks got 2 chunks or shapes; it takes one per rank"
    shapes = ((3,),) * 2
    for name, call in {
        "all_gather": lambda: transport.all_gather_rows(np.ones(3), RANKS, shapes),
        "reduce_scatter": lambda: transport.reduce_scatter_rows(np.ones((2, 3)), "sum", RANKS, shapes),
        "all_to_all": lambda: transport.all_to_all_rows(np.ones((2, 3)), RANKS, shapes, shapes),
    }.items():
        with pytest.raises(CollectiveMismatchError) as caught:
            call()
        assert str(caught.value) == text.format(name)
