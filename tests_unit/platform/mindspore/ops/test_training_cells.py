"""Training cells and optimizers that MindSpore runs as operators: a step on ranks is that of one device."""

from __future__ import annotations

import os

import numpy as np
import pytest

from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


def _whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).asnumpy()


def trained(form, kind):
    """As :func:`losses`; ranks are warm, so nothing of one run may be left for the next."""
    import mindspore as ms

    try:
        return losses(form, kind)
    finally:
        os.environ.pop("MS_JIT", None)
        ms.reset_auto_parallel_context()


def losses(form, kind):
    """Losses, overflows, scales and weights of three steps with a loss scale, of which the second overflows."""
    import mindspore as ms
    from mindspore import Tensor, nn
    from mindspore.communication import get_rank, init

    from hyper_parallel import Shard, distribute_module, distribute_tensor, fully_shard, init_device_mesh

    init()
    rng = np.random.default_rng(0)
    net = nn.Dense(3, 2)
    for parameter in net.trainable_params():
        parameter.set_data(Tensor(rng.standard_normal(parameter.shape), ms.float32))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    if form == "distributed":
        distribute_module(net, mesh)
    if form == "fully sharded":
        fully_shard(net, mesh=mesh)
    scales = {
        "dynamic": nn.DynamicLossScaleUpdateCell(1024, 2, 1),
        "fixed": nn.FixedLossScaleUpdateCell(1024),
        "tensor": Tensor([1024.0], ms.float32),
    }
    if form == "data parallel":
        os.environ["MS_JIT"] = "0"  # compiled, the reduction of gradients would call HCCL
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    loss = nn.WithLossCell(net, nn.MSELoss())
    step = nn.TrainOneStepWithLossScaleCell(loss, nn.Momentum(net.trainable_params(), 0.1, 0.9), scales[kind])
    found = []
    for number in range(3):
        x, y = (rng.standard_normal((4, size)).astype(np.float32) for size in (3, 2))
        x[0, 0] = 1e30 if number == 1 else x[0, 0]  # on one rank
        own = slice(None) if form == "one device" else slice(2 * get_rank(), 2 * get_rank() + 2)
        if form == "distributed":
            batch = [distribute_tensor(Tensor(each), mesh, [Shard(0)]) for each in (x, y)]
        else:
            batch = [Tensor(each[own]) for each in (x, y)]
        value, overflowed, scale = map(_whole, step(*batch))
        found += [overflowed, scale, *([value] if form == "distributed" and number != 1 else [])]
    return [np.asarray(each).reshape(-1).tolist() for each in (*found, *map(_whole, net.trainable_params()))]


@pytest.mark.parametrize("kind", ["dynamic", "fixed", "tensor"])
@pytest.mark.parametrize("form", ["data parallel", "distributed", "fully sharded"])
def test_an_overflow_on_one_rank_is_one_on_all(form, kind):
    """All ranks skip the step, and scale alike; weights are those of one device."""
    one = simulate(trained, 2, platform="mindspore", args=("one device", kind))[0]
    ranks = simulate(trained, 2, platform="mindspore", args=(form, kind))
    for rank in ranks:
        overflows = [each for each in rank if each in ([True], [False])]
        assert overflows == [[False], [True], [False]]
        for found, wanted in zip(rank[-2:], one[-2:], strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def adadelta(distributed):
    """The weights after three steps of ``nn.Adadelta``."""
    import mindspore as ms
    from mindspore import Tensor, nn

    from hyper_parallel import Shard, distribute_module, distribute_tensor, init_device_mesh

    rng, net = np.random.default_rng(1), nn.Dense(3, 2, weight_init="ones", bias_init="zeros")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    if distributed:
        distribute_module(net, mesh)
    optimizer = nn.Adadelta(net.trainable_params(), 0.5, 0.8, 1e-3)
    step = ms.value_and_grad(lambda x: (net(x) ** 2).sum(), None, optimizer.parameters)
    for _ in range(3):
        x = Tensor(rng.standard_normal((5, 3)), ms.float32)
        optimizer(step(distribute_tensor(x, mesh, [Shard(0)]) if distributed else x)[1])
    return [_whole(each).reshape(-1).tolist() for each in net.trainable_params()]


def test_adadelta_steps_as_on_one_device():
    """The operator of ``nn.Adadelta`` writes the weight and both running means."""
    one, many = (simulate(adadelta, 2, platform="mindspore", args=(how,))[0] for how in (False, True))
    for found, wanted in zip(many, one, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def warned():
    """Warnings of an operator whose splitting is stated."""
    import warnings

    import mindspore as ms
    from mindspore import ops
    from mindspore.communication import init

    init()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ops.MatMul().shard(((2, 1), (1, 1)))
        before = len(caught)
        ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
        ops.MatMul().shard(((2, 1), (1, 1)))
        ms.reset_auto_parallel_context()
    return before, str(caught[-1].message)


def test_stating_how_operators_are_split_has_no_effect():
    """Semi-automatic parallelism needs MindSpore's compiler, and a warning says so."""
    before, message = simulate(warned, 2, platform="mindspore")[0]
    assert before == 0
    assert message == (
        "MatMul.shard() has no effect on simulated or rehearsed ranks: MindSpore's graph compiler, which splits "
        "operators, does not run there, so every rank computes the complete operator; declare layouts with "
        "hyper_parallel.parallelize_module or distribute_tensor"
    )


def stepped_semi_automatically():
    """Weights after a step in semi-automatic parallelism, while nothing is compiled."""
    import mindspore as ms
    from mindspore import nn

    weight = ms.Parameter(ms.Tensor(np.array([3.0, -1.0, 2.0], np.float32)), name="w")
    optimizer = nn.Momentum([weight], 0.5, 0.9)
    os.environ["MS_JIT"] = "0"
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    try:
        optimizer((ms.Tensor(np.array([2.0, 4.0, -6.0], np.float32)),))
    finally:
        del os.environ["MS_JIT"]
        ms.reset_auto_parallel_context()
    return weight.asnumpy().tolist()


def test_plain_parameters_step_uncompiled():
    """A step of plain parameters is left to Python where nothing is compiled: MindSpore's compiler needs devices."""
    assert simulate(stepped_semi_automatically, 2, platform="mindspore") == [[2.0, -3.0, 5.0]] * 2
