"""Which ranks wait for each other for good."""

from __future__ import annotations

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.checks.fingerprint import ANY_SOURCE, CollectiveFingerprint, MessageFingerprint, Site
from hyper_parallel.transport.simulated.coordinator import Coordinator
from hyper_parallel.transport.simulated.endpoint import Contribution
from hyper_parallel.transport.simulated.message_board import MessageBoard
from hyper_parallel.transport.simulated.pending_collective import stuck_ranks

SITE = Site(("train.py", 7))


def message(source, destination, tag=0):
    """A message of two numbers."""
    return MessageFingerprint(source, destination, tag, (("shape", (2,)), ("dtype", "float32")), SITE)


def barrier(ranks):
    """A part in a barrier."""
    return Contribution(CollectiveFingerprint("barrier", ranks, (), SITE), [None] * len(ranks))


def test_ranks_that_wait_in_a_circle_are_told_while_another_runs():
    """Ranks 0 and 2 wait for each other, and rank 1 for them: they are reported; rank 3 runs and is not disturbed."""
    coordinator = Coordinator(4)
    board = MessageBoard(coordinator)
    for source, destination in ((0, 2), (2, 0)):
        board.settle(board.post(message(source, destination), sending=True))
    coordinator.join(1, barrier((0, 1)))
    resumptions = coordinator.resumptions({0, 1, 2})
    assert sorted(resumptions) == [0, 1, 2]
    text = (
        "deadlock, ranks 0, 1, 2 cannot go on:\n"
        "  rank 0 waited in send(f32[2], dst=2, tag=0) at train.py:7\n"
        "  rank 1 waited in barrier() (collective 0 of ranks (0, 1)) for ranks [0] at train.py:7\n"
        "  rank 2 waited in send(f32[2], dst=0, tag=0) at train.py:7\n"
        "  rank 3 was not in a communication call"
    )
    assert {str(resumption.error) for resumption in resumptions.values()} == {text}


def test_a_rank_that_anybody_may_answer_is_not_stuck():
    """A receive from any source, and a chain that begins at a running rank, are no deadlock."""
    coordinator = Coordinator(3)
    board = MessageBoard(coordinator)
    board.settle(board.post(message(ANY_SOURCE, 0), sending=False))
    board.settle(board.post(message(0, 1), sending=False))
    assert coordinator.resumptions({0, 1}) == {}
    mailbox = {0: message(1, 0), 1: message(2, 1)}
    assert stuck_ranks(mailbox, [2], 3) == []
    assert stuck_ranks(mailbox, [], 3) == [0, 1]


def test_a_message_that_was_given_up_meets_no_later_one():
    """After the error, a new pair of messages between the same ranks matches, and unanswered ones are listed."""
    coordinator = Coordinator(2)
    board = MessageBoard(coordinator)
    loose = board.post(message(1, 0, tag=5), sending=True)
    board.settle(board.post(message(1, 0, tag=1), sending=False))
    board.settle(board.post(message(1, 0, tag=2), sending=True))
    text = str(coordinator.resumptions({0, 1})[0].error)
    assert text.splitlines() == [
        "deadlock, no rank can go on; ranks 1 and 0 disagree about the tag of a message:",
        "  rank 0 waited in recv(f32[2], src=1, tag=1) at train.py:7",
        "  rank 1 waited in send(f32[2], dst=0, tag=2) at train.py:7",
        "  rank 1, unanswered: send(f32[2], dst=0, tag=5) at train.py:7",
    ]
    later = board.post(message(1, 0, tag=1), "payload", sending=True)
    assert not later.matched
    assert board.post(message(1, 0, tag=1), sending=False).resumption().value == (1, "payload")
    assert isinstance(loose.matched, bool)
    assert board.undelivered() == [loose.message]


def test_a_wait_for_ranks_that_have_ended_fails_at_once():
    """A rank that asks for what nobody can post any more is reported, with what others posted and nobody answers."""
    coordinator = Coordinator(2)
    board = MessageBoard(coordinator)
    board.post(message(1, 0, tag=3), sending=True)
    coordinator.finish(1)
    board.settle(board.post(message(1, 0), sending=False))
    error = coordinator.resumptions({0})[0].error
    assert isinstance(error, CollectiveMismatchError)
    assert str(error).splitlines() == [
        "rank 1 returned without sending what rank 0 waits for:",
        "  rank 0: recv(f32[2], src=1, tag=0) at train.py:7",
        "  rank 1, unanswered: send(f32[2], dst=0, tag=3) at train.py:7",
    ]
