"""Messages in pieces, from a sender that is a list."""

from collections import deque

import pytest

from hyper_parallel.transport.chunked_receive import ChunkedReceiver


class Line:
    """What was sent, how many pieces there was room for, and what the sender was told of it."""

    def __init__(self, *pieces):
        self.sent = deque(pieces)
        self.room = 0
        self.answers = []
        self.heard = 0

    def receive(self):
        """Room for one piece."""
        self.room += 1
        return self.come

    def come(self):
        """The next piece, unless the sender has left."""
        if not self.sent:
            raise RuntimeError("gone")
        return self.sent.popleft()

    def tell(self, room):
        """Tell the sender, who hears it once it has sent something."""
        self.answers.append(room)
        return self.hear

    def hear(self):
        """The sender, which may have left."""
        self.heard += 1
        if not self.sent:
            raise RuntimeError("gone")

    def receiver(self):
        """What receives from here."""
        return ChunkedReceiver(self.receive, count, self.tell)


def count(first):
    """``a3`` begins a message of three pieces, ``?`` is none of ours."""
    return int(first[1:]) if first != "?" else 0


def test_pieces_come_in_the_order_of_messages():
    """Whoever is waited for first, each message gets its own pieces; of one that is too long only the first."""
    line = Line("a2", "a", "b3", "b", "b", "c1", "d1")
    receiver = line.receiver()
    waits = [receiver.expect(pieces) for pieces in (2, 1, 4)]
    assert line.room == 7
    assert [waits[2](), waits[0](), waits[1]()] == [["c1"], ["a2", "a"], ["b3"]]
    assert line.room == 9  # the long one took room that the last message's pieces could not use after all
    assert receiver.expect(2)() == ["d1"]
    assert line.room == 9


def test_senders_are_told_how_much_room_there_has_been():
    """Per message that is expected, before anything comes; only who sends such messages is waited for until it knows.

    One that has left need not know.
    """
    line = Line("a1", "?", "b3", "b", "b", "c1")
    receiver = line.receiver()
    waits = [receiver.expect(pieces) for pieces in (2, 1, 1)]
    assert (line.answers, line.heard) == ([2, 3, 4], 0)
    assert [wait() for wait in waits] == [["a1"], ["?"], ["b3"]]
    assert line.heard == 2
    assert receiver.expect(1)() == ["c1"]
    assert (line.answers, line.heard) == ([2, 3, 4, 6], 3)


def test_a_lost_connection_is_told_to_who_waits():
    """What is waited for raises, and so does what was to come after it."""

    def receive():
        def wait():
            raise RuntimeError("gone")

        return wait

    receiver = ChunkedReceiver(receive, count, lambda _room: lambda: None)
    for taken in [receiver.expect(1) for _ in range(2)][::-1]:
        with pytest.raises(RuntimeError, match="gone"):
            taken()


def test_what_is_refused_need_not_come_to_its_end():
    """Of a message that is too long the beginning is all that is needed, of another one every piece."""
    ended = "a3", "a"
    line = Line(*ended)
    assert line.receiver().expect(1)() == ["a3"]
    line = Line(*ended)
    with pytest.raises(RuntimeError, match="gone"):
        line.receiver().expect(3)()
