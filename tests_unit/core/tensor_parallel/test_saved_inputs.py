"""`input_reshard`: shards are kept instead of replicated inputs, with the bits of the module without it."""

from __future__ import annotations

import copy
import gc

import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    input_reshard,
    parallelize_module,
    record_events,
)
from hyper_parallel.errors import ArgumentTypeError, MeshError, PlanError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")
SIZES = (3, 7, 10)
WIDTH = 12
LAYERS = {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel()}
PLAIN = {**LAYERS, "mlp.down": RowwiseParallel()}
SEQUENCE = {
    "norm": SequenceParallel(use_local_output=False),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    **LAYERS,
    "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def block(mesh=None, plan=PLAIN, dim=None):
    """A gated MLP with a norm before it; the same weights on every call."""
    import torch
    from torch import nn

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = nn.Linear(SIZES[2], WIDTH, bias=False), nn.Linear(SIZES[2], WIDTH)
            self.down = nn.Linear(WIDTH, SIZES[2])

        def forward(self, x):
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(SIZES[2]), MLP()

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    torch.manual_seed(0)
    model = Block()
    if mesh is not None:
        parallelize_module(model, mesh, plan)
        input_reshard(model, mesh, dim)
    return model


def whole(tensor):
    """The values of a tensor or DTensor."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def step(model, mesh=None, call=None):
    """Output, gradients of the input and of every parameter, for random inputs and cotangents."""
    import torch

    x, weights = torch.randn(*SIZES, generator=torch.Generator().manual_seed(1)), torch.rand(SIZES)
    weights = torch.linspace(-1, 2, weights.numel()).reshape(SIZES)
    if mesh is not None:
        x, weights = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(weights, mesh, [Shard(1)])
    x.requires_grad_()
    output = (call or model)(x)
    (output * weights).sum().backward()
    return [whole(output), whole(x.grad), *[whole(parameter.grad) for parameter in model.parameters()]]


def equal(these, others):
    """Whether all have the same bits."""
    import torch

    return all(torch.equal(one, other) for one, other in zip(these, others, strict=True))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("plan", ["plain", "sequence"])
def test_values_keep_their_bits(plan, world):
    """Output and gradients are those without it, for each dim and uneven shards, with and without sequence shards."""

    def body():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        chosen, given = (PLAIN, None) if plan == "plain" else (SEQUENCE, mesh)
        expected = step(block(mesh, chosen), given)
        return [equal(expected, step(block(mesh, chosen, dim), given)) for dim in (0, 1, 2, -1)]

    assert simulate(body, world, platform="torch") == [[True] * 4] * world


def kept_for_backward(plan, dim, world=2):
    """Whether the input of the column-wise layers is alive between forward and backward, and what backward gathers."""

    def body():
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef

        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        model, inputs = block(mesh, plan, dim), []
        model.mlp.gate.register_forward_pre_hook(
            lambda _, args: inputs.append(StorageWeakRef(args[0].to_local().untyped_storage()))
        )
        x = torch.randn(SIZES, requires_grad=True)
        output = model(x if plan is PLAIN else distribute_tensor(x, mesh, [Shard(1)]))
        gc.collect()
        alive = not inputs[0].expired()
        with record_events() as log:
            output.sum().backward()
        return alive, [event.bytes for event in log if event.op == "input_reshard"]

    return simulate(body, world, platform="torch")


@pytest.mark.parametrize("plan", [PLAIN, SEQUENCE])
def test_the_input_is_freed_after_forward(plan):
    """Without it the complete input lives until backward; with it a shard does, and two layers gather it."""
    received = 3 * 4 * 10 * 4  # of seven rows in dim 1, a rank keeps four or three
    assert kept_for_backward(plan, None) == [(True, [])] * 2
    assert [alive for alive, _ in kept_for_backward(plan, 1)] == [False] * 2
    assert kept_for_backward(plan, 1)[0][1] == [received] * 2


def test_a_dim_shorter_than_the_axis_is_kept_complete():
    """Three of four ranks could have a shard of three rows: nothing is gathered, and the input stays."""
    assert kept_for_backward(PLAIN, 0, world=4) == [(True, [])] * 4


def on_two_ranks(body):
    """What `body(mesh)` returns on rank 0 of two."""
    return simulate(lambda: body(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))), 2, platform="torch")[0]


def test_further_derivatives_and_a_second_backward():
    """Second derivatives and a graph that is kept gather again, with the same bits."""
    import torch

    def derivatives(model):
        x = torch.randn(*SIZES, generator=torch.Generator().manual_seed(1)).requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        loss = first.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [whole(first), whole(x.grad), *[whole(parameter.grad) for parameter in model.mlp.parameters()]]

    assert on_two_ranks(lambda mesh: equal(derivatives(block(mesh)), derivatives(block(mesh, dim=1))))


def test_inside_and_around_recomputation():
    """Hooks further out see what it leaves: a checkpoint around the module or inside gives the same bits."""
    from torch.utils.checkpoint import checkpoint

    def body(mesh):
        expected, around, inside = step(block(mesh)), block(mesh, dim=1), block(mesh)
        forward = inside.mlp.forward
        inside.mlp.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
        input_reshard(inside, mesh, 1)
        recomputed = step(around, call=lambda x: checkpoint(around, x, use_reentrant=False))
        return equal(expected, recomputed), equal(expected, step(inside))

    assert on_two_ranks(body) == (True, True)


def test_what_it_leaves_goes_to_hooks_further_out():
    """Saved tensors that are no replicated inputs reach the program's own `saved_tensors_hooks`."""
    import torch

    def body(mesh):
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda value: seen.append(value) or value, lambda value: value):
            output = block(mesh, dim=1)(torch.randn(SIZES, requires_grad=True))
        output.sum().backward()
        rows = SIZES[0] * SIZES[1]
        return [(rows, size) in {tuple(value.shape) for value in seen} for size in (WIDTH // 2, SIZES[2])]

    assert on_two_ranks(body) == [True, False]


def test_a_module_inside_has_a_dim_of_its_own():
    """The innermost decides about what both know."""

    def body(mesh):
        model = block(mesh, dim=2)
        input_reshard(model.mlp, mesh, 1)
        return equal(step(block(mesh)), step(model))

    assert on_two_ranks(body)


def test_a_tensor_that_is_written_after_it_was_noted():
    """An input that forward writes in place is saved as it is then: complete, with the values of one without it."""

    def body(mesh):
        results = []
        for dim in (None, 1):
            model = block(mesh, dim=dim)
            forward = model.mlp.forward
            model.mlp.forward = lambda x, forward=forward: forward(x.mul_(0.5))
            results.append(step(model))
        return equal(*results)

    assert on_two_ranks(body)


def test_an_error_in_forward_ends_it():
    """After an exception the hooks are off, and the module works on."""
    import torch
    from torch import nn

    class Failing(nn.Module):
        def forward(self, x):
            raise ArithmeticError(str(x.shape))

    def body(mesh):
        model = block(mesh, dim=1)
        down, model.mlp.down = model.mlp.down, Failing()
        with pytest.raises(ArithmeticError):
            step(model)
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda value: seen.append(value) or value, lambda value: value):
            torch.ones(2, requires_grad=True).square()
        model.mlp.down = down
        return len(seen), equal(step(block(mesh)), step(model))

    assert on_two_ranks(body) == (1, True)


def test_copies_keep_shards_too():
    """A copy of the module has hooks of its own."""

    def body(mesh):
        model = block(mesh, dim=1)
        other, expected = copy.deepcopy(model), step(block(mesh))
        return equal(expected, step(other)), equal(expected, step(model))

    assert on_two_ranks(body) == (True, True)


def test_on_a_mesh_of_two_axes():
    """A tensor on (dp, tp) that is sharded along dp is replicated along `mesh["tp"]`, and sharded there."""

    def body():
        import torch

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        results = []
        for dim in (None, 1):
            torch.manual_seed(0)
            layer = torch.nn.Linear(SIZES[2], WIDTH)
            for name, parameter in list(layer.named_parameters()):
                placed = distribute_tensor(parameter, mesh, [Replicate(), Shard(0)])
                layer.register_parameter(name, torch.nn.Parameter(placed))
            input_reshard(layer, mesh["tp"], dim)
            x = distribute_tensor(torch.randn(SIZES), mesh, [Shard(0), Replicate()]).requires_grad_()
            with record_events() as log:
                layer(x).square().sum().backward()
            gathers = sum(event.op == "input_reshard" for event in log)
            results.append(([whole(x.grad), whole(layer.weight.grad), whole(layer.bias.grad)], gathers))
        (expected, none), (values, one) = results
        return equal(expected, values), none, one

    assert simulate(body, 4, platform="torch") == [(True, 0, 1)] * 4


def test_misuse():
    """What it cannot take is refused before the first forward; None as the dim does nothing."""
    import torch

    def body(mesh):
        messages = []
        square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        for kind, arguments in (
            (ArgumentTypeError, (block(mesh), mesh, "rows")),
            (MeshError, (block(mesh), square, 1)),
            (PlanError, (block(), mesh, 1)),
        ):
            with pytest.raises(kind) as caught:
                input_reshard(*arguments)
            messages.append(str(caught.value))
        plain = torch.nn.Linear(2, 2)
        assert input_reshard(plain, mesh) is plain
        return messages

    assert on_two_ranks(body) == [
        "input_reshard: input_reshard_dim must be an integer or None, not 'rows'",
        "input_reshard: DeviceMesh(cpu, dp=1, tp=2, ranks=[0, 1]) has 2 axes; pass one of them, such as mesh['tp']",
        (
            "input_reshard: no parameter of Block is a DTensor, so nothing in it is known to be replicated; call "
            "parallelize_module first"
        ),
    ]


def test_with_compile():
    """A compiled module saves what its graph says: both together are refused, in either order."""
    import torch

    import hyper_parallel

    def body(mesh):
        with pytest.raises(PlanError) as caught:
            hyper_parallel.compile(block(mesh, dim=1))
        model = block(mesh)
        hyper_parallel.compile(model)
        input_reshard(model, mesh, 1)
        with pytest.raises(PlanError) as again:
            model(torch.randn(SIZES))
        return {str(caught.value), str(again.value)}

    message = (
        "compile: input_reshard was applied to norm or around it, but a compiled graph keeps what it saves as it is; "
        "compile, or call input_reshard, not both"
    )
    assert on_two_ranks(body) == {message}
