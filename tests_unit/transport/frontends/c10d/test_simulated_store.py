"""The store of a simulated world: ranks wait for each other's keys, and a key that nobody sets is named."""

import datetime as dt
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.errors import RankFailedError, UnsupportedOnBackend
from hyper_parallel.transport.frontends.c10d.simulated_store import SimulatedStore
from hyper_parallel.verify import simulate
from hyper_parallel.verify.simulate import simulate_forked

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


def _of_programs(path):
    """A program that makes stores of its own; returns what it reads."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", 29533, world, is_master=rank == 0, timeout=dt.timedelta(seconds=5))
    again = dist.TCPStore("localhost", 29533, is_master=False)
    other = dist.TCPStore("127.0.0.1", 29534, wait_for_workers=False)
    dist.TCPStore("127.0.0.1", 29535, -1, rank == 0)  # any number of workers
    own = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    files = dist.FileStore(path, world)
    store.set(f"rank {rank}", str(rank))
    files.set(f"rank {rank}", str(rank * 2))
    assert not other.check(["rank 0"])
    assert isinstance(store, dist.TCPStore)
    assert isinstance(files, dist.FileStore)
    read = [int(each.get(f"rank {number}")) for each in (store, again, files) for number in range(world)]
    dist.barrier()
    return read, (store.host, store.port, own.port, files.path), int(other.add("count", 0))


@pytest.mark.parametrize("forked", [False, True])
def test_stores_of_a_program_are_shared_by_port_and_by_file(forked, tmp_path):
    """``TCPStore`` and ``FileStore`` of simulated ranks wait as PyTorch's do; the file is not written."""
    plain, path = dist.TCPStore, str(tmp_path / "store")
    if forked:
        results = simulate_forked(_of_programs, 3, (path,), timeout=100)
    else:
        results = simulate(_of_programs, 3, "torch", (path,))
    assert [read for read, _, _ in results] == [[0, 1, 2, 0, 1, 2, 0, 2, 4]] * 3
    places = [place for _, place, _ in results]
    assert {(host, port, file) for host, port, _, file in places} == {("127.0.0.1", 29533, path)}
    assert sorted(port for _, _, port, _ in places) == [40001, 40002, 40003]
    assert not (tmp_path / "store").exists()
    assert dist.TCPStore is plain


def test_the_server_of_a_store_waits_for_all_ranks():
    """One that does not come is named at once; PyTorch's would wait for its timeout."""

    def body():
        if dist.get_rank() == 0:
            dist.TCPStore("127.0.0.1", 29533, 2, is_master=True)

    with pytest.raises(RankFailedError) as caught:
        simulate(body, 2, "torch")
    assert str(caught.value.__cause__) == (
        "deadlock, no rank can go on:\n"
        f"  rank 0 waited in store.wait(['tcp 29533/all ranks']) at {__file__}:{body.__code__.co_firstlineno + 2}\n"
        "  rank 1 returned"
    )


def test_only_ranks_get_other_stores(tmp_path):
    """While a simulation runs, the rest of the process makes PyTorch's own."""
    made = []

    def body():
        outside.submit(lambda: made.append(dist.FileStore(str(tmp_path / "own"), 1))).result()

    with ThreadPoolExecutor(1) as outside:
        outside.submit(int).result()  # its thread was started outside of ranks
        simulate(body, 1, "torch")
    (store,) = made
    store.set("a", "1")
    assert (tmp_path / "own").exists()


def test_a_rank_opens_no_connections_itself():
    """A group of gloo's that a program makes would wait for ranks that do not run; later the class is PyTorch's."""
    plain = dist.ProcessGroupGloo.__init__

    def body():
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1)

    with pytest.raises(RankFailedError) as caught:
        simulate(body, 2, "torch")
    assert isinstance(caught.value.__cause__, UnsupportedOnBackend)
    assert str(caught.value.__cause__) == (
        f"ProcessGroupGloo(...) at {__file__}:{body.__code__.co_firstlineno + 1}: a simulated rank opens no "
        "connections to others; call torch.distributed.new_group"
    )
    assert dist.ProcessGroupGloo.__init__ is plain
