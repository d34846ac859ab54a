"""``fully_shard`` as PyTorch's users call it: options, lists, methods, and modules that change afterwards."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass, replace

import pytest

import hyper_parallel
from hyper_parallel import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Shard,
    fully_shard,
    init_device_mesh,
)
from hyper_parallel.errors import ArgumentTypeError, PlanError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def make():
    """Three layers of odd sizes, in float64."""
    import torch
    from torch import nn

    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.LayerNorm(3), nn.Linear(3, 5)).double()


def batch(rank, step):
    """Input and cotangent of one rank."""
    import torch

    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(2, 5, generator=generator, dtype=torch.float64) for _ in range(2)]


def assert_trains(model, dense, size, rank, *, steps=3, first=0, parts=(1.0,), change=None):
    """Assert that gradients and weights are those of one device that trains on all batches.

    Args:
        model: under ``fully_shard``.
        dense: a plain copy.
        size: number of batches of a step.
        rank: whose batch is this rank's.
        steps: number of steps.
        first: number of the first one.
        parts: of the cotangent, one for each backward pass.
        change: called with both models and the step, before each step.
    """
    import torch

    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (dense, model)]
    for step in range(first, first + steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if change is not None:
            change(dense, step), change(model, step)
        inputs = []
        for each in range(size):
            x, cotangent = batch(each, step)
            inputs.append(x.requires_grad_())
            dense(x).backward(cotangent / size)
        x, cotangent = batch(rank, step)
        x.requires_grad_()
        for index, part in enumerate(parts):
            if len(parts) > 1:
                model.set_requires_gradient_sync(index == len(parts) - 1)
            model(x).backward(cotangent * part)
        torch.testing.assert_close(x.grad / size, inputs[rank].grad, rtol=1e-10, atol=1e-10)
        assert_same([parameter.grad for parameter in model.parameters()], [each.grad for each in dense.parameters()])
        for optimizer in optimizers:
            optimizer.step()
        assert_same(model.parameters(), dense.parameters())


def assert_same(mine, theirs):
    """Assert that DTensors have the values of plain tensors, or are None as these are."""
    import torch

    for own, expected in zip(mine, theirs, strict=True):
        assert (own is None) == (expected is None)
        if own is not None:
            torch.testing.assert_close(own.full_tensor(), expected, rtol=1e-10, atol=1e-10)


def on_ranks(world, body):
    """Run ``body(mesh)`` on every simulated rank."""
    return simulate(lambda: body(init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))), world, platform="torch")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_parameters_are_split_along_the_dim_that_a_function_says(world):
    """Any dim may be split, evenly or not; values, gradients, checkpoints and further training are those of dim 0."""

    def rank(mesh):
        dense, model = make(), make()

        def place(parameter):
            return Shard(-1) if parameter.ndim == 2 and parameter.shape[0] != 3 else None

        for each in (model[0], model[2], model):
            fully_shard(each, mesh=mesh, shard_placement_fn=place)
        assert model[0].weight.placements == (Shard(1),)
        assert model[2].weight.placements == (Shard(0),)
        assert_trains(model, dense, world, mesh.rank)
        assert_trains(model, dense, world, mesh.rank, first=5, parts=(0.25, 0.75))

    on_ranks(world, rank)


@pytest.mark.parametrize("dims", [(2, 1), (2, 2)])
def test_a_dim_is_split_inside_of_a_tensor_parallel_one(dims):
    """The data axis splits dim 1 of what tensor parallelism has split along dim 0 or 1."""
    import torch

    def rank():
        mesh = init_device_mesh("cpu", dims, mesh_dim_names=("dp", "tp"))
        dense, model = make(), make()
        styles = {"0": hyper_parallel.ColwiseParallel(), "2": hyper_parallel.RowwiseParallel()}
        hyper_parallel.parallelize_module(model, mesh["tp"], styles)
        fully_shard(
            model, mesh=mesh["dp"], shard_placement_fn=lambda parameter: Shard(1) if parameter.ndim == 2 else None
        )
        own = mesh["dp"].get_local_rank()
        for each in range(dims[0]):
            x, cotangent = batch(each, 0)
            dense(x).backward(cotangent / dims[0])
        x, cotangent = batch(own, 0)
        model(x).backward(cotangent)
        for theirs, mine in zip(dense.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)

    simulate(rank, dims[0] * dims[1], platform="torch")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_list_of_modules_is_one_group(world):
    """Modules of a list are gathered together, train as on one device, and have the same methods."""

    def rank(mesh):
        dense, model = make(), make()
        fully_shard([model[0], model[2]], mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=world, offload_policy=CPUOffloadPolicy())
        assert isinstance(model[0], FSDPModule)
        assert not isinstance(model[4], FSDPModule)
        assert_trains(model, dense, world, mesh.rank, parts=(0.5, 0.5))

    on_ranks(world, rank)


@pytest.mark.parametrize("world", [2, 3])
def test_methods_change_when_parameters_are_gathered_and_not_what_is_computed(world):
    """Unshard shows the whole and reshard the shard; every switch leaves values and gradients those of one device."""
    import torch

    def rank(mesh):
        dense, model = make(), make()
        fully_shard(model[0], mesh=mesh, reshard_after_forward=1, offload_policy=OffloadPolicy())
        fully_shard(model, mesh=mesh)
        for _ in range(2):
            handle = model[0].unshard(async_op=True)
            handle.wait()
            assert torch.equal(model[0].weight, dense[0].weight)
            model[0].reshard()
            assert model[0].weight.placements == (Shard(0),)
        assert model.unshard() is None
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(PlanError, match=r"the parameter is the gathered one of unshard\(\)"):
            early.step()
        model.reshard()
        assert_trains(model, dense, world, mesh.rank)
        model.set_modules_to_forward_prefetch([model[0]])
        model[0].set_modules_to_backward_prefetch([model])
        model.set_is_last_backward(True)
        model.set_unshard_in_backward(True)
        model.set_post_optim_event(None)
        for number, keep in enumerate((True, False)):
            model.set_reshard_after_forward(not keep)
            model.set_reshard_after_backward(not keep)
            assert_trains(model, dense, world, mesh.rank, first=5 + 5 * number, parts=(0.25, 0.25, 0.5))
        x, cotangent = batch(mesh.rank, 50)
        gradients = []
        for factor in (float(world), 1.0):
            model.zero_grad()
            model.set_gradient_divide_factor(factor)
            model(x).backward(cotangent)
            gradients.append(model[4].weight.grad.full_tensor())
        torch.testing.assert_close(gradients[0] * world, gradients[1])
        with pytest.raises(ArgumentTypeError) as caught:
            model.set_modules_to_forward_prefetch([model[4]])
        assert str(caught.value) == "set_modules_to_forward_prefetch: fully_shard was not applied to this Linear"

    on_ranks(world, rank)


def test_reduction_over_the_replicas_may_wait():
    """Sums of the data axis are kept until a pass reduces over the replicas, and a step before that is refused."""
    import torch

    def rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "dp"))
        dense, model = make(), fully_shard(make(), mesh=mesh)
        for each in range(4):
            x, cotangent = batch(each, 0)
            dense(x).backward(cotangent / 4)
        x, cotangent = batch(mesh.rank, 0)
        model.set_requires_all_reduce(False)
        model(x).backward(cotangent * 0.25)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(PlanError, match=r"it was not reduced over the replicas"):
            optimizer.step()
        model.set_requires_all_reduce(True)
        model(x).backward(cotangent * 0.75)
        for theirs, mine in zip(dense.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
        optimizer.step()

    simulate(rank, 4, platform="torch")


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_are_frozen_and_unfrozen_between_passes(world):
    """requires_grad may change after fully_shard; the next pass trains accordingly."""

    def change(model, step):
        model[0].requires_grad_(step % 2 == 0)
        model[4].weight.requires_grad_(step < 3)

    def rank(mesh):
        dense, model = make(), make()
        for each in (model[0], model):
            fully_shard(each, mesh=mesh)
        assert_trains(model, dense, world, mesh.rank, steps=5, change=change)

    on_ranks(world, rank)


def test_what_is_added_afterwards_is_refused():
    """A parameter or module that fully_shard has not seen would train on each rank by itself."""
    import torch
    from torch import nn

    def rank(mesh):
        messages = []
        for add in (
            lambda model: model.register_parameter("extra", nn.Parameter(torch.ones(3))),
            lambda model: model.append(nn.Linear(5, 5)),
            lambda model: setattr(model[0], "bias_of_mine", nn.Parameter(torch.ones(3))),
        ):
            model = fully_shard(make(), mesh=mesh)
            add(model)
            with pytest.raises(PlanError) as caught:
                model(batch(0, 0)[0])
            messages.append(str(caught.value))
        return messages

    message = (
        "fully_shard: a parameter or submodule of Sequential was added or removed after fully_shard, which does not "
        "shard it; change the module first"
    )
    assert on_ranks(2, rank)[0] == [message] * 3


def test_copies_keep_class_options_and_groups_of_lists():
    """A deep copy and a saved module train by themselves, split along the same dims."""
    import torch

    def rank(mesh):
        model = make()
        fully_shard([model[0], model[2]], mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
        fully_shard(model, mesh=mesh)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert type(other) is type(model)
            assert type(other).__name__ == "Sequential"
            assert_trains(other, make(), 2, mesh.rank)

    on_ranks(2, rank)


def test_options_that_do_not_exist_are_refused():
    """A dim that a parameter has not, a placement that is not a shard, and a number that divides nothing."""

    def rank(mesh):
        messages = []
        for options in (
            {"shard_placement_fn": lambda _: Shard(2)},
            {"shard_placement_fn": lambda _: "dp"},
            {"reshard_after_forward": 3},
            {"reshard_after_forward": 0},
        ):
            with pytest.raises(PlanError) as caught:
                fully_shard(make(), mesh=mesh, **options)
            messages.append(str(caught.value))
        with pytest.raises(PlanError) as caught:
            fully_shard([], mesh=mesh)
        return [*messages, str(caught.value)]

    must = (
        "for a parameter of shape [7, 5]; it must be Shard(dim) of one of its dims, None, or "
        "ShardPlacementResult(placement, FSDPMeshInfo(...))"
    )
    assert on_ranks(2, rank)[0] == [
        f"fully_shard: shard_placement_fn returned Shard(2) {must}".replace("Shard(2)", repr(Shard(2))),
        f"fully_shard: shard_placement_fn returned 'dp' {must}",
        "fully_shard: reshard_after_forward=3 must be true, false or a divisor of the 2 ranks of dp",
        "fully_shard: reshard_after_forward=0 must be true, false or a divisor of the 2 ranks of dp",
        "fully_shard: the list of modules is empty",
    ]


def test_a_slice_of_a_sharded_module_is_a_plain_one():
    """What a module makes of its own class was not sharded; its modules are still those that were."""
    import torch

    def rank(mesh):
        model = fully_shard(
            torch.nn.Sequential(fully_shard(torch.nn.Linear(5, 4), mesh=mesh), torch.nn.Tanh()), mesh=mesh
        )
        for part in (model[:1], type(model)(model[0])):
            assert type(part) is torch.nn.Sequential
            assert part[0] is model[0]
            assert isinstance(part[0], FSDPModule)
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(torch.tanh(model[:1](x)), model(x))
        assert isinstance(copy.deepcopy(model), FSDPModule)

    on_ranks(2, rank)


def test_all_methods_of_pytorch_are_there():
    """Each public method of PyTorch's class is served, accepted where it changes no value, or refused by name."""
    from torch.distributed.fsdp import FSDPModule as Theirs

    assert not [name for name in vars(Theirs) if not name.startswith("_") and not hasattr(FSDPModule, name)]

    def rank(mesh):
        dense, model = make(), fully_shard(make(), mesh=mesh)
        model.set_reduce_scatter_divide_factor(float(mesh.size()))
        model.set_force_sum_reduction_for_comms(True)
        model.set_allocate_memory_from_process_group_for_comm(True)
        model.set_symm_mem_for_comm()
        model.set_separate_reduce_scatter_group()
        model.set_reduce_scatter_max_input_buffers(2)
        model.set_reduce_scatter_unused_params(False)
        model.reset_iter_state()
        assert_trains(model, dense, 2, mesh.rank)
        for number in (0, -1, True, 1.5, None):
            with pytest.raises(PlanError) as caught:
                model.set_reduce_scatter_max_input_buffers(number)
            assert str(caught.value) == f"set_reduce_scatter_max_input_buffers: {number!r} must be a positive integer"
        with pytest.raises(PlanError) as caught:
            model.set_reduce_scatter_unused_params(True)
        assert str(caught.value) == (
            "set_reduce_scatter_unused_params: ranks may use different parameters without it, and a parameter that no "
            "rank uses has no gradient, as on one device; leave it out"
        )
        for name in ("set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"):
            with pytest.raises(PlanError) as caught:
                getattr(model, name)(None)
            assert str(caught.value) == (
                f"{name}: collectives of fully_shard are not replaced, since all ranks agree on them beforehand; to "
                "change gradients, use hooks of the parameters, which get the reduced gradients"
            )

    on_ranks(2, rank)


def test_values_travel_in_dataclasses():
    """Dataclasses between sharded modules, nested and frozen, train as on one device, and are cast by the policy."""
    import torch
    from torch import nn

    class Layer(nn.Linear):
        def forward(self, pair):
            seen.append((pair.x.dtype, pair.rest.scale.dtype, pair.rest.count))
            y = super().forward(pair.x)
            return Pair(torch.tanh(y), replace(pair.rest, scale=pair.rest.scale * y[..., :1]))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Layer(5, 7), Layer(7, 5)

        def forward(self, x):
            pair = self.second(self.first(Pair(x, Rest(x[..., :1], torch.tensor(3)))))
            return pair.x * pair.rest.scale

    seen = []

    def train():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        torch.manual_seed(1)
        dense = Model().double()
        for reshard in (True, False):
            model = copy.deepcopy(dense)
            for module in (model.first, model.second, model):
                fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
            assert_trains(model, copy.deepcopy(dense), 3, mesh.rank)

    def cast():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        layer = fully_shard(Layer(5, 5), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        given = Pair(torch.ones(2, 5), Rest(torch.ones(2, 1), torch.tensor(3)))
        seen.clear()
        out = layer(given)
        assert seen[0] == (torch.bfloat16, torch.bfloat16, torch.tensor(3))
        assert given.x.dtype is given.rest.scale.dtype is torch.float32
        assert out.rest.count is given.rest.count

    simulate(train, 3, platform="torch")
    simulate(cast, 2, platform="torch")


@dataclass(frozen=True)
class Rest:
    """A tensor to differentiate and one that is not."""

    scale: object
    count: object


@dataclass
class Pair:
    """A tensor and a dataclass."""

    x: object
    rest: Rest


def test_gathering_that_a_parameter_brings_along_is_refused():
    """A parameter whose class would change what is gathered is refused by name, and nothing of the module changed."""
    import torch

    class Quantized(torch.Tensor):
        def fsdp_pre_all_gather(self, _mesh):
            return (self.to(torch.bfloat16),), None

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        module = torch.nn.Linear(3, 2)
        module.weight = torch.nn.Parameter(module.weight.detach().as_subclass(Quantized))
        before = dict(module.named_parameters())
        with pytest.raises(PlanError) as info:
            fully_shard(module, mesh=mesh)
        assert str(info.value) == (
            "fully_shard: parameter weight has fsdp_pre_all_gather, which would not be called, since collectives of "
            "fully_shard are not replaced; exclude the parameter with ignored_params"
        )
        assert all(each is before[name] for name, each in module.named_parameters())
        fully_shard(module, mesh=mesh, ignored_params={module.weight})
        assert module.weight is before["weight"]

    simulate(rank, 2, platform="torch")
