"""``nn.SyncBatchNorm`` on simulated ranks is ``nn.BatchNorm2d`` on one device, which has the whole batch."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


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
        re.match(r"nn\.SyncBatchNorm takes the batch of each rank as a plain tensor; .*BatchNorm2d", m)
        for m in messages
    )
