"""Recurrent layers of MindSpore on DTensors, and fully sharded: values and gradients are those of one device."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

OPTIONS = ({}, {"bidirectional": True}, {"num_layers": 2}, {"has_bias": False}, {"batch_first": True})


def trained(ms, net, x, states, lengths):
    """Value, gradient of the input, and gradients of the weights."""
    from mindspore import ops

    def run(x):
        out, last = net(x, states, lengths)
        last = ops.tanh(last[0]) * 2 + last[1] if isinstance(last, tuple) else last
        return (out * out * out).sum() + (last * last).sum()

    value, (by_input, by_weights) = ms.value_and_grad(run, 0, ms.ParameterTuple(net.trainable_params()))(x)
    found = [value, by_input, *by_weights]
    return [(each.full_tensor() if hasattr(each, "full_tensor") else each).asnumpy() for each in found]


def differences(kind, options, how):
    """Placements with which a layer is not that of one device."""
    import mindspore as ms
    from mindspore import Tensor, nn

    from hyper_parallel import distribute_module, distribute_tensor, fully_shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rng, batch = np.random.default_rng(0), 1 - bool(options.get("batch_first"))
    shape = (3, 5, 4) if batch else (5, 3, 4)
    x = rng.standard_normal(shape).astype(np.float32)
    first = rng.standard_normal((1, 5, 6)).astype(np.float32)

    def states(make):
        if how != "states":
            return None
        return (make(first), make(first * 2)) if kind == "LSTM" else make(first)

    wrong = []
    for placement in (Shard(batch), Replicate()):
        net = getattr(nn, kind)(4, 6, **options)
        plain = Tensor(np.array([1, 3, 2, 3, 1], np.int32)) if how == "lengths" else None
        wanted = trained(ms, net, Tensor(x), states(Tensor), plain)
        if how == "fully sharded":
            fully_shard(net, mesh=mesh)
            found = trained(ms, net, Tensor(x), None, None)
        else:
            distribute_module(net, mesh)
            lengths = None if plain is None else distribute_tensor(plain, mesh, [Replicate()])
            given = states(lambda value: distribute_tensor(Tensor(value), mesh, [Replicate()]))
            found = trained(ms, net, distribute_tensor(Tensor(x), mesh, [placement]), given, lengths)
        if not all(np.allclose(*both, rtol=1e-3, atol=1e-4) for both in zip(found, wanted, strict=True)):
            wrong.append(str(placement))
    return wrong


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_train_data_parallel(kind):
    """A batch of DTensors may be sharded; the first states are made by the layer."""
    assert simulate(differences, 2, platform="mindspore", args=(kind, {}, ""), timeout=300) == [[], []]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_train_fully_sharded(kind):
    """A cell that keeps its parameters in a ``ParameterTuple`` computes with gathered ones."""
    assert simulate(differences, 2, platform="mindspore", args=(kind, {}, "fully sharded"), timeout=300) == [[], []]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_options_of_recurrent_layers(kind, options):
    """Layers in several directions, stacked, without biases, or with the batch first."""
    assert simulate(differences, 2, platform="mindspore", args=(kind, options, ""), timeout=500) == [[], []]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("how", ["states", "lengths"])
def test_states_and_lengths_of_recurrent_layers(kind, how):
    """First states, and lengths of sequences, may be passed."""
    assert simulate(differences, 2, platform="mindspore", args=(kind, {}, how), timeout=500) == [[], []]
