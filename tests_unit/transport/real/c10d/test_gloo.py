"""What gloo's transports send."""

from collections import deque

import pytest
import torch

from hyper_parallel.transport.host.torch.ops import bytes_of
from hyper_parallel.transport.real.c10d.gloo import ChunkedReceiver

pytestmark = pytest.mark.platforms("torch")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_a_single_element_of_any_stride_is_sent(dtype):
    """One element counts as contiguous whatever its stride; its bytes are sent, and of no element none."""
    x = torch.arange(6).reshape(2, 3).to(dtype)[:1, 1]
    assert x.stride() == (3,)
    assert bytes_of(x).tolist() == bytes_of(x.clone()).tolist()
    assert bytes_of(x).numel() == x.element_size()
    assert bytes_of(x[:0]).tolist() == []


def test_a_transposed_tensor_is_sent_row_by_row():
    """The bytes are those of the values in row-major order, from the first element of a view on."""
    x = torch.arange(6.0).reshape(2, 3).T[1:]
    assert bytes_of(x).tolist() == bytes_of(torch.tensor([[1.0, 4.0], [2.0, 5.0]])).tolist()


class Line:
    """A sender: the chunks that it sends, how many receives were posted, and the capacity announced to it."""

    def __init__(self, *pieces):
        self.sent = deque(pieces)
        self.room = 0
        self.answers = []
        self.heard = 0

    def receive(self):
        """Post a receive for one chunk."""
        self.room += 1
        return self.come

    def come(self):
        """Return the next chunk; raise if the sender has left."""
        if not self.sent:
            raise RuntimeError("gone")
        return self.sent.popleft()

    def tell(self, room):
        """Announce the capacity to the sender, which reads it after it has sent something."""
        self.answers.append(room)
        return self.hear

    def hear(self):
        """Count an announcement that the sender has read; raise if it has left."""
        self.heard += 1
        if not self.sent:
            raise RuntimeError("gone")

    def receiver(self):
        """Return a receiver of this sender's chunks."""
        return ChunkedReceiver(self.receive, count, self.tell)


def count(first):
    """Return the number of chunks: ``a3`` begins a message of three, ``?`` is from a foreign sender."""
    return int(first[1:]) if first != "?" else 0


def test_chunks_come_in_the_order_of_messages():
    """Each message gets its own chunks, in any order of waiting; a message that is too long gets its first only."""
    line = Line("a2", "a", "b3", "b", "b", "c1", "d1")
    receiver = line.receiver()
    waits = [receiver.expect(pieces) for pieces in (2, 1, 4)]
    assert line.room == 7
    assert [waits[2](), waits[0](), waits[1]()] == [["c1"], ["a2", "a"], ["b3"]]
    assert line.room == 9  # the message that is too long used receives that were posted for the last one
    assert receiver.expect(2)() == ["d1"]
    assert line.room == 9


def test_senders_learn_the_capacity():
    """A sender learns the capacity per expected message at once; only senders of such messages are waited for.

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


def test_a_lost_connection_fails_every_wait():
    """After a lost connection, every wait raises, in any order."""

    def receive():
        def wait():
            raise RuntimeError("gone")

        return wait

    receiver = ChunkedReceiver(receive, count, lambda _room: lambda: None)
    for taken in [receiver.expect(1) for _ in range(2)][::-1]:
        with pytest.raises(RuntimeError, match="gone"):
            taken()


def test_a_refused_message_need_not_arrive_completely():
    """A message that is too long is refused after its first chunk; any other needs all of its chunks."""
    ended = "a3", "a"
    line = Line(*ended)
    assert line.receiver().expect(1)() == ["a3"]
    line = Line(*ended)
    with pytest.raises(RuntimeError, match="gone"):
        line.receiver().expect(3)()
