"""A world of one."""

import numpy as np
import pytest

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.calls import Call, Message, Site
from hyper_parallel.transport.numpy_ops import NumpyOps
from hyper_parallel.transport.single import SingleTransport, _Alone


def test_every_collective_is_a_copy():
    """Alone, every collective returns the rank's own data in fresh memory."""
    t, x = SingleTransport(NumpyOps()), np.arange(3.0)
    results = [
        t.all_reduce(x, "avg", (0,)),
        *t.all_gather(x, (0,), [(3,)]),
        t.reduce_scatter([x], "prod", (0,)),
        *t.all_to_all([x], (0,), [(3,)]),
        t.broadcast(x, 0, (0,)),
    ]
    x[:] = 0
    assert [result.tolist() for result in results] == [[0, 1, 2]] * 5
    assert t.all_gather_object("a", (0,)) == ["a"]
    t.barrier((0,))
    assert (t.rank, t.world_size, t.backend) == (0, 1, "single")
    assert t.build_group((0,), timeout=1) is t.group((0,))
    assert t.claimed("what it does", (0,)) == []


def test_nobody_is_at_the_other_end():
    """Whatever would need another rank is refused."""
    site = Site(("a.py", 1))
    for use in (
        lambda: _Alone().exchange(Call("barrier", (0, 1), (), [], site)),
        lambda: _Alone().start(Call("barrier", (0, 1), (), [], site)),
        lambda: _Alone().send(Message(0, 1, 0, (), site)),
        lambda: _Alone().receive(Message(1, 0, 0, (), site)),
    ):
        with pytest.raises(CollectiveMismatchError, match="one rank"):
            use()
    with pytest.raises(CollectiveMismatchError) as caught:
        _Alone().wait(7)
    assert str(caught.value) == "ticket 7 was never given out"


def test_what_was_started_alone_is_there():
    """A collective that is started has its result, which later writes to the operand do not change."""
    t, x = SingleTransport(NumpyOps()), np.arange(3.0)
    pending = t.start("all_reduce", x, "sum", (0,))
    x[:] = 9
    assert pending.wait().tolist() == [0, 1, 2]
