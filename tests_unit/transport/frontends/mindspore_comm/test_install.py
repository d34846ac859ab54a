"""What is replaced beneath MindSpore's functions on a rank, and what is refused there by name."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hyper_parallel.errors import CollectiveMismatchError, UnsupportedOnBackend, UnsupportedOperatorError
from hyper_parallel.platform.tested import TESTED, newer_than_tested
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

ARGUMENTS = {
    "ops.AllGather gathers along the first dim, which a 0-d tensor does not have",
    "ops.ReduceScatter splits the first dim of [3] over the world: it must be a multiple of 2",
    "ops.Broadcast names rank 5 of the world; its ranks are 0..1",
    "ops.AlltoAll splits dim 0 of [3] in 3 for the world: split_count must be its size, and the dim a multiple of it",
    "ops.AlltoAllV sends chunks of [1, 1] elements from a tensor of 3",
    "AlltoAll in the world sends 3 chunks; expected one per member, 2",
    "ops.AlltoAllVC in the world takes a matrix of 2 x 2 counts; it has 3",
    "ops.AllGatherV in the world: output_split_sizes [1, 2] do not have this rank's 3 elements",
    "ops.NeighborExchange sends a tensor of [3], but its send_shapes name [2]",
    "all_gather_into_tensor yields float32[6], which does not match the output float32[5]",
    "all_gather_into_tensor_uneven in the world: rows [1, 2] must be 2 numbers whose sum is the first dim of [4]",
    "all_gather_into_tensor_uneven: output_split_sizes [1, 2] give this rank 1 rows; it has 3",
    "all_to_all sends chunks of [1, 1] elements from a tensor of 3",
}


def wrong_arguments():
    """The messages of collectives whose arguments cannot be right, before anybody else is asked."""
    import mindspore as ms
    from mindspore import Tensor, mint, ops
    from mindspore.ops.operations import comm_ops

    dist = mint.distributed
    x = Tensor([1.0, 2.0, 3.0])
    calls = [
        lambda: ops.AllGather()(Tensor(1.0)),
        lambda: ops.ReduceScatter()(x),
        lambda: ops.Broadcast(5)((x,)),
        lambda: ops.AlltoAll(3, 0, 0)(x),
        lambda: comm_ops.AlltoAllV()(x, (1, 1), (1, 1)),
        lambda: comm_ops.AlltoAllV()(x, (1, 1, 1), (1, 1, 1)),
        lambda: comm_ops.AlltoAllVC()(x, (1, 1, 1)),
        lambda: comm_ops.AllGatherV()(x, (1, 2)),
        lambda: ops.NeighborExchange([1], [1], ([3],), ([2],), ms.float32)((x,)),
        lambda: dist.all_gather_into_tensor_uneven(mint.zeros((4,)), x, [1, 2]),
        lambda: dist.all_gather_into_tensor_uneven(mint.zeros((3,)), x, [1, 2]),
        lambda: dist.all_to_all_single(mint.zeros((3,)), x, [1, 1], [1, 1]),
    ]
    messages = set()
    for call in calls if dist.get_rank() == 0 else ():
        try:
            call()
        except CollectiveMismatchError as error:  # noqa: PERF203 - each call has its own
            messages.add(str(error))
    try:
        dist.all_gather_into_tensor(mint.zeros((5,)), x)
    except CollectiveMismatchError as error:
        messages.add(str(error))
    return messages


def test_wrong_arguments():
    """Sizes, chunks and ranks that cannot be right are named, with what would be."""
    assert simulate(wrong_arguments, 2, "mindspore")[0] == ARGUMENTS


def refused():
    """The errors of what is not served."""
    import mindspore as ms
    from mindspore import Tensor, mint, nn, ops
    from mindspore.ops.operations import comm_ops

    from hyper_parallel import DTensor, Replicate, init_device_mesh

    class Net(nn.Cell):
        """Reduces."""

        def __init__(self):
            super().__init__()
            self.reduce = ops.AllReduce()

        def construct(self, x):
            """Computes."""
            return self.reduce(x)

    # The compiler imports the module of what it compiles; a rank process cannot import a test module by name.
    Net.__module__ = Net.construct.__module__ = "__main__"
    x = Tensor([1.0, 2.0])
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    errors = []

    def attempt(call):
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the types are compared
            errors.append((type(error), str(error).splitlines()[0]))

    net = Net()
    attempt(lambda: ops.NeighborExchangeV2([1] * 8, [0] * 4, [1] * 8, [0] * 4, "NCHW")(x))
    attempt(lambda: comm_ops._MirrorOperator("hccl_world_group", 2, False)(x))
    attempt(lambda: ms.grad(lambda y: ops.Reduce(0)(y).sum())(x))
    attempt(lambda: ops.AllReduce()(DTensor.from_local(x, mesh, [Replicate()])))
    attempt(lambda: mint.distributed.all_reduce(DTensor.from_local(x, mesh, [Replicate()])))
    attempt(lambda: mint.distributed.all_gather([DTensor.from_local(x, mesh, [Replicate()])] * 2, x))
    attempt(lambda: mint.distributed.all_reduce(mint.zeros((3, 2))[1:]))
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        attempt(lambda: net(x))
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    return errors


def test_what_is_not_served_is_refused_by_name():
    """Primitives of compiled graphs, gradients that MindSpore cannot run, DTensors, views and compiled code."""
    here = "is not supported on simulated or rehearsed ranks"
    unruled = "has no sharding rule (layouts: {0}); add one with hyper_parallel.DistributedOp, or run it replicated: "
    assert simulate(refused, 2, "mindspore")[0] == [
        (UnsupportedOnBackend, f"ops.NeighborExchangeV2 {here}: write it as ops.NeighborExchange of the borders"),
        (
            UnsupportedOnBackend,
            (
                f"ops._MirrorOperator {here}: it is made by MindSpore's graph compiler, which does not run on "
                "simulated ranks"
            ),
        ),
        (
            UnsupportedOnBackend,
            (
                "ops.Reduce has no gradient on MindSpore that could run; stop the gradient before it, or use a "
                "primitive whose output every member has"
            ),
        ),
        (
            UnsupportedOperatorError,
            f"operator AllReduce {unruled.format('f32[2]')}hyper_parallel.ReplicatedOp('AllReduce')",
        ),
        (
            UnsupportedOperatorError,
            f"operator DistCommAllReduce {unruled.format('f32[2]')}hyper_parallel.ReplicatedOp('DistCommAllReduce')",
        ),
        (
            UnsupportedOperatorError,
            (
                f"operator DistCommAllGather {unruled.format('f32[2], f32[2]')}"
                "hyper_parallel.ReplicatedOp('DistCommAllGather')"
            ),
        ),
        (
            UnsupportedOnBackend,
            (
                "all_reduce writes into a tensor of shape [2, 2] that is a view of another; MindSpore's CPU build "
                "loses such writes silently; pass a separate tensor and copy the result from it"
            ),
        ),
        (
            UnsupportedOnBackend,
            (
                f"AllReduce in a function compiled by ms.jit, or in graph mode, {here}: the compiled code would call "
                "HCCL; run it uncompiled, with MS_JIT=0 in the environment"
            ),
        ),
    ]


def test_replacements_are_checked_for_this_version():
    """An upgrade of MindSpore fails here until somebody has looked at what is replaced."""
    import mindspore

    from hyper_parallel.transport.frontends.mindspore_comm.install import VERSIONS

    installed = mindspore.__version__.rpartition(".")[0]
    if installed not in TESTED["mindspore"] and not newer_than_tested("mindspore", installed):
        pytest.skip(f"MindSpore {installed} is older than the versions that are tested")
    assert installed in VERSIONS


def _rows(rank, sizes):
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def differences(sizes, groups):
    """What differs on this rank: outputs, gradients of the input, statistics, summed gradients of the weights."""
    import mindspore as ms
    from mindspore import Tensor, nn, ops
    from mindspore.communication import get_rank, init

    init()
    rank, rng = get_rank(), np.random.default_rng(0)
    members = next((group for group in groups or () if rank in group), list(range(len(sizes))))
    whole = [row for member in members for row in range(sum(sizes))[_rows(member, sizes)]]
    x, cotangent = (rng.standard_normal((sum(sizes), 3, 2, 5)).astype(np.float32) for _ in range(2))
    x[:, 1] = x[:, 1] * 3 + 100
    mine = [row for row, number in enumerate(whole) if number in range(sum(sizes))[_rows(rank, sizes)]]

    def trained(layer, x, cotangent):
        layer.set_train()
        layer.gamma.set_data(Tensor([1.5, -0.5, 2.0], ms.float32))
        weights = ms.ParameterTuple(layer.trainable_params())
        run = ms.value_and_grad(
            lambda x: (out := layer(x), (out * Tensor(cotangent)).sum())[::-1], 0, weights, has_aux=True
        )
        (_, out), (by_x, by_weights) = run(Tensor(x))
        moving = [layer.moving_mean.asnumpy(), layer.moving_variance.asnumpy()]
        return [out.asnumpy(), by_x.asnumpy()], moving, [each.asnumpy() for each in by_weights]

    one = trained(nn.BatchNorm2d(3), x[whole], cotangent[whole])
    layer = nn.SyncBatchNorm(3, process_groups=groups)
    own = trained(layer, x[whole][mine], cotangent[whole][mine])
    totals = [ops.AllReduce()(Tensor(each)).asnumpy() for each in own[2]] if groups is None else one[2]
    wanted = [each[mine] for each in one[0]] + one[1] + one[2]
    found = own[0] + own[1] + totals
    names = ("output", "input gradient", "mean", "variance", "scale gradient", "offset gradient")
    pairs = zip(names, found, wanted, strict=True)
    return [name for name, a, b in pairs if not np.allclose(a, b, rtol=2e-3, atol=2e-3)]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (2, 1, 4)], ids=str)
def test_batch_statistics_are_those_of_all_ranks(sizes):
    """Outputs, gradients and running statistics are those of one device, of unequal batches too."""
    assert simulate(differences, len(sizes), platform="mindspore", args=(sizes, None)) == [[]] * len(sizes)


def test_process_groups_have_statistics_of_their_own():
    """Each group normalizes over the batches of its members."""
    groups = [[0, 2], [1, 3]]
    assert simulate(differences, 4, platform="mindspore", args=((2, 3, 1, 2), groups)) == [[]] * 4


def of_a_dtensor():
    """The refusal of a DTensor."""
    from mindspore import Tensor, nn
    from mindspore.communication import init

    from hyper_parallel import Shard, distribute_tensor, init_device_mesh

    init()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = distribute_tensor(Tensor(np.ones((4, 3, 2, 2), np.float32)), mesh, [Shard(0)])
    with pytest.raises(NotImplementedError) as caught:
        nn.SyncBatchNorm(3).set_train()(x)
    return str(caught.value)


def test_dtensors_are_refused():
    """A DTensor has the whole batch: the message names the layer that takes its statistics."""
    messages = simulate(of_a_dtensor, 2, platform="mindspore")
    assert all(
        re.match(r"nn\.SyncBatchNorm takes each rank's batch as a plain tensor; .*BatchNorm2d", m) for m in messages
    )
