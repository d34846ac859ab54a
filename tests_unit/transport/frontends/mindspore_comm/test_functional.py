"""``mint.distributed``, ``ops.communication`` and ``comm_func`` on simulated and on real ranks, against NumPy."""

import numpy as np
import pytest

from hyper_parallel.pytest_plugin.ranks import require_transport
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

REDUCTIONS = {"sum": np.add.reduce, "prod": np.multiply.reduce, "max": np.maximum.reduce, "min": np.minimum.reduce}


def values(rank, shape, dtype=np.float64):
    """Random values that every rank can make for every rank."""
    return np.random.default_rng([rank, *shape]).normal(size=shape).astype(dtype)


def in_place():  # noqa: PLR0915 - one run checks everything: ranks are slow to start
    """Every function of mint.distributed that writes into tensors, with unequal sizes where it takes them."""
    import mindspore as ms
    from mindspore import Tensor, mint
    from mindspore.communication import comm_func

    dist = mint.distributed
    rank, size = dist.get_rank(), dist.get_world_size()
    checked = []

    def check(name, tensor, expected):
        np.testing.assert_allclose(tensor.asnumpy(), expected, rtol=1e-12, err_msg=name)
        checked.append(name)

    def every(shape):
        return [values(other, shape) for other in range(size)]

    x = Tensor(values(rank, (3, 2)))
    for op, reduce in REDUCTIONS.items():
        y = Tensor(values(rank, (3, 2)))
        assert dist.all_reduce(y, op) is None
        check("all_reduce", y, reduce(every((3, 2))))
    y = Tensor(values(rank, (5,)))
    # Where MindSpore itself has no average, a sum stands for it.
    averages = "avg" in str(dist.all_reduce.__doc__)
    handle = dist.all_reduce(y, "avg" if averages else "sum", async_op=True)
    handle.wait()
    handle.wait()
    check("all_reduce avg", y, sum(every((5,))) / (size if averages else 1))

    y = Tensor(values(rank, (3, 2)))
    dist.reduce(y, size - 1)
    check("reduce", y, sum(every((3, 2))) if rank == size - 1 else values(rank, (3, 2)))
    y = Tensor(values(rank, (4,)))
    dist.broadcast(y, 1)
    check("broadcast", y, values(1, (4,)))

    outputs = [mint.zeros((other + 1, 2), dtype=ms.float64) for other in range(size)]
    dist.all_gather(outputs, Tensor(values(rank, (rank + 1, 2))))
    for other, output in enumerate(outputs):
        check("all_gather", output, values(other, (other + 1, 2)))
    whole = mint.zeros((3 * size, 2), dtype=ms.float64)
    dist.all_gather_into_tensor(whole, x)
    check("all_gather_into_tensor", whole, np.concatenate(every((3, 2))))
    rows = [other + 1 for other in range(size)]
    uneven = mint.zeros((sum(rows), 2), dtype=ms.float64)
    dist.all_gather_into_tensor_uneven(uneven, Tensor(values(rank, (rank + 1, 2))), rows)
    check(
        "all_gather_into_tensor_uneven",
        uneven,
        np.concatenate([values(other, (other + 1, 2)) for other in range(size)]),
    )

    mine = mint.zeros((rank + 1, 2), dtype=ms.float64)
    dist.reduce_scatter(mine, [Tensor(values(rank, (other + 1, 2))) for other in range(size)])
    check("reduce_scatter", mine, sum(every((rank + 1, 2))))
    mine = mint.zeros((2, 2), dtype=ms.float64)
    dist.reduce_scatter_tensor(mine, Tensor(values(rank, (2 * size, 2))), "max")
    check("reduce_scatter_tensor", mine, np.max(every((2 * size, 2)), 0)[2 * rank : 2 * rank + 2])
    mine = mint.zeros((rank + 1, 2), dtype=ms.float64)
    dist.reduce_scatter_tensor_uneven(mine, Tensor(values(rank, (sum(rows), 2))), rows)
    start = sum(rows[:rank])
    check("reduce_scatter_tensor_uneven", mine, sum(every((sum(rows), 2)))[start : start + rank + 1])

    outputs = [mint.zeros((3,), dtype=ms.float64) for _ in range(size)]
    dist.gather(Tensor(values(rank, (3,))), outputs, 1)
    for other, output in enumerate(outputs):
        check("gather", output, values(other, (3,)) if rank == 1 else np.zeros(3))
    mine = mint.zeros((3,), dtype=ms.float64)
    dist.scatter(mine, [Tensor(values(other, (3,))) for other in range(size)], 1)
    check("scatter", mine, values(rank, (3,)))
    whole = mint.zeros((2 * size,), dtype=ms.float64)
    ms.ops.communication.gather_into_tensor(whole, Tensor(values(rank, (2,))), 0)
    check("gather_into_tensor", whole, np.concatenate(every((2,))) if rank == 0 else np.zeros(2 * size))
    mine = mint.zeros((2,), dtype=ms.float64)
    ms.ops.communication.scatter_tensor(mine, Tensor(values(7, (2 * size,))), 0)
    check("scatter_tensor", mine, values(7, (2 * size,))[2 * rank : 2 * rank + 2])

    outputs = [mint.zeros((rank + other + 1,), dtype=ms.float64) for other in range(size)]
    dist.all_to_all(outputs, [Tensor(values(rank, (rank + other + 1,))) for other in range(size)])
    for other, output in enumerate(outputs):
        check("all_to_all", output, values(other, (rank + other + 1,)))
    rows = [rank + other for other in range(size)]
    single = mint.zeros((sum(rows), 2), dtype=ms.float64)
    dist.all_to_all_single(single, Tensor(values(rank, (sum(rows), 2))), rows, rows)
    starts = [[sum(other + third for third in range(before)) for before in range(size)] for other in range(size)]
    parts = [values(other, (sum(other + third for third in range(size)), 2)) for other in range(size)]
    pieces = [parts[o][starts[o][rank] : starts[o][rank] + o + rank] for o in range(size)]
    check("all_to_all_single", single, np.concatenate(pieces))
    matrix = [other + third for other in range(size) for third in range(size)]
    single = mint.zeros((sum(rows), 2), dtype=ms.float64)
    comm_func.all_to_all_v_c(single, Tensor(values(rank, (sum(rows), 2))), matrix)
    check("all_to_all_v_c", single, np.concatenate(pieces))
    dist.barrier()
    return checked


def messages():
    """Sends and receives in a ring, batched, tagged, of objects, and the collectives of objects."""
    import mindspore as ms
    from mindspore import Tensor, mint

    dist = mint.distributed
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    checked = []

    def check(name, actual, expected):
        np.testing.assert_array_equal(actual, expected, err_msg=name)
        checked.append(name)

    dist.send(Tensor(values(rank, (2, 3))), right, tag=5)
    dist.isend(Tensor(values(rank, (4,))), right, tag=6).wait()
    late, early = mint.zeros((4,), dtype=ms.float64), mint.zeros((3, 2), dtype=ms.float64)
    handle = dist.irecv(late, left, tag=6)
    dist.recv(early, left, tag=5)
    handle.wait()
    check("recv", early.asnumpy(), values(left, (2, 3)).reshape(3, 2))
    check("irecv", late.asnumpy(), values(left, (4,)))
    received = mint.zeros((3,), dtype=ms.float64)
    batch = [dist.P2POp("isend", Tensor(values(rank, (3,))), right), dist.P2POp("irecv", received, left)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    check("batch_isend_irecv", received.asnumpy(), values(left, (3,)))

    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": other, "text": "x" * other} for other in range(size)]
    objects = [None] * size if rank else [f"for {other}" for other in range(size)]
    dist.broadcast_object_list(objects, 0)
    mine = [None]
    dist.scatter_object_list(mine, objects if rank == 0 else [None] * size, 0)
    assert mine == [f"for {rank}"]
    collected = [None] * size
    dist.gather_object(rank * 10, collected, 1)
    assert collected == ([other * 10 for other in range(size)] if rank == 1 else [None] * size)
    if not hasattr(dist, "send_object_list"):  # MindSpore itself sends no lists of objects
        return [*checked, "objects"]
    if rank == 0:
        dist.send_object_list(["a", 2], 1)
    elif rank == 1:
        taken = [None, None]
        dist.recv_object_list(taken, 0)
        assert taken == ["a", 2]
    return [*checked, "objects"]


def returned():  # noqa: PLR0915 - as above
    """The functions that return new tensors: their values, blocking and started, and gradients."""
    import mindspore as ms
    from mindspore import Tensor, ops
    from mindspore.communication import comm_func, get_group_size, get_rank

    rank, size = get_rank(), get_group_size()
    every = [values(other, (2 * size, 2)) for other in range(size)]
    x = Tensor(every[rank])
    rows = slice(2 * rank, 2 * rank + 2)
    checked = []

    def check(name, tensor, expected):
        np.testing.assert_allclose(tensor.asnumpy(), expected, rtol=1e-12, err_msg=name)
        checked.append(name)

    weights = [values(50 + other, (2 * size, 2)) for other in range(size)]
    mine = Tensor(weights[rank])
    check("all_reduce", comm_func.all_reduce(x)[0], sum(every))
    check("all_reduce'", ms.grad(lambda y: (comm_func.all_reduce(y)[0] * mine).sum())(x), sum(weights))

    def later(y):
        total, handle = comm_func.all_reduce(y * y, async_op=True)
        handle.wait()
        return (total * mine).sum()

    check("started'", ms.grad(later)(x), 2 * every[rank] * sum(weights))
    total, handle = comm_func.all_reduce(x, "max", async_op=True)
    assert np.isnan(total.asnumpy()).all()
    if "__repr__" in vars(type(handle)):  # older versions of MindSpore do not show the pointer
        assert "CommHandle_ptr=0x" in repr(handle)
    assert type(handle).__name__ == "CommHandle"
    handle.wait()
    check("started", total, np.max(every, 0))

    check("all_gather_into_tensor", comm_func.all_gather_into_tensor(x)[0], np.concatenate(every))
    check("reduce_scatter_tensor", comm_func.reduce_scatter_tensor(x)[0], sum(every)[rows])
    gathered = ms.grad(lambda y: (comm_func.all_gather_into_tensor(y)[0] * mine).sum())(Tensor(every[rank][rows]))
    check("all_gather_into_tensor'", gathered, sum(weights)[rows])
    scattered = ms.grad(lambda y: (comm_func.reduce_scatter_tensor(y)[0] * mine[rows]).sum())(x)
    diagonal = np.concatenate([weights[other][2 * other : 2 * other + 2] for other in range(size)])
    check("reduce_scatter_tensor'", scattered, diagonal)

    sent = Tensor(values(rank, (size,)))
    shapes = [(1,)] * size
    parts, _ = comm_func.all_to_all_with_output_shape(shapes, [sent[o : o + 1] for o in range(size)])
    check("all_to_all_with_output_shape", ops.cat(parts), [values(o, (size,))[rank] for o in range(size)])
    single, _ = comm_func.all_to_all_single_with_output_shape((size,), sent)
    check("all_to_all_single", single, [values(o, (size,))[rank] for o in range(size)])
    exchanged = ms.grad(lambda y: (comm_func.all_to_all_single_with_output_shape((size,), y)[0] * mine[0, 0]).sum())
    check("all_to_all_single'", exchanged(sent), [weights[o][0, 0] for o in range(size)])

    check("broadcast", comm_func.broadcast(x, 1), every[1])
    reduced = comm_func.reduce(x, 1)
    check("reduce", reduced, sum(every) if rank == 1 else [np.nan])
    joined = comm_func.gather_into_tensor(x, 0)
    check("gather_into_tensor", joined, np.concatenate(every) if rank == 0 else [np.nan])
    check("scatter_tensor", comm_func.scatter_tensor(Tensor(every[1]), 1), every[1][rows])
    comm_func.barrier()
    comm_func.send(x, (rank + 1) % size)
    check("recv", comm_func.recv(x, (rank - 1) % size), every[(rank - 1) % size])
    comm_func.isend(x, (rank + 1) % size).wait()
    received, handle = comm_func.irecv(x, (rank - 1) % size)
    handle.wait()
    check("irecv", received, every[(rank - 1) % size])
    pair = [comm_func.P2POp("isend", x, (rank + 1) % size), comm_func.P2POp("irecv", x, (rank - 1) % size)]
    check("batch_isend_irecv", comm_func.batch_isend_irecv(pair)[1], every[(rank - 1) % size])
    return checked


IN_PLACE = {
    "all_reduce", "all_reduce avg", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "all_gather_into_tensor_uneven", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_uneven",
    "gather", "scatter", "gather_into_tensor", "scatter_tensor", "all_to_all", "all_to_all_single", "all_to_all_v_c",
}  # fmt: skip


def every_function():
    """All of it, on one set of ranks."""
    from mindspore.mint import distributed

    results = set(in_place()), messages(), set(returned())
    distributed.barrier()  # no real process may end while its messages are on their way
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_functions_equal_numpy(size):
    """Every function, blocking and started, gives every rank what NumPy computes, gradients included."""
    for into, sent, new in simulate(every_function, size, "mindspore"):
        assert into == IN_PLACE
        assert sent == ["recv", "irecv", "batch_isend_irecv", "objects"]
        assert len(new) == 18


def test_real_processes_equal_numpy():
    """Real processes that share no coordinator serve the same functions, over gloo."""
    require_transport("mindspore")
    for into, sent, new in launch(every_function, 3, "mindspore", timeout=120):
        assert into == IN_PLACE
        assert sent == ["recv", "irecv", "batch_isend_irecv", "objects"]
        assert len(new) == 18


def test_warm_real_processes_equal_numpy():
    """Warm real processes, which all run at once, serve them on their coordinator, in every run anew."""
    require_transport("mindspore")
    from hyper_parallel.transport.real.launched_processes import run_launched
    from hyper_parallel.transport.serialization import pack

    for _ in range(2):
        run = run_launched(pack((every_function, ()), every_function), 2, "mindspore", 120.0)
        assert run.failure is None
        assert [into for into, _, _ in run.results] == [IN_PLACE] * 2
