"""The simulated transport's own checks, and its groups."""

import numpy as np
import pytest

from hyper_parallel.errors import ArgumentTypeError, CollectiveMismatchError
from hyper_parallel.transport.base import Parts, ReductionError, active_transport_of, use_transport
from hyper_parallel.transport.host.numpy_ops import NumpyOps
from hyper_parallel.transport.simulated.single_process import SingleTransport
from hyper_parallel.transport.simulated.transport import SimulatedGroup, SimulatedTransport

ALONE = SingleTransport(NumpyOps())


@pytest.mark.parametrize(
    "use, says",
    [
        (lambda t: t.all_gather(np.ones(2), (0,), [(3,)]), "to itself in all_gather, but its shapes name \\[3\\]"),
        (lambda t: t.all_gather(np.ones(2), (0,), []), "one per rank"),
        (lambda t: t.all_to_all(np.ones(2), (0,), Parts.of([(2,)]), Parts.of([(1,)])), "to itself in all_to_all"),
        (lambda t: t.all_to_all(np.ones(0), (0,), Parts.of([]), Parts.of([])), "one per rank"),
        (
            lambda t: t.all_to_all(np.ones(3), (0,), Parts.of([(2,)]), Parts.of([(2,)])),
            "all_to_all over 1 ranks sends 2 elements of a tensor of 3",
        ),
        (lambda t: t.reduce_scatter([], "sum", (0,)), "one per rank"),
        (lambda t: t.broadcast(np.ones(2), 1, (0,)), "src is a global rank"),
        (lambda t: t.send(np.ones(2), 0), "must be another rank"),
        (lambda t: t.recv(np.ones(2), 5), "must be another rank"),
        (lambda t: t.barrier((1,)), "is not a member"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(use, says):
    """Shapes, counts, sources and peers that cannot be right are refused before anything is sent."""
    with pytest.raises(CollectiveMismatchError, match=says):
        use(ALONE)


def test_integer_average_is_refused():
    """Both reductions refuse the average of integers."""
    with pytest.raises(ReductionError):
        ALONE.all_reduce(np.ones(2, np.int64), "avg", (0,))
    with pytest.raises(ReductionError):
        ALONE.reduce_scatter([np.ones(2, np.int64)], "avg", (0,))


def test_group_is_its_ranks():
    """Groups of equal ranks are equal, know their ranks and size, and None is the world."""
    group = ALONE.group((0,))
    assert group == SimulatedGroup((0,))
    assert (ALONE.ranks_of(group), ALONE.ranks_of(None), group.size()) == ((0,), (0,), 1)


def test_tensors_of_another_framework_are_refused():
    """A rank that carries tensors of one framework refuses those of the other; host arrays have none."""
    ops = NumpyOps()
    assert active_transport_of("torch") is None
    with use_transport(SimulatedTransport(0, 1, ops, None)):
        assert active_transport_of("torch") is active_transport_of("mindspore")
    ops.framework = "mindspore"
    with use_transport(SimulatedTransport(0, 1, ops, None)):
        assert active_transport_of("mindspore").framework == "mindspore"
        with pytest.raises(ArgumentTypeError) as caught:
            active_transport_of("torch")
    assert str(caught.value) == (
        "a rank of mindspore got a tensor of torch, which it cannot send to other ranks; "
        'write platform="torch" in simulate or launch, or @pytest.mark.platforms("torch") for a test'
    )
