"""Messages in pieces, from a sender that is a list."""

import threading
from collections import deque

import pytest

from hyper_parallel.transport.inbox import Inbox


class Line:
    """What was sent, and how many pieces there was room for."""

    def __init__(self, *pieces):
        self.sent = deque(pieces)
        self.room = 0

    def receive(self):
        """Room for one piece."""
        self.room += 1
        return self.sent.popleft


def count(first):
    """``a3`` begins a message of three pieces."""
    return int(first[1:])


def test_pieces_come_in_the_order_of_messages():
    """Whoever is waited for first, each message gets its own pieces; of one that is too long only the first."""
    line = Line("a2", "a", "b3", "b", "b", "c1", "d1")
    inbox = Inbox(line.receive, count)
    waits = [inbox.expect(pieces) for pieces in (2, 1, 4)]
    assert line.room == 7
    assert [waits[2](), waits[0](), waits[1]()] == [["c1"], ["a2", "a"], ["b3"]]
    assert line.room == 9  # the long one took room that the last message's pieces could not use after all
    assert inbox.expect(2)() == ["d1"]
    assert line.room == 9


def test_a_lost_connection_is_told_to_who_waits():
    """Waiting in the background ends quietly; what is waited for raises, and nothing is left to wait for in vain."""
    lost = threading.Event()

    def receive():
        def wait():
            lost.set()
            raise RuntimeError("gone")

        return wait

    inbox = Inbox(receive, count)
    inbox.serve_meanwhile()
    assert not lost.is_set()
    taken = inbox.expect(1)
    inbox.serve_meanwhile()
    assert lost.wait(20)
    with pytest.raises(RuntimeError, match="gone"):
        taken()
