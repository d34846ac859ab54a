"""What real ranks ask of their coordinator."""

from __future__ import annotations

import pytest

from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, MessageFingerprint, Site
from hyper_parallel.transport.real.requests import Requests, called
from hyper_parallel.transport.simulated.coordinator import Coordinator
from hyper_parallel.transport.simulated.endpoint import Contribution, RankAbortedError

SITE = Site(("train.py", 7))


def message(size=2):
    """A message from rank 0 to rank 1."""
    return MessageFingerprint(0, 1, 3, (("shape", (size,)), ("dtype", "float32")), SITE)


def test_a_message_is_handed_over_when_both_sides_are_posted():
    """Each side is asked for by its number; the receiver gets source and payload."""
    coordinator = Coordinator(2)
    requests = Requests(coordinator)
    assert not requests.carry_out(1, "post", (1, message(), None, False, True))
    assert requests.carry_out(1, "probe", 1)
    assert coordinator.resumptions({1})[1].value is False
    assert not requests.carry_out(0, "post", (9, message(), b"payload", True, True))
    assert requests.carry_out(1, "probe", 1)
    assert coordinator.resumptions({1})[1].value is True
    assert requests.carry_out(1, "settle", 1)
    assert requests.carry_out(0, "settle", 9)
    assert {rank: resumption.value for rank, resumption in coordinator.resumptions({0, 1}).items()} == {
        0: (0, b"payload"),
        1: (0, b"payload"),
    }
    assert requests.lost() is None


@pytest.mark.parametrize("told", [True, False])
def test_only_the_sides_that_want_to_be_told_are(told):
    """A mismatch is the receiver's error, and the sender's if it asked for that; unseen, it is found at the end."""
    coordinator = Coordinator(2)
    requests = Requests(coordinator)
    requests.carry_out(0, "post", (1, message(2), None, True, told))
    requests.carry_out(1, "post", (1, message(3), None, False, True))
    text = (
        "ranks 0 and 1 disagree about the shape of a message:\n"
        "  rank 0: send(f32[2], dst=1, tag=3) at train.py:7\n"
        "  rank 1: recv(f32[3], src=0, tag=3) at train.py:7"
    )
    assert requests.lost() == text
    requests.carry_out(0, "settle", 1)
    assert str(coordinator.resumptions({0})[0].error) == (text if told else "None")
    assert requests.lost() == (None if told else text)
    requests.carry_out(1, "settle", 1)
    assert str(coordinator.resumptions({1})[1].error) == text
    assert requests.lost() is None


def test_nothing_is_posted_in_a_world_that_has_failed():
    """After a failure messages go nowhere, and a rank that waits for one unwinds."""
    coordinator = Coordinator(2)
    requests = Requests(coordinator)
    coordinator.fail(1, "died")
    assert isinstance(coordinator.resumptions({0})[0].error, RankAbortedError)
    assert not requests.carry_out(0, "post", (1, message(), None, True, True))
    assert not requests.carry_out(0, "send", (message(), None))
    assert requests.carry_out(0, "settle", 1)
    assert isinstance(coordinator.resumptions({0})[0].error, RankAbortedError)


def test_calls_are_named_with_their_site():
    """Collectives and messages are, other requests are none."""
    contribution = Contribution(CollectiveFingerprint("barrier", (0, 1), (), SITE), [None, None])
    assert called("join", contribution) == called("start", contribution) == "barrier() at train.py:7"
    sent, received = "send(f32[2], dst=1, tag=3) at train.py:7", "recv(f32[2], src=0, tag=3) at train.py:7"
    assert called("post", (1, message(), None, True, True)) == called("send", (message(), None)) == sent
    assert called("post", (1, message(), None, False, True)) == called("receive", message()) == received
    assert called("settle", 1) is called("probe", 1) is called("await", 1) is None
