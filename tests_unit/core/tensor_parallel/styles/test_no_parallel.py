from __future__ import annotations

import pytest

from hyper_parallel import DTensor, NoParallel, Replicate, Shard, distribute_tensor, parallelize_module

pytestmark = pytest.mark.platforms("torch")


@pytest.mark.parametrize("source", [Replicate(), Shard(1)])
@pytest.mark.parametrize("local", [True, False])
def test_the_whole_is_computed_everywhere(twin, source, local):
    """Weights and activations are whole on every rank; gradients are the dense ones."""
    ref = twin.Twin(twin.randomized(twin.MLP()), twin.random(2, 5, 7))

    def rank(mesh):
        style = NoParallel(input_layout=source, output_layout=source, use_local_output=local)
        model = parallelize_module(ref.copy(), mesh, style)
        x = twin.local_shard(ref.inputs[0], mesh, [source]).requires_grad_()
        y = model(x)
        assert isinstance(y, DTensor) is not local
        y = y if local else y.to_local()
        twin.same(twin.gather(y, mesh, [source], ref.output.shape), ref.output, "output")
        y.backward(twin.local_shard(ref.cotangent, mesh, [source]))
        twin.same(twin.gather(x.grad, mesh, [source], (2, 5, 7)), ref.inputs[0].grad, "gradient of the input")
        ref.assert_gradients(model)

    twin.on_mesh((3,), rank)


def test_it_fits_a_module_between_dtensors(twin):
    """Along other axes a DTensor keeps its placement."""
    ref = twin.Twin(twin.randomized(twin.MLP()), twin.random(5, 7))

    def rank(mesh):
        model = parallelize_module(ref.copy(), mesh, NoParallel(use_local_output=False))
        x = distribute_tensor(ref.inputs[0].detach().requires_grad_(), mesh, [Shard(0), Shard(1)])
        y = model(x)
        assert y.placements == (Shard(0), Replicate())
        y.backward(distribute_tensor(ref.cotangent, mesh, [Shard(0), Replicate()]))
        twin.same(x.grad, ref.inputs[0].grad, "gradient of the input")
        ref.assert_gradients(model)

    twin.on_mesh((2, 3), rank, ("dp", "tp"))


@pytest.mark.parametrize("by_name", [False, True])
def test_the_output_may_follow_the_input(twin, by_name):
    """With None a plain input gives a plain output and a DTensor a DTensor, in modules inside of others too."""
    ref = twin.Twin(twin.randomized(twin.MLP()), twin.random(5, 7))

    def rank(mesh):
        style = NoParallel(use_local_output=None)
        model = parallelize_module(ref.copy(), mesh, {"": style, "fc1": style, "fc2": style})
        inside = []
        model.fc1.register_forward_hook(lambda *call: inside.append(isinstance(call[-1], DTensor)))
        plain = ref.inputs[0].detach()
        distributed = distribute_tensor(plain, mesh, [Shard(0)])
        outputs = [model(x=x) if by_name else model(x) for x in (plain, distributed)]
        assert [isinstance(output, DTensor) for output in outputs] == [False, True]
        assert inside == [True, True]
        for output in outputs:
            twin.same(output, ref.output, "output")
        outputs[0].backward(ref.cotangent)
        ref.assert_gradients(model)

    twin.on_mesh((2,), rank)


def test_outputs_that_are_no_tensors_pass(twin):
    """A structure of outputs without tensors keeps its type."""
    from torch import nn

    class Two(nn.Linear):
        def forward(self, x):
            return {"y": super().forward(x), "n": 3}

    def rank(mesh):
        out = parallelize_module(Two(4, 6), mesh, NoParallel())(twin.random(3, 4).float())
        return type(out["y"]).__name__, out["n"]

    assert twin.on_mesh((2,), rank)[0] == ("Tensor", 3)


def test_options_are_shown():
    """``repr`` shows every option with its default."""
    assert repr(NoParallel()) == (
        "NoParallel(input_layout=Replicate(), output_layout=Replicate(), use_local_output=True)"
    )
