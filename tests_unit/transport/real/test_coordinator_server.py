"""A coordinator that ranks connect to: here, the ends of its connections in one process."""

import socket
import sys

import pytest

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, MessageFingerprint, Site
from hyper_parallel.transport.real.coordinator_server import CoordinatorServer, connect, peer_user
from hyper_parallel.transport.simulated.endpoint import Contribution, RankAbortedError

SITE = Site(("train.py", 1))


@pytest.fixture
def world(tmp_path):
    """Return a function that starts a server for so many ranks and connects them; ended ranks have returned."""
    servers = []

    def start(world_size, how=lambda _rank: "returned"):
        servers.append(CoordinatorServer(tmp_path / "line", world_size, how))
        lines = [connect(tmp_path / "line", rank) for rank in range(world_size)]
        while len(servers[0]._ranks) < world_size:
            servers[0].serve(1)
        return servers[0], lines

    yield start
    for server in servers:
        server.close()


def call(operation="barrier", ranks=(0, 1), **more):
    """Return a contribution."""
    return Contribution(CollectiveFingerprint(operation, ranks, (), SITE), [operation] * len(ranks), **more)


def served(server):
    """Serve until nothing has come."""
    while server.serve(0):
        pass


def test_ranks_meet_in_a_collective(world):
    """Blocking and started collectives and messages come to their ends, and waiting ranks do not count as running."""
    server, lines = world(2)
    lines[0].send(("join", call()))
    served(server)
    assert server.running() == [1]
    lines[1].send(("join", call()))
    served(server)
    assert [line.recv().value for line in lines] == [["barrier"] * 2] * 2
    for line in lines:
        line.send(("start", call("all_gather", ticket=1)))
        line.send(("await", 1))
    served(server)
    assert [line.recv().value for line in lines] == [["all_gather"] * 2] * 2
    message = MessageFingerprint(0, 1, 0, (), SITE)
    lines[1].send(("receive", message))
    lines[0].send(("send", (message, "payload")))
    served(server)
    assert lines[1].recv().value == "payload"
    assert server.running() == [0, 1]


def test_ranks_that_differ_get_the_error(world):
    """Each of two ranks that call different collectives gets the error."""
    server, lines = world(2)
    for line, operation in zip(lines, ("barrier", "all_gather"), strict=True):
        line.send(("join", call(operation)))
    served(server)
    for line in lines:
        assert isinstance(line.recv().error, CollectiveMismatchError)


def test_a_rank_that_returned_is_missed(world):
    """A rank that returns without joining ends the wait of the others with an error."""
    server, lines = world(2)
    lines[0].send(("join", call()))
    lines[1].close()
    served(server)
    assert "rank 1 returned without joining" in str(lines[0].recv().error)


def test_the_others_of_a_rank_that_died_unwind(world):
    """When a rank has died, the others unwind; what they send afterwards is dropped."""
    server, lines = world(2, lambda _rank: "died")
    lines[0].send(("join", call()))
    served(server)
    lines[1].close()
    served(server)
    assert isinstance(lines[0].recv().error, RankAbortedError)
    assert server.coordinator.aborted_in == {1: "died", 0: server.coordinator.aborted_in[0]}
    lines[0].send(("send", (MessageFingerprint(0, 1, 0, (), SITE), None)))
    served(server)
    assert server.coordinator.undelivered() is None


def test_a_rank_that_goes_disturbs_nobody(world):
    """A rank that goes while it waits has joined all the same, and one that goes as it connects never came."""
    server, lines = world(2)
    lines[0].send(("join", call()))
    served(server)
    lines[0].close()
    lines[1].send(("join", call()))
    served(server)
    assert lines[1].recv().value == ["barrier"] * 2
    assert server.running() == [1]
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(server._socket.getsockname())
    stranger.close()
    served(server)
    assert len(server._ranks) == 1


def test_the_user_of_a_connection_is_unknown_elsewhere(monkeypatch):
    """Only Linux tells the user of the other process; elsewhere the mode of the file protects the socket."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with socket.socket(socket.AF_UNIX) as unconnected:
        assert peer_user(unconnected) is None
