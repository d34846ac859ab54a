"""Normalizations of MindSpore: of the whole batch, in half precision, and layer norm, which is differentiated twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_module, distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.rule import find_rule
from hyper_parallel.core.shard.sample import samples_of
from hyper_parallel.errors import LayoutError, MixedTensorError
from hyper_parallel.platform.select import platform_named, use_platform
from hyper_parallel.verify.ops.report import OperatorReport
from hyper_parallel.verify.ops.selection import QUICK
from hyper_parallel.verify.ops.sweep import Sweep
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


# -- layer norm --------------------------------------------------------------------------------------------------------

ROWS, SCALE, SHIFT = (RNG.standard_normal(size) for size in ((3, 2, 6), (6,), (6,)))
SEEDS = [RNG.standard_normal(size) for size in ((3, 2, 6), (3, 2, 6), (6,), (6,))]


def _loss_gradients(x, scale, shift, eps):
    """Gradients of ``(out * out * SEEDS[0]).sum()`` by input, weight and bias, in the precision of NumPy."""
    centred = x - x.mean(-1, keepdims=True)
    reciprocal = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps)
    normal = centred * reciprocal
    grad = 2 * (normal * scale + shift) * SEEDS[0]
    wide = grad * scale
    dx = wide - wide.mean(-1, keepdims=True) - normal * (wide * normal).mean(-1, keepdims=True)
    return [dx * reciprocal, (grad * normal).sum((0, 1)), grad.sum((0, 1))]


def _penalty_gradients(operands, wanted, eps):
    """Gradients of the sum of gradients times ``SEEDS[1:]``, by differences."""

    def penalty(values):
        grads = _loss_gradients(*values, eps)
        return sum((grads[index] * SEEDS[1 + index]).sum() for index in wanted)

    results = []
    for index in wanted:
        slopes = np.zeros_like(operands[index])
        for place in np.ndindex(slopes.shape):
            ends = []
            for step in (1e-6, -1e-6):
                values = [operand.copy() for operand in operands]
                values[index][place] += step
                ends.append(penalty(values))
            slopes[place] = (ends[0] - ends[1]) / 2e-6
        results.append(slopes)
    return results


def _normalised(operands, affine, eps):
    """The call of a layer norm with the operands in ``affine`` ("weight", "bias") and the input."""
    from mindspore import ops
    from mindspore.mint.nn import functional as F

    x, *rest = operands
    if affine == "weight, bias":
        return ops.LayerNorm(2, 2, eps)(x, *rest)[0]
    weight, bias = (rest[0] if affine == name else None for name in ("weight", "bias"))
    return F.layer_norm(x, (6,), weight, bias, eps)


AFFINE = {"weight, bias": (0, 1, 2), "weight": (0, 1), "bias": (0, 2), "": (0,)}


def _differentiated_twice(place, eps):
    """Per choice of weight and bias: output, gradients, and gradients of the penalty."""
    import mindspore

    from hyper_parallel import value_and_grad

    mesh = init_device_mesh("cpu", (platform_named("mindspore").get_world_size(),), mesh_dim_names=("tp",))

    def placed(array, placement):
        return distribute_tensor(mindspore.Tensor(array.astype(np.float32)), mesh, [placement])

    places = (place, Replicate(), Replicate())
    operands = [placed(*pair) for pair in zip((ROWS, SCALE, SHIFT), places, strict=True)]
    seed, *seeds = (placed(*pair) for pair in zip(SEEDS, (place, *places), strict=True))

    def differentiated(function, numbers):
        if len(numbers) == 1:
            return lambda x: (value_and_grad(function, 0)(x)[1],)
        return lambda *values: value_and_grad(function, numbers)(*values)[1]

    results = {}
    for affine, wanted in AFFINE.items():
        chosen, numbers = [operands[index] for index in wanted], tuple(range(len(wanted)))

        def loss(*values, affine=affine):
            out = _normalised(values, affine, eps)
            return (out * out * seed).sum()

        def penalty(*values, loss=loss, wanted=wanted, numbers=numbers):
            grads = differentiated(loss, numbers)(*values)
            return sum((grad * seeds[index]).sum() for grad, index in zip(grads, wanted, strict=True))

        out = _normalised(chosen, affine, eps)
        arrays = [out, *differentiated(loss, numbers)(*chosen), *differentiated(penalty, numbers)(*chosen)]
        results[affine] = [array.full_tensor().asnumpy() for array in arrays]
    return results


@pytest.mark.parametrize("eps", [1e-7, 0.25])
@pytest.mark.parametrize("place", [Shard(0), Shard(1), Shard(2), Replicate()], ids=repr)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_layer_norm_has_first_and_second_gradients(world, place, eps):
    """With and without weight and bias, on empty shards too, gradients of every operand are those of the formula."""
    absent = [ROWS, np.ones(6), np.zeros(6)]
    for results in simulate(_differentiated_twice, world, "mindspore", (place, eps), timeout=200):
        for affine, (out, *grads) in results.items():
            wanted = AFFINE[affine]
            operands = [
                (ROWS, SCALE, SHIFT)[index] if index in wanted else operand for index, operand in enumerate(absent)
            ]
            x, scale, shift = operands
            centred = x - x.mean(-1, keepdims=True)
            expected = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * scale + shift
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
            first = _loss_gradients(*operands, eps)
            second = _penalty_gradients(operands, wanted, eps)
            for array, formula in zip(grads, [*(first[index] for index in wanted), *second], strict=True):
                bound = 2e-5 * max(1.0, np.abs(formula).max())
                np.testing.assert_allclose(array, formula, rtol=0, atol=bound, err_msg=affine)


def _where_nothing_varies(eps):
    import mindspore
    from mindspore import ops

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rows, seed = np.full((3, 6), 0.5), SEEDS[0][:, 0]
    rows[1] += [0, 1e-6, 0, 0, -1e-6, 0]
    x, w, b = (
        distribute_tensor(mindspore.Tensor(array.astype(np.float32)), mesh, [placement])
        for array, placement in zip((rows, SCALE, SHIFT), (Shard(0), Replicate(), Replicate()), strict=True)
    )
    grads = distribute_tensor(mindspore.Tensor(seed.astype(np.float32)), mesh, [Shard(0)])
    gradient = mindspore.grad(lambda x: (ops.LayerNorm(1, 1, eps)(x, w, b)[0] * grads).sum())(x)
    return x.full_tensor().asnumpy().astype(np.float64), gradient.full_tensor().asnumpy()


@pytest.mark.parametrize("eps", [1e-12, 1e-7, 1e-6, 0.25])
def test_gradients_of_layer_norm_know_epsilon(eps):
    """Where next to nothing varies a gradient is as large as epsilon lets it be; MindSpore's kernel adds 1e-7 alone."""
    wide = SEEDS[0][:, 0] * SCALE
    for x, gradient in simulate(_where_nothing_varies, 2, "mindspore", (eps,), timeout=200):
        centred = x - x.mean(-1, keepdims=True)
        reciprocal = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps)
        normal = centred * reciprocal
        formula = wide - wide.mean(-1, keepdims=True) - normal * (wide * normal).mean(-1, keepdims=True)
        np.testing.assert_allclose(gradient, formula * reciprocal, rtol=1e-3, atol=1e-6)


def _three_results(dtype, place):
    import mindspore
    from mindspore import ops

    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    norm = ops.LayerNorm(1, 1, 2.0**-10)  # which float32 has exactly, as MindSpore rounds it
    plain = [mindspore.Tensor(array.astype(dtype)) for array in (X.reshape(15, 8) + 3, SCALE8, SHIFT8)]
    placed = [
        distribute_tensor(tensor, mesh, [p]) for tensor, p in zip(plain, (place, *[Replicate()] * 2), strict=True)
    ]
    return [
        [(str(result.dtype), tuple(result.shape), result.asnumpy()) for result in norm(*operands)]
        for operands in (plain, placed)
    ]


SCALE8, SHIFT8 = RNG.standard_normal((2, 8))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("place", [Shard(0), Replicate()], ids=repr)
def test_layer_norm_returns_what_mindspore_does(place, dtype):
    """The normalised tensor, mean and variance are those of one device; in float32, where it is exact, to the bit.

    MindSpore computes float64 in single precision, and means of float16 in half; here they are as exact as their dtype.
    """
    x, scale, shift = ((array).astype(dtype).astype(np.float64) for array in (X.reshape(15, 8) + 3, SCALE8, SHIFT8))
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    exact = (x - mean) / np.sqrt(variance + 2.0**-10) * scale + shift
    for plain, placed in simulate(_three_results, 3, "mindspore", (dtype, place), timeout=200):
        for (kind, shape, array), (own_kind, own_shape, own) in zip(plain, placed, strict=True):
            assert (own_kind, own_shape) == (kind, shape)
            if dtype == np.float32:
                np.testing.assert_array_equal(own, array)
        bound = {np.float16: 5e-3, np.float32: 1e-5, np.float64: 1e-12}[dtype]
        np.testing.assert_allclose(placed[0][2], exact, rtol=bound, atol=bound)
        for (_, _, own), statistic in zip(placed[1:], (mean, variance), strict=True):
            np.testing.assert_allclose(own, statistic, rtol=1e-5)


def test_layer_norm_of_float32_holds_in_every_placement():
    """Where MindSpore's kernel runs, every claimed placement holds; the sweeps of ``verify ops`` compute in float64."""
    rules.load()
    effort = replace(QUICK, meshes=((2,), (3,)), reproducers=False)
    for name in ("layer_norm", "native_layer_norm"):
        report = OperatorReport(name, "mindspore")
        samples = [replace(sample, dtypes=("float32",)) for sample in samples_of(name)]
        with use_platform("mindspore"):
            Sweep(report, "mindspore", name, find_rule(name), samples, effort).run()
        assert report.outcome == "ok", report.text()
        assert report.checks == report.ok > 0
