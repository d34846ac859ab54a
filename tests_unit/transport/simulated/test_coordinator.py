"""The coordinator as a pure state machine: no thread, no process, no framework."""

import pytest

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, MessageFingerprint, Site
from hyper_parallel.transport.simulated.coordinator import Coordinator
from hyper_parallel.transport.simulated.endpoint import Contribution, RankAbortedError, unwinding

SITE = Site(("train.py", 1))


def call(rank, ranks=(0, 1), operation="barrier", facts=(), *, sends=None, expects=None, **more):
    """A contribution of ``rank``, whose payload for each position is ``(rank, position)``."""
    fingerprint = CollectiveFingerprint(operation, ranks, facts, SITE, sends, expects)
    return Contribution(fingerprint, [(rank, i) for i in range(len(ranks))], **more)


def message(source, destination, facts=(("shape", (1,)),)):
    """The fingerprint of a message, or of a receive that is posted for one."""
    return MessageFingerprint(source, destination, 0, facts, SITE)


def test_each_member_gets_what_is_for_it():
    """When the last member has joined, each member gets the deposits for its position, in rank order."""
    world = Coordinator(3)
    world.join(2, call(2, (2, 0)))
    assert world.next_rank(2) == 0
    world.join(0, call(0, (2, 0)))
    assert world.take(2) == [(2, 0), (0, 0)]
    assert world.take(0) == [(2, 1), (0, 1)]


def test_order_is_round_robin():
    """The next rank is the lowest ready one above the last, or else the lowest ready one."""
    world = Coordinator(3)
    assert [world.next_rank(rank) for rank in (-1, 0, 1, 2)] == [0, 1, 2, 0]


def test_world_ends_when_all_returned():
    """No rank is next once all have returned."""
    world = Coordinator(2)
    world.finish(0)
    world.finish(1)
    assert world.next_rank(1) is None


@pytest.mark.parametrize(
    "other, what",
    [
        ({"operation": "all_gather"}, "operation"),
        ({"facts": (("shape", (2,)),)}, "shape"),
        ({"facts": (("shape", (1,)), ("dtype", "int64"))}, "dtype"),
    ],
)
def test_disagreement_names_both_ranks(other, what):
    """Members that call different collectives both get an error with both ranks, the difference and both call sites."""
    world = Coordinator(2)
    world.join(0, call(0, facts=(("shape", (1,)),)))
    world.join(1, call(1, **{"facts": (("shape", (1,)),), **other}))
    for rank in (0, 1):
        with pytest.raises(CollectiveMismatchError, match=f"ranks 0 and 1 disagree about the {what}") as caught:
            world.take(rank)
        assert str(caught.value).count("train.py:1") == 2


def test_chunks_must_fit_what_is_expected():
    """A chunk of another shape than its receiver expects is an error on both ranks, which shows both shapes."""
    world, facts = Coordinator(2), (("dtype", "float32"),)
    world.join(0, call(0, operation="all_to_all", facts=facts, sends=((1,), (2,)), expects=((1,), (4,))))
    world.join(1, call(1, operation="all_to_all", facts=facts, sends=((3,), (1,)), expects=((2,), (1,))))
    for rank in (0, 1):
        with pytest.raises(CollectiveMismatchError) as caught:
            world.take(rank)
        assert str(caught.value) == (
            "ranks 0 and 1 disagree about the chunk shapes of collective 0 of ranks (0, 1): "
            "rank 1 sends [3] to rank 0, which expects [4]\n"
            "  rank 0: all_to_all(f32[1] f32[2], expects f32[1] f32[4]) at train.py:1\n"
            "  rank 1: all_to_all(f32[3] f32[1], expects f32[2] f32[1]) at train.py:1"
        )


def test_late_member_learns_of_the_failure():
    """A member that joins a failed collective gets the same error, which names the odd rank, and the world goes on."""
    world = Coordinator(3)
    everyone = (0, 1, 2)
    world.join(0, call(0, everyone))
    world.join(1, call(1, everyone, "all_gather"))
    with pytest.raises(CollectiveMismatchError) as first:
        world.take(0)
    assert str(first.value).startswith("ranks 0 and 1 disagree about the operation of collective 0")
    world.join(2, call(2, everyone))
    for rank in (1, 2):
        with pytest.raises(CollectiveMismatchError) as caught:
            world.take(rank)
        assert str(caught.value) == (
            "rank 1 disagrees with ranks 0, 2 about the operation of collective 0 of ranks (0, 1, 2):\n"
            "  ranks 0, 2: barrier() at train.py:1\n"
            "  rank 1: all_gather() at train.py:1"
        )
        assert caught.value.odd_ranks == (1,)
    assert (str(first.value), first.value.odd_ranks) == (str(caught.value), (1,))
    for rank in everyone:
        world.join(rank, call(rank, everyone))
    assert len(world.take(1)) == 3


def test_an_error_waits_for_members_that_still_run():
    """Of ranks that run at once, those that differ get their error when all have joined, ended, wait or time is up."""
    everyone = (0, 1, 2)

    def differing():
        world = Coordinator(3)
        world.join(0, call(0, everyone))
        world.join(1, call(1, everyone, "all_gather"))
        assert world.resumptions({0, 1}) == {}
        return world

    joined, elsewhere, ended, late = (differing() for _ in range(4))
    joined.join(2, call(2, everyone))
    assert "rank 1 disagrees with ranks 0, 2" in str(joined.resumptions({0, 1, 2})[0].error)
    elsewhere.join(2, call(2, (1, 2)))
    assert list(elsewhere.resumptions({0, 1, 2})) == [0, 1]
    ended.finish(2)
    assert list(ended.resumptions({0, 1})) == [0, 1]
    assert late.release_held()
    assert "ranks 0 and 1 disagree" in str(late.resumptions({0, 1})[0].error)
    assert not late.release_held()


def test_member_that_returned_is_missed_at_once():
    """A rank that returns without joining fails the ranks that wait for it."""
    world = Coordinator(2)
    world.join(0, call(0))
    world.finish(1)
    with pytest.raises(CollectiveMismatchError, match="rank 1 returned without joining collective 0") as caught:
        world.take(0)
    assert caught.value.odd_ranks == (1,)


def test_members_that_returned_are_named_together():
    """One message names all ranks that ended without the collective."""
    world = Coordinator(3)
    world.finish(0)
    world.finish(2)
    world.join(1, call(1, (0, 1, 2)))
    with pytest.raises(CollectiveMismatchError) as caught:
        world.take(1)
    assert str(caught.value).splitlines()[0] == (
        "ranks 0, 2 returned without joining collective 0 of ranks (0, 1, 2), in which others wait:"
    )


def test_joining_after_a_member_returned_fails_at_once():
    """A collective with a rank that has returned fails when the first member joins."""
    world = Coordinator(2)
    world.finish(1)
    world.join(0, call(0))
    with pytest.raises(CollectiveMismatchError, match="rank 1 returned without joining"):
        world.take(0)


def test_deadlock_lists_what_every_rank_waits_in():
    """When no rank can go on, all waiting ranks get an error that lists what each waits in."""
    world = Coordinator(2)
    world.join(0, call(0, (0, 1)))
    world.join(1, call(1, (1, 0), "all_gather"))
    assert world.next_rank(1) == 0
    for rank in (0, 1):
        with pytest.raises(CollectiveMismatchError, match="deadlock") as caught:
            world.take(rank)
        assert "rank 0 waited in barrier()" in str(caught.value)
        assert "rank 1 waited in all_gather()" in str(caught.value)


def test_failure_unwinds_the_others():
    """When a rank fails, the others unwind, and the collective that each waited in is recorded."""
    world = Coordinator(3)
    world.join(0, call(0, (0, 2)))
    world.fail(1, "raised ValueError")
    for rank in (0, 2):
        with pytest.raises(RankAbortedError):
            world.take(rank)
    assert world.aborted_in[0].startswith("waited in barrier()")
    for again in (lambda: world.join(0, call(0)), lambda: world.receive(message(2, 0))):
        again()
        with pytest.raises(RankAbortedError):
            world.take(0)
    with pytest.raises(RankAbortedError):
        world.send(message(0, 2), None)


def test_messages_keep_their_order():
    """Messages of one sender and tag arrive in the order in which they were sent, waited for or not."""
    world = Coordinator(2)
    world.send(message(0, 1), "first")
    world.send(message(0, 1), "second")
    for expected in ("first", "second"):
        world.receive(message(0, 1))
        assert world.take(1) == expected
    world.receive(message(0, 1))
    assert world.next_rank(1) == 0
    world.send(message(0, 1), "third")
    assert world.take(1) == "third"


def test_message_of_another_shape_is_an_error():
    """A message of another shape than its receiver expects is an error that names both ranks."""
    world = Coordinator(2)
    world.send(message(0, 1), "x")
    world.receive(message(0, 1, facts=(("shape", (2,)),)))
    with pytest.raises(CollectiveMismatchError, match="ranks 0 and 1 disagree about the shape of a message"):
        world.take(1)


def test_message_that_is_never_sent_is_missed():
    """Waiting for a message of a rank that returns, or has returned, fails at once."""
    world = Coordinator(3)
    world.receive(message(0, 1))
    world.finish(0)
    world.receive(message(0, 2))
    for rank in (1, 2):
        with pytest.raises(CollectiveMismatchError, match="rank 0 returned without sending"):
            world.take(rank)


def test_message_that_is_never_received_is_reported():
    """A message that nobody received is reported at the end."""
    world = Coordinator(2)
    assert world.undelivered() is None
    world.send(message(0, 1), "x")
    assert "was never received; sent at train.py:1" in (world.undelivered() or "")


def test_unwinding_sees_through_what_it_caused():
    """An error raised while a rank was being unwound counts as unwinding."""
    error = ValueError()
    assert not unwinding(error)
    error.__context__ = RankAbortedError()
    assert unwinding(error)


def test_facts_in_another_order_are_refused():
    """Members that list the same facts in another order are refused: they run different versions of this library."""
    world = Coordinator(2)
    facts = (("src", 0), ("shape", (1,)))
    world.join(0, call(0, facts=facts))
    world.join(1, call(1, facts=facts[::-1]))
    with pytest.raises(CollectiveMismatchError, match="disagree about the order of facts"):
        world.take(0)


def test_started_collectives_end_with_their_world():
    """After a failure, waiting for a started collective unwinds; a member that returned fails the wait."""
    world = Coordinator(2)
    world.start(0, call(0, ticket=1))
    world.fail(1, "raised")
    world.start(0, call(0, ticket=2))
    world.await_ticket(0, 2)
    with pytest.raises(RankAbortedError):
        world.take(0)
    assert world.describe(1) == "raised"
    world = Coordinator(2)
    world.start(0, call(0, ticket=1))
    world.finish(1)
    world.await_ticket(0, 1)
    with pytest.raises(CollectiveMismatchError, match="rank 1 returned without joining"):
        world.take(0)


def test_errors_that_nobody_waits_for_are_reported():
    """A collective that nobody waits for is reported if a member differs, comes late or never comes."""
    unreported = {"ticket": 1, "awaited": False}
    world = Coordinator(2)
    world.start(0, call(0, **unreported))
    world.finish(1)
    assert "rank 1 returned without joining" in str(world.unreported[0])
    world = Coordinator(3)
    everyone = (0, 1, 2)
    world.start(0, call(0, everyone, **unreported))
    world.start(1, call(1, everyone, ticket=1))
    world.finish(0)
    world.join(2, call(2, everyone, "all_gather"))
    assert "rank 2 disagrees with ranks 0, 1 about the operation" in str(world.unreported.pop(0))
    assert not world.unreported
    world.await_ticket(1, 1)
    for rank in (1, 2):
        with pytest.raises(CollectiveMismatchError, match="rank 2 disagrees"):
            world.take(rank)
    world = Coordinator(3)
    for rank, operation in enumerate(("barrier", "all_gather", "barrier")):
        world.start(rank, call(rank, everyone, operation, **unreported))
    assert set(world.unreported) == {0, 1, 2}


def test_ranks_that_wait_for_a_returned_rank_fail_together():
    """When a member returns, all ranks in its collective get the error together; ranks that wait for others go on."""
    world = Coordinator(4)
    for rank in (0, 1):
        world.join(rank, call(rank, (0, 1, 2)))
    world.receive(message(0, 3))
    world.finish(2)
    resumptions = world.resumptions({0, 1, 3})
    assert set(resumptions) == {0, 1}
    assert all("rank 2 returned without joining" in str(resumption.error) for resumption in resumptions.values())
    world.receive(message(3, 0))
    world.receive(message(0, 1))
    resumptions = world.resumptions({0, 1, 3})
    assert set(resumptions) == {0, 1, 3}
    assert all("deadlock, no rank can go on" in str(resumption.error) for resumption in resumptions.values())
    assert "rank 2 returned" in str(resumptions[0].error)
