"""``fully_shard`` on MindSpore: training is that of one device; what is gathered is freed; bad input is refused."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    DataParallelMeshDims,
    DTensor,
    RowwiseParallel,
    Shard,
    clip_grad_norm_,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.data_parallel import MixedPrecisionPolicy, fully_shard, no_sync
from hyper_parallel.errors import PlanError, UnsupportedOnBackend
from hyper_parallel.pytest_plugin.ranks import require_transport
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


def array(*shape, seed=0):
    """Normal float32 values from a fresh generator."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make_model():
    """Blocks of odd sizes: one called twice, a tied weight, a frozen and an unused parameter."""
    import mindspore as ms
    from mindspore import nn, ops

    class Block(nn.Cell):
        def __init__(self, width, hidden):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm((width,)), nn.Dense(width, hidden), nn.Dense(hidden, width)
            self.scale = ms.Parameter(ms.Tensor([1.5], ms.float32))
            self.frozen = ms.Parameter(ms.Tensor(array(width, seed=1)), requires_grad=False)
            self.unused = ms.Parameter(ms.Tensor(array(3, 2)))

        def construct(self, x):
            return x * self.frozen + self.down(ops.tanh(self.up(self.norm(x)))) * self.scale

    class Model(nn.Cell):
        def __init__(self):
            super().__init__()
            self.first, self.second = Block(5, 7), Block(5, 3)
            self.enter, self.leave = nn.Dense(5, 5), nn.Dense(5, 5, has_bias=False)
            self.leave.weight = self.enter.weight

        def construct(self, x):
            return self.leave(self.first(self.second(self.first(self.enter(x)))))

    model = Model()
    for index, parameter in enumerate(model.get_parameters()):
        parameter.set_data(ms.Tensor(array(*parameter.shape, seed=50 + index) * 0.5))
    return model


def batch(part, step=0):
    """Input and cotangent of one part of a batch."""
    import mindspore as ms

    return [ms.Tensor(array(2, 3, 5, seed=seed + part + 10 * step)) for seed in (100, 200)]


def step_of(model, weights, parts, share):
    """Return the gradients by ``weights`` of the sum over ``parts`` of a batch, times ``share``."""
    import mindspore as ms

    def loss():
        return sum((model(x) * cotangent).sum() * share for x, cotangent in parts)

    return ms.value_and_grad(loss, None, weights)()[1]


def whole(value):
    """The values of the whole tensor."""
    return np.array((value.full_tensor() if isinstance(value, DTensor) else value).asnumpy())


def assert_same(mine, theirs, what):
    """Equal up to rounding in float32."""
    np.testing.assert_allclose(whole(mine), whole(theirs), rtol=2e-5, atol=2e-5, err_msg=what)


def make_optimizer(name, weights):
    """An optimizer of ``mindspore.nn`` or ``mint.optim``."""
    from mindspore import mint, nn

    if name == "nn.Momentum":
        return nn.Momentum(weights, 0.05, 0.9)
    return nn.AdamWeightDecay(weights, 0.05) if name == "nn.AdamWeightDecay" else mint.optim.SGD(weights, lr=0.05)


def train_alike(dense, model, position, count, optimizer):
    """Train both for three steps and compare outputs, gradients, norms and weights.

    Args:
        dense: the model on one device.
        model: the sharded one.
        position: of this rank's part of the batch.
        count: number of parts.
        optimizer: its name.
    """
    weights = [model.trainable_params(), dense.trainable_params()]
    optimizers = [make_optimizer(optimizer, each) for each in weights]
    assert [each.name for each in weights[0]] == [each.name for each in weights[1]]
    for step in range(3):
        x, _ = batch(position, step)
        assert_same(model(x), dense(x), "output")
        mine = step_of(model, weights[0], [batch(position, step)], 1.0)
        theirs = step_of(dense, weights[1], [batch(part, step) for part in range(count)], 1 / count)
        for parameter, left, right in zip(weights[0], mine, theirs, strict=True):
            assert left.layout == parameter.layout
            assert_same(left, right, f"gradient of {parameter.name} in step {step}")
        norms = [clip_grad_norm_(list(mine), 0.5), clip_grad_norm_(list(theirs), 0.5)]
        assert_same(*norms, "norm")
        optimizers[0](mine)
        if optimizer == "mint.optim.SGD":  # on plain parameters of the CPU build mint.optim does nothing
            for parameter, gradient in zip(weights[1], theirs, strict=True):
                parameter.set_data(parameter - 0.05 * gradient)
        else:
            optimizers[1](theirs)
        for left, right in zip(*weights, strict=True):
            assert_same(left, right, f"{right.name} after step {step}")


def train_sharded(world, reshard, optimizer):
    """What each rank of :func:`test_training_equals_one_device` runs."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    dense, model = make_model(), make_model()
    for block in (model.first, model.second, model):
        assert fully_shard(block, mesh=mesh, reshard_after_forward=reshard) is block
    train_alike(dense, model, mesh.rank, world, optimizer)
    return [parameter.local_shape for parameter in model.trainable_params()]


@pytest.mark.parametrize(
    "world, reshard, optimizer",
    [
        (1, None, "nn.Momentum"),
        (2, None, "nn.AdamWeightDecay"),
        (3, True, "mint.optim.SGD"),
        (4, False, "nn.Momentum"),
    ],
)
def test_training_equals_one_device(world, reshard, optimizer):
    """Outputs, gradients, norms and weights over steps, for tied, frozen and unused parameters, and empty shards."""
    shapes = simulate(train_sharded, world, platform="mindspore", args=(world, reshard, optimizer))
    assert (world < 2) != any((0,) in rank or (0, 2) in rank for rank in shapes)


@pytest.mark.slow
def test_real_processes():
    """Over real processes as well."""
    require_transport("mindspore")
    launch(train_sharded, 2, "mindspore", (2, True, "nn.Momentum"))


@pytest.mark.parametrize("kind", ["tensor parallel", "replicas"])
def test_two_axes_equal_one_device(kind):
    """On top of tensor parallelism, and with replicas of the shards."""

    def rank():
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "second"))
        dense, model = make_model(), make_model()
        mesh = grid
        if kind == "tensor parallel":
            plan = {f"{name}.{layer}": style for name in ("first", "second")
                    for layer, style in (("up", ColwiseParallel()), ("down", RowwiseParallel()))}  # fmt: skip
            parallelize_module(model, grid["second"], plan)
            mesh = grid["first"]
        for block in (model.first, model.second, model):
            fully_shard(block, mesh=mesh)
        count = 2 if kind == "tensor parallel" else 4
        train_alike(dense, model, grid.rank // 2 if count == 2 else grid.rank, count, "nn.Momentum")

    simulate(rank, 4, platform="mindspore")


def test_flattened_data_axes_equal_one_device():
    """Two data axes as one next to tensor parallelism, where parameters are split along their last dim."""

    def rank():
        grid = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp", "cp"))  # more ranks take too long
        dense, model = make_model(), make_model()
        parallelize_module(model, grid["tp"], {"second.up": ColwiseParallel(), "second.down": RowwiseParallel()})
        for block in (model.first, model.second, model):
            fully_shard(
                block,
                mesh=grid,
                shard_placement_fn=lambda parameter: Shard(len(parameter.shape) - 1),
                dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")),
            )
        assert model.second.up.weight.layout.mesh.names == ("dp_cp", "tp")
        train_alike(dense, model, grid["dp", "cp"].ranks.index(grid.rank), 4, "nn.Momentum")

    simulate(rank, 4, platform="mindspore")


def test_accumulation_reduces_once_and_a_step_before_it_is_refused():
    """Passes that do not reduce return zeros; the one that does returns the gradients of all."""

    def rank():
        from mindspore import nn

        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        dense, model = make_model(), make_model()
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
        weights = model.trainable_params()
        optimizer = nn.SGD(weights, 0.1)
        platform, reduced = weights[0]._platform, []
        plain = platform.reduce_scatter_tensor
        platform.reduce_scatter_tensor = lambda data, *args, **kwargs: (
            reduced.append(data.size) or plain(data, *args, **kwargs)
        )
        with no_sync(model):
            for step in range(2):
                gradients = step_of(model, weights, [batch(mesh.rank, step)], 1.0)
                assert not any(whole(gradient).any() for gradient in gradients)
        assert not reduced
        with pytest.raises(PlanError) as info:
            optimizer(gradients)
        assert str(info.value) == (
            f"optimizer step: the gradient of {weights[0].name} is not reduced: it was accumulated under no_sync(); "
            "before the step, run the last backward outside of no_sync()"
        )
        mine = step_of(model, weights, [batch(mesh.rank, 2)], 1.0)
        parts = [batch(part, step) for part in range(3) for step in range(3)]
        for gradient, right in zip(mine, step_of(dense, dense.trainable_params(), parts, 1 / 3), strict=True):
            assert_same(gradient, right, "gradient")
        optimizer(mine)
        platform.reduce_scatter_tensor = plain
        return len(reduced)

    assert simulate(rank, 3, platform="mindspore") == [3] * 3  # of the model, and of each call of the first block


def test_what_is_gathered_is_freed():
    """Between forward and backward no whole parameter is alive that is to be freed; backward gathers what it reads."""

    def rank():
        import mindspore as ms
        from mindspore import nn

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.SequentialCell(*(nn.Dense(6, 6) for _ in range(3)))
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
        platform, live, gathers = model[0].weight._platform, [], []
        plain = platform.all_gather_into_tensor
        platform.all_gather_into_tensor = lambda data, *args: gathers.append(data.size) or plain(data, *args)

        def wholes():
            gc.collect()
            tensors = [each for each in gc.get_objects() if type(each) is ms.Tensor and id(each) not in others]
            return sum(tuple(tensor.shape) == (6, 6) for tensor in tensors)

        others = {id(each): each for each in gc.get_objects() if type(each) is ms.Tensor}  # of tests before

        def loss(x):
            out = model(x).sum()
            live.append(wholes())
            return out

        ms.value_and_grad(loss, 0, model.trainable_params())(ms.Tensor(array(2, 6)))
        live.append(wholes())
        platform.all_gather_into_tensor = plain
        return live, gathers

    for live, gathers in simulate(rank, 2, platform="mindspore"):
        assert live == [0, 0]
        assert gathers == [21] * 6


def test_parts_of_a_parameter_are_saved_as_they_are():
    """A view that begins where the parameter does is not a reference to it: gradients are those of one device."""

    def rank():
        import mindspore as ms
        from mindspore import nn

        class Parts(nn.Dense):
            def construct(self, x):
                return ms.ops.matmul(ms.ops.tanh(x * self.weight[:2]), self.weight.T)

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        dense = Parts(4, 3, has_bias=False)
        model = fully_shard(copy.deepcopy(dense), mesh=mesh, reshard_after_forward=True)
        x = ms.Tensor(array(2, 4))

        def of(cell):
            return ms.value_and_grad(lambda x: (cell(x) ** 2).sum(), 0, cell.trainable_params())(x)[1]

        (mine, weights), (theirs, expected) = of(model), of(dense)
        assert_same(mine, theirs, "gradient of the input")
        assert_same(weights[0], expected[0], "gradient of the weight")

    simulate(rank, 2, platform="mindspore")


def _forwards_of_a_plain_vjp():
    import mindspore as ms

    runs = []
    _, pull = ms.vjp(lambda x: [runs.append(1), x * 2][1], ms.Tensor([1.0]))
    pull(ms.Tensor([1.0]))
    return len(runs)


def test_backward_uses_the_values_of_forward():
    """A write to the shards between forward and backward does not change the gradient."""
    if _forwards_of_a_plain_vjp() > 1:
        pytest.skip("MindSpore itself runs the forward again with the seed, on what was written")

    def rank():
        import mindspore as ms
        from mindspore import nn

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Dense(3, 5)
        x, weight = ms.Tensor(array(2, 3)), whole(model.weight)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        _, pull = ms.vjp(model, x)
        model.weight.set_data(ms.ops.zeros_like(model.weight))
        seed = array(2, 5, seed=3)
        result = pull(ms.Tensor(seed))
        return whole(result[0] if isinstance(result, tuple) else result), seed @ weight

    for gradient, right in simulate(rank, 2, platform="mindspore"):
        np.testing.assert_allclose(gradient, right, rtol=1e-5, atol=1e-5)


def test_dtypes_of_the_policy():
    """Forward computes in ``param_dtype``, outputs have ``output_dtype``, gradients and shards keep theirs.

    Both ranks have one batch, so the mean of their gradients is exactly what one device computes in ``param_dtype``.
    """

    def rank():
        import mindspore as ms
        from mindspore import nn

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        seen = []

        class Layer(nn.Dense):
            def construct(self, x):
                seen.append((x.dtype, self.weight.dtype))
                return super().construct(x)

        dense = Layer(3, 5)
        model = copy.deepcopy(dense)
        policy = MixedPrecisionPolicy(ms.float16, ms.float32, ms.float32)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        x = ms.Tensor(array(2, 3))
        out, gradients = ms.value_and_grad(lambda: model(x=x), None, model.trainable_params())()
        assert seen == [(ms.float16, ms.float16)]
        assert [out.dtype, *(gradient.dtype for gradient in gradients)] == [ms.float32] * 3
        for parameter in dense.get_parameters():
            parameter.set_dtype(ms.float16)
        low = x.astype(ms.float16)
        right = ms.value_and_grad(lambda: dense(low), None, dense.trainable_params())()[1]
        for gradient, expected in zip(gradients, right, strict=True):
            np.testing.assert_array_equal(whole(gradient), whole(expected).astype(np.float32))

    simulate(rank, 2, platform="mindspore")


def test_a_policy_leaves_integers_alone():
    """A frozen table of integers, beside floating weights, has its values and dtype under ``param_dtype``."""

    def rank():
        import mindspore as ms
        from mindspore import nn

        class Layer(nn.Dense):
            def __init__(self):
                super().__init__(3, 5)
                self.table = ms.Parameter(ms.Tensor([1, 300, 2049, 5, 7], ms.int32), name="table", requires_grad=False)

            def construct(self, x):
                seen.append((self.table.dtype, self.table.asnumpy().tolist(), self.weight.dtype))
                return super().construct(x)

        seen = []
        model = Layer()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(ms.float16, ms.float32))
        model(ms.Tensor(array(2, 3)))
        assert seen == [(ms.int32, [1, 300, 2049, 5, 7], ms.float16)]

    simulate(rank, 2, platform="mindspore")


def test_a_cell_that_calls_itself_and_one_that_raises():
    """An inner call ends without taking the outer call's parameters away; after an error the shards are back."""

    def rank():
        import mindspore as ms
        from mindspore import nn

        class Twice(nn.Dense):
            def construct(self, x, depth):
                if depth > 1:
                    raise ValueError("stop here")
                inner = self(x, depth + 1) if depth == 0 else x
                return super().construct(inner)

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        dense = Twice(4, 4)
        model = fully_shard(copy.deepcopy(dense), mesh=mesh, reshard_after_forward=True)
        x = ms.Tensor(array(2, 4))
        with pytest.raises(ValueError, match="stop here"):
            model(x, 2)
        assert isinstance(model.weight, DTensor)

        def of(cell):
            return ms.value_and_grad(lambda: cell(x, 0), None, cell.trainable_params())()

        mine, theirs = of(model), of(dense)
        assert_same(mine[0], theirs[0], "output")
        for gradient, right in zip(mine[1], theirs[1], strict=True):
            assert_same(gradient, right, "gradient")

    simulate(rank, 2, platform="mindspore")


def test_parameters_of_two_dtypes():
    """They are two groups of one cell, with the gradients of one device."""

    def rank():
        import mindspore as ms
        from mindspore import nn

        class Two(nn.Dense):
            def __init__(self):
                super().__init__(4, 3, has_bias=False)
                self.scale = ms.Parameter(ms.Tensor(array(3).astype(np.float64)))

            def construct(self, x):
                return super().construct(x) * self.scale

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        dense = Two()
        model = fully_shard(copy.deepcopy(dense), mesh=mesh, reshard_after_forward=True)
        x = ms.Tensor(array(2, 4))

        def of(cell):
            return ms.value_and_grad(lambda x: (cell(x) ** 2).sum(), 0, cell.trainable_params())(x)[1]

        (mine, weights), (theirs, expected) = of(model), of(dense)
        for left, right in zip((mine, *weights), (theirs, *expected), strict=True):
            assert_same(left, right, "gradient")

    simulate(rank, 2, platform="mindspore")


def test_what_cannot_be_sharded_is_refused():
    """An optimizer from before, a parameter replaced since, a shared one, and a second gradient."""

    def rank():
        import mindspore as ms
        from mindspore import nn

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        fully_shard(nn.SequentialCell(), mesh=mesh)(ms.Tensor(array(2)))
        for container in (nn.CellList([nn.Dense(3, 2)]), nn.CellDict({"a": nn.Dense(3, 2)})):
            with pytest.raises(PlanError) as info:
                fully_shard(container, mesh=mesh)
            assert str(info.value) == (
                f"fully_shard: this {type(container).__name__} is never called, so nothing would gather its "
                "parameters; apply fully_shard to each module inside, or to the module that contains it"
            )
        model = nn.Dense(3, 5)
        early = nn.SGD(model.trainable_params(), 0.1)
        fully_shard(model, mesh=mesh)
        x = ms.Tensor(array(2, 3))
        gradients = ms.value_and_grad(lambda: model(x).sum(), None, model.trainable_params())()[1]
        with pytest.raises(PlanError, match=r"^the optimizer: parameter weight was replaced when its module was"):
            early(gradients)
        with pytest.raises(UnsupportedOnBackend) as info:
            ms.grad(lambda x: ms.grad(lambda x: (model(x) ** 2).sum(), None, [model.weight])(x)[0].sum())(x)
        assert str(info.value) == (
            "fully_shard: the gradient of a gradient is not supported; gradients are reduced off the graph"
        )
        model.bias = ms.Parameter(ms.Tensor(array(5)))
        with pytest.raises(PlanError) as info:
            model(x)
        assert str(info.value) == (
            "fully_shard: parameter bias of Dense was replaced or converted after fully_shard, which gathers the "
            "original parameter; convert the module first, and load values into its parameters"
        )
        other = nn.Dense(3, 5)
        second = nn.Dense(3, 5)
        second.weight = other.weight
        fully_shard(other, mesh=mesh)
        with pytest.raises(PlanError, match=r"^fully_shard: parameter weight is shared with a module that is sharded"):
            fully_shard(second, mesh=mesh)

    simulate(rank, 2, platform="mindspore")
