"""Collectives that members compare by themselves over a transport: here over a simulated one, on numpy arrays."""

import numpy as np
import pytest

from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.transport.base import active_transport
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, MessageFingerprint, Site
from hyper_parallel.transport.host.numpy_ops import NumpyOps
from hyper_parallel.transport.real.mindspore.gathering_endpoint import GatheringEndpoint
from hyper_parallel.transport.simulated.endpoint import Contribution
from hyper_parallel.transport.simulated.threads import run_threads

SITE = Site(("program.py", 3))


def endpoint():
    """The endpoint of this rank."""
    return GatheringEndpoint(active_transport(), np.array, np.array)


def test_members_get_what_the_others_have_for_them():
    """Each member gets every member's payload for it, at once or by ticket, and messages in their order."""

    def rank():
        line, here = endpoint(), active_transport().rank
        fingerprint = CollectiveFingerprint("Swap", (0, 1, 2), (), SITE)
        line.start(Contribution(fingerprint, [f"{here} to {other}" for other in range(3)], ticket=7))
        message = MessageFingerprint(here, (here + 1) % 3, 4, (("shape", (2,)), ("dtype", "float64")), SITE)
        posted = MessageFingerprint((here - 1) % 3, here, 4, (("shape", (2,)), ("dtype", "float64")), SITE)
        line.send(message, np.array([here, 5.0]))
        return line.wait(7), line.exchange(Contribution(fingerprint, [here] * 3)), line.receive(posted).tolist()

    for here, (swapped, same, received) in enumerate(run_threads(rank, 3, NumpyOps(), 60.0)):
        assert swapped == [f"{other} to {here}" for other in range(3)]
        assert same == [0, 1, 2]
        assert received == [(here - 1) % 3, 5.0]


def test_members_that_differ_raise():
    """Every member that called another collective gets the error with both calls."""

    def rank():
        operation = ["Swap", "Gather"][active_transport().rank]
        endpoint().exchange(Contribution(CollectiveFingerprint(operation, (0, 1), (), SITE), [None, None]))

    with pytest.raises(RankFailedError) as caught:
        run_threads(rank, 2, NumpyOps(), 60.0)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)
    assert str(caught.value.__cause__) == (
        "ranks 0 and 1 disagree about the operation of a collective of ranks (0, 1):\n"
        "  rank 0: Swap() at program.py:3\n  rank 1: Gather() at program.py:3"
    )
