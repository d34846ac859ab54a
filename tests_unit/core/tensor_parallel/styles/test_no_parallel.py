from __future__ import annotations

import pytest

from hyper_parallel import (
    DeviceMesh,
    DTensor,
    NoParallel,
    Replicate,
    RowwiseParallel,
    Shard,
    complete_plan,
    distribute_tensor,
    parallelize_module,
)
from hyper_parallel.errors import MixedTensorError
from hyper_parallel.verify.simulate import simulate

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


def positions(dp):
    """A model that adds learned positions, counted in forward; the batch is distributed along dp or local to it."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(11, 5), nn.Embedding(7, 5)

        def forward(self, ids):
            shift = dp() if dp else 0
            return self.tokens(ids) + self.places(torch.arange(ids.shape[1]) + shift)

    return Model


@pytest.mark.parametrize("grid", [(2, 2), (3, 2)])
def test_positions_counted_in_forward_fit_a_mesh_of_two_axes(twin, grid):
    """A completed plan takes them, since the ranks see that they are equal; values and gradients are the dense ones."""
    import torch

    ids = torch.arange(30).reshape(6, 5) % 11
    ref = twin.Twin(twin.randomized(positions(None)()), ids)

    def rank(mesh):
        plan = complete_plan(ref.copy(), {"tokens": RowwiseParallel(input_layouts=Replicate(), use_local_output=False)})
        assert repr(plan["places"]) == repr(NoParallel(use_local_output=False))
        model = parallelize_module(ref.copy(), mesh, plan)
        y = model(distribute_tensor(ids, mesh, [Shard(0), Replicate()]))
        twin.same(y, ref.output, "output")
        y.backward(distribute_tensor(ref.cotangent, mesh, [Shard(0), Replicate()]))
        ref.assert_gradients(model)

    twin.on_mesh(grid, rank, ("dp", "tp"))


def test_positions_on_ranks_outside_of_a_mesh_of_two_axes(twin):
    """A rank that is not in the mesh gets a DTensor without elements, and takes no part in the comparison of ranks."""
    import torch
    from torch import nn

    table = twin.randomized(nn.Embedding(7, 5)).weight.detach().float()

    def rank():
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        module = nn.Embedding(7, 5)
        with torch.no_grad():
            module.weight.copy_(table)
        y = parallelize_module(module, mesh, NoParallel(use_local_output=False))(torch.arange(4))
        return list(y.to_local().shape), y.to_local().tolist()

    *inside, outside = simulate(rank, 5, "torch")
    assert inside == [([4, 5], table[:4].tolist())] * 4
    assert outside == ([0, 0], [])


@pytest.mark.parametrize("grid", [(2, 2), (3, 2)])
def test_positions_on_meta_are_not_compared(twin, grid):
    """A rehearsal on meta tensors has no values: the plain input counts as equal on all ranks."""
    import torch
    from torch import nn

    def rank(mesh):
        module = parallelize_module(nn.Embedding(7, 5, device="meta"), mesh, NoParallel(use_local_output=False))
        y = module(torch.arange(4, device="meta"))
        assert y.placements == (Replicate(), Replicate())
        return list(y.shape), y.device.type

    assert set(map(str, twin.on_mesh(grid, rank, ("dp", "tp")))) == {"([4, 5], 'meta')"}


def test_plain_inputs_that_differ_between_ranks_are_refused_on_several_axes(twin):
    """They are parts of something, along axes that the style does not know."""
    import torch

    def rank(mesh):
        model = parallelize_module(
            positions(lambda: mesh.get_local_rank("dp"))(),
            mesh,
            {
                "tokens": NoParallel(use_local_output=False),
                "places": NoParallel(use_local_output=False),
            },
        )
        ids = distribute_tensor(torch.zeros(4, 5, dtype=torch.int64), mesh, [Shard(0), Replicate()])
        with pytest.raises(MixedTensorError) as caught:
            model(ids)
        return str(caught.value)

    assert twin.on_mesh((2, 2), rank, ("dp", "tp"))[0] == (
        "places (Embedding): input is a plain tensor [5]; Replicate() says how it is placed along tp, but not along "
        "dp of DeviceMesh(cpu, dp=2, tp=2, ranks=[0, 1, 2, 3]); pass use_local_output=False to the style that "
        "produced it or, if it is the batch, distribute it: hyper_parallel.distribute_tensor(batch, mesh, [Shard(0), "
        "Replicate()]); if every rank has the same values, such as an arange in forward, give the module "
        "NoParallel(use_local_output=False), or a layout over all axes: (Replicate(), Replicate())"
    )
