"""The communication primitives of ``mindspore.ops``: values against NumPy, gradients as MindSpore defines them."""

from types import SimpleNamespace

import numpy as np
import pytest

from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


def values(rank, shape):
    """Random values that every rank can make for every rank."""
    return np.random.default_rng([rank, *shape]).normal(size=shape)


def every_primitive():  # noqa: PLR0915 - one run checks everything: ranks are slow to start
    """Each primitive's value and gradient, with unequal sizes where it takes them."""
    import mindspore as ms
    from mindspore import Tensor, ops
    from mindspore.communication import create_group, get_group_size, get_rank
    from mindspore.ops.operations import comm_ops

    rank, size = get_rank(), get_group_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    checked = []

    def check(name, tensor, expected):
        np.testing.assert_allclose(tensor.asnumpy(), expected, rtol=1e-10, err_msg=name)
        checked.append(name)

    def both(name, fn, x, expected, cotangents, gradient):
        """Value and gradient of ``fn``, whose output every rank multiplies with its own cotangent."""
        check(name, fn(Tensor(x)), expected)
        mine = Tensor(cotangents[rank])
        check(f"{name}'", ms.grad(lambda y: (fn(y) * mine).sum())(Tensor(x)), gradient)

    xs = [values(other, (2 * size, 3)) for other in range(size)]
    cs = [values(40 + other, (2 * size, 3)) for other in range(size)]
    x, total = xs[rank], sum(xs)
    both("AllReduce sum", ops.AllReduce(), x, total, cs, sum(cs))
    largest = np.max(xs, 0)
    both("AllReduce max", ops.AllReduce("max"), x, largest, cs, sum(cs) * (x == largest))
    product = np.prod(xs, 0)
    both("AllReduce prod", ops.AllReduce("prod"), x, product, cs, sum(c * product for c in cs) / x)
    rows = [slice(2 * other, 2 * other + 2) for other in range(size)]
    pieces = [c[rows[0]] for c in cs]
    both("ReduceScatter", ops.ReduceScatter(), x, total[rows[rank]], pieces, np.concatenate(pieces))
    parts = [values(other, (2, 3)) for other in range(size)]
    both("AllGather", ops.AllGather(), parts[rank], np.concatenate(parts), cs, sum(cs)[rows[rank]])
    both("Broadcast", lambda y: ops.Broadcast(1)((y,))[0], x, xs[1], cs, cs[rank])
    unused = ms.grad(lambda y: (ops.Broadcast(1)((y, y * 2))[1] * Tensor(cs[rank])).sum())(Tensor(x))
    check("Broadcast of two; one unused'", unused, 2 * cs[rank])
    check("Reduce", ops.Reduce(1)(Tensor(x)), total if rank == 1 else [np.nan])
    check("CollectiveGather", ops.CollectiveGather(0)(Tensor(x)), np.concatenate(xs) if rank == 0 else [np.nan])
    both("CollectiveScatter", ops.CollectiveScatter(0), x, xs[0][rows[rank]], pieces,
         np.concatenate(pieces) if rank == 0 else np.zeros_like(x))  # fmt: skip

    wide = [values(other, (3, 2 * size)) for other in range(size)]
    outs = [values(60 + other, (3 * size, 2)) for other in range(size)]
    expected = np.concatenate([part[:, rows[rank]] for part in wide])
    back = np.concatenate([out[3 * rank : 3 * rank + 3] for out in outs], 1)
    both("AlltoAll", ops.AlltoAll(size, 1, 0), wide[rank], expected, outs, back)

    counts = [[other + third for third in range(size)] for other in range(size)]
    starts = [[sum(row[:third]) for third in range(size)] for row in counts]
    flat = [values(other, (sum(counts[other]),)) for other in range(size)]
    weight = [values(70 + other, (sum(counts[other]),)) for other in range(size)]

    def piece(source, arrays, destination):
        start = starts[source][destination]
        return arrays[source][start : start + counts[source][destination]]

    arrived = np.concatenate([piece(other, flat, rank) for other in range(size)])
    returned = np.concatenate([piece(other, weight, rank) for other in range(size)])
    mine = tuple(counts[rank])
    both("AlltoAllV", lambda y: comm_ops.AlltoAllV()(y, mine, mine), flat[rank], arrived, weight, returned)
    matrix = [count for row in counts for count in row]
    both("AlltoAllVC", lambda y: comm_ops.AlltoAllVC()(y, matrix), flat[rank], arrived, weight, returned)

    sizes = [other + 1 for other in range(size)]
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    uneven = [values(other, (other + 1,)) for other in range(size)]
    whole = [values(80 + other, (sum(sizes),)) for other in range(size)]
    both("AllGatherV", lambda y: comm_ops.AllGatherV()(y, sizes), uneven[rank], np.concatenate(uneven), whole,
         sum(whole)[own])  # fmt: skip
    both("ReduceScatterV", lambda y: comm_ops.ReduceScatterV()(y, sizes), whole[rank], sum(whole)[own], uneven,
         np.concatenate(uneven))  # fmt: skip

    ops.Barrier()()
    ops.Send(3, right)(Tensor(x))
    check("Receive", ops.Receive(3, left, x.shape, ms.float64)(), xs[left])
    batch = comm_ops.BatchISendIRecv(["isend", "irecv"], [right, left], [x.shape], [ms.float64])
    check("BatchISendIRecv", batch([Tensor(x)])[1], xs[left])
    shapes = ([2 * size, 3],)
    exchange = ops.NeighborExchange([right], [left], shapes, shapes, ms.float64)
    both("NeighborExchange", lambda y: exchange((y,))[0], x, xs[left], cs, cs[right])

    def pipelined(y):
        """Rank 0 sends its activation to rank 1, whose cotangent comes back."""
        if rank == 0:
            return ops.Send(9, 1)(y * 2).sum()
        return (ops.Receive(9, 0, x.shape, ms.float64)(y) * Tensor(cs[1])).sum() if rank == 1 else y.sum()

    gradient = ms.grad(pipelined)(Tensor(x))
    check("Send'", gradient, 2 * cs[1] if rank == 0 else np.ones_like(x) * (rank > 1))

    create_group("ends", [0, size - 1])
    if rank in (0, size - 1):
        summed = ops.AllReduce("sum", "ends")(Tensor(np.full(3, 1.0 + rank), ms.bfloat16))
        assert summed.dtype == ms.bfloat16
        check("bfloat16 in a group", summed.astype(ms.float64), np.full(3, 1.0 + size))
    return checked


@pytest.mark.parametrize("size", [2, 3, 4])
def test_primitives_equal_numpy(size):
    """Values and gradients of every primitive that is carried, in worlds of two, three and four ranks."""
    expected = """AllReduce sum, AllReduce sum', AllReduce max, AllReduce max', AllReduce prod, AllReduce prod',
        ReduceScatter, ReduceScatter', AllGather, AllGather', Broadcast, Broadcast',
        Broadcast of two; one unused', Reduce, CollectiveGather,
        CollectiveScatter, CollectiveScatter', AlltoAll, AlltoAll', AlltoAllV, AlltoAllV', AlltoAllVC, AlltoAllVC',
        AllGatherV, AllGatherV', ReduceScatterV, ReduceScatterV', Receive, BatchISendIRecv, NeighborExchange,
        NeighborExchange', Send', bfloat16 in a group"""
    names = [name.strip() for name in expected.split(",")]
    for rank, checked in enumerate(simulate(every_primitive, size, "mindspore")):
        assert checked == (names if rank in (0, size - 1) else names[:-1])


def on_a_device():
    """Every primitive where this process seems to compute on Ascend: the array of a tensor is a copy there."""
    from mindspore import Tensor

    from hyper_parallel.transport.frontends.mindspore_comm import host

    plain_array, plain_to = Tensor.asnumpy, Tensor.to
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_CONTEXT", SimpleNamespace(get_param=lambda _: "Ascend"))
        patch.setattr(Tensor, "asnumpy", lambda x: plain_array(x).copy())
        patch.setattr(Tensor, "to", lambda x, place: x if place == "Ascend" else plain_to(x, place))
        return every_primitive()


def test_primitives_fill_tensors_of_a_device():
    """Outputs are written by copies there, since the array of a tensor has memory of its own; values are the same."""
    assert simulate(on_a_device, 2, "mindspore") == simulate(every_primitive, 2, "mindspore")
