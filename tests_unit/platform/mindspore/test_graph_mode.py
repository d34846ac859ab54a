"""Programs that set MindSpore's graph mode train DTensors as one device trains plain tensors."""

from __future__ import annotations

import os

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_module, distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.tensor_parallel.parallelize import parallelize_module
from hyper_parallel.core.tensor_parallel.styles import ColwiseParallel, RowwiseParallel
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(11)
X, TARGET = (RNG.normal(size=size).astype(np.float32) for size in ((5, 3), (5, 2)))
WEIGHTS = [RNG.normal(size=size, scale=0.5).astype(np.float32) for size in ((7, 3), (7,), (2, 7), (2,))]


def _net(*, parallel):
    from mindspore import Tensor, nn

    net = nn.SequentialCell(nn.Dense(3, 7), nn.Tanh(), nn.Dense(7, 2))
    for parameter, value in zip(net.trainable_params(), WEIGHTS, strict=True):
        parameter.set_data(Tensor(value))
    if parallel:
        mesh = init_device_mesh("cpu", (platform_named("mindspore").get_world_size(),), mesh_dim_names=("tp",))
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return net


def _array(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).asnumpy()


def _train_one_step_cell(net):
    """MindSpore's own cells: loss, optimizer and step."""
    from mindspore import Tensor, nn

    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.Adam(net.trainable_params(), 0.05), 2.0)
    return [_array(step(Tensor(X), Tensor(TARGET))) for _ in range(3)]


def _value_and_grad(net):
    """A loop of the script's own, with the gradient function made once."""
    import mindspore as ms
    from mindspore import Tensor, nn

    optimizer, results = nn.Momentum(net.trainable_params(), 0.1, 0.9), []

    def loss_of(x, y):
        return ((net(x) - y) ** 2).mean()

    step = ms.value_and_grad(loss_of, 0, optimizer.parameters)
    for _ in range(3):
        loss, (of_x, of_weights) = step(Tensor(X), Tensor(TARGET))
        results += [_array(loss), _array(of_x), *map(_array, of_weights)]
        optimizer(of_weights)
    return results


def _grad_operation(net):
    """The gradient operator by parameters and inputs, with a cotangent."""
    from mindspore import ParameterTuple, Tensor, ops

    operator = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)
    of_inputs, of_weights = operator(net, ParameterTuple(net.trainable_params()))(Tensor(X), Tensor(TARGET))
    return [*map(_array, of_inputs), *map(_array, of_weights)]


def _forward(net):
    """A call, and a Cell that reaches DTensors by its arguments alone."""
    from mindspore import Tensor, nn

    y = net(Tensor(X))
    if isinstance(net[0].weight, DTensor):
        y = distribute_tensor(Tensor(_array(y)), net[0].weight.device_mesh, [Shard(1)])
    return [_array(y), _array(nn.Softmax()(y)), _array(nn.ReLU()(y + y))]


def _plain_beside(net):
    """Plain cells and gradients are still compiled, between those of DTensors."""
    import mindspore as ms
    from mindspore import Tensor, nn

    plain = nn.Dense(3, 7)
    plain.weight.set_data(Tensor(WEIGHTS[0]))
    results = [_array(plain(Tensor(X))), _array(net(Tensor(X)))]
    results.append(_array(ms.grad(plain)(Tensor(X))))
    return [*results, _array(plain(Tensor(X)))]


def _model_train(net):
    """``ms.Model`` with a dataset, an uneven last batch and a callback."""
    import mindspore as ms
    from mindspore import dataset, nn

    losses = []

    class Losses(ms.Callback):
        def step_end(self, run_context):
            losses.append(_array(run_context.original_args().net_outputs))

    data = dataset.NumpySlicesDataset((X, TARGET), ["x", "y"], shuffle=False).batch(2)
    model = ms.Model(net, nn.MSELoss(), nn.Adam(net.trainable_params(), 0.05))
    model.train(2, data, callbacks=[Losses()], dataset_sink_mode=False)
    assert len(losses) == 6
    return [*losses, *map(_array, net.trainable_params())]


PROGRAMS = (_forward, _train_one_step_cell, _value_and_grad, _grad_operation, _plain_beside, _model_train)


def _on_one_device(number):
    """The reference, uncompiled: MindSpore compiles no function of a test, whose module it cannot import."""
    return PROGRAMS[number](_net(parallel=False))


def _in_graph_mode(number, parallel):
    import mindspore as ms

    net = _net(parallel=parallel)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        results = PROGRAMS[number](net)
        assert ms.get_context("mode") == ms.GRAPH_MODE
        return results
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=[program.__name__ for program in PROGRAMS])
def test_graph_mode_trains_as_one_device(number, world):
    """Outputs, losses, every gradient and the steps of optimizers equal those of plain tensors."""
    (expected,) = simulate(_on_one_device, 1, platform="mindspore", args=(number,))
    assert len(expected) > 2
    for results in simulate(_in_graph_mode, world, platform="mindspore", args=(number, True)):
        for result, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, wanted, rtol=2e-5, atol=1e-6)


def _uncompiled(parallel):
    os.environ["MS_JIT"] = "0"
    try:
        return _in_graph_mode(PROGRAMS.index(_grad_operation), parallel)
    finally:
        del os.environ["MS_JIT"]


def test_nothing_is_compiled_where_compilation_is_off():
    """With MS_JIT=0 in the environment, gradients are computed uncompiled in graph mode, plain ones too."""
    (expected,) = simulate(_in_graph_mode, 1, platform="mindspore", args=(PROGRAMS.index(_grad_operation), False))
    for parallel in (False, True):
        for results in simulate(_uncompiled, 2, platform="mindspore", args=(parallel,)):
            for result, wanted in zip(results, expected, strict=True):
                np.testing.assert_allclose(result, wanted, rtol=2e-5, atol=1e-6)


def _raising():
    import mindspore as ms
    from mindspore import Tensor

    net = _net(parallel=True)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with pytest.raises(ValueError, match="2 features"):
            net(distribute_tensor(Tensor(X[:, :2]), net[0].weight.device_mesh, [Replicate()]))
        return ms.get_context("mode") == ms.GRAPH_MODE
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


def test_the_mode_is_graph_mode_again_after_an_error():
    """A call that fails in PyNative mode leaves the mode that the program has set."""
    assert simulate(_raising, 2, platform="mindspore") == [True, True]


def _mixing():
    import mindspore as ms
    from mindspore import Tensor, nn

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    net = nn.Dense(3, 7)
    distribute_module(net, mesh)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with pytest.raises(UnsupportedOperatorError) as caught:
            net(Tensor(X))
        return str(caught.value)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


def test_a_plain_input_is_refused_as_in_pynative_mode():
    """A plain tensor that meets DTensors is refused, and the message says in which mode the cell ran."""
    for message in simulate(_mixing, 2, platform="mindspore"):
        assert message == (
            "graph mode: a Cell or function that reaches DTensors runs uncompiled, as in ms.PYNATIVE_MODE: "
            "argument x is a plain tensor [5, 3], but other operands are DTensors on "
            "DeviceMesh(cpu, tp=2, ranks=[0, 1]); "
            "x = hyper_parallel.DTensor.from_local(x, mesh, [Replicate()]) if every rank holds the same values; "
            "if it is a local shard that a parallel style returned, give that style use_local_output=False"
        )
