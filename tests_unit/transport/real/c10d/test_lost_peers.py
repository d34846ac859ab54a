"""Who is named when gloo has waited in vain, with a real store; ``test_cut_link.py`` has real ranks and hosts."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.platforms("torch")

GAVE_UP = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete\nstack"
CLOSED = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
HOST = socket.gethostname()


@pytest.fixture
def lost_peers(monkeypatch):
    """The module, whose ranks are in a world of this process with a store of its own, and the store."""
    import torch.distributed as dist

    from hyper_parallel.transport.real.c10d import lost_peers

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(lost_peers, "default_store", lambda: dist.PrefixStore("a", store))
    monkeypatch.setattr(lost_peers, "_ANSWER_SECONDS", 60.0)  # so that a rank is late only where a test wants it
    monkeypatch.setattr(lost_peers, "_ENDED_SECONDS", 0.2)
    return lost_peers, store


def failed(peers, text, ranks):
    """The lines of the error where gloo says ``text``."""
    from hyper_parallel.errors import RankFailedError

    with pytest.raises(RankFailedError) as caught, peers.named(f"all_gather of ranks {ranks}", ranks):
        raise RuntimeError(text)
    return [line.strip() for line in str(caught.value).splitlines()]


def test_ranks_that_failed_as_well_are_told_with_their_lines(lost_peers):
    """Two ranks that both gave up name each other's call; gloo's own first line is kept."""
    module, _ = lost_peers
    world, told = [module.LostPeers(rank) for rank in range(2)], {}

    def fail(rank):
        told[rank] = failed(world[rank], GAVE_UP, (0, 1))

    threads = [threading.Thread(target=fail, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        first, other, gloo = told[rank]
        assert first.startswith(f"all_gather of ranks (0, 1) at {__file__}:")
        assert first.endswith(f": rank {rank} waited in vain for another rank")
        assert other.startswith(f"rank {1 - rank} has failed, too, in all_gather of ranks (0, 1) at {__file__}:")
        assert gloo == "gloo: " + GAVE_UP.splitlines()[0]


def test_a_silent_rank_is_named_with_its_host(lost_peers):
    """What may have become of it is said; a rank that never said where it is is named as well."""
    module, store = lost_peers
    peers = module.LostPeers(0)
    store.set("hyper_parallel/lost/host/2", "far")
    first, *silent, gloo = failed(peers, CLOSED, (0, 1, 2))
    assert first.endswith(": rank 0 lost the connection to another rank")
    reason = "cannot be reached, or the rank has ended, is stopped, or does something else"
    assert silent == [
        "rank 1 does not answer; its host is not known",
        f"rank 2 does not answer; its host far {reason}",
    ]
    assert gloo == "gloo: " + CLOSED


def test_a_store_that_has_ended_is_named(lost_peers):
    """Nobody listens at the store's port any more: that is said, and of whom nothing is known."""
    module, store = lost_peers
    peers = module.LostPeers(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    peers._store = SimpleNamespace(host=store.host, port=port)
    _, *told, _ = failed(peers, GAVE_UP, (0, 1, 2))
    reason = "no process listens there any more, so the process that kept the store has ended"
    assert told == [
        f"the store of the world at 127.0.0.1:{port} cannot be reached from host {HOST}: {reason}",
        "nothing is known of ranks 0, 2",
    ]


def test_something_else_at_the_stores_port_is_no_hang(lost_peers, monkeypatch):
    """A listener that is not a store is reported within the limit."""
    module, _ = lost_peers
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(module, "_HOST_SECONDS", 0.2)
    peers = module.LostPeers(0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        peers._store = SimpleNamespace(host="127.0.0.1", port=other.getsockname()[1])
        _, told, _ = failed(peers, GAVE_UP, (0, 1))
    assert told == f"the store of the world at 127.0.0.1:{peers._store.port} did not answer in time"


def test_a_world_without_a_network_says_so(lost_peers, monkeypatch, tmp_path):
    """Ranks that met through a file are on one host, and have no store to ask."""
    import torch.distributed as dist

    module, _ = lost_peers
    store = dist.FileStore(str(tmp_path / "store"), 2)
    monkeypatch.setattr(module, "default_store", lambda: store)
    _, told, _ = failed(module.LostPeers(0), GAVE_UP, (0, 1))
    assert told == "nothing is known of rank 1: this world has no store that ranks reach over the network"


def test_a_store_that_gives_no_answer_is_an_error_at_the_limit(lost_peers, monkeypatch):
    """A request that waits for ever ends at the limit of the store; others return or raise what they did."""
    from datetime import timedelta

    from hyper_parallel.errors import RankFailedError

    module, store = lost_peers
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.2)
    peers, never = module.LostPeers(0), threading.Event()
    assert peers.answered("claim", (0, 1), lambda: ["a"]) == ["a"]
    with pytest.raises(KeyError, match="no"):
        peers.answered("claim", (0, 1), lambda: {}["no"])
    peers._store = SimpleNamespace(host=store.host, port=store.port, timeout=timedelta(seconds=0.2))
    with pytest.raises(RankFailedError, match=r"^claim at .*: rank 0 waited in vain for another rank\n") as caught:
        peers.answered("claim", (0, 1), never.wait)
    never.set()
    assert str(caught.value).endswith("\n  the world's store gave no answer within 0.2 s")
    peers._store = None
    assert peers.answered("claim", (0, 1), lambda: ["b"]) == ["b"]


def test_a_group_that_cannot_be_built_is_an_error_at_the_limit(lost_peers, monkeypatch):
    """A store that fails or is out of reach names the ranks; a slow one within reach is waited for."""
    from datetime import timedelta

    from torch.distributed import DistStoreError

    from hyper_parallel.errors import RankFailedError

    def fail():
        raise DistStoreError("wait timeout after 200ms, keys: /a\nstack")

    module, store = lost_peers
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.2)
    peers, never = module.LostPeers(0), threading.Event()
    assert peers.limits() == {"timeout": store.timeout}
    with pytest.raises(
        RankFailedError, match=r"^building the group of ranks \(0, 1\) at .*: rank 0 waited in vain for another rank\n"
    ) as caught:
        peers.built((0, 1), fail)
    assert str(caught.value).endswith("\n  the world's store: wait timeout after 200ms, keys: /a")
    assert "\n  rank 1 does not answer; " in str(caught.value)
    with pytest.raises(KeyError, match="no"):
        peers.built((0, 1), lambda: {}["no"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = free.getsockname()[1]
    peers._store = SimpleNamespace(host=store.host, port=closed, timeout=timedelta(seconds=0.2))
    with pytest.raises(RankFailedError) as caught:
        peers.built((0, 1), never.wait)
    never.set()
    assert str(caught.value).endswith("\n  nothing is known of rank 1\n  the group was not built within 0.2 s")
    slow = threading.Event()
    peers._store = SimpleNamespace(host=store.host, port=store.port, timeout=timedelta(seconds=0.0))
    monkeypatch.setattr(module, "_problem", lambda *_place: slow.set())
    assert peers.built((0, 1), lambda: slow.wait() and "group") == "group"
    peers._store = None
    assert (peers.limits(), peers.built((0, 1), lambda: "group")) == ({}, "group")


def test_other_errors_stay_as_they_are(lost_peers):
    """What is not a lost peer, and what was named before, is raised unchanged."""
    from hyper_parallel.errors import RankFailedError

    module, _ = lost_peers
    peers = module.LostPeers(0)
    for error in (RuntimeError("shape"), ValueError("gloo Timed out waiting"), RankFailedError(GAVE_UP)):
        with pytest.raises(type(error)) as caught, peers.named("barrier", (0, 1)):
            raise error
        assert caught.value is error
