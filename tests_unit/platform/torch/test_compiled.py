"""``torch.compile`` beside DTensors: graphs of the plain parts, calls on DTensors between them, equal to eager."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from hyper_parallel.core.data_parallel import fully_shard
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_module, distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.shard.custom.function_map import local_map
from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from hyper_parallel.platform.torch.compiled import configure_loaded_compiler, end_graph_at
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")
on_simulated_ranks = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="[no-tool] torch.compile on simulated ranks needs PyTorch 2.13"
)


class Block(nn.Module):
    """A layer whose control flow depends on a size, with two outputs."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x):
        """Return the output, and a sum of what was inside."""
        if x.shape[0] > 4:
            x = 2 * x
        hidden = torch.sin(self.norm(x)) + 1
        return x + torch.cos(self.down(torch.relu(self.up(hidden)))), hidden.sum()


class Model(nn.Module):
    """Two such layers between tied weights."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 5), nn.Linear(5, 11, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        """Return logits."""
        x = self.embedding(ids)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)


def styles(model, mesh):
    """Tensor parallelism; values between modules are plain."""
    parallelize_module(model, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})
    return model


def dtensors(model, mesh):
    """Tensor parallelism in which every value is a DTensor."""
    plan = {
        "blocks.*.up": ColwiseParallel(use_local_output=False),
        "blocks.*.down": RowwiseParallel(use_local_output=False),
    }
    return distribute_module(parallelize_module(model, mesh, plan), mesh)


def sharded(model, mesh):
    """Fully sharded data parallelism."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor):
    """The value of a tensor, global where it is a DTensor."""
    value = tensor.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def trained(parallelize, backend):
    """Train a compiled and an eager copy for steps of several batch sizes; return how many graphs there were."""
    from torch._dynamo.testing import CompileCounterWithBackend

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(3)
    model = Model()
    eager, compiled = (parallelize(copy.deepcopy(model), mesh) for _ in range(2))
    counter = CompileCounterWithBackend(backend)
    forwards = (eager, torch.compile(compiled, backend=counter))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (eager, compiled)]
    for size in (3, 5, 6, 3):
        ids, cotangent = torch.randint(0, 11, (size, 4)), torch.randn(size, 4, 11)
        if parallelize is dtensors:
            ids, cotangent = (distribute_tensor(value, mesh, [Replicate()]) for value in (ids, cotangent))
        outputs = [forward(ids) for forward in forwards]
        losses = [(output * cotangent).sum() for output in outputs]
        for loss in losses:
            loss.backward()
        assert torch.equal(whole(outputs[0]), whole(outputs[1]))
        assert torch.equal(whole(losses[0]), whole(losses[1]))
        for (name, own), other in zip(eager.named_parameters(), compiled.parameters(), strict=True):
            assert torch.equal(whole(own.grad), whole(other.grad)), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, own), other in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert torch.equal(whole(own), whole(other)), name
    return counter.frame_count


@on_simulated_ranks
@pytest.mark.parametrize("parallelize", [styles, dtensors, pytest.param(sharded, marks=pytest.mark.sweep)])
def test_compiled_models_are_equal_to_eager_ones(parallelize):
    """Outputs, losses, gradients and weights of steps of several batch sizes are those without a compiler, bit by bit.

    What is plain between the styles is compiled; a model that is all DTensors has no graph.
    """
    graphs = simulate(trained, 3, "torch", args=(parallelize, "aot_eager"), timeout=600)
    assert graphs[0] == graphs[1] == graphs[2]
    assert bool(graphs[0]) is (parallelize is not dtensors)


def on_process():
    """One process's part of the test below, which has no module of the tests."""
    return trained(styles, "eager")


@pytest.mark.sweep
def test_on_real_processes():
    """On real processes a compiled model is equal to the eager one, too."""
    graphs = launch(on_process, 2, "torch", timeout=600)
    assert graphs[0] == graphs[1] > 0


def refusal():
    """Return the text of a graph that may not end at a DTensor; a local function is one graph all the same."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(1)])
    with pytest.raises(Exception, match="cannot hold a DTensor") as caught:
        torch.compile(lambda value: torch.tanh(value @ value.T), backend="eager", fullgraph=True)(x)
    local = local_map(
        torch.compile(lambda value: value.sin() + 1, backend="eager", fullgraph=True), [Shard(1)], device_mesh=mesh
    )
    torch.testing.assert_close(local(x).full_tensor(), x.full_tensor().sin() + 1)
    end_graph_at("of which no graph is traced")
    assert not is_traceable_wrapper_subclass(x)
    return str(caught.value)


@on_simulated_ranks
def test_a_graph_that_may_not_end_is_refused():
    """``fullgraph=True`` on a DTensor names its layout and what to write; local functions may be one graph."""
    assert (
        "a graph of torch.compile cannot hold a DTensor, but the traced code uses one (f32[2, 3@tp]); leave out "
        "fullgraph=True, and calls on DTensors run between the graphs, or compile functions of local tensors: "
        "hyper_parallel.local_map(torch.compile(function, fullgraph=True), ...)"
    ) in simulate(refusal, 2, "torch", timeout=600)[0]


def scaled(x):
    """A function in which the compiler takes the rank for a constant."""
    return x * (dist.get_rank() + 1)


def in_world(x):
    """A function in which the compiler takes for constants whether there is a world, and the rank."""
    return scaled(x) if dist.is_initialized() else x * 100


@on_simulated_ranks
def test_code_that_was_compiled_outside_is_compiled_again_on_ranks():
    """What ranks compile does not use the code of a call outside of them, in which there is no world."""
    assert torch.compile(in_world, backend="eager")(torch.ones(1)).tolist() == [100.0]

    def on_rank():
        return torch.compile(in_world, backend="eager")(torch.ones(1)).item()

    assert simulate(on_rank, 3, "torch", timeout=600) == [1.0, 2.0, 3.0]
    assert torch.compile(in_world, backend="eager")(torch.ones(1)).tolist() == [100.0]


@on_simulated_ranks
def test_functional_collectives_are_part_of_a_graph():
    """With PyTorch's own group, functional collectives are traced as without this package, and equal to eager ones."""

    def on_rank():
        world, x = dist.group.WORLD, torch.ones(2) + dist.get_rank()

        def collected(x):
            rows = functional.all_gather_tensor(functional.all_reduce(x, "sum", world), 0, world)
            return functional.wait_tensor(rows) + 1

        return torch.equal(torch.compile(collected, backend="aot_eager", fullgraph=True)(x), collected(x))

    assert simulate(on_rank, 3, "torch", timeout=600) == [True] * 3


@on_simulated_ranks
def test_simulated_ranks_have_compiled_code_of_their_own():
    """The rank is a constant of compiled code, so each simulated rank has its own, also after a collective inside."""

    def on_rank():
        compiled = torch.compile(scaled, backend="eager")

        def communicating(x):
            dist.all_reduce(x)
            return compiled(x)

        first = compiled(torch.ones(2)).tolist()
        return first, torch.compile(communicating, backend="eager")(torch.ones(2)).tolist()

    assert simulate(on_rank, 3, "torch", timeout=600) == [
        ([1.0, 1.0], [3.0, 3.0]), ([2.0, 2.0], [6.0, 6.0]), ([3.0, 3.0], [9.0, 9.0])
    ]  # fmt: skip


def test_code_that_is_compiled_while_other_code_is_is_refused_too():
    """A rank whose compilation begins during another one, of which PyTorch's callbacks hear nothing, is refused."""
    shared = torch.compile(lambda x: in_world(x) + 3, backend="eager")

    def on_rank():
        with pytest.raises(Exception, match="was called outside"):
            shared(torch.ones(2))

    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(1))
    callbacks = torch._dynamo.callback.callback_handler
    with callbacks.install_callbacks(torch._dynamo.callback.CallbackTrigger.DYNAMO, "0"):
        simulate(on_rank, 2, "torch", timeout=600)


def test_compiled_code_that_ranks_would_share_is_refused():
    """A function that was compiled outside of the ranks would answer each with the constants of the first."""
    shared = torch.compile(in_world, backend="eager")

    def on_rank():
        with pytest.raises(Exception, match="was called outside") as caught:
            shared(torch.ones(2))
        return str(caught.value)

    def refused():
        return (
            "torch.compile was called outside of the function that each simulated rank runs, so that ranks would share "
            "compiled code, in which the rank is a constant; call torch.compile in that function, or run the program "
            "on real processes"
        ) in simulate(on_rank, 2, "torch", timeout=600)[1]

    assert refused()
    for _ in range(2):
        assert shared(torch.ones(2)).tolist() == [100.0, 100.0]
        assert refused()
    torch._dynamo.reset()
    assert refused()
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).tolist() == [2.0]


def test_a_compiler_that_is_loaded_first(monkeypatch):
    """The compiler gets this package's check once if it is loaded already, and is not loaded for that."""
    from torch._dynamo import callback_handler

    configure_loaded_compiler()
    check = vars(callback_handler)["install_callbacks"]
    configure_loaded_compiler()
    assert callback_handler.install_callbacks is check
    monkeypatch.delattr(callback_handler, "install_callbacks")
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    configure_loaded_compiler()
    assert "install_callbacks" not in vars(callback_handler)
