"""Modules laid out by path have the outputs and gradients of one device; plans that do not fit are refused."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.shard.custom.sharding_plan import ShardingPlan, shard_module
from hyper_parallel.errors import MeshMismatchError, PlacementError, PlanError, ShardMismatchError
from hyper_parallel.platform.select import current_platform
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.simulate import simulate

torch_only = pytest.mark.platforms("torch")


def network(*, tied=False):
    """Two linear layers with a norm between them; sizes that two and three ranks do not divide."""
    import torch

    torch.manual_seed(3)
    layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 5)).double()
    if tied:
        layers[2].weight = torch.nn.Parameter(layers[0].weight.detach())
        layers = torch.nn.ModuleList([layers[0], torch.nn.Linear(5, 7).double()])
        layers[1].weight = layers[0].weight
    return layers


PLAN = {"0.weight": ("tp", "None"), "0.bias": ("tp",), "2.weight": ("None", "tp")}


@torch_only
@pytest.mark.parametrize("world", [2, 3])
def test_trains_like_one_device(world):
    """Output and every gradient equal the plain module's, with uneven shards and local inputs."""
    import torch

    def body():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        plain, sharded = network(), network()
        shard_module(sharded, mesh, ShardingPlan(PLAN, {"": ([Replicate()],)}, {"": [Shard(0)]}))
        x = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (4, 5)))
        seed = torch.from_numpy(np.random.default_rng(1).uniform(-1, 1, (4, 5)))
        out, wanted = sharded(x), plain(x)
        assert out.placements == (Shard(0),)
        out.backward(distribute_tensor(seed, mesh, [Shard(0)]))
        wanted.backward(seed)
        torch.testing.assert_close(out.full_tensor(), wanted, rtol=1e-12, atol=1e-12)
        compared = 0
        for (path, tensor), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(tensor, DTensor), path
            torch.testing.assert_close(tensor.grad.full_tensor(), other.grad, rtol=1e-12, atol=1e-12)
            compared += 1
        return compared

    assert simulate(body, world, platform="torch") == [6] * world


@pytest.mark.platforms("mindspore")
def test_the_same_on_mindspore():
    """A MindSpore cell laid out by the same plan has the gradients of one device."""

    def body():
        import mindspore as ms
        from mindspore import mint

        class Net(ms.nn.Cell):
            def __init__(self):
                super().__init__()
                self.up, self.down = mint.nn.Linear(5, 7), mint.nn.Linear(7, 4)

            def construct(self, x):
                """Two layers."""
                return self.down(mint.nn.functional.silu(self.up(x)))

        platform = current_platform()
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        plain, sharded = Net(), Net()
        weights = {name: np.random.default_rng(len(name)).uniform(-1, 1, tensor.shape).astype(np.float32)
                   for name, tensor in platform.parameters_dict(plain).items()}  # fmt: skip
        harness_of(platform).load_arrays(plain, weights)
        harness_of(platform).load_arrays(sharded, weights)
        plan = {"up.weight": ("tp", "None"), "up.bias": ("tp",), "down.weight": ("None", "tp")}
        shard_module(sharded, mesh, ShardingPlan(plan, {"": [Replicate()]}, {"": [Replicate()]}))
        x = platform.from_numpy(np.random.default_rng(0).uniform(-1, 1, (4, 5)).astype(np.float32))
        compared = 0
        steps = [
            harness_of(platform).training_step(net, lambda net=net: (net(x) * net(x)).sum()) for net in (plain, sharded)
        ]
        for path, wanted in steps[0].gradients.items():
            messages = steps[1].gradients[path].full_tensor()
            np.testing.assert_allclose(messages.asnumpy(), wanted.asnumpy(), rtol=2e-5, atol=2e-5)
            compared += 1
        return compared

    assert simulate(body, 3, platform="mindspore") == [4] * 3


@torch_only
def test_local_outputs_and_named_inputs():
    """`return_local_tensor` gives local tensors; inputs may be named; uneven local batches make one global batch."""
    import torch

    def body():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        model = network()
        plan = ShardingPlan({}, {"0": {"input": [Shard(0)]}}, None, [""])
        shard_module(model, mesh, plan)
        rows = (2, 2, 1)[mesh.rank]
        out = model(torch.ones(rows, 5, dtype=torch.float64))
        assert not isinstance(out, DTensor)
        return tuple(out.shape)

    assert simulate(body, 3, platform="torch") == [(2, 5), (2, 5), (1, 5)]


class Pair(NamedTuple):
    """Two tensors by name."""

    left: object
    right: object


@torch_only
@pytest.mark.parametrize("plain", [False, True])
def test_nested_inputs_and_outputs(plain):
    """Values in dicts, tuples and named tuples are laid out by a plan of the same nesting."""
    import torch

    class Nested(torch.nn.Module):
        def forward(self, batch, pair):
            assert batch["note"] == "kept"
            return {"sum": batch["x"] + pair.left, "both": Pair((pair.left * 2,), [pair.right])}

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model, rows = Nested(), [Shard(0)]
        layout = Layout.place(mesh, rows, (4, 3)).with_shape(None)
        outputs = {"sum": [Replicate()], "both": (([Shard(1)],), [None])}
        inputs = ({"x": rows}, (layout, Shard(0)))
        shard_module(model, mesh, ShardingPlan({}, {"": inputs}, {"": outputs}, [""] if plain else None))
        whole = torch.arange(12.0).reshape(4, 3)
        shard = whole.chunk(2)[mesh.rank]
        out = model({"x": shard, "note": "kept"}, Pair(shard, distribute_tensor(whole, mesh, [Replicate()])))
        messages = [out["sum"], out["both"].left[0], out["both"].right[0]]
        if plain:
            wanted = [whole * 2, whole[:, :2] * 2 if mesh.rank == 0 else whole[:, 2:] * 2, shard]
            return all(map(torch.equal, messages, wanted))
        assert [tensor.placements for tensor in messages] == [(Replicate(),), (Shard(1),), (Shard(0),)]
        return all(
            torch.equal(tensor.full_tensor(), wanted)
            for tensor, wanted in zip(messages, (whole * 2, whole * 2, whole), strict=True)
        )

    assert simulate(body, 2, platform="torch") == [True] * 2


@torch_only
def test_keys_that_end_in_input_and_output():
    """``0.input`` and ``output`` name the inputs of module ``0`` and the outputs of the whole; a module comes first."""
    import torch

    def laid_out(model, x, inputs, outputs):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        shard_module(model, mesh, ShardingPlan({}, inputs, outputs))
        return model(x[mesh.get_local_rank() : mesh.get_local_rank() + 2])

    def body():
        x = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (4, 5)))
        first = laid_out(network(), x, {"input": ([Shard(0)],)}, {"0.output": ([Replicate()],), "output": [Shard(1)]})
        second = laid_out(network(), x, {"": ([Shard(0)],)}, {"0": [Replicate()], "": [Shard(1)]})
        named = torch.nn.Sequential()
        named.add_module("input", torch.nn.Linear(5, 7).double())
        third = laid_out(named, x, {"input.input": [Shard(0)]}, {"input": [Shard(1)], "output": [Replicate()]})
        with pytest.raises(PlanError) as twice:
            laid_out(network(), x, {"0": None, "0.input": None}, None)
        with pytest.raises(PlanError) as unknown:
            laid_out(network(), x, {"9.input": None}, None)
        assert torch.equal(first.full_tensor(), second.full_tensor())
        return first.placements, third.placements, str(twice.value), str(unknown.value).splitlines()[1:]

    assert simulate(body, 3, platform="torch")[0] == (
        (Shard(1),),
        (Replicate(),),
        "shard_module: input_plan has two entries for '0': '0' and '0.input'",
        ["  - input_plan: '9' names no module; children of the module: 0, 1, 2"],
    )


@torch_only
def test_all_faults_of_a_plan_are_one_error():
    """Unmatched patterns, misfit placements and conflicting ties are one error, and no weight is touched."""

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = network(tied=True)
        plan = ShardingPlan(
            {
                "0.weight": [Shard(0)],
                "1.weight": [Shard(1)],
                "0.bias": [Shard(1)],
                "5.weight": [Shard(0)],
                "1.bias": None,
            },
            {"x": [Shard(0)]},
        )
        with pytest.raises(PlanError) as caught:
            shard_module(model, mesh, plan)
        assert not any(isinstance(tensor, DTensor) for tensor in model.parameters())
        return str(caught.value)

    assert simulate(body, 2, platform="torch")[0].splitlines() == [
        "shard_module: the plan does not match the module (5 problems); no parameter was changed:",
        "  - plan: 0.bias [7]: placements: Shard(1) names dim 1, the tensor has 1 dims",
        "  - plan: '5.weight' matches no parameter; children of the module: 0, 1",
        (
            "  - plan: 1.bias [7]: placements: got None; give one placement per mesh axis, such as [Replicate()], "
            "or one alias per dim"
        ),
        "  - input_plan: 'x' names no module; children of the module: 0, 1",
        "  - plan: tied weight with conflicting layouts: 0.weight -> [Shard(0)], 1.weight -> [Shard(1)]",
    ]


@torch_only
def test_inputs_that_do_not_fit_the_plan():
    """A wrong count, an unknown name, a non-tensor and inconsistent local shards are refused by name."""
    import torch

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = torch.ones(2, 5, dtype=torch.float64)
        messages = []
        for entry, value, error in (
            (([Shard(0)], None), x, PlacementError),
            ({"y": [Shard(0)]}, x, PlacementError),
            ([Shard(0)], 3, PlacementError),
            ([Shard(0)], torch.ones(1 + mesh.rank, 5), ShardMismatchError),
            (({"y": [Shard(0)]},), {"x": x}, PlacementError),
            ((([Shard(0)], [Shard(0)]),), [x], PlacementError),
            ([Shard(0)], distribute_tensor(x, other, [Shard(0)]), MeshMismatchError),
        ):
            model = network()
            shard_module(model, mesh, ShardingPlan({}, {"0": entry}))
            with pytest.raises(error) as caught:
                model[0](value)
            messages.append(str(caught.value))
        return messages

    assert simulate(body, 2, platform="torch")[0] == [
        "shard_module(0): input_plan has 2 entries, the call 1 positional arguments",
        "shard_module(0): input_plan names 'y'; the call has input",
        "shard_module(0): input must be a tensor to be laid out as [Shard(0)], got int",
        (
            "shard_module(0): the local shards of input do not form one f32[3@tp, 5] (rank 0: [1, 5], rank 1: [2, "
            "5]); every shard must have ceil(size / ranks) elements, except the last ones, which may have fewer"
        ),
        "shard_module(0): input has no 'y'; it has x",
        "shard_module(0): input is a sequence of 1, its entry is ([Shard(0)], [Shard(0)])",
        (
            "shard_module(0): input is on DeviceMesh(cpu, dp=2, ranks=[0, 1]), "
            "but the module is on DeviceMesh(cpu, tp=2, ranks=[0, 1])"
        ),
    ]


@torch_only
def test_what_is_no_plan():
    """A mapping instead of a ShardingPlan, None instead of its mapping, and paths that are not text are refused."""

    def body():
        messages = []
        for plan in (
            {"0.weight": [Shard(0)]},
            ShardingPlan(None),
            ShardingPlan({0: [Shard(0)]}),
            ShardingPlan(input_plan={"0": [Shard(0)], None: [Shard(0)]}),
            ShardingPlan(return_local_tensor=[1]),
        ):
            with pytest.raises(TypeError) as caught:
                shard_module(network(), init_device_mesh("cpu", (2,)), plan)
            messages.append(str(caught.value))
        return messages

    assert simulate(body, 2, platform="torch")[0] == [
        "shard_module: sharding_plan must be a ShardingPlan, got dict",
        "shard_module: plan must map paths to placements, got NoneType; {} replicates everything",
        "shard_module: a path in plan must be a str, got 0",
        "shard_module: a path in input_plan must be a str, got None",
        "shard_module: a path in return_local_tensor must be a str, got 1",
    ]


@torch_only
def test_a_tie_with_an_earlier_call_is_not_cut():
    """A second call over one of two modules with a tied weight is refused, unless it leaves the weight as it is."""

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layers = network(tied=True)
        shard_module(layers, mesh, ShardingPlan({"*.weight": ("tp", "None")}))
        shard_module(layers[1], mesh, ShardingPlan({}))
        with pytest.raises(PlanError) as caught:
            shard_module(layers[1], mesh, ShardingPlan({"weight": ("None", "tp")}))
        assert layers[0].weight is layers[1].weight
        return str(caught.value)

    assert simulate(body, 2, platform="torch")[0] == (
        "shard_module: the plan does not match the module (1 problem); no parameter was changed:\n  - plan: weight "
        "is tied to the weight of Linear, which an earlier call has placed and this call would not replace; give "
        "both modules their styles in one call, or give each module its own parameter before the first call"
    )
