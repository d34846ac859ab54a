"""MindSpore's transports: the bridge, its simulated ranks, and HCCL's logic over an engine that imitates it."""

from collections import Counter
from types import SimpleNamespace
from unittest.mock import create_autospec

import numpy as np
import pytest

from hyper_parallel.errors import MeshError, UnsupportedOnBackend
from hyper_parallel.transport.base import Parts, ReductionError, active_transport, use_transport
from hyper_parallel.verify.simulate import simulate
from workshop.conformance.transport import check_transport

pytestmark = pytest.mark.platforms("mindspore")


class Counted:
    """An engine that counts the calls of its functions by name, and keeps the groups that it destroyed."""

    def __init__(self, engine):
        self.engine, self.calls, self.destroyed = engine, Counter(), []

    def __getattr__(self, name):
        """Return the engine's function, counted."""
        call = getattr(self.engine, name)

        def counted(*arguments, **named):
            self.calls[name] += 1
            if name == "destroy_process_group":
                self.destroyed.append(arguments[0] if arguments else None)
            return call(*arguments, **named)

        return counted


def rehearsed():
    """HCCL's rehearsal over the simulated rank, counted."""
    from hyper_parallel.transport.real.mindspore.rehearsal import RehearsedHccl

    return Counted(RehearsedHccl(active_transport()))


def over_hccl(dtypes):
    """Run the conformance suite through the HCCL transport over the imitated engine."""
    from hyper_parallel.transport.real.mindspore.transport import HcclTransport

    engine = rehearsed()
    transport = HcclTransport(engine)
    with use_transport(transport):
        # The engine adds in the order of its group.
        count = len(check_transport("mindspore", exact=False, dtypes=dtypes))
    used = {
        "all_gather",
        "all_to_all_single",
        "broadcast",
        "all_gather_object",
        "barrier",
        "send",
        "recv",
        "isend",
        "irecv",
    }
    assert transport.world_size == 1 or used <= set(engine.calls), engine.calls
    return count


def groups_over_hccl():
    """Return what is cached after each step of a group's life, and what the engine destroyed."""
    from hyper_parallel.transport.real.mindspore.transport import HcclTransport

    engine = rehearsed()
    transport = HcclTransport(engine)
    groups = [transport.known_group((0, 1)), transport.group((1, 0)), transport.known_group((0, 1))]
    elsewhere = engine.new_group([0])
    transport.adopt(elsewhere)
    groups.append(transport.known_group((0,)) is elsewhere)
    transport.drop(elsewhere)
    groups.append(transport.known_group((0,)))
    refused = []
    for stranger in (elsewhere, "abc", [1]):
        with pytest.raises(MeshError) as caught:
            transport.ranks_of(stranger)
        refused.append(str(caught.value).partition(";")[0])
        with pytest.raises(MeshError):
            transport.adopt(stranger)
    transport.drop(engine.new_group([1]))  # one that was not adopted
    transport.adopt(engine.new_group([1]))
    transport.drop(groups[1])
    groups += [transport.known_group((1,)), transport.known_group((1, 0))]
    again = transport.group((0, 1))
    groups.append((again, transport.ranks_of(again)))
    transport.close()
    return groups, refused, transport.known_group((1,)), engine.destroyed


def test_groups_over_hccl_are_kept_and_dropped():
    """A group is the cached one of its ranks, in any order, until it is dropped; close() leaves the world.

    A dropped group is refused, and its ranks get another one, which has the same name.
    """
    groups, refused, after, destroyed = simulate(groups_over_hccl, 2, "mindspore")[1]
    assert groups == [None, "0-1", "0-1", True, None, "1", None, ("0-1", (0, 1))]
    assert refused == [f"{name} is not a group of this world, or was destroyed" for name in ("'0'", "'abc'", "[1]")]
    assert after is None
    assert destroyed == ["0", "1", "0-1", None]


def averages_of_integers():
    """Return the HCCL transport's error for an average of integers."""
    import mindspore

    from hyper_parallel.transport.real.mindspore.transport import HcclTransport

    transport = HcclTransport(rehearsed())
    with pytest.raises(ReductionError):
        transport.all_reduce(mindspore.Tensor([1]), "avg", (0, 1))
    with pytest.raises(ReductionError):
        transport.reduce_scatter([mindspore.Tensor([1])] * 2, "avg", (0, 1))
    return transport.backend


@pytest.mark.parametrize(
    "world_size, dtypes", [(1, ("float32",)), (2, ("int64", "bool", "complex64")), (3, ("float32",))]
)
def test_hccl_logic_passes_the_conformance_suite(world_size, dtypes):
    """The HCCL transport flattens, pads, orders and folds so that every collective gives what numpy gives.

    Every call to the engine fits the signature of MindSpore's own function, with tensors that HCCL carries.
    """
    assert min(simulate(over_hccl, world_size, "mindspore", (dtypes,)))


def test_hccl_refuses_averages_of_integers():
    """The HCCL transport refuses averages of integers as the others do."""
    assert simulate(averages_of_integers, 2, "mindspore") == ["hccl", "hccl"]


def extrema_of_nan():
    """Return maximum and minimum of doubles, which HCCL does not reduce, where each rank has a NaN of its own."""
    import mindspore

    from hyper_parallel.transport.real.mindspore.transport import HcclTransport

    transport = HcclTransport(rehearsed())
    values = np.array([1.0, 2.0, 3.0])
    values[transport.rank] = np.nan
    return [transport.all_reduce(mindspore.Tensor(values), op, (0, 1)).asnumpy() for op in ("max", "min")]


def test_extrema_over_hccl_keep_nan():
    """A NaN of any rank is the extremum, as NumPy's, although MindSpore's CPU kernels lose it in one operand."""
    for found in simulate(extrema_of_nan, 2, "mindspore"):
        for extremum in found:
            np.testing.assert_array_equal(extremum, [np.nan, np.nan, 3.0])


@pytest.mark.parametrize("backend", ["mccl", "nccl"])
def test_other_engines_are_refused(backend):
    """MCCL is refused with the reason, and so is a backend that MindSpore lacks."""
    from hyper_parallel.transport.real.mindspore.transport import connect

    reasons = {"mccl": "silently truncates int64", "nccl": "'nccl' is not a backend of MindSpore; use 'hccl'"}
    with pytest.raises(UnsupportedOnBackend, match=reasons[backend]):
        connect(backend)


@pytest.mark.parametrize("target, calls", [("CPU", 0), ("Ascend", 1)])
def test_ranks_on_cpu_leave_the_device_alone(monkeypatch, target, calls):
    """Where MindSpore has loaded its plugin it would compute on Ascend, although --device is cpu."""
    import mindspore

    from hyper_parallel.transport.frontends.mindspore_comm import host
    from hyper_parallel.transport.real.mindspore.transport import compute_on_cpu

    chosen = create_autospec(mindspore.set_device)
    monkeypatch.setattr(host, "_CONTEXT", SimpleNamespace(get_param=lambda _: target))
    monkeypatch.setattr(mindspore, "set_device", chosen)
    compute_on_cpu()
    assert [call.args for call in chosen.call_args_list] == [("CPU",)] * calls


def test_host_round_trip():
    """Tensors of every dtype, bfloat16 included, survive the way to numpy and back."""
    import mindspore
    from mindspore import Tensor

    from hyper_parallel.transport.host.numpy_ops import BFLOAT16
    from hyper_parallel.transport.real.mindspore.transport import from_host, to_host

    half = Tensor([1.5, -2.0], mindspore.bfloat16)
    assert to_host(half).dtype == BFLOAT16
    assert (from_host(to_host(half)).asnumpy().view(np.uint16) == half.asnumpy().view(np.uint16)).all()
    for array in (np.array(3.5), np.zeros((0, 2), np.int64), np.array([True])):
        back = from_host(array)
        assert (back.shape, back.asnumpy().dtype) == (array.shape, array.dtype)


def test_single_bridge_gives_fresh_tensors():
    """The bridge returns tensors that share no memory with their input, views included."""
    simulate(_check_single_bridge, 1, "mindspore")  # a process of its own: it becomes a rank


def _check_single_bridge():
    from mindspore import Tensor

    from hyper_parallel.transport.host.numpy_ops import NumpyOps
    from hyper_parallel.transport.real.mindspore.transport import start_rank
    from hyper_parallel.transport.simulated.single_process import SingleTransport

    bridge = start_rank(SingleTransport(NumpyOps()))
    x = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    for source in (x, x[1], x.T):
        want, parts = source.asnumpy().copy(), Parts.of([source.shape])
        results = [
            bridge.all_reduce(source, "sum", (0,)),
            *bridge.all_gather(source, (0,), [source.shape]),
            bridge.reduce_scatter([source], "sum", (0,)),
            bridge.all_to_all(source, (0,), parts, parts).reshape(source.shape),
            bridge.broadcast(source, 0, (0,)),
        ]
        source.asnumpy()[...] = -1
        x.asnumpy()[...] = np.arange(6).reshape(2, 3)
        for result in results:
            assert np.array_equal(result.asnumpy(), want)
    bridge.barrier((0,))
    assert bridge.all_gather_object(1, (0,)) == [1]
    assert (bridge.ranks_of(bridge.group((0,))), bridge.backend, bridge.world_size) == ((0,), "single", 1)
