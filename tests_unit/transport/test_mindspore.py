"""MindSpore's transports: the bridge, its simulated ranks, and HCCL's logic over an engine that imitates it."""

import inspect
from collections import Counter

import numpy as np
import pytest

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.transport.base import ReductionError, active_transport, use_transport
from hyper_parallel.verify.simulate import simulate
from hyper_parallel.verify.transport_conformance import check_transport

pytestmark = pytest.mark.platforms("mindspore")


class Engine:
    """The functions of mindspore.mint.distributed that the HCCL transport calls, over a simulated rank."""

    def __init__(self, carrier):
        self.carrier, self.destroyed = carrier, []

    def get_rank(self):
        """Imitates ``mint.distributed.get_rank``."""
        return self.carrier.rank

    def get_world_size(self):
        """Imitates ``mint.distributed.get_world_size``."""
        return self.carrier.world_size

    def new_group(self, ranks):
        """Imitates ``mint.distributed.new_group``."""
        return ranks or list(range(self.carrier.world_size))

    def get_process_group_ranks(self, group):
        """Imitates ``mint.distributed.get_process_group_ranks``."""
        return group

    def destroy_process_group(self, group=None):
        """Imitates ``mint.distributed.destroy_process_group``."""
        self.destroyed.append(group)

    def all_reduce(self, tensor, op, group, async_op):
        """Imitates ``mint.distributed.all_reduce``."""
        return self._start(async_op, lambda total: self._put(tensor, total), "all_reduce", tensor, op, tuple(group))

    def all_gather(self, tensors, tensor, group, async_op):
        """Imitates ``mint.distributed.all_gather``."""

        def put(parts):
            for target, part in zip(tensors, parts, strict=True):
                self._put(target, part)

        return self._start(async_op, put, "all_gather", tensor, tuple(group), [tensor.shape] * len(group))

    def all_to_all_single(self, output, tensor, received, sent, group, async_op):
        """Imitates ``mint.distributed.all_to_all_single``."""
        from mindspore import Tensor

        array = tensor.asnumpy()
        starts = np.cumsum([0, *sent])
        chunks = [Tensor(array[starts[i] : starts[i + 1]]) for i in range(len(sent))]

        def put(parts):
            self._put(output, Tensor(np.concatenate([part.asnumpy() for part in parts])))

        return self._start(async_op, put, "all_to_all", chunks, tuple(group), [(size,) for size in received])

    def reduce_scatter_tensor(self, output, tensor, op, group, async_op):
        """Imitates ``mint.distributed.reduce_scatter_tensor``."""
        from mindspore import Tensor

        chunks = [Tensor(chunk) for chunk in np.split(tensor.asnumpy(), len(group))]
        return self._start(async_op, lambda mine: self._put(output, mine), "reduce_scatter", chunks, op, tuple(group))

    def broadcast(self, tensor, src, group, async_op):
        """Imitates ``mint.distributed.broadcast``."""
        return self._start(async_op, lambda value: self._put(tensor, value), "broadcast", tensor, src, tuple(group))

    def send(self, tensor, dst, tag):
        """Imitates ``mint.distributed.send``."""
        self.carrier.send(tensor, dst, tag)

    def recv(self, tensor, src, tag):
        """Imitates ``mint.distributed.recv``."""
        self._put(tensor, self.carrier.recv(tensor, src, tag))

    def isend(self, tensor, dst, tag):
        """Imitates ``mint.distributed.isend``."""
        return self._start(True, lambda _: None, "send", tensor, dst, tag)

    def irecv(self, tensor, src, tag):
        """Imitates ``mint.distributed.irecv``."""
        return self._start(True, lambda value: self._put(tensor, value), "recv", tensor, src, tag)

    def _start(self, async_op, put, *call):
        """Return a handle whose wait fills the engine's output."""
        assert async_op
        return self.carrier.start(*call).then(put)

    def all_gather_object(self, gathered, obj, group):
        """Imitates ``mint.distributed.all_gather_object``."""
        gathered[:] = self.carrier.all_gather_object(obj, tuple(group))

    def barrier(self, group):
        """Imitates ``mint.distributed.barrier``."""
        self.carrier.barrier(tuple(group))

    @staticmethod
    def _put(target, value):
        assert (target.shape, target.dtype) == (value.shape, value.dtype)
        if 0 not in target.shape:
            target.asnumpy()[...] = value.asnumpy()


class Documented:
    """An engine whose calls must fit the signatures of ``mindspore.mint.distributed``; counts them by name."""

    def __init__(self, engine):
        self.engine, self.calls = engine, Counter()

    def __getattr__(self, name):
        """Return the engine's function, which checks its arguments against MindSpore's own."""
        from mindspore import Tensor
        from mindspore.mint import distributed

        signature, call = inspect.signature(getattr(distributed, name)), getattr(self.engine, name)

        def checked(*arguments, **named):
            given = signature.bind(*arguments, **named).arguments
            self.calls[name] += 1
            for word, kinds in (("async_op", bool), ("op", str), ("src", int), ("dst", int), ("tag", int)):
                assert isinstance(given.get(word, kinds()), kinds), f"{name}: {word} is {given[word]!r}"
            tensors = [value for word, value in given.items() if word not in ("group", "op", "object_list")]
            flat = [each for value in tensors for each in (value if isinstance(value, list) else [value])]
            for tensor in (each for each in flat if isinstance(each, Tensor)):
                assert tensor.is_contiguous(), f"{name}: a tensor has strides {tensor.stride()}"
                assert str(tensor.dtype) not in ("Bool", "Complex64"), f"{name}: HCCL does not carry {tensor.dtype}"
            return call(*arguments, **named)

        return checked


def over_hccl(dtypes):
    """Run the conformance suite through the HCCL transport over the imitated engine."""
    from hyper_parallel.transport.mindspore import HcclTransport

    engine = Documented(Engine(active_transport()))
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
    from hyper_parallel.transport.mindspore import HcclTransport

    engine = Engine(active_transport())
    transport = HcclTransport(engine)
    groups = [transport.known_group((0, 1)), transport.group((1, 0)), transport.known_group((0, 1))]
    elsewhere = [0]
    transport.adopt(elsewhere)
    groups.append(transport.known_group((0,)) is elsewhere)
    transport.drop(elsewhere)
    groups.append(transport.known_group((0,)))
    transport.adopt([1])
    transport.drop([1, 0])  # another handle of the same ranks
    groups.append(transport.known_group((1, 0)))
    transport.drop([0, 1])
    groups += [transport.known_group((1,)), transport.known_group((1, 0))]
    transport.close()
    return groups, transport.known_group((1,)), engine.destroyed


def test_groups_over_hccl_are_kept_and_dropped():
    """A group is the cached one of its ranks, in any order, until it is dropped; close() leaves the world."""
    groups, after, destroyed = simulate(groups_over_hccl, 2, "mindspore")[1]
    assert groups == [None, [0, 1], [0, 1], True, None, [0, 1], [1], None]
    assert after is None
    assert destroyed == [[0], [1, 0], [0, 1], None]


def averages_of_integers():
    """Return the HCCL transport's error for an average of integers."""
    import mindspore

    from hyper_parallel.transport.mindspore import HcclTransport

    transport = HcclTransport(Engine(active_transport()))
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


@pytest.mark.parametrize("backend", ["mccl", "nccl"])
def test_other_engines_are_refused(backend):
    """MCCL is refused with the reason, and so is a backend that MindSpore lacks."""
    from hyper_parallel.transport.mindspore import connect

    with pytest.raises(UnsupportedOnBackend, match="silently truncates int64" if backend == "mccl" else "none of"):
        connect(backend)


def test_host_round_trip():
    """Tensors of every dtype, bfloat16 included, survive the way to numpy and back."""
    import mindspore
    from mindspore import Tensor

    from hyper_parallel.transport.mindspore import from_host, to_host
    from hyper_parallel.transport.numpy_ops import BFLOAT16

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

    from hyper_parallel.transport.mindspore import start_rank
    from hyper_parallel.transport.numpy_ops import NumpyOps
    from hyper_parallel.transport.single_process import SingleTransport

    bridge = start_rank(SingleTransport(NumpyOps()))
    x = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    for source in (x, x[1], x.T):
        want = source.asnumpy().copy()
        results = [
            bridge.all_reduce(source, "sum", (0,)),
            *bridge.all_gather(source, (0,), [source.shape]),
            bridge.reduce_scatter([source], "sum", (0,)),
            *bridge.all_to_all([source], (0,), [source.shape]),
            bridge.broadcast(source, 0, (0,)),
        ]
        source.asnumpy()[...] = -1
        x.asnumpy()[...] = np.arange(6).reshape(2, 3)
        for result in results:
            assert np.array_equal(result.asnumpy(), want)
    bridge.barrier((0,))
    assert bridge.all_gather_object(1, (0,)) == [1]
    assert (bridge.ranks_of(bridge.group((0,))), bridge.backend, bridge.world_size) == ((0,), "single", 1)
