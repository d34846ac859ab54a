"""Training batch normalization on MindSpore: statistics of the whole batch, wherever its samples are."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_module, distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import LayoutError, MixedTensorError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(0)
X, C = (RNG.standard_normal((5, 3, 4, 2)).astype(np.float32) for _ in range(2))


def _cell(library):
    from mindspore import Tensor, mint, nn

    cell = nn.BatchNorm2d(3) if library == "nn" else mint.nn.BatchNorm2d(3)
    for number, parameter in enumerate(cell.trainable_params()):
        parameter.set_data(Tensor(np.array([0.5, 1.5, -1.0], np.float32) + number))
    return cell.set_train()


def _stepped(cell, x, c):
    """Output, gradients of the input and of what is trained, and running statistics of two steps, as arrays."""
    import mindspore

    from hyper_parallel import value_and_grad
    from hyper_parallel.core.dtensor.dtensor import DTensor

    weights = cell.trainable_params()
    kept = []

    def loss(tensor):
        kept[:] = [cell(tensor)]
        return (kept[0] * c).sum()

    run = (value_and_grad if isinstance(x, DTensor) else mindspore.value_and_grad)(loss, 0, weights)
    for _ in range(2):
        _, (dx, dweights) = run(x)
    tensors = [kept[0], dx, *dweights, *(tensor for tensor in cell.get_parameters() if not tensor.requires_grad)]
    return [
        (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).asnumpy() for tensor in tensors if tensor.ndim
    ]


def _distributed(library, placement):
    import mindspore

    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    x, c = (distribute_tensor(mindspore.Tensor(tensor), mesh, [placement]) for tensor in (X, C))
    return _stepped(distribute_module(_cell(library), mesh), x, c)


def _plain():
    import mindspore

    return _stepped(_cell("nn"), mindspore.Tensor(X), mindspore.Tensor(C))


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate()], ids=repr)
@pytest.mark.parametrize("kind", ["nn", "mint"])
def test_training_is_that_of_the_whole_batch(kind, place):
    """Outputs, all gradients and running statistics are those of one device; ``mint``'s, for NPU, are the same."""
    expected = simulate(_plain, 1, "mindspore", timeout=200)[0]
    for rank_arrays in simulate(_distributed, 3, "mindspore", (kind, place), timeout=200):
        assert len(rank_arrays) == len(expected) == 6
        for tensor, wanted in zip(rank_arrays, expected, strict=True):
            np.testing.assert_allclose(tensor, wanted, rtol=2e-5, atol=2e-5)


def _half_distributed():
    import mindspore

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(MixedTensorError) as caught:
        _cell("nn")(distribute_tensor(mindspore.Tensor(X), mesh, [Shard(0)]))
    return str(caught.value)


def test_statistics_of_one_rank_are_refused():
    """Running statistics that are no DTensors would differ between ranks."""
    assert simulate(_half_distributed, 2, "mindspore", timeout=200)[0] == (
        "batch_norm: the running mean is a plain tensor [3] and the input a DTensor; distribute the module's "
        "parameters too: hyper_parallel.distribute_module(module, mesh)"
    )


def _without_spread():
    import mindspore
    from mindspore import mint

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    tensor = distribute_tensor(mindspore.Tensor(X[:1, :, :1, :1]), mesh, [Shard(0)])
    with pytest.raises(LayoutError) as caught:
        mint.nn.functional.batch_norm(tensor, None, None, training=True)
    x = distribute_tensor(mindspore.Tensor(X), mesh, [Shard(0)])
    mean, variance = (distribute_tensor(mindspore.Tensor(np.full(3, by, np.float32)), mesh) for by in (0.5, 4.0))
    return str(caught.value), mint.nn.functional.batch_norm(x, mean, variance, eps=0.0).full_tensor().asnumpy()


def test_one_value_per_channel_has_no_variance():
    """Batch norm of one value per channel is refused in training and uses fixed statistics otherwise."""
    message, arrays = simulate(_without_spread, 1, "mindspore", timeout=200)[0]
    assert message == "batch_norm: training needs more than one value per channel, got [1, 3, 1, 1]"
    np.testing.assert_allclose(arrays, (X - 0.5) / 2, rtol=1e-6)


# -- half precision ----------------------------------------------------------------------------------------------------

HALF = {
    "of one element": np.array([[[-3.0]], [[2.0]], [[5.0]]]),
    "of equal elements": np.full((3, 2, 5), 0.25),
    "with squares beyond float16": np.array([[[600.0, -700.0], [250.0, 251.0]], [[-3.0, 30.0], [900.0, -900.0]]]),
}


def _norms(of, x, weight, bias):
    """Outputs and gradients of norms and deviations of ``x``; by name."""
    import mindspore
    from mindspore import ops

    sizes = of.shape[1:]
    calls = {
        "layer": lambda x, weight, bias: ops.LayerNorm(2, 1, 1e-5)(x, weight[0, :], bias[0, :])[0],
        "group": lambda x, weight, bias: ops.group_norm(x, 1, weight[:, 0], bias[:, 0]),
        "groups": lambda x, weight, bias: ops.group_norm(x, sizes[0], weight[:, 0], bias[:, 0]),
        "std": lambda x, weight, bias: ops.std(x, (1, 2)) + weight.sum() + bias.sum(),
        "rms": lambda x, weight, bias: ops.rms_norm(x, weight[0, :], 1e-5)[0] + bias,
        "add rms": lambda x, weight, bias: ops.add_rms_norm(x, x, weight[0, :], 1e-5)[0] + bias,
    }
    results = {}
    for name, call in calls.items():
        run = mindspore.value_and_grad(lambda *args, call=call: (call(*args) * 0.5).sum(), (0, 1, 2))
        results[name] = [call(x, weight, bias), *run(x, weight, bias)[1]]
    return results


def _in_half_precision(of, dtype):
    from mindspore import Tensor

    sizes = of.shape[1:]
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    operands = [of, np.full(sizes, 1.5), np.full(sizes, -0.5)]
    leaves = [
        distribute_tensor(Tensor(operand.astype(dtype)), mesh, [placement])
        for operand, placement in zip(operands, (Shard(0), Replicate(), Replicate()), strict=True)
    ]
    return {
        name: [(str(tensor.dtype), tensor.full_tensor().asnumpy()) for tensor in tensors]
        for name, tensors in _norms(of, *leaves).items()
    }


@pytest.mark.parametrize("of", HALF)
def test_half_precision_is_normalised_in_single_precision(of):
    """Norms of float16 and their gradients are those of float32, rounded once: finite for all inputs, on all ranks."""
    half, single = (
        simulate(_in_half_precision, 4, "mindspore", (HALF[of], dtype), timeout=200)[1]
        for dtype in (np.float16, np.float32)
    )
    assert half.keys() == single.keys()
    for name, tensors in half.items():
        for position, ((dtype, array), (_, expected)) in enumerate(zip(tensors, single[name], strict=True)):
            assert dtype == "Float16"
            where = f"{name}, {position}"
            np.testing.assert_allclose(array, expected.astype(np.float16), rtol=4e-3, atol=4e-3, err_msg=where)
