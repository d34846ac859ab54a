"""``hyper_parallel.compile``: bit-equal to the uncompiled module, guarded by what its graphs depend on."""

from __future__ import annotations

import copy
import io
import shutil

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyper_parallel
from hyper_parallel import (
    ColwiseParallel,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    manual_seed,
    parallelize_module,
    record_events,
)
from hyper_parallel.core.dtensor.random import get_rng_state
from hyper_parallel.errors import ArgumentTypeError, MeshMismatchError, PlanError, UnsupportedOperatorError
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


class Block(nn.Module):
    """A norm, a wide layer and dropout around a residual."""

    def __init__(self, p=0.3):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        """``x_BLD -> y_BLD``."""
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def plan():
    """Sequence parallel outside of the layers, tensor parallel inside."""
    kept = {"use_local_output": False}
    return {
        "norm": SequenceParallel(**kept),
        "up": ColwiseParallel(input_layouts=Shard(1), **kept),
        "down": RowwiseParallel(output_layouts=Shard(1), **kept),
    }


def twins(mesh, p=0.3):
    """A parallel block, and its compiled copy."""
    torch.manual_seed(0)
    block = parallelize_module(Block(p), mesh, plan())
    return block, hyper_parallel.compile(copy.deepcopy(block))


def placed(mesh, *shape, seed=0, placements=None):
    """Random values, sharded along the sequence, that require grad."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return distribute_tensor(value, mesh, placements or [Shard(1)]).requires_grad_()


def run(module, x, cotangent, seed=5):
    """Output, gradients of input and parameters, and where random numbers go on."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    manual_seed(seed)
    y = module(x)
    y.backward(cotangent.detach())
    gradients = [parameter.grad.to_local().clone() for parameter in module.parameters()]
    return [y.to_local(), x.grad.to_local(), *gradients], y.layout, get_rng_state()


def assert_equal(compiled, eager, *args, **options):
    """Assert that both give the same bits in the same layouts."""
    mine, theirs = run(compiled, *args, **options), run(eager, *args, **options)
    assert mine[1] is theirs[1]
    assert mine[2] == theirs[2]
    for own, expected in zip(mine[0], theirs[0], strict=True):
        assert torch.equal(own, expected)


def graphs(module):
    """How many graphs a compiled module has."""
    return len(module.forward._graphs)


# Three leave unequal shares; two and four run the same code.
@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.sweep), 3, pytest.param(4, marks=pytest.mark.sweep)]
)
def test_forward_and_backward_have_the_bits_of_the_uncompiled_module(ranks):
    """Output, every gradient and the random stream are equal for shapes that come, go and come again."""

    def main():
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        eager, compiled = twins(mesh)
        for step, batch in enumerate((2, 3, 2, 1, 3)):
            x, cotangent = placed(mesh, batch, 5, 6, seed=step), placed(mesh, batch, 5, 6, seed=9 + step)
            assert_equal(compiled, eager, x, cotangent, seed=2**64 - 1 - step)
        assert graphs(compiled) == 3
        for module in (eager, compiled):
            module.eval()
        x, cotangent = placed(mesh, 2, 5, 6), placed(mesh, 2, 5, 6, seed=1)
        assert_equal(compiled, eager, x, cotangent)
        assert graphs(compiled) == 4
        with torch.no_grad():
            assert torch.equal(compiled(x).to_local(), eager(x).to_local())
        compiled.train(), eager.train()
        assert_equal(compiled, eager, x, cotangent)
        assert graphs(compiled) == 5

    simulate(main, ranks)


def _on_processes():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    eager, compiled = twins(mesh)
    for step in range(3):
        assert_equal(compiled, eager, placed(mesh, 2, 5, 6, seed=step), placed(mesh, 2, 5, 6, seed=9 + step))


def test_graphs_communicate_over_processes():
    """The collectives of a graph run on the transport of real processes."""
    launch(_on_processes, 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_backend_gets_graphs_of_operators_and_collectives(ranks):
    """A backend that runs the graphs as they are has the bits of the uncompiled module, random numbers included."""

    def main():
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        eager, given = parallelize_module(Block(), mesh, plan()), []

        def backend(graph, examples):
            given.append((len(examples), [str(node.target) for node in graph.graph.nodes]))
            return graph

        compiled = hyper_parallel.compile(copy.deepcopy(eager), backend=backend)
        for step in range(2):
            assert_equal(compiled, eager, placed(mesh, 2, 5, 6, seed=step), placed(mesh, 2, 5, 6, seed=9 + step))
        assert len(given) == 2
        for inputs, targets in given:
            assert inputs
            assert "hyper_parallel.collective.default" in targets
            assert any(target.startswith("aten.") for target in targets)
        assert "hyper_parallel.numbers.default" in given[0][1]

    simulate(main, ranks)


class WithPlainDropout(nn.Module):
    """A parallel block, and dropout of a plain tensor, whose numbers are PyTorch's own."""

    def __init__(self):
        super().__init__()
        self.block, self.weight = Block(), nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self, x):
        """``x_BLD -> y_BLD``, and a plain vector."""
        return self.block(x), torch.nn.functional.dropout(self.weight, 0.5).outer(self.weight).t()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="[no-tool] Inductor compiles by g++")
def test_inductor_is_within_its_tolerance():
    """Fused graphs under fully_shard and recomputation draw the same numbers, with results and gradients alike."""

    def main():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        results = []
        for backend in (None, "inductor"):
            torch.manual_seed(0)
            model = WithPlainDropout()
            parallelize_module(model.block, mesh["tp"], plan())
            hyper_parallel.compile(model, backend=backend)
            fully_shard(model, mesh=mesh["dp"])
            x = placed(mesh["tp"], 2, 4, 6, seed=mesh["dp"].get_local_rank())
            torch.manual_seed(3)
            manual_seed(3)
            y, plain = checkpoint(model, x, use_reentrant=False)
            torch.autograd.backward([y, plain], [y.detach(), plain.detach()])
            gradients = [parameter.grad.to_local() for parameter in model.parameters()]
            results.append([y.to_local(), plain, x.grad.to_local(), *gradients])
            assert plain.stride() == (1, 6)
        for eager, fused in zip(*results, strict=True):
            torch.testing.assert_close(fused, eager)
            assert fused.stride() == eager.stride()

    simulate(main, 4)


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(0.0), Block(0.0)])

    def forward(self, x):
        """``x_BLD -> y_BLD``."""
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (3, 1)])
def test_fully_shard_gathers_around_compiled_blocks(shape):
    """Three steps of compiled blocks, sharded over a data axis, have the bits of uncompiled ones."""

    def train(*, compiled):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = Stack()
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan())
            if compiled:
                hyper_parallel.compile(block)
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            local = torch.randn(
                2, 4, 6, generator=torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
            )
            y = model(distribute_tensor(local, mesh["tp"], [Shard(1)], src_data_rank=None))
            loss = (y * y).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.full_tensor().item())
        return losses, [parameter.to_local().clone() for parameter in model.parameters()]

    def main():
        losses, weights = train(compiled=True)
        expected, their_weights = train(compiled=False)
        assert losses == expected
        assert all(map(torch.equal, weights, their_weights))

    simulate(main, shape[0] * shape[1])


def test_recomputation_around_a_compiled_module_draws_the_same_numbers():
    """A checkpointed call runs its graph again in backward, with the dropout of the first run."""

    def main():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        eager, compiled = twins(mesh)
        x, cotangent = placed(mesh, 2, 4, 6), placed(mesh, 2, 4, 6, seed=1)
        gradients = []
        for module in (eager, compiled, lambda x: checkpoint(compiled, x, use_reentrant=False)):
            value = x.detach().clone().requires_grad_()
            manual_seed(3)
            module(value).backward(cotangent.detach())
            gradients.append(value.grad.to_local())
        assert torch.equal(gradients[0], gradients[1])
        assert torch.equal(gradients[0], gradients[2])

    simulate(main, 2)


class Scaled(nn.Module):
    """Several arguments and results, a buffer that forward writes, and an attribute that it reads."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 6.0))
        self.register_buffer("count", torch.zeros(()))
        self.factor = 2.0

    def forward(self, x, options, *, bias=None):
        """Return a dict with the result, the count and what was passed."""
        self.count.add_(1)
        y = torch.tanh(x * self.weight) * self.factor * options["scale"]
        return {"y": y if bias is None else y + bias, "mode": options["mode"], "x": x}


def test_attributes_arguments_buffers_and_results_are_followed():
    """A changed attribute or plain argument traces anew; buffers are written; results keep their structure."""

    def main():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        eager = parallelize_module(Scaled(), mesh, {"": hyper_parallel.NoParallel(use_local_output=False)})
        compiled = hyper_parallel.compile(copy.deepcopy(eager))
        x, bias = placed(mesh, 3, 5, placements=[Replicate()]), placed(mesh, 5, placements=[Replicate()], seed=2)
        for factor, scale in ((2.0, 1.0), (2.0, -0.0), (3.0, 1.0), (2.0, 1.0)):
            results = []
            for module in (eager, compiled):
                module.factor = factor
                out = module(x, {"scale": scale, "mode": "a"}, bias=bias)
                assert out["mode"] == "a"
                results.append([out["y"].to_local(), *torch.autograd.grad(out["y"].sum(), [x, bias, module.weight])])
            for mine, theirs in zip(*results, strict=True):
                assert torch.equal(*(getattr(value, "_local", value) for value in (mine, theirs)))
        assert graphs(compiled) == 3
        assert compiled.count.full_tensor().item() == 4

    simulate(main, 2)


class Settings:
    """An object without a comparison of its own, which holds itself."""

    def __init__(self, factor):
        self.factor, self.nested, self.me = factor, {"shift": [0.0]}, self


class Configured(nn.Module):
    """Two layers that share a configuration."""

    def __init__(self, settings):
        super().__init__()
        self.settings, self.layer = settings, nn.Linear(5, 5)
        self.layer.settings = settings

    def forward(self, x, options):
        """``x_BD -> y_BD``."""
        return self.layer(x) * self.settings.factor * options.factor + self.layer.settings.nested["shift"][0]


def test_fields_of_objects_are_followed():
    """A changed field of an attribute or an argument, however deep, traces anew; changed back, the first graph runs."""

    def main():
        settings, options = Settings(2.0), Settings(1.0)
        eager = Configured(settings)
        compiled = hyper_parallel.compile(copy.deepcopy(eager))
        compiled.settings = compiled.layer.settings = settings
        x = torch.randn(3, 5)
        for factor, shift, own in ((2.0, 0.0, 1.0), (3.0, 0.0, 1.0), (3.0, 1.0, 1.0), (3.0, 1.0, 2.0), (2.0, 0.0, 1.0)):
            settings.factor, settings.nested["shift"][0], options.factor = factor, shift, own
            assert torch.equal(compiled(x, options), eager(x, options))
        assert torch.equal(compiled(x, Settings(1.0)), eager(x, options))  # equal fields, another object
        assert graphs(compiled) == 4

    simulate(main, 2)


def test_copies_and_files_of_a_compiled_module_trace_for_themselves():
    """A deep copy computes with its own weights, a saved module too."""

    def main():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        eager, compiled = twins(mesh, p=0.0)
        x, cotangent = placed(mesh, 2, 4, 6), placed(mesh, 2, 4, 6, seed=1)
        assert_equal(compiled, eager, x, cotangent)
        file = io.BytesIO()
        torch.save(compiled, file)
        file.seek(0)
        copies = [copy.deepcopy(compiled), torch.load(file, weights_only=False)]
        with torch.no_grad():
            for parameter in compiled.parameters():
                parameter.zero_()
        for other in copies:
            assert_equal(other, eager, x, cotangent)

    simulate(main, 2)


def test_calls_that_are_followed_are_made_one_by_one():
    """The event log has the collectives of a compiled module."""

    def main():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        eager, compiled = twins(mesh, p=0.0)
        x = placed(mesh, 2, 4, 6)
        logs = []
        for module in (eager, compiled):
            module(x)
            with record_events() as log:
                module(x)
            logs.append([event.collective for event in log])
        assert logs[0] == logs[1]
        assert logs[0]

    simulate(main, 2)


def test_shards_whose_sizes_ranks_exchange_are_compared_at_each_call():
    """Another rank's uneven shard changes the global shape, and so the graph of every rank."""

    def main():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        styles = {"": ColwiseParallel(input_layouts=Shard(0), use_local_output=False)}
        eager = nn.Sequential(parallelize_module(nn.Linear(3, 5), mesh, styles))
        compiled = hyper_parallel.compile(copy.deepcopy(eager))
        for rows in ((2, 2), (2, 1), (2, 2)):
            local = torch.randn(rows[mesh.rank], 3)
            y, expected = compiled(local), eager(local)
            assert y.layout is expected.layout
            assert torch.equal(y.to_local(), expected.to_local())

    simulate(main, 2)


class Differentiating(nn.Module):
    """Returns a gradient, of which there are further gradients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        """Like ``x``."""
        (gradient,) = torch.autograd.grad(torch.tanh(self.linear(x)).square().sum(), x, create_graph=True)
        return gradient


def test_gradients_of_gradients():
    """Inside of forward they have the bits of the uncompiled module; through a compiled module they are refused."""

    def main():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        eager = hyper_parallel.distribute_module(Differentiating(), mesh)
        compiled = hyper_parallel.compile(copy.deepcopy(eager))
        assert_equal(compiled, eager, placed(mesh, 3, 6), placed(mesh, 3, 6, seed=1))
        _, block = twins(mesh, p=0.0)
        x = placed(mesh, 2, 4, 6)
        for _ in ("traced", "traced before"):
            (gradient,) = torch.autograd.grad((block(x) ** 2).sum(), [x], create_graph=True)
            with pytest.raises(UnsupportedOperatorError) as caught:
                torch.autograd.grad((gradient**2).sum(), [x])
            assert str(caught.value) == (
                "compile: gradients of gradients (create_graph=True) through a compiled module are not recorded; "
                "compute them with the uncompiled module"
            )

    simulate(main, 2)


class Careless(nn.Module):
    """A layer with one thing that a graph cannot hold."""

    def __init__(self, what):
        super().__init__()
        self.linear, self.what, self.other = nn.Linear(5, 5), what, None
        if what == "constant":
            self.table = torch.ones(5)

    def forward(self, x):
        """``x_BD -> y_BD``."""
        y = self.linear(x)
        if self.what == "values" and y.sum() > 0:
            return -y
        if self.what == "attribute":
            self.other = y
        if self.what == "argument":
            x.add_(1)
        if self.what == "constant":
            return y + self.table
        if self.what == "seed":
            manual_seed(1)
        return y


MESSAGES = {
    "attribute": "compile: forward of Careless assigns other, which a graph would do once only; return the value, or "
    "write to a buffer in place",
    "argument": "compile: forward of Careless writes to one of its arguments; clone() it first",
    "constant": "compile: forward of Careless reads a tensor that is neither an argument nor a parameter or buffer, "
    "and would be a constant in its graph; register it as a buffer, or pass it",
    "seed": "compile: forward of the compiled module seeds the random numbers of DTensors; seed them outside",
}


@pytest.mark.parametrize("what", [*MESSAGES, "values"])
def test_what_a_graph_cannot_hold_is_refused(what):
    """Values that decide, attributes, written arguments, captured tensors and seeds raise, and nothing is kept."""

    def main():
        module = hyper_parallel.compile(Careless(what))
        with pytest.raises(UnsupportedOperatorError) as caught:
            module(torch.ones(2, 5))
        if what == "values":
            assert str(caught.value).startswith("compile: forward of Careless depends on values of tensors (")
            assert str(caught.value).endswith("), which a graph cannot; compile the modules around that part")
        else:
            assert str(caught.value) == MESSAGES[what]
        assert graphs(module) == 0

    simulate(main, 2)


def test_plans_come_first_and_meshes_stay():
    """A plan after compile, a second compile, hooks inside, and tensors of another mesh are refused."""

    def main():
        mesh, other = (init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("tp", "dp"))
        late = hyper_parallel.compile(Block())
        parallelize_module(late, mesh, plan())
        with pytest.raises(PlanError) as caught:
            late(placed(mesh, 2, 4, 6))
        assert str(caught.value) == (
            "compile: norm.weight of Block was a plain tensor when the module was compiled, and is [6] on "
            f"{mesh!r} now; apply the plan first, then compile"
        )
        with pytest.raises(PlanError, match=r"^compile was applied to this Block before; apply it once$"):
            hyper_parallel.compile(late)
        _, compiled = twins(mesh)
        with pytest.raises(MeshMismatchError) as caught:
            compiled(placed(other, 2, 4, 6))
        assert str(caught.value) == (
            f"norm (LayerNorm): input is on {other!r}, but the module was parallelized on {mesh!r}; distribute input "
            "on the module's mesh"
        )
        with pytest.raises(ArgumentTypeError) as caught:
            hyper_parallel.compile(Block(), backend="eager")
        assert str(caught.value) == (
            "compile: backend 'eager' is not known; pass 'inductor', or a function of a graph and examples"
        )
        compiled(placed(mesh, 2, 4, 6))
        compiled.up.register_forward_hook(lambda *_: None)
        with pytest.raises(PlanError, match=r"^compile: up has a hook, .*, which a compiled graph would not call; "):
            compiled(placed(mesh, 2, 4, 6))
        stack = Stack()
        fully_shard(stack.blocks[0], mesh=mesh)
        with pytest.raises(PlanError, match=r"^compile: fully_shard was applied to blocks\.0, a submodule of the "):
            hyper_parallel.compile(stack)
        module = hyper_parallel.compile(Scaled())
        with pytest.raises(ArgumentTypeError, match=r"^compile: an argument of type bytearray cannot be compared"):
            module(torch.ones(5), {"scale": 1.0, "mode": bytearray()})

    simulate(main, 2)
