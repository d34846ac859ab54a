"""Two threads in lockstep: in turn, one leaving early, one failing, one never arriving."""

from __future__ import annotations

import threading

import pytest

from hyper_parallel.errors import RendezvousError
from hyper_parallel.platform.contract.differentiable import HookCoordinator


def run(*bodies):
    """Run each body in a thread of its own; return what each returned or raised."""
    results = [None] * len(bodies)

    def call(index, body):
        try:
            results[index] = body()
        except (RendezvousError, ValueError) as error:
            results[index] = error

    threads = [
        threading.Thread(target=call, args=position, name=f"thread-{position[0]}") for position in enumerate(bodies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_each_learns_where_the_other_is():
    """Two threads meet at every position, one forward and one backward."""
    meet = HookCoordinator(5.0)
    results = run(
        lambda: [meet.rendezvous(position, "forward") for position in "ABCD"],
        lambda: [meet.rendezvous(position, "backward") for position in "DCBA"],
    )
    assert results == [
        [f"{position} (backward)" for position in "DCBA"],
        [f"{position} (forward)" for position in "ABCD"],
    ]


def test_who_leaves_lets_the_other_go_on():
    """A thread with fewer positions leaves at its end; the other continues alone."""
    meet = HookCoordinator(5.0)

    def short():
        with meet.taking_part():
            return meet.rendezvous("A")

    results = run(short, lambda: [meet.rendezvous(position, "backward") for position in "DCB"])
    assert results == ["D (backward)", ["A (forward)", None, None]]
    meet.reset()
    assert run(lambda: meet.rendezvous("A"), lambda: meet.rendezvous("B")) == ["B (forward)", "A (forward)"]


def test_a_failure_of_one_reaches_the_other():
    """If a thread raises, its partner raises with the cause."""
    meet = HookCoordinator(5.0)

    def failing():
        with meet.taking_part():
            meet.rendezvous("A")
            raise ValueError("lost")

    own, other = run(failing, lambda: [meet.rendezvous(position) for position in "BC"])
    assert isinstance(own, ValueError)
    assert isinstance(other, RendezvousError)
    assert str(other) == "HookCoordinator: the partner thread 'thread-0' raised ValueError: lost"


def test_a_deadlock_raises():
    """A deadlock raises with the time waited, the position and the partner's last one; later calls raise it too."""
    meet = HookCoordinator(0.1)
    results = run(lambda: [meet.rendezvous(position) for position in "AB"], lambda: meet.rendezvous("C", "backward"))
    assert str(results[0]) == (
        "HookCoordinator: thread 'thread-0' waited 0.1 s at B (forward) for its partner, thread 'thread-1', last at "
        "C (backward); both threads must pass the same number of positions, or call leave()"
    )
    assert isinstance(results[0], TimeoutError)
    with pytest.raises(RendezvousError, match=r"waited 0\.1 s at B"):
        meet.rendezvous("D")
