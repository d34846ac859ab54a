"""``value_and_grad`` gives the framework's gradients their layouts."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.platform.select import platform_named, value_and_grad
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

X = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)
W = np.linspace(-2, 1, 12, dtype=np.float32).reshape(4, 3)


def _placed(platform, mesh, array, place):
    layout = Layout.place(mesh, [place], array.shape)
    return platform.wrap(platform.from_numpy(array[tuple(slice(*box) for box in layout.local_box())]), layout)


def _loss(x, w):
    from mindspore.mint.nn import functional as F

    y = F.linear(x, w)
    return (y * y).sum()


def _both(x_place, w_place):
    from mindspore import Parameter, Tensor, value_and_grad

    from hyper_parallel.platform.mindspore import autodiff

    platform = platform_named("mindspore")
    mesh = init_device_mesh("cpu", (platform.get_world_size(),), mesh_dim_names=["tp"])
    weight, plain_weight = Parameter(_placed(platform, mesh, W, w_place), name="w"), Parameter(Tensor(W), name="p")
    x = _placed(platform, mesh, X, x_place)
    value, (gx, (gw,)) = autodiff.value_and_grad(lambda x: _loss(x, weight), 0, [weight])(x)
    plain, (px, (pw,)) = value_and_grad(lambda x: _loss(x, plain_weight), 0, [plain_weight])(Tensor(X))
    return {
        "value": (value.item(), float(plain)),
        "pending": value.placements,
        "placements": (gx.placements, gw.placements),
        "x": (gx.full_tensor().asnumpy(), px.asnumpy()),
        "w": (gw.full_tensor().asnumpy(), pw.asnumpy()),
    }


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "x_place, w_place, gradients",
    [
        (Replicate(), Shard(0), (Replicate(), Shard(0))),
        (Shard(0), Replicate(), (Shard(0), Replicate())),
        (Shard(1), Shard(1), (Shard(1), Shard(1))),
    ],
)
def test_gradients_are_true_and_dual(world, x_place, w_place, gradients):
    """Gradients of inputs and weights equal the plain ones without any factor, in the layout dual to the value's."""
    for seen in simulate(_both, world, platform="mindspore", args=(x_place, w_place)):
        np.testing.assert_allclose(*seen["value"], rtol=1e-5)
        np.testing.assert_allclose(*seen["x"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(*seen["w"], rtol=1e-5, atol=1e-5)
        assert seen["placements"] == tuple((array,) for array in gradients)
        assert seen["pending"] == (Replicate(),)


def _aux():
    from hyper_parallel.platform.mindspore import autodiff

    platform = platform_named("mindspore")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
    x = _placed(platform, mesh, X, Shard(0))
    (value, aux), grad = autodiff.value_and_grad(lambda x: ((x * x).sum(), x.sum()), 0, None, True)(x)
    return value.item(), aux.item(), grad.full_tensor().asnumpy()


def test_aux_outputs_pass_through():
    """With has_aux the other outputs are returned and leave the gradient alone."""
    for value, aux, grad in simulate(_aux, 2, platform="mindspore"):
        assert value == pytest.approx(float((X * X).sum()))
        assert aux == pytest.approx(float(X.sum()), abs=1e-5)
        np.testing.assert_allclose(grad, 2 * X, rtol=1e-6)


def _second(exponent):
    import mindspore

    platform = platform_named("mindspore")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
    x = _placed(platform, mesh, X + 2, Shard(0))

    def slope(array):
        grad = mindspore.grad(lambda local: platform.wrap(local, x.layout) ** exponent)(array)
        return (grad * grad).sum()

    return platform.wrap(mindspore.grad(slope)(x.to_local()), x.layout).full_tensor().asnumpy()


@pytest.mark.parametrize("exponent", [2, 2.5])
def test_powers_can_be_differentiated_twice(exponent):
    """Powers with integer and float exponents have second derivatives."""
    wanted = 2 * exponent**2 * (exponent - 1) * (X + 2.0) ** (2 * exponent - 3)
    for results in simulate(_second, 2, platform="mindspore", args=(exponent,)):
        np.testing.assert_allclose(results, wanted, rtol=1e-5)


def _penalty(placements):
    from mindspore import ops

    platform = platform_named("mindspore")
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=["tp"])
    x, w = (_placed(platform, mesh, array, placement) for array, placement in zip(PENALTY, placements, strict=True))

    def penalty(x, w):
        value, grad = value_and_grad(lambda x, w: ops.tanh(ops.matmul(x, w.T)).sum(), 0)(x, w)
        return (grad * grad).sum() + value

    # By x alone: of plain tensors, too, MindSpore loses what a weight adds to the gradient of a product.
    value, grad = value_and_grad(penalty, 0)(x, w)
    return [array.full_tensor().asnumpy() for array in (value, grad)]


PENALTY = [np.random.default_rng(size[0]).normal(size=size, scale=0.3).astype(np.float32) for size in ((5, 4), (3, 4))]


@pytest.mark.parametrize("placements", [(Shard(1), Shard(1)), (Replicate(), Shard(1)), (Shard(0), Shard(1))])
def test_gradients_of_empty_shards_can_be_differentiated(placements):
    """A rank with an empty shard runs the others' collectives in a second backward too."""
    x, w = (array.astype(np.float64) for array in PENALTY)
    y = np.tanh(x @ w.T)
    slope = 1 - y * y
    grad = slope @ w
    bent = -2 * y * slope * (2 * grad @ w.T)  # of the penalty by x @ w.T, through the slope
    wanted = [(grad * grad).sum() + y.sum(), (bent + slope) @ w]
    for results in simulate(_penalty, 3, platform="mindspore", args=(placements,)):
        for array, other in zip(results, wanted, strict=True):
            np.testing.assert_allclose(array, other, rtol=1e-4, atol=1e-4)


def test_a_tensor_of_pytorch_is_refused():
    """The error names the argument and both frameworks; MindSpore would take the tensor as a constant."""
    tensor = type("Tensor", (), {"__module__": "torch"})()
    with pytest.raises(TypeError) as caught:
        value_and_grad(lambda x, y: (x * y).sum())(np.ones(2), tensor)
    assert isinstance(caught.value, HyperParallelError)
    assert str(caught.value) == (
        "value_and_grad ran on mindspore, and argument 1 is a Tensor of torch; on PyTorch call loss.backward() and "
        "read .grad, and set HYPER_PARALLEL_PLATFORM=torch if both frameworks are imported"
    )
