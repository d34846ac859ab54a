from __future__ import annotations

import pytest

from hyper_parallel import ColwiseParallel, DTensor, Partial, Replicate, Shard, distribute_tensor, parallelize_module
from hyper_parallel.errors import LayoutError, MeshError, MeshMismatchError, MixedTensorError, UnsupportedModuleError

pytestmark = pytest.mark.platforms("torch")


def linear(twin, width=7, out=10):
    """A linear layer with random values."""
    from torch import nn

    return twin.randomized(nn.Linear(width, out))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("source", [Replicate(), Shard(0), Shard(-1)])
@pytest.mark.parametrize("target", [None, Replicate(), Shard(0)])
def test_local_inputs_and_outputs_of_any_layout(twin, world, source, target):
    """A plain input has its declared layout, uneven sizes included, and the output has the requested one."""
    ref = twin.Twin(linear(twin), twin.random(5, 7))
    leaving = Shard(-1) if target is None else target

    def rank(mesh):
        style = ColwiseParallel(input_layouts=source, output_layouts=target)
        layer = parallelize_module(ref.copy(), mesh, style)
        x = twin.local_shard(ref.inputs[0], mesh, [source]).requires_grad_()
        y = layer(x)
        twin.same(twin.gather(y, mesh, [leaving], (5, 10)), ref.output, "output")
        y.backward(twin.local_shard(ref.cotangent, mesh, [leaving]))
        twin.same(twin.gather(x.grad, mesh, [source], (5, 7)), ref.inputs[0].grad, "gradient of the input")
        ref.assert_gradients(layer)
        return layer.weight.placements, layer.bias.placements

    assert twin.on_mesh((world,), rank)[0] == ((Shard(0),), (Shard(0),))


@pytest.mark.parametrize("world", [2, 3])
def test_a_dtensor_brings_its_own_layout(twin, world):
    """``input_layouts`` applies to plain inputs; a DTensor is redistributed from its own layout."""
    ref = twin.Twin(linear(twin), twin.random(5, 7))

    def rank(mesh):
        layer = parallelize_module(ref.copy(), mesh, ColwiseParallel(use_local_output=False))
        x = distribute_tensor(ref.inputs[0].detach().requires_grad_(), mesh, [Shard(0)])
        y = layer(x)
        assert isinstance(y, DTensor)
        assert y.placements == (Shard(1),)
        y.backward(distribute_tensor(ref.cotangent, mesh, [Shard(1)]))
        twin.same(x.grad, ref.inputs[0].grad, "gradient of the input")
        ref.assert_gradients(layer)

    twin.on_mesh((world,), rank)


@pytest.mark.parametrize("world", [2, 3])
def test_embedding_by_features(twin, world):
    """Columns of the table are sharded; the gradient of the table is the dense one, padding included."""
    import torch
    from torch import nn

    table = twin.randomized(nn.Embedding(11, 7, padding_idx=2))
    ids = torch.tensor([[0, 2, 10], [2, 5, 0]])
    ref = twin.Twin(table, ids)

    def rank(mesh):
        layer = parallelize_module(ref.copy(), mesh, ColwiseParallel())
        y = layer(ids)
        twin.same(twin.gather(y, mesh, [Shard(2)], (2, 3, 7)), ref.output, "output")
        y.backward(twin.local_shard(ref.cotangent, mesh, [Shard(2)]))
        ref.assert_gradients(layer)
        return layer.weight.placements

    assert twin.on_mesh((world,), rank)[0] == (Shard(1),)


def test_the_input_by_keyword(twin):
    """Keyword arguments reach the module, and the declared one is converted."""
    ref = twin.Twin(linear(twin), twin.random(5, 7))

    def rank(mesh):
        layer = parallelize_module(ref.copy(), mesh, ColwiseParallel(output_layouts=Replicate()))
        twin.same(layer(input=ref.inputs[0].detach()), ref.output, "output")

    twin.on_mesh((2,), rank)


def test_other_arguments_pass_unchanged(twin):
    """Only the annotated argument is converted; positional and keyword ones beside it reach the module."""
    from torch import nn

    class Scaled(nn.Linear):
        def forward(self, x, factor, *, shift=None):
            assert isinstance(x, DTensor)
            assert (factor, shift) == (2, "s")
            return super().forward(x)

    def rank(mesh):
        parallelize_module(Scaled(4, 6), mesh, ColwiseParallel())(twin.random(3, 4).float(), 2, shift="s")

    twin.on_mesh((2,), rank)


@pytest.mark.parametrize("call, message", [
    (lambda layer: layer(None), "fc1 (Linear): input must be a tensor, got NoneType"),
    (lambda layer: layer([1.0]), "fc1 (Linear): input must be a tensor, got list"),
    (lambda layer: layer(), "fc1 (Linear): called without input, which ColwiseParallel converts"),
])  # fmt: skip
def test_a_wrong_argument_names_module_and_argument(twin, call, message):
    """A wrong argument raises a ValueError that names module and argument."""

    def rank(mesh):
        model = parallelize_module(twin.MLP(), mesh, {"fc*": ColwiseParallel()})
        with pytest.raises(ValueError, match="fc1") as caught:
            call(model.fc1)
        return str(caught.value)

    assert twin.on_mesh((2,), rank)[0] == message


def test_a_module_of_another_kind_is_refused(twin):
    """A module of another kind raises NotImplementedError, as in PyTorch, with its type."""
    from torch import nn

    def rank(mesh):
        with pytest.raises(NotImplementedError) as caught:
            ColwiseParallel().apply(nn.LayerNorm(3), mesh)
        assert isinstance(caught.value, UnsupportedModuleError)
        return str(caught.value)

    assert twin.on_mesh((2,), rank)[0] == "ColwiseParallel supports linear and embedding layers, not LayerNorm"


def test_a_wrapped_layer_is_named(twin):
    """A module that wraps one layer, as adapters do, is refused with its whole type and the name of the layer."""
    from torch import nn

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer, self.lora = nn.Linear(4, 6), nn.ModuleDict({"default": nn.Linear(4, 2)})

    def rank(mesh):
        with pytest.raises(NotImplementedError) as caught:
            ColwiseParallel().apply(Linear(), mesh)
        return str(caught.value)

    assert twin.on_mesh((2,), rank)[0] == (
        "ColwiseParallel supports linear and embedding layers, not "
        f"{__name__}.test_a_wrapped_layer_is_named.<locals>.Linear, which wraps one: name its 'base_layer' in the "
        "plan, and lay out the other parameters that it contains"
    )


def test_plain_tensors_are_refused_on_several_axes(twin):
    """A plain tensor with one placement on several axes is refused with the fix."""

    def rank(mesh):
        model = parallelize_module(twin.randomized(twin.MLP()), mesh, {"fc*": ColwiseParallel()})
        with pytest.raises(MixedTensorError) as caught:
            model(twin.random(4, 7))
        return str(caught.value)

    assert twin.on_mesh((2, 2), rank, ("dp", "tp"))[0] == (
        "fc1 (Linear): input is a plain tensor [4, 7]; Replicate() says how it is placed along tp, but not along dp "
        "of DeviceMesh(cpu, dp=2, tp=2, ranks=[0, 1, 2, 3]); pass use_local_output=False to the style that produced "
        "it or, if it is the batch, distribute it: hyper_parallel.distribute_tensor(batch, mesh, [Shard(0), "
        "Replicate()]); if every rank has the same values, such as an arange in forward, give the module "
        "NoParallel(use_local_output=False), or a layout over all axes: (Replicate(), Replicate())"
    )


@pytest.mark.parametrize("layout", [(Shard(0), Replicate()), ("dp", "None")])
def test_a_full_layout_of_a_plain_tensor_is_accepted(twin, layout):
    """One placement per mesh axis, or one alias per dim, defines the layout of a plain tensor on any mesh."""
    ref = twin.Twin(linear(twin), twin.random(5, 7))
    out = (Shard(0), Shard(1))

    def rank(mesh):
        layer = parallelize_module(ref.copy(), mesh, ColwiseParallel(input_layouts=layout))
        x = twin.local_shard(ref.inputs[0], mesh, layout).requires_grad_()
        y = layer(x)
        twin.same(twin.gather(y, mesh, out, (5, 10)), ref.output, "output")
        y.backward(twin.local_shard(ref.cotangent, mesh, out))
        twin.same(twin.gather(x.grad, mesh, layout, (5, 7)), ref.inputs[0].grad, "gradient of the input")
        ref.assert_gradients(layer)

    twin.on_mesh((2, 3), rank, ("dp", "tp"))


def test_a_dtensor_of_another_mesh_is_refused(twin):
    """A DTensor of another mesh is refused, naming both meshes and the argument."""
    from hyper_parallel import init_device_mesh

    def rank(mesh):
        layer = parallelize_module(linear(twin), mesh, ColwiseParallel())
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        with pytest.raises(MeshMismatchError) as caught:
            layer(distribute_tensor(twin.random(5, 7), other, [Replicate()]))
        return str(caught.value)

    assert twin.on_mesh((2,), rank)[0] == (
        "Linear: input is on DeviceMesh(cpu, x=2, ranks=[0, 1]), but the module was parallelized on "
        "DeviceMesh(cpu, 2, ranks=[0, 1]); distribute input on the module's mesh"
    )


def test_several_axes_without_tp(twin):
    """On several axes without one named tp a style is refused."""

    def rank(mesh):
        with pytest.raises(MeshError) as caught:
            parallelize_module(twin.MLP(), mesh, {"fc*": ColwiseParallel()})
        return str(caught.value)

    assert twin.on_mesh((2, 2), rank, ("a", "b"))[0] == (
        "parallel styles act on the mesh axis 'tp', but DeviceMesh(cpu, a=2, b=2, ranks=[0, 1, 2, 3]) has several axes "
        "and none with that name; name an axis 'tp', or pass a 1-D mesh: mesh['b']"
    )


def test_shards_that_are_not_one_tensor(twin):
    """Local shards that do not form one tensor are refused before anything is computed."""

    def rank(mesh):
        layer = parallelize_module(linear(twin), mesh, ColwiseParallel(input_layouts=Shard(0)))
        with pytest.raises(ValueError, match="local shards") as caught:
            layer(twin.random(2 + mesh.rank, 7))
        return str(caught.value)

    assert twin.on_mesh((2,), rank)[0] == (
        "Linear: the local shards of input do not form one f64[5@0, 7] (rank 0: [2, 7], rank 1: [3, 7]); every shard "
        "must have ceil(size / ranks) elements, except the last ones, which may have fewer"
    )


def test_a_shard_that_does_not_fit_the_layer(twin):
    """A shard that does not fit the global width of the layer's weight is refused."""

    def rank(mesh):
        layer = parallelize_module(linear(twin), mesh, ColwiseParallel(input_layouts=Shard(1)))
        with pytest.raises(ValueError, match="should be the shard") as caught:
            layer(twin.random(5, 2))
        return str(caught.value)

    assert (
        twin.on_mesh((2,), rank)[0] == "Linear: input should be the shard [5, 4] of f64[5, 7@0] on rank 0, got [5, 2]"
    )


def test_a_layout_that_does_not_fit_the_tensor(twin):
    """A dim that does not exist is refused, naming module, style and placement."""

    def rank(mesh):
        layer = parallelize_module(linear(twin), mesh, ColwiseParallel(output_layouts=Shard(2)))
        with pytest.raises(LayoutError) as caught:
            layer(twin.random(5, 7))
        return str(caught.value)

    assert twin.on_mesh((2,), rank)[0] == "Linear: ColwiseParallel asks for Shard(2) of a tensor of 2 dims"


def test_options_are_checked_and_shown():
    """``repr`` shows every option with its default; a value that is not a layout is refused by the constructor."""
    assert repr(ColwiseParallel()) == (
        "ColwiseParallel(input_layouts=(Replicate(),), output_layouts=(Shard(-1),), use_local_output=True)"
    )
    assert repr(ColwiseParallel(output_layouts=Partial())) == (
        "ColwiseParallel(input_layouts=(Replicate(),), output_layouts=(Partial(sum),), use_local_output=True)"
    )
    with pytest.raises(TypeError, match="input_layouts must be a placement, one placement per mesh axis") as caught:
        ColwiseParallel(input_layouts=3)
    assert str(caught.value).startswith("ColwiseParallel: input_layouts must be")


def test_a_layer_that_returns_a_plain_tensor(twin):
    """A forward that returns a plain tensor is refused, naming module, style and type."""
    from torch import nn

    class Leaving(nn.Linear):
        def forward(self, x):
            return super().forward(x).to_local()

    def rank(mesh):
        layer = parallelize_module(Leaving(4, 6), mesh, ColwiseParallel())
        with pytest.raises(ValueError, match="output") as caught:
            layer(twin.random(3, 4).float())
        return str(caught.value)

    assert twin.on_mesh((2,), rank)[0] == (
        "Leaving: output must be a DTensor for ColwiseParallel to redistribute it, got Tensor"
    )
