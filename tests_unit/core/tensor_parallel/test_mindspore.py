from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("mindspore")

WIDTHS = (7, 10, 5)


def arrays():
    """Weights, biases, input and cotangent of an MLP ``7 -> 10 -> 5``."""
    rng = np.random.default_rng(0)
    width, hidden, out = WIDTHS
    shapes = [(hidden, width), (hidden,), (out, hidden), (out,), (4, width), (4, out)]
    return [rng.standard_normal(shape) for shape in shapes]


def numpy_run(w1, b1, w2, b2, x, g):
    """Output, and gradients of weights, biases and input, in NumPy."""
    h = np.tanh(x @ w1.T + b1)
    dh = (g @ w2) * (1 - h * h)
    return h @ w2.T + b2, [dh.T @ x, dh.sum(0), g.T @ h, g.sum(0), dh @ w1]


def rank_run(values):
    """The parallel run on one rank: output, whole gradients and layouts of the weights."""
    import mindspore
    from mindspore import Tensor, nn

    from hyper_parallel import ColwiseParallel, RowwiseParallel, init_device_mesh, parallelize_module

    w1, b1, w2, b2, x, g = values

    class MLP(nn.Cell):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Dense(7, 10, weight_init=Tensor(w1), bias_init=Tensor(b1), dtype=mindspore.float64)
            self.fc2 = nn.Dense(10, 5, weight_init=Tensor(w2), bias_init=Tensor(b2), dtype=mindspore.float64)

        def construct(self, x):
            return self.fc2(self.fc1(x).tanh())

    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    model = parallelize_module(MLP(), mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    weights = model.trainable_params()

    def loss(x):
        y = model(x)
        return (y * Tensor(g)).sum(), y

    (_, y), (dx, dw) = mindspore.value_and_grad(loss, 0, weights, has_aux=True)(Tensor(x))
    whole = [gradient.full_tensor().asnumpy() for gradient in dw]
    return y.asnumpy(), [*whole, dx.asnumpy()], [repr(parameter.placements) for parameter in weights]


def test_column_then_row_equals_numpy():
    """Uneven widths over three ranks: output and every gradient are the dense ones, with no factor."""
    values = arrays()
    expected, gradients = numpy_run(*values)
    for y, result, layouts in simulate(rank_run, 3, "mindspore", (values,), timeout=300):
        np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(result, gradients, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)
        assert layouts == ["(Shard(0),)", "(Shard(0),)", "(Shard(1),)", "(Replicate(),)"]


def make_model():
    """An embedding, a norm, two layers of odd width with a residual, and a head."""
    import mindspore
    from mindspore import nn

    class Model(nn.Cell):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Embedding(11, 6), nn.LayerNorm((6,))
            self.up, self.down, self.head = nn.Dense(6, 9), nn.Dense(9, 6), nn.Dense(6, 5)

        def construct(self, ids):
            x = self.embed(ids)
            x = x + self.down(self.up(self.norm(x)).tanh())
            return self.head(x)

    mindspore.set_seed(3)
    return Model()


def trained(model, ids, cotangent):
    """Loss, whole gradients and whole weights after a step of the optimizer."""
    import mindspore
    from mindspore import Tensor, nn

    def whole(x):
        return getattr(x, "full_tensor", lambda: x)().asnumpy()

    weights = model.trainable_params()
    optimizer = nn.SGD(weights, learning_rate=0.1)
    step = mindspore.value_and_grad(lambda x: (model(x) * Tensor(cotangent)).sum(), None, weights)
    loss, gradients = step(Tensor(ids))
    optimizer(gradients)
    return [whole(loss), *map(whole, gradients), *map(whole, weights)], [hasattr(x, "placements") for x in weights]


@pytest.mark.parametrize("world, local", [(2, True), (3, False)])
def test_a_completed_plan_equals_one_device(world, local):
    """Embedding, norm and head get styles under which loss, gradients and a step are those of one device."""
    from hyper_parallel import ColwiseParallel, RowwiseParallel, complete_plan, init_device_mesh, parallelize_module

    rng = np.random.default_rng(0)
    ids, cotangent = rng.integers(0, 11, (2, 3)).astype(np.int32), rng.standard_normal((2, 3, 5)).astype(np.float32)
    plan = {"up": ColwiseParallel(use_local_output=local), "down": RowwiseParallel(use_local_output=local)}

    def rank():
        single, _ = trained(make_model(), ids, cotangent)
        model = make_model()
        completed = complete_plan(model, plan)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        return list(completed), single, trained(parallelize_module(model, mesh, completed), ids, cotangent)

    for names, single, (values, are_dtensors) in simulate(rank, world, "mindspore", timeout=300):
        assert names == ["up", "down", "embed", "norm", "head"]
        assert all(are_dtensors)
        for mine, theirs in zip(values, single, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def rank_clip(value):
    """Norms of a sharded gradient and of the clipped one."""
    from mindspore import Tensor

    from hyper_parallel import Shard, clip_grad_norm_, distribute_tensor, init_device_mesh

    grad = distribute_tensor(Tensor(value), init_device_mesh("cpu", (3,)), [Shard(0)])
    norm = clip_grad_norm_([grad], 1.0)
    return float(norm.asnumpy()), grad.full_tensor().asnumpy()


def test_clipping_gradients_that_are_values():
    """Gradients of ``value_and_grad`` are clipped as they are, in place."""
    value = arrays()[0].astype(np.float32)
    norm = np.linalg.norm(value)
    for result, clipped in simulate(rank_clip, 3, "mindspore", (value,), timeout=300):
        np.testing.assert_allclose(result, norm, rtol=2**-20)
        np.testing.assert_allclose(clipped, value / (norm + 1e-6), rtol=2**-20)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_sharded_logits_equals_numpy(world, reduction):
    """Inside loss_parallel, loss and gradient of logits sharded over classes are those of whole logits."""
    import mindspore
    from mindspore import Tensor, ops

    from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh, loss_parallel

    rows, classes, ignored = 6, 10, 3
    logits = np.random.default_rng(4).standard_normal((rows, classes))
    labels = np.array([0, 5, ignored, 9, ignored, 2], np.int32)

    def on_rank():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))

        def loss(x):
            with loss_parallel():
                return ops.cross_entropy(x, Tensor(labels), ignore_index=ignored, reduction=reduction)

        sharded = distribute_tensor(Tensor(logits), mesh, [Shard(1)])
        value, gradient = mindspore.value_and_grad(loss)(sharded)
        assert (value.placements, gradient.placements) == ((Replicate(),), (Shard(1),))
        return value.asnumpy(), gradient.full_tensor().asnumpy()

    exponentials = np.exp(logits)
    probabilities = exponentials / exponentials.sum(1, keepdims=True)
    kept = (labels != ignored) / ((labels != ignored).sum() if reduction == "mean" else 1)
    expected = -(np.log(probabilities[range(rows), labels]) * kept).sum()
    slope = (probabilities - np.eye(classes)[labels]) * kept[:, None]
    for value, gradient in simulate(on_rank, world, platform="mindspore"):
        np.testing.assert_allclose(value, expected, rtol=1e-10)
        np.testing.assert_allclose(gradient, slope, rtol=1e-10)
