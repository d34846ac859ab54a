"""MindSpore's own transforms return the gradients of DTensors as DTensors; old parameters are refused."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_module, distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.tensor_parallel.parallelize import parallelize_module
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
from hyper_parallel.errors import LayoutError, PlanError, UnsupportedOperatorError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

RANDOM = np.random.default_rng(11)
X = RANDOM.standard_normal((5, 3)).astype(np.float32)
W = RANDOM.standard_normal((3, 7)).astype(np.float32)
SEED = RANDOM.standard_normal((5, 7)).astype(np.float32)


def _whole(value):
    if isinstance(value, (list, tuple)):
        return [_whole(item) for item in value]
    return np.array(value.asnumpy())


def _mesh():
    import mindspore

    from hyper_parallel.platform.select import platform_named

    del mindspore
    return init_device_mesh("cpu", (platform_named("mindspore").get_world_size(),), mesh_dim_names=("tp",))


# -- every transform that differentiates -------------------------------------------------------------------------------


def _transforms(x, w, seed):
    """Each transform over ``sin(x @ w)``, by ``x``, by parameter ``w`` or by both."""
    import mindspore as ms
    from mindspore import ops

    def out(x):
        return ops.sin(ops.matmul(x, w))

    def loss(x):
        return (out(x) * out(x)).sum()

    by_list = ops.GradOperation(get_by_list=True)
    everything = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)
    value, pull = ms.vjp(out, x)
    pulled_by_weight = ms.vjp(out, x, weights=[w])[1](seed)
    return {
        "grad": ms.grad(loss)(x),
        "grad of weights": ms.grad(loss, None, [w])(x),
        "grad of both": ms.grad(loss, 0, [w])(x),
        "grad of one weight": ms.grad(loss, None, w)(x),
        "value_and_grad": ms.value_and_grad(loss, (0,), [w])(x),
        "value_and_grad with an auxiliary": ms.value_and_grad(lambda x: (loss(x), out(x)), 0, [w], has_aux=True)(x),
        "GradOperation": ops.GradOperation()(loss)(x),
        "GradOperation by list": by_list(loss, [w])(x),
        "GradOperation with a seed": everything(out, [w])(x, seed),
        "vjp": (value, pull(seed)),
        "vjp of weights": pulled_by_weight,
        "second order": ms.grad(lambda x: ms.grad(loss)(x).sum())(x),
    }


def _differentiated(x_place, w_place, seed_place):
    from mindspore import Parameter, Tensor

    plain = _transforms(Tensor(X), Parameter(Tensor(W), name="w"), Tensor(SEED))
    mesh = _mesh()
    weight = Parameter(distribute_tensor(Tensor(W), mesh, [w_place]), name="w")
    seed = Tensor(SEED) if seed_place is None else distribute_tensor(Tensor(SEED), mesh, [seed_place])
    placed = _transforms(distribute_tensor(Tensor(X), mesh, [x_place]), weight, seed)
    return {name: (_whole(placed[name]), _whole(plain[name])) for name in plain}


def _compare(actual, expected, name):
    if isinstance(expected, list):
        assert len(actual) == len(expected), name
        for part, whole in zip(actual, expected, strict=True):
            _compare(part, whole, name)
    else:
        assert actual.shape == expected.shape, name
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "x_place, w_place, seed_place",
    [
        (Replicate(), Shard(1), None),
        (Shard(0), Replicate(), Shard(1)),
        (Shard(1), Shard(0), Partial()),
    ],
)
def test_gradients_of_every_transform_are_those_of_one_device(world, x_place, w_place, seed_place):
    """grad, value_and_grad, GradOperation and vjp: values, nesting and shapes; seeds are whole, in any layout."""
    for compared in simulate(_differentiated, world, platform="mindspore", args=(x_place, w_place, seed_place)):
        for name, (actual, expected) in compared.items():
            _compare(actual, expected, name)


def _placements():
    import mindspore as ms
    from mindspore import Parameter, Tensor

    weight = Parameter(distribute_tensor(Tensor(W), _mesh(), [Shard(1)]), name="w")
    x = distribute_tensor(Tensor(X), _mesh(), [Replicate()])
    loss, (gradient,) = ms.value_and_grad(lambda x: (x @ weight).sum(), None, [weight])(x)
    return gradient.placements, loss.placements, float(loss), float(_whole(loss))


def test_a_returned_value_is_reduced():
    """The loss needs no other rank's help to be printed; gradients have the layout of their parameters."""
    for gradient, loss, number, array in simulate(_placements, 2, platform="mindspore"):
        assert (gradient, loss) == ((Shard(1),), (Replicate(),))
        assert number == array == pytest.approx(float((X @ W).sum()), rel=1e-5)


def _refused():
    import mindspore as ms
    from mindspore import Tensor

    x = distribute_tensor(Tensor(X), _mesh(), [Shard(0)])
    with pytest.raises(UnsupportedOperatorError) as extremum:
        ms.grad(_pending_maximum)(x)
    with pytest.raises(LayoutError) as seed:
        ms.vjp(lambda x: x * 2, x)[1](Tensor(X[:1]))
    return str(extremum.value), str(seed.value)


def _pending_maximum(x):
    return x.amax(0).redistribute(_mesh(), [Partial("max")])


def test_seeds_that_would_be_wrong_are_refused():
    """A pending maximum is not what MindSpore would seed; a seed of another shape has no meaning."""
    for extremum, seed in simulate(_refused, 2, platform="mindspore"):
        assert extremum == (
            "the differentiated function returns f32[3] + Partial(max)@tp, and MindSpore would seed its gradient on "
            "every rank as if that were the value; return out.reduce_partial(), or use hyper_parallel.value_and_grad"
        )
        assert seed == (
            "the seed of the gradient has shape [1, 3], the output is f32[5@tp, 3]; pass a seed of the output's shape "
            "[5, 3], equal on all ranks, or a DTensor"
        )


# -- replaced parameters -----------------------------------------------------------------------------------------------


def _cells():
    from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

    class Holder(nn.Cell):
        """Holds its weights as attributes, in a ParameterTuple, in nested containers and in another cell."""

        def __init__(self):
            super().__init__()
            self.a = Parameter(Tensor(W[:, :3]), name="a")
            self.b = Parameter(Tensor(W[:, 3:6]), name="b")
            self.all = ParameterTuple((self.a, self.b))
            self.nested = {"pair": [self.a, (self.b, 2.0)], "scale": 0.5}

        def construct(self, x):
            for weight in self.all:
                x = ops.matmul(x, weight)
            first, (second, factor) = self.nested["pair"]
            return ops.matmul(ops.matmul(x, first), second) * factor * self.nested["scale"]

    class Parent(nn.Cell):
        def __init__(self):
            super().__init__()
            self.holder = Holder()
            self.weights = ParameterTuple(self.holder.trainable_params())

        def construct(self, x):
            return self.holder(x) + ops.matmul(x, self.weights[1])

    return Parent()


def _losses(net, x):
    import mindspore as ms
    from mindspore import nn

    optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
    step = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, net.trainable_params())
    losses = []
    for _ in range(4):
        loss, gradients = step(x)
        optimizer(gradients)
        losses.append(float(loss))
    return losses


def _trained_in_containers(distributed):
    from mindspore import Tensor

    net, x = _cells(), Tensor(X)
    if distributed:
        distribute_module(net, _mesh())
        x = distribute_tensor(x, _mesh(), [Shard(0)])
    names = [parameter.name for parameter in net.get_parameters()]
    return _losses(net, x), names


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_in_containers_are_replaced_too(world):
    """A cell that iterates over a ParameterTuple, a list or a dict trains what the optimizer trains."""
    ((expected, names),) = simulate(_trained_in_containers, 1, platform="mindspore", args=(False,))
    assert expected[-1] < expected[0]
    for losses, distributed_names in simulate(_trained_in_containers, world, platform="mindspore", args=(True,)):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert distributed_names == names


def _recurrent(kind, distributed):
    import mindspore as ms
    from mindspore import Tensor, nn

    net = getattr(nn, kind)(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    random = np.random.default_rng(5)
    for parameter in net.get_parameters():
        parameter.set_data(Tensor(random.standard_normal(parameter.shape).astype(np.float32) * 0.3))
    x, state = (Tensor(random.standard_normal(shape).astype(np.float32)) for shape in ((5, 6, 3), (4, 5, 4)))
    if distributed:
        distribute_module(net, _mesh())
        x, state = (distribute_tensor(value, _mesh(), [Shard(dim)]) for value, dim in ((x, 0), (state, 1)))
    optimizer = nn.SGD(net.trainable_params(), 0.05)
    step = ms.value_and_grad(lambda x: (net(x, state)[0] ** 2).mean(), None, net.trainable_params())
    losses = []
    for _ in range(3):
        loss, gradients = step(x)
        optimizer(gradients)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("kind", ["RNN", "GRU"])
def test_recurrent_layers_train(kind):
    """Recurrent layers, which keep their weights in ParameterTuples, train as on one device."""
    (expected,) = simulate(_recurrent, 1, platform="mindspore", args=(kind, False))
    for losses in simulate(_recurrent, 3, platform="mindspore", args=(kind, True)):
        np.testing.assert_allclose(losses, expected, rtol=1e-4)


def _stale():
    import mindspore as ms
    from mindspore import Tensor, nn

    net = nn.Dense(3, 4)
    old = list(net.trainable_params())
    optimizer = nn.SGD(old, 0.1)
    distribute_module(net, _mesh())
    with pytest.raises(PlanError) as differentiated:
        ms.grad(lambda: net.weight.sum(), None, old)()  # noqa: PLW0108 - MindSpore wants a name
    with pytest.raises(PlanError) as stepped:
        optimizer(tuple(Tensor(np.ones(parameter.shape, np.float32)) for parameter in old))
    return str(differentiated.value), str(stepped.value)


def test_replaced_parameters_are_refused():
    """Gradients with respect to, and steps on, parameters that their module no longer has would train nothing."""
    rest = (
        "parameter weight was replaced when its module was distributed or initialized, so the module has a different "
        "one; get the parameters, and build optimizers of them, after that"
    )
    for differentiated, stepped in simulate(_stale, 2, platform="mindspore"):
        assert differentiated == f"the gradient: {rest}"
        assert stepped == f"the optimizer: {rest}"


def _names(distributed):
    from mindspore import nn

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.fc1, self.norm, self.fc2 = nn.Dense(3, 7), nn.LayerNorm((7,)), nn.Dense(7, 3)

        def construct(self, x):
            return self.fc2(self.norm(self.fc1(x)))

    net = Net()
    if distributed:
        plan = {"fc1": ColwiseParallel(output_layouts=Replicate()), "fc2": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(net, _mesh(), plan)
    optimizer = nn.Adam(net.trainable_params())
    states = [parameter.name for parameter in optimizer.get_parameters()]
    return [parameter.name for parameter in net.get_parameters()], sorted(net.parameters_dict()), sorted(states)


def test_parameters_keep_their_names():
    """Parameters, the states that optimizers name after them, and checkpoints have the names of one device."""
    (expected,) = simulate(_names, 1, platform="mindspore", args=(False,))
    for names in simulate(_names, 3, platform="mindspore", args=(True,)):
        assert names == expected


# -- hooks -------------------------------------------------------------------------------------------------------------


def _hooked(x, w, log):
    """Gradients by ``x`` and ``w`` of a loss with hooks on the input, a result and the parameter."""
    import mindspore as ms
    from mindspore import ops

    def seen(name, hook):
        def run(grad):
            log.append((name, type(grad).__name__.endswith("DTensor"), tuple(grad.shape), _whole(grad)))
            return hook(grad)

        return run

    def loss(x):
        x.register_hook(seen("input", lambda grad: grad * (grad * grad).sum()))
        out = ops.matmul(x, w)
        handle = out.register_hook(seen("removed", lambda grad: grad))
        out.register_hook(seen("result", lambda grad: grad / grad.max()))
        handle.remove()
        return ops.sin(out).sum()

    handle = w.register_hook(seen("parameter", lambda _: None))
    grads = ms.grad(loss, 0, [w])(x)
    handle.remove()
    return _whole(grads)


def _with_hooks(x_place, w_place):
    from mindspore import Parameter, Tensor

    plain_log, log = [], []
    plain = _hooked(Tensor(X), Parameter(Tensor(W), name="w"), plain_log)
    mesh = _mesh()
    weight = Parameter(distribute_tensor(Tensor(W), mesh, [w_place]), name="w")
    grads = _hooked(distribute_tensor(Tensor(X), mesh, [x_place]), weight, log)
    return plain, grads, *(sorted(entries, key=lambda entry: entry[0]) for entries in (plain_log, log))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("places", [(Replicate(), Shard(1)), (Shard(0), Replicate()), (Shard(1), Shard(0))])
def test_hooks_of_dtensors_get_and_return_whole_gradients(world, places):
    """Hooks of inputs, results and parameters see what they see on one device, and replace it as there."""
    for plain, grads, plain_log, log in simulate(_with_hooks, world, "mindspore", places):
        for gradient, expected in zip(grads[0:1] + grads[1], plain[0:1] + plain[1], strict=True):
            np.testing.assert_allclose(gradient, expected, rtol=2e-4, atol=1e-5)
        assert [entry[0] for entry in log] == [entry[0] for entry in plain_log] == ["input", "parameter", "result"]
        for (_, is_dtensor, shape, values), (_, _, plain_shape, plain_values) in zip(log, plain_log, strict=True):
            assert is_dtensor
            assert shape == plain_shape
            np.testing.assert_allclose(values, plain_values, rtol=2e-4, atol=1e-5)


def _wrong_hooks():
    import mindspore as ms
    from mindspore import Tensor, nn, ops

    mesh = _mesh()
    x = distribute_tensor(Tensor(X), mesh, [Shard(0)])
    messages = []
    for hook in (lambda grad: grad.to_local(), lambda grad: grad.sum(), lambda _: 1):

        def loss(x, hook=hook):
            out = ops.sin(x)
            out.register_hook(hook)
            return out.sum()

        with pytest.raises(LayoutError) as caught:
            ms.grad(loss)(x)
        messages.append(str(caught.value))
    for register in ("register_backward_hook", "register_backward_pre_hook"):
        cell = nn.ReLU()
        handle = getattr(cell, register)(lambda *_: None)
        assert ms.grad(lambda x, cell=cell: cell(x).sum())(Tensor(X)).shape == X.shape
        with pytest.raises(UnsupportedOperatorError) as refused:
            cell(x)
        messages.append(str(refused.value))
        handle.remove()
        cell(x)
    with pytest.raises(TypeError):
        x.register_hook(None)
    return messages


def test_hooks_that_would_be_wrong_are_refused():
    """A hook returns a whole gradient; backward hooks of cells, which know no layouts, are refused for DTensors."""
    start, fix = "the hook of f32[5@tp, 3] returned ", "; return the gradient as a DTensor of shape [5, 3], or None"
    cells = (
        "backward hooks of ReLU would get this rank's shards of the gradients of DTensors; "
        "in a forward hook, call register_hook of the input or output, whose hooks get DTensors"
    )
    for rank, messages in enumerate(simulate(_wrong_hooks, 2, "mindspore")):
        assert messages == [
            f"{start}a plain Tensor of shape {[[3, 3], [2, 3]][rank]}{fix}",
            f"{start}a DTensor of shape []{fix}",
            f"{start}a plain int{fix}",
            cells,
            cells,
        ]
