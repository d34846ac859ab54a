"""``fully_shard`` as MindFormers uses it: imperative backward, sums, copies, main gradients, meta parameters."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from hyper_parallel import (
    DTensor,
    Replicate,
    Shard,
    ShardingPlan,
    distribute_tensor,
    init_device_mesh,
    no_sync,
    shard_module,
)
from hyper_parallel.compat.activation_checkpoint import enable_mindspore_backward_compat
from hyper_parallel.compat.fully_shard import (
    CPUOffloadPolicy,
    HSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from hyper_parallel.errors import PlanError, UnsupportedOnBackend
from hyper_parallel.verify.simulate import simulate

NAMES = ("first.weight", "first.gain", "second.weight", "second.gain", "bias", "frozen")
SHAPES = ((5, 4), (5,), (4, 6), (4,), (6,), (3,))


def array(*shape, seed=0):
    """Normal float32 values from a fresh generator."""
    return (0.5 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def make_model(*, meta=False):
    """Two layers of odd sizes with a gain before each weight, a bias and an unused parameter of the model."""
    import mindspore as ms
    from mindspore import Parameter, Tensor, mint, nn

    def local(value):
        return value.to_local() if isinstance(value, DTensor) else value

    def parameter(index):
        if meta:
            return Parameter(mint.empty(SHAPES[index], dtype=ms.float32), name=NAMES[index])
        return Parameter(Tensor(array(*SHAPES[index], seed=index)), name=NAMES[index])

    class Layer(nn.Cell):
        def __init__(self, index):
            super().__init__()
            self.weight, self.gain = parameter(index), parameter(index + 1)

        def construct(self, x):
            return mint.matmul(x * local(self.gain), local(self.weight))

    class Model(nn.Cell):
        def __init__(self):
            super().__init__()
            self.first, self.second = Layer(0), Layer(2)
            self.bias, self.frozen = parameter(4), parameter(5)
            self.bias.requires_grad = True

        def construct(self, x):
            hidden = self.first(x)
            return self.second(hidden * hidden) + local(self.bias)

    return Model()


def rows(part):
    """Inputs and cotangents of one part of a batch."""
    return array(3, 5, seed=100 + part), array(3, 6, seed=200 + part)


def expected(parts, share=1.0):
    """Gradients of the sum over parts of a batch, by hand."""
    total = [np.zeros(shape, np.float32) for shape in SHAPES]
    w1, g1, w2, g2 = (array(*SHAPES[index], seed=index) for index in range(4))
    for part in parts:
        x, cotangent = rows(part)
        before = (x * g1) @ w1
        hidden = before**2
        total[4] += cotangent.sum(0)
        total[2] += (hidden * g2).T @ cotangent
        back = cotangent @ w2.T
        total[3] += (back * hidden).sum(0)
        back = back * g2 * 2 * before
        total[0] += (x * g1).T @ back
        total[1] += ((back @ w1.T) * x).sum(0)
    return [share * value for value in total]


def backward(model, part, share=1.0):
    """One forward and backward of a part."""
    from mindspore import Tensor

    x, cotangent = rows(part)
    (model(Tensor(x)) * Tensor(cotangent)).sum().backward(Tensor([share], dtype=Tensor(x).dtype))


def assert_gradients(model, wanted, attribute="main_grad", names=NAMES[:5]):
    """The gradients are DTensors in the layouts of their parameters, with these values."""
    found = dict(model.parameters_and_names())
    for name, values in zip(NAMES, wanted, strict=True):
        if name not in names:
            continue
        gradient = getattr(found[name], attribute)
        assert isinstance(gradient, DTensor), name
        assert gradient.layout is found[name].layout, name
        np.testing.assert_allclose(gradient.full_tensor().asnumpy(), values, rtol=2e-5, atol=2e-5, err_msg=name)
        if attribute == "main_grad":
            assert found[name].grad is None


MAIN = MixedPrecisionPolicy(apply_grad_on_fp32_main_grad=True)


def shard_all(model, mesh, **options):
    """``fully_shard`` of both layers and of the model."""
    for cell in (model.first, model.second, model):
        fully_shard(cell, mesh=mesh, **options)
    return model


def sums():
    """Sums over an uneven data axis, on ``main_grad`` and on ``grad``, over two passes, and cleared."""
    enable_mindspore_backward_compat()
    mesh = init_device_mesh("npu", (3,), mesh_dim_names=("fsdp",))
    model = shard_all(make_model(), mesh, mp_policy=MAIN, offload_policy=OffloadPolicy())
    assert isinstance(model.first, HSDPModule)
    assert type(model.first).__name__ == "Layer"
    for _, cell in model.cells_and_names():
        if isinstance(cell, HSDPModule):
            cell.set_reduce_op_type("sum")
    model.set_modules_to_forward_prefetch([model.first])
    model.set_modules_to_backward_prefetch([model.second])
    backward(model, mesh.rank)
    assert_gradients(model, expected(range(3)))
    backward(model, mesh.rank)
    assert_gradients(model, expected(range(3), 2.0))
    model.zero_grad()
    assert all(parameter.main_grad is None for parameter in model.get_parameters())
    backward(model, mesh.rank, 0.5)
    assert_gradients(model, expected(range(3), 0.5))

    with no_sync(model):
        backward(model, mesh.rank)
    assert model.first.weight.grad is None
    backward(model, mesh.rank)
    assert_gradients(model, expected(range(3), 2.5))

    averaged = shard_all(make_model(), mesh, offload_policy=CPUOffloadPolicy())
    backward(averaged, mesh.rank)
    assert_gradients(averaged, expected(range(3), 1 / 3), "grad")
    averaged.zero_grad()
    assert averaged.first.weight.grad is None
    return True


def replicas():
    """Two replicas of two shards: sums wait for the pass that reduces over the replicas."""
    enable_mindspore_backward_compat()
    mesh = init_device_mesh("npu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
    model = shard_all(make_model(), mesh, mp_policy=MAIN)
    for _, cell in model.cells_and_names():
        if isinstance(cell, HSDPModule):
            cell.set_reduce_op_type("sum")
    model.set_requires_all_reduce(False)
    backward(model, mesh.rank)
    assert getattr(model.first.weight, "main_grad", None) is None
    model.set_requires_all_reduce(True)
    backward(model, 4 + mesh.rank)
    assert_gradients(model, expected(range(8)))
    return True


def copies():
    """Tensor-parallel copies see parts of a sequence: their gradients are added up; shards keep their own."""
    enable_mindspore_backward_compat()
    from mindspore import Tensor

    world = init_device_mesh("npu", (4,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (1, 1, 2, 2), ("pp", "dp_replicate", "fsdp", "tp"), backend_override={"pp": "fake"})
    loading = world._unflatten(0, (1, 2, 1, 2), ("pp", "batch", "cp", "tp"), backend_override={"pp": "fake"})
    model = make_model()
    for cell in (model.first, model.second):
        plan = ShardingPlan(plan={"weight": (Shard(1),), "gain": (Replicate(),)})
        shard_module(cell, loading["tp"], plan)
    fully_shard(model.first, mesh=dense["fsdp"], mp_policy=MAIN)
    model.first.set_reduce_op_type("sum")
    assert model.first.weight.layout.mesh.names == ("fsdp", "tp")
    x, _ = rows(world.rank)
    out = model.first(Tensor(x))
    cotangent = array(3, 2, seed=300 + world.rank)
    out.backward(Tensor(cotangent))
    gain = np.zeros((5,), np.float32)
    halves = [np.zeros((5, 2), np.float32) for _ in range(2)]
    w1, g1 = array(5, 4, seed=0), array(5, seed=1)
    for rank in range(4):
        x, cotangent = rows(rank)[0], array(3, 2, seed=300 + rank)
        half = rank % 2
        halves[half] += (x * g1).T @ cotangent
        gain += ((cotangent @ w1[:, 2 * half : 2 * half + 2].T) * x).sum(0)
    wanted = [np.concatenate(halves, 1), gain]
    for parameter, values in zip((model.first.weight, model.first.gain), wanted, strict=True):
        np.testing.assert_allclose(parameter.main_grad.full_tensor().asnumpy(), values, rtol=2e-5, atol=2e-5)
        assert parameter.main_grad.layout is parameter.layout
    return True


def kept_out():
    """Ignored parameters are untouched; replicated ones stay whole, and their gradients are summed over the mesh."""
    enable_mindspore_backward_compat()
    mesh = init_device_mesh("npu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
    model = make_model()
    first, second = model.first, model.second
    ignored = {first.gain, second.weight}
    own = first.gain
    fully_shard(first, mesh=mesh, mp_policy=MAIN, ignored_params=ignored, replicate_params=[first.weight])
    fully_shard(second, mesh=mesh, mp_policy=MAIN, ignored_params=ignored, shard_placement_fn=lambda _: Shard(0))
    fully_shard(model, mesh=mesh, mp_policy=MAIN, ignored_params=ignored, replicate_params=[model.frozen])
    assert first.gain is own
    assert not isinstance(first.gain, DTensor)
    assert first.weight.placements == (Replicate(), Replicate())
    assert second.gain.placements == (Replicate(), Shard(0))
    for cell in (first, second, model):
        cell.set_reduce_op_type("sum")
    backward(model, mesh.rank)
    wanted = expected(range(4))
    assert_gradients(model, wanted, names=("first.weight", "second.gain", "bias"))
    np.testing.assert_allclose(first.gain.grad.asnumpy(), expected([mesh.rank])[1], rtol=2e-5, atol=2e-5)
    return True


def meta():
    """Parameters of the meta device are sharded there, get storage afterwards, and train as others."""
    import mindspore as ms
    from mindspore import Tensor

    enable_mindspore_backward_compat()
    mesh = init_device_mesh("npu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    with ms.DeviceCtx("meta"):
        model = make_model(meta=True)
        plan = ShardingPlan(plan={"weight": (Shard(1),), "gain": (Replicate(),)})
        shard_module(model.first, mesh["tp"], plan)
        fully_shard(model.first, mesh=mesh["fsdp"], mp_policy=MAIN)
        model.first.set_reduce_op_type("sum")
    layer = model.first
    before = layer.weight
    assert layer.weight.to_local().device == "meta"
    layer.to_empty(device="CPU")
    assert layer.weight is before
    assert layer.weight.layout.local_shape == tuple(layer.weight.to_local().shape)
    for index, parameter in enumerate((layer.weight, layer.gain)):
        whole = Tensor(array(*SHAPES[index], seed=index))
        parameter.set_data(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
        np.testing.assert_array_equal(parameter.full_tensor().asnumpy(), whole.asnumpy())
    x, _ = rows(mesh["fsdp"].get_local_rank())
    layer(Tensor(x)).backward(Tensor(np.ones((3, 2), np.float32)))
    total = sum((rows(part)[0] * array(5, seed=1)).T @ np.ones((3, 4), np.float32) for part in range(2))
    np.testing.assert_allclose(layer.weight.main_grad.full_tensor().asnumpy(), total, rtol=2e-5, atol=2e-5)
    return True


def experts():
    """Experts inside a layer are sharded over another view of the world; in forward their mesh still names its axis."""
    enable_mindspore_backward_compat()
    from mindspore import Parameter, Tensor, mint, nn

    world = init_device_mesh("npu", (4,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (2, 2), ("fsdp", "tp"))
    sparse = world._unflatten(0, (2, 2), ("efsdp", "ep"))

    class Experts(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = Parameter(Tensor(array(6, 5, 4, seed=1)), name="weight")

        def construct(self, x):
            assert "ep" in self.weight.device_mesh.mesh_dim_names
            return mint.matmul(x.expand_dims(0), self.weight.to_local()).sum(0)

    class Layer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.experts, self.gain = Experts(), Parameter(Tensor(array(5, seed=2)), name="gain")

        def construct(self, x):
            return self.experts(x * self.gain.to_local())

    layer = Layer()
    shard_module(layer.experts, sparse["ep"], ShardingPlan(plan={"weight": (Shard(0),)}))
    fully_shard(layer.experts, mesh=sparse["efsdp"], mp_policy=MAIN)
    layer.gain = Parameter(distribute_tensor(Tensor(array(5, seed=2)), dense["tp"], [Replicate()]), name="gain")
    fully_shard(layer, mesh=dense["fsdp"], mp_policy=MAIN)
    for cell in (layer.experts, layer):
        cell.set_reduce_op_type("sum")
    assert layer.experts.weight.layout.mesh.names == ("efsdp", "ep")
    layer(Tensor(rows(world.rank)[0])).backward(Tensor(array(3, 4, seed=300 + world.rank)))
    weight, gain = np.zeros((6, 5, 4), np.float32), np.zeros((5,), np.float32)
    for rank in range(4):
        x, cotangent, own = rows(rank)[0], array(3, 4, seed=300 + rank), slice(3 * (rank % 2), 3 * (rank % 2) + 3)
        weight[own] += (x * array(5, seed=2)).T @ cotangent
        gain += ((cotangent @ array(6, 5, 4, seed=1)[own].sum(0).T) * x).sum(0)
    for parameter, values in ((layer.experts.weight, weight), (layer.gain, gain)):
        np.testing.assert_allclose(parameter.main_grad.full_tensor().asnumpy(), values, rtol=2e-5, atol=2e-5)
    return True


def other_dims():
    """Shards of dim 1, of an uneven size, of a plain parameter and of one that tensor parallelism has split before."""
    enable_mindspore_backward_compat()
    from mindspore import Tensor

    def last_dim(parameter):
        return Shard(-1) if len(parameter.shape) > 1 else None

    mesh = init_device_mesh("npu", (3, 2), mesh_dim_names=("fsdp", "tp"))
    model = make_model()
    plan = ShardingPlan(plan={"weight": (Shard(1),), "gain": (Replicate(),)})
    shard_module(model.first, mesh["tp"], plan)
    fully_shard(model.first, mesh=mesh["fsdp"], mp_policy=MAIN, shard_placement_fn=last_dim)
    fully_shard(model.second, mesh=mesh["fsdp"], mp_policy=MAIN, shard_placement_fn=last_dim)
    for cell in (model.first, model.second):
        cell.set_reduce_op_type("sum")
    assert model.first.weight.layout.notation() == "[5, 4@tp@fsdp]"
    assert model.second.weight.layout.local_shape == (4, 2)
    x = rows(mesh["fsdp"].get_local_rank())[0]
    model.first(Tensor(x)).backward(Tensor(array(3, 2, seed=300 + mesh.rank)))
    weight = np.zeros((5, 4), np.float32)
    for rank in range(6):
        half = slice(2 * (rank % 2), 2 * (rank % 2) + 2)
        weight[:, half] += (rows(rank // 2)[0] * array(5, seed=1)).T @ array(3, 2, seed=300 + rank)
    found = model.first.weight.main_grad.full_tensor().asnumpy()
    np.testing.assert_allclose(found, weight, rtol=2e-5, atol=2e-5)

    model.second(Tensor(array(3, 4, seed=400 + mesh.rank))).backward(Tensor(array(3, 6, seed=500 + mesh.rank)))
    line = range(mesh.rank % 2, 6, 2)
    weight = sum((array(3, 4, seed=400 + r) * array(4, seed=3)).T @ array(3, 6, seed=500 + r) for r in line)
    found = model.second.weight.main_grad.full_tensor().asnumpy()
    np.testing.assert_allclose(found, weight, rtol=2e-5, atol=2e-5)
    return True


def counters():
    """Ignored parameters that nothing trains stay untrained, and each rank adds what it has counted to its own."""
    import mindspore as ms
    from mindspore import Parameter, Tensor, nn

    enable_mindspore_backward_compat()
    world = init_device_mesh("npu", (3, 2), mesh_dim_names=("fsdp", "tp"))

    class Layer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = Parameter(Tensor(array(5, 4)), name="weight")
            self.counts = Parameter(Tensor(np.zeros(5, np.float32)), name="counts", requires_grad=False)

    layer = Layer()
    own = layer.counts
    counts = distribute_tensor(own, world["tp"], [Replicate()])
    layer.counts = Parameter(counts, name=own.name, requires_grad=own.requires_grad)
    assert not layer.counts.requires_grad
    fully_shard(layer, mesh=world["fsdp"], ignored_params={layer.counts})
    counted = Tensor([0, 1, 2, 3, 4], ms.float32) + world.rank
    from hyper_parallel.verify.frameworks.mindspore.pretended_npu import pretended_npu

    with pretended_npu():  # MindSpore's CPU drops what add_ adds
        layer.counts.add_(counted)
        layer.counts.add_(distribute_tensor(Tensor([1, 1, 1, 1, 1], ms.float32), world["tp"], [Replicate()]))
    np.testing.assert_array_equal(layer.counts.to_local().asnumpy(), np.arange(5) + world.rank + 1)
    layer.counts = ms.mint.zeros_like(layer.counts)
    np.testing.assert_array_equal(layer.counts.to_local().asnumpy(), np.zeros(5))
    layer.counts.requires_grad = True
    assert layer.counts.requires_grad
    return True


def refusals():
    """A wrong reduction, placement or number of ranks is refused; the parameters stay whole."""
    mesh = init_device_mesh("npu", (2,), mesh_dim_names=("fsdp",))
    model = fully_shard(make_model().first, mesh=mesh)
    with pytest.raises(ValueError, match=r"^set_reduce_op_type: 'max' is not one of avg, mean, sum$"):
        model.set_reduce_op_type("max")
    plain = make_model().first
    shape = list(plain.weight.shape)
    for placement in (Shard(2), Shard(-3), Replicate(), 1):
        with pytest.raises(PlanError) as caught:
            fully_shard(plain, mesh=mesh, shard_placement_fn=lambda _, chosen=placement: chosen)
        assert str(caught.value) == (
            f"fully_shard: shard_placement_fn returned {placement!r} for a parameter of shape {shape}; "
            "it must be Shard(dim) of one of its dims, None, or ShardPlacementResult(placement, FSDPMeshInfo(...))"
        )
        assert not isinstance(plain.weight, DTensor)
    for reshard in ("yes", 0, 3, 1.0):
        with pytest.raises(PlanError) as caught:
            fully_shard(plain, mesh=mesh, reshard_after_forward=reshard)
        assert str(caught.value) == (
            f"fully_shard: reshard_after_forward={reshard!r} must be true, false or a divisor of the 2 ranks of fsdp"
        )
        assert not isinstance(plain.weight, DTensor)
    fully_shard(plain, mesh=mesh, reshard_after_forward=2)
    assert isinstance(plain.weight, DTensor)
    return True


@pytest.mark.platforms("mindspore")
@pytest.mark.parametrize(
    "check, ranks",
    [
        (sums, 3),
        (replicas, 4),
        (copies, 4),
        (kept_out, 4),
        (meta, 4),
        (experts, 4),
        (other_dims, 6),
        (counters, 6),
        (refusals, 2),
    ],
)
def test_gradients_are_those_of_one_device(check, ranks):
    """Gradients by imperative backward add up what the ranks compute, in the layouts of the parameters."""
    if check is meta and not hasattr(importlib.import_module("mindspore").nn.Cell, "to_empty"):
        pytest.skip("MindSpore itself has no Cell.to_empty")
    assert simulate(check, ranks, platform="mindspore") == [True] * ranks


@pytest.mark.platforms("torch")
def test_pytorch_is_pointed_to_the_other_function():
    """On PyTorch the call names the function that serves it."""
    import torch

    with pytest.raises(UnsupportedOnBackend) as caught:
        fully_shard(torch.nn.Linear(2, 2), mesh=None)
    assert str(caught.value) == (
        "hyper_parallel.compat.fully_shard.fully_shard is for MindSpore; on PyTorch call hyper_parallel.fully_shard"
    )
