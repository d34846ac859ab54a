"""The store of a simulated world: ranks wait for each other's keys, and a key that nobody sets is named."""

import datetime as dt

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.errors import RankFailedError
from hyper_parallel.transport.frontends.c10d.simulated_store import SimulatedStore
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def test_ranks_wait_for_keys():
    """Get and wait return once another rank has set the key; counters add up; check lets others run."""

    def body():
        store, rank = distributed_c10d._get_default_store(), dist.get_rank()
        if rank == 1:
            store.set("key", "value")
        value = store.get("key")
        store.add("count", rank + 1)
        if rank == 2:
            store.set("last", b"\x00")
        while not store.check(["last"]):
            pass
        store.wait(["last"], dt.timedelta(seconds=60))
        dist.barrier()
        return value, store.add("count", 0)

    assert simulate(body, 3, "torch") == [(b"value", 6)] * 3


def test_every_method_of_a_store():
    """What PyTorch's other stores do, this one does: through prefixes, in C++, and directly."""

    def body():
        group = dist.group.WORLD
        store = group.get_group_store()
        assert isinstance(store, SimulatedStore)
        prefixed = dist.PrefixStore("a", store)
        for each in [store, prefixed]:
            each.multi_set(["x", "y"], ["1", "2"])
            assert each.multi_get(["x", "y"]) == [b"1", b"2"]
            each.append("x", "3")
            assert each.get("x") == b"13"
            assert each.compare_set("x", "13", "4") == b"4"
            assert each.compare_set("x", "13", "5") == b"4"
            assert each.compare_set("new", "13", "5") == b"13"
            assert each.compare_set("new", "", "5") == b"5"
            assert each.delete_key("new")
            assert not each.delete_key("new")
            assert each.has_extended_api()
            each.set_timeout(dt.timedelta(seconds=1))
        assert store.num_keys() == len(store.list_keys()) == 4
        assert store.timeout == dt.timedelta(seconds=300)
        return store

    (store,) = simulate(body, 1, "torch")
    with pytest.raises(RankFailedError, match="used by a thread that is not one of its ranks, or after its end"):
        store.set("x", "1")


def test_a_key_that_nobody_sets_is_a_deadlock():
    """Its waiter is told at once, with the key and the line."""

    def body():
        if dist.get_rank():
            distributed_c10d._get_default_store().get("never")

    with pytest.raises(RankFailedError) as caught:
        simulate(body, 2, "torch")
    assert str(caught.value.__cause__) == (
        "deadlock, no rank can go on:\n  rank 0 returned\n"
        f"  rank 1 waited in store.wait(['default_pg/never']) at {__file__}:{body.__code__.co_firstlineno + 2}"
    )
