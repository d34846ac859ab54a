from __future__ import annotations

import copy

import pytest

from hyper_parallel import DTensor, Shard, clip_grad_norm_, init_device_mesh
from hyper_parallel.core.data_parallel import fully_shard, no_sync
from hyper_parallel.errors import MeshError, MixedTensorError, PlanError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def random(*shape, seed=0):
    """Normal float64 values from a fresh generator."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_model():
    """Three blocks of odd sizes: one called twice, one tied weight, a frozen and an unused parameter."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width, hidden):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
            self.scale = nn.Parameter(torch.ones(1))
            self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
            self.unused = nn.Parameter(torch.ones(3, 2))

        def forward(self, x):
            return x * self.frozen + self.fc2(torch.tanh(self.fc1(x))) * self.scale

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 5)
            self.first, self.second = Block(5, 7), Block(5, 3)
            self.head = nn.Linear(5, 11)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.first(self.second(self.first(self.embed(tokens)))))

    model = Model().double()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(random(*parameter.shape, seed=50 + index) * 0.5)
    return model


def batch(rank, step):
    """Tokens and cotangent of one rank's batch."""
    import torch

    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 11, (2, 3), generator=generator), random(2, 3, 11, seed=7 + 100 * step + rank)


def assert_same(mine, theirs, what):
    """Equal up to rounding in float64."""
    import torch

    assert (mine is None) == (theirs is None), what
    if mine is not None:
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(
            whole.detach(), theirs.detach(), rtol=1e-10, atol=1e-10, msg=lambda t: f"{what}: {t}"
        )


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_training_equals_one_device(world, reshard):
    """Gradients, clipped norms and weights over AdamW steps are those of one device, for uneven and empty shards."""
    import torch

    source = make_model()

    def rank():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        dense, model = copy.deepcopy(source), copy.deepcopy(source)
        for block in (model.first, model.second, model):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (dense, model)]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for each in range(world):
                tokens, cotangent = batch(each, step)
                dense(tokens).backward(cotangent / world)
            tokens, cotangent = batch(mesh.rank, step)
            for part in (0.25, 0.75):  # gradients of two backward passes are added
                model(tokens).backward(cotangent * part)
            pairs = list(zip(dense.named_parameters(), model.parameters(), strict=True))
            assert len(pairs) == 16
            for (name, theirs), mine in pairs:
                assert mine.placements == (Shard(0),)
                assert_same(mine.grad, theirs.grad, f"gradient of {name}")
            norms = [torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5), clip_grad_norm_(model.parameters(), 0.5)]
            assert_same(norms[1], norms[0], "norm")
            for optimizer in optimizers:
                optimizer.step()
            for (name, theirs), mine in pairs:
                assert_same(mine, theirs, name)

    simulate(rank, world, platform="torch")


def on_ranks(world, fn):
    """Run ``fn(mesh)`` on every simulated rank."""
    return simulate(lambda: fn(init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))), world, platform="torch")


def counted(group):
    """Storage in elements of the gathered parameters of ``group``."""
    return sum(member.whole.untyped_storage().nbytes() // 8 for member in group.members)


def test_ignored_parameters_stay_as_they_are():
    """Ignored parameters keep their values, their objects and each rank's own gradients; the others are averaged."""

    def rank_code():
        import torch

        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        layer = torch.nn.Linear(5, 4).double()
        with torch.no_grad():
            layer.weight.copy_(random(4, 5))
        bias = layer.bias
        fully_shard(layer, mesh=mesh, ignored_params={bias, torch.nn.Parameter(torch.ones(2))})
        assert layer.bias is bias
        cotangents = [random(3, 4, seed=10 + rank) for rank in range(3)]
        layer(random(3, 5, seed=mesh.rank)).backward(cotangents[mesh.rank])
        torch.testing.assert_close(bias.grad, cotangents[mesh.rank].sum(0))
        total = sum(cotangents[rank].T @ random(3, 5, seed=rank) for rank in range(3)) / 3
        torch.testing.assert_close(layer.weight.grad.full_tensor(), total)

    simulate(rank_code, 3, "torch")


def test_one_collective_per_group_and_storage_is_freed(monkeypatch):
    """Per group: two all-gathers and one reduce-scatter of the planned size; nothing gathered stays, within bounds."""
    import torch

    from hyper_parallel.platform.select import get_torch_platform

    platform, calls = get_torch_platform(), []

    def recorded(name, call):
        def record(data, *args, **kwargs):
            calls.append((name, data.numel()))
            return call(data, *args, **kwargs)

        return record

    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        monkeypatch.setattr(platform, name, recorded(name, getattr(platform, name)), raising=False)

    def rank(mesh):
        model = torch.nn.Sequential(*(torch.nn.Linear(5, 5).double() for _ in range(3)))
        peak = [0]
        groups = []
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            groups += layer._hyper_parallel_fully_sharded

        def look(*_):
            peak[0] = max(peak[0], sum(counted(group) for group in groups))

        for layer in model:
            layer.register_forward_hook(look, prepend=True)
        fully_shard(model, mesh=mesh)
        x = random(2, 5, seed=mesh.rank).requires_grad_()
        (x * 1).register_hook(look)
        model(x * 1).sum().backward()
        assert peak[0] == 30
        assert sum(counted(group) for group in groups) == 0

    on_ranks(3, rank)
    gathers = [size for name, size in calls if name == "all_gather_into_tensor"]
    reduces = [size for name, size in calls if name == "reduce_scatter_tensor"]
    assert gathers == [12 + 3] * (3 * 3 * 2)
    assert reduces == [3 * (12 + 2 + 3)] * (3 * 3)


def test_evaluation_recompute_and_a_stale_graph():
    """Evaluation frees, recomputation has the same gradients, and backward through old values is refused."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def rank(mesh):
        torch.manual_seed(0)
        dense = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
        model = fully_shard(copy.deepcopy(dense), mesh=mesh)
        x = random(2, 4)
        with torch.no_grad():
            assert_same(model(x), dense(x), "output")
        assert counted(model._hyper_parallel_fully_sharded[0]) == 0
        checkpoint(model, x, use_reentrant=False).sum().backward()
        dense(x).sum().backward()
        for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
            assert_same(mine.grad, theirs.grad, "gradient")
        loss = model(x).sum()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    on_ranks(2, rank)


def test_parameters_meet_plain_tensors_in_calls_of_their_module_alone():
    """A slice of a sharded Sequential has shards in it, which the error says; from_local would take other data."""
    import torch

    def rank(mesh):
        model = fully_shard(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)), mesh=mesh)
        text = (
            "linear: an operand is this rank's shard of a parameter, and others are plain tensors; fully_shard gathers "
            "parameters for calls of the module that it was applied to: call that module, or use "
            "register_fsdp_forward_method(module, name) for a method of it"
        )
        for call in (model[:1], lambda x: torch.nn.functional.linear(x, model[0].weight)):
            with pytest.raises(MixedTensorError) as info:
                call(torch.ones(4, 3))
            assert str(info.value) == text
        assert model(torch.ones(4, 3)).shape == (4, 2)

    on_ranks(3, rank)


def test_what_cannot_be_sharded_is_refused():
    """One clear line for each kind of bad input."""
    import torch

    def refused(error, message, fn):
        with pytest.raises(error) as info:
            fn()
        assert str(info.value) == message

    def rank(mesh):
        linear = fully_shard(torch.nn.Linear(3, 2), mesh=mesh)
        refused(
            PlanError,
            "fully_shard was applied to this Linear before; apply it once",
            lambda: fully_shard(linear, mesh=mesh),
        )
        refused(
            PlanError,
            "fully_shard: ignored_params holds the name 'weight'; pass the parameter itself",
            lambda: fully_shard(torch.nn.Linear(3, 2), mesh=mesh, ignored_params=["weight"]),
        )
        for container in (
            torch.nn.ModuleList([torch.nn.Linear(3, 2)]),
            torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2)}),
            torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2))]),
        ):
            refused(
                PlanError,
                f"fully_shard: this {type(container).__name__} is never called, so nothing would gather its "
                "parameters; apply fully_shard to each module inside, or to the module that contains it",
                lambda container=container: fully_shard(container, mesh=mesh),
            )
        layer = torch.nn.Linear(3, 1)
        for ignored, held in (([layer], "a Linear"), (layer.named_parameters(), "a tuple")):
            refused(
                PlanError,
                f"fully_shard: ignored_params holds {held}; pass the parameter itself",
                lambda ignored=ignored: fully_shard(layer, mesh=mesh, ignored_params=ignored),
            )
        refused(
            PlanError,
            "fully_shard: ignored_params is a parameter; pass a list of parameters",
            lambda: fully_shard(layer, mesh=mesh, ignored_params=layer.bias),
        )
        grid = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
        text = (
            r"has 3 axes; pass the data axis, as in mesh\['pp'\], or an axis of replicas and the data axis, as in mesh"
        )
        with pytest.raises(MeshError, match=text):
            fully_shard(torch.nn.Linear(3, 2), mesh=grid)
        scalar = torch.nn.Module()
        scalar.value = torch.nn.Parameter(torch.ones(()))
        refused(
            PlanError,
            "fully_shard: parameter value has no dim to shard; give it the shape (1,)",
            lambda: fully_shard(scalar, mesh=mesh),
        )
        tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        tied[1].weight = tied[0].weight
        fully_shard(tied[0], mesh=mesh)
        with pytest.raises(PlanError, match=r"^fully_shard: parameter 1.weight is shared with a module that is"):
            fully_shard(tied, mesh=mesh)
        with pytest.raises(PlanError) as info:
            fully_shard(tied[1], mesh=mesh)
        assert str(info.value) == (
            "fully_shard: parameter weight is shared with a module that is sharded by itself; shard both with one "
            "fully_shard of a module that holds them"
        )
        parent = torch.nn.Sequential(torch.nn.Linear(2, 2))
        parent[0].weight = linear.weight
        order = (
            "was sharded before, by fully_shard of another module that holds it, such as one that contains this "
            "module; apply fully_shard to inner modules first, and then to the modules that contain them"
        )
        refused(PlanError, f"fully_shard: parameter 0.weight {order}", lambda: fully_shard(parent, mesh=mesh))
        outer = fully_shard(torch.nn.Sequential(torch.nn.Linear(2, 2)), mesh=mesh)
        refused(PlanError, f"fully_shard: parameter weight {order}", lambda: fully_shard(outer[0], mesh=mesh))
        with pytest.raises(PlanError, match=r"create_graph=True\) is not supported"):
            linear(torch.ones(1, 3)).pow(2).sum().backward(create_graph=True)

    on_ranks(2, rank)


def test_an_optimizer_from_before_sharding_is_refused():
    """A step on parameters that fully_shard has replaced would train nothing: it is an error that says what to do."""
    import torch

    def rank(mesh):
        linear = torch.nn.Linear(3, 2)
        early = torch.optim.SGD(linear.parameters(), lr=0.1)
        fully_shard(linear, mesh=mesh)
        linear(random(2, 3).float()).sum().backward()
        with pytest.raises(PlanError) as info:
            early.step()
        assert str(info.value) == (
            "optimizer step: parameter 0 of group 0 is Linear.weight from before fully_shard, which no longer trains; "
            "build the optimizer after fully_shard"
        )
        torch.optim.SGD(linear.parameters(), lr=0.1).step()

    on_ranks(2, rank)


@pytest.mark.parametrize("reshard", [True, False])
def test_backward_from_a_value_that_left_forward_unseen_is_refused(reshard):
    """An attribute, or an object of a class of its own: its gradient would never be reduced, so it is an error."""
    import torch

    class Box:
        def __init__(self, value):
            self.value = value

    class Hidden(torch.nn.Linear):
        def forward(self, x):
            self.kept = super().forward(x)
            return Box(self.kept)

    class Biased(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            self.kept = x + self.bias
            return Box(self.kept)

    def rank(mesh):
        x = torch.ones(2, 3, requires_grad=True)
        for make, freed in ((lambda: Hidden(3, 2), True), (Biased, False)):
            module = fully_shard(make(), mesh=mesh, reshard_after_forward=reshard)
            boxed = module(x)
            for value in (boxed.value, module.kept):
                with pytest.raises((PlanError, RuntimeError)) as info:
                    value.sum().backward(retain_graph=True)
                if freed:
                    assert "modified by an inplace operation" in str(info.value)
                else:
                    assert str(info.value) == (
                        "fully_shard: backward through module group 0 (Biased) began at a value that is not an output "
                        "of its forward; return the value, in a dataclass or a structure that torch.utils._pytree knows"
                    )
            assert all(parameter.grad is None for parameter in module.parameters())

    on_ranks(2, rank)


def test_a_seen_and_an_unseen_value_together_are_reduced():
    """A bias whose gradient comes from an attribute after the module's own backward is still reduced, once."""
    import torch

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            self.kept = x + self.bias
            return x * self.bias

    def rank(mesh):
        dense, model = Both(), fully_shard(Both(), mesh=mesh)
        for each in range(2):
            y = dense(torch.full((3,), 1.0 + each)).sum()
            ((y + dense.kept.square().sum()) / 2).backward()
        y = model(torch.full((3,), 1.0 + mesh.rank)).sum()
        (y + model.kept.square().sum()).backward()
        assert_same(model.bias.grad, dense.bias.grad, "gradient")

    on_ranks(2, rank)


def test_after_a_backward_that_raises_training_goes_on():
    """A step on what it left behind is refused, and the next forward and backward are right."""
    import torch

    def fail(_gradient):
        raise ValueError("stop here")

    def fail_in_backward(_module, _inputs, output):
        output.register_hook(fail)

    def rank(mesh):
        torch.manual_seed(0)
        dense = torch.nn.Sequential(*(torch.nn.Linear(3, 3).double() for _ in range(3)))
        model = copy.deepcopy(dense)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = random(2, 3)
        for _ in range(2):
            model(x).sum().backward()
            handle = model[1].register_forward_hook(fail_in_backward)
            loss = model(x).sum()
            handle.remove()
            with pytest.raises(ValueError, match="stop here"):
                loss.backward()
            with pytest.raises(PlanError) as info:
                optimizer.step()
            assert str(info.value) == (
                "optimizer step: the gradient of parameter 2 of group 0 is not reduced: a backward through module "
                "group 1 (Linear) has not ended"
            )
            optimizer.zero_grad(), dense.zero_grad()
            model(x).sum().backward()
            dense(x).sum().backward()
            for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
                assert_same(mine.grad, theirs.grad, "gradient")
            optimizer.zero_grad(), dense.zero_grad()

    on_ranks(2, rank)


@pytest.mark.parametrize("world", [2, 3])
def test_a_backward_that_raises_leaves_no_gradient_behind(world):
    """Modules hold their shards again at once, and what was in flight is not added after ``zero_grad``."""
    import torch

    def fail(_gradient):
        raise ValueError("stop here")

    def rank(mesh):
        torch.manual_seed(0)
        dense = torch.nn.Sequential(*(torch.nn.Linear(3, 3).double() for _ in range(3)))
        for zeroed in ("module", "optimizer"):
            model = copy.deepcopy(dense)
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            zero_grad = (model if zeroed == "module" else torch.optim.SGD(model.parameters(), lr=0.1)).zero_grad
            for at in (1, 0, 2):
                x = random(2, 3).requires_grad_()
                handle = model[at].register_forward_pre_hook(lambda _, inputs: (Failing.apply(inputs[0]),))
                loss = model(x).sum()
                handle.remove()
                with pytest.raises(ValueError, match="stop here"):
                    loss.backward()
                assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
                zero_grad()
                dense.zero_grad()
                for each in (model, dense):
                    each(x).square().sum().backward()
                for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
                    assert_same(mine.grad, theirs.grad, "gradient")

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x * 1

        @staticmethod
        def backward(_ctx, gradient):
            fail(gradient)

    on_ranks(world, rank)


def test_a_backward_that_raises_elsewhere_leaves_a_forward_alone():
    """A plain backward that raises within a sharded forward, or beside one, changes no gradient."""
    import torch

    def fail(_gradient):
        raise ValueError("stop here")

    class Trying(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(3, 3).double()
            self.last = torch.nn.Linear(3, 3).double()

        def forward(self, x):
            hidden = self.inner(x)
            with torch.enable_grad():
                other = hidden.detach().requires_grad_()
                product = other * 2
                product.register_hook(fail)
                with pytest.raises(ValueError, match="stop here"):
                    product.sum().backward()
            return self.last(hidden)

    def rank(mesh):
        torch.manual_seed(0)
        dense = Trying()
        model = copy.deepcopy(dense)
        fully_shard(model.inner, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(3):
            for each in (model, dense):
                each.zero_grad()
                each(random(2, 3)).square().sum().backward()
            for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
                assert_same(mine.grad, theirs.grad, "gradient")

    on_ranks(2, rank)


def test_requires_grad_of_values_made_after_sharding_counts():
    """What is frozen or unfrozen between sharding on the meta device and the first forward trains accordingly."""

    def rank(mesh):
        import torch

        for frozen in ("weight", "bias"):
            with torch.device("meta"):
                model = torch.nn.Linear(3, 5)
                model.bias.requires_grad_(False)
            fully_shard(model, mesh=mesh).to_empty(device="cpu")
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name != frozen)
                torch.nn.init.ones_(parameter)
            model(torch.full((2, 3), 2.0)).sum().backward()
            grads = {name: parameter.grad for name, parameter in model.named_parameters()}
            assert grads.pop(frozen) is None
            [(name, gradient)] = grads.items()
            assert gradient.full_tensor().tolist() == ([[4.0] * 3] * 5 if name == "weight" else [2.0] * 5)

    on_ranks(2, rank)


def test_a_backward_within_a_forward_is_reduced():
    """A module whose forward trains its submodules leaves reduced gradients behind."""
    import torch

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2).double()

        def forward(self, x):
            self.layer(x).square().sum().backward()

    def rank(mesh):
        torch.manual_seed(0)
        dense = Step()
        model = copy.deepcopy(dense)
        fully_shard(model.layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(3):
            model(random(4, 3, seed=mesh.rank))
            for each in range(2):
                dense(random(4, 3, seed=each))
        for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
            assert_same(mine.grad, theirs.grad / 2, "gradient")

    on_ranks(2, rank)


def test_a_parameter_that_was_replaced_after_sharding_is_refused():
    """A conversion, an assignment, or loading by assignment would leave the module training another parameter."""
    import torch

    def assign(model):
        model[0].bias = torch.nn.Parameter(torch.zeros(4))

    def rank(mesh):
        for replace in (
            lambda model: model.double(),
            assign,
            lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True),
        ):
            model = torch.nn.Sequential(torch.nn.Linear(3, 4))
            fully_shard(model, mesh=mesh)
            model(torch.ones(1, 3)).sum().backward()
            replace(model)
            with pytest.raises(PlanError) as info:
                model(torch.ones(1, 3))
            name = "bias" if replace is assign else "weight"
            assert str(info.value) == (
                f"fully_shard: parameter {name} of Linear was replaced or converted after fully_shard, which gathers "
                "the original parameter; convert the module first, and load values into its parameters"
            )
        loaded = fully_shard(torch.nn.Linear(3, 4), mesh=mesh)
        loaded.load_state_dict({name: value * 2 for name, value in loaded.state_dict().items()})
        assert_same(loaded(torch.ones(1, 3)), loaded(torch.ones(1, 3)), "output")

    on_ranks(2, rank)


@pytest.mark.parametrize("world", [2, 3])
def test_memory_is_that_of_two_groups_and_one_gathered_ahead(world):
    """In the second and later steps, too: at most the parameters of two neighbours, and the rows of one group."""
    import torch

    def rank(mesh):
        model = torch.nn.Sequential(*(torch.nn.Linear(5, 5).double() for _ in range(5)))
        groups = [fully_shard(layer, mesh=mesh)._hyper_parallel_fully_sharded[0] for layer in model]
        most = {"forward": [0, 0], "backward": [0, 0]}

        def look(phase):
            seen = [sum(counted(group) for group in groups), sum(group.pending is not None for group in groups)]
            most[phase] = [max(pair) for pair in zip(most[phase], seen, strict=True)]

        def announce(_module, _inputs, output):
            output.register_hook(lambda _gradient: look("backward"))

        fully_shard(model, mesh=mesh)
        for layer in model:
            layer.register_forward_hook(lambda *_: look("forward"), prepend=True)
            layer.register_forward_hook(announce)
        for step in range(3):
            model(random(2, 5, seed=mesh.rank)).sum().backward()
            assert most == {"forward": [30, int(step > 0)], "backward": [60, int(step > 0)]}
            assert not any(counted(group) or group.pending for group in groups)

    on_ranks(world, rank)


def make_mixed():
    """A module whose own parameters have two dtypes, one of them frozen, with a submodule that is sharded by itself."""
    import torch
    from torch import nn

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 7), nn.Linear(7, 3)
            self.gain = nn.Parameter(torch.ones(7, dtype=torch.float64))
            self.frozen = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
            self.head = nn.Linear(3, 5)

        def reset_parameters(self):
            with torch.no_grad():
                self.gain.fill_(2)
                self.frozen.fill_(0.5)

        def forward(self, x):
            return self.head(self.fc2((torch.tanh(self.fc1(x)) * self.gain).float()) * self.frozen.float())

    return Mixed()


def trained_beside(model, mesh):
    """Train ``model`` and a plain copy of it for three steps over unequal batches; gradients and weights are equal."""
    import torch

    dense = make_mixed()
    dense.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, dense)]
    for step in range(3):
        batches = torch.randn(mesh.size(), 2, 4, generator=torch.Generator().manual_seed(step))
        for each in batches:
            (dense(each).square().sum() / mesh.size()).backward()
        model(batches[mesh.rank]).square().sum().backward()
        pairs = list(zip(model.named_parameters(), dense.parameters(), strict=True))
        for (name, mine), theirs in pairs:
            assert (mine.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                torch.testing.assert_close(
                    mine.grad.full_tensor(), theirs.grad, msg=lambda t, name=name: f"{name}: {t}"
                )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (_, mine), theirs in pairs:
            torch.testing.assert_close(mine.full_tensor(), theirs)


@pytest.mark.untraced
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_several_dtypes_in_one_module(world, reshard):
    """Parameters of each dtype are a group of their own; gradients and weights keep their dtype and are right."""

    def rank(mesh):
        import torch

        torch.manual_seed(0)
        model = make_mixed()
        fully_shard(model.fc1, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        assert [len(each._hyper_parallel_fully_sharded) for each in (model.fc1, model)] == [1, 3]
        dtypes = [str(parameter.dtype) for parameter in model.parameters()]
        assert sorted(set(dtypes)) == ["torch.bfloat16", "torch.float32", "torch.float64"]
        trained_beside(model, mesh)
        assert [str(parameter.dtype) for parameter in model.parameters()] == dtypes
        with no_sync(model):
            model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(PlanError, match="no_sync"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()

    on_ranks(world, rank)


def test_collectives_of_several_dtypes(monkeypatch):
    """For each dtype two gathers of its padded row, and a reduction of its trained parameters' row; none of frozen."""
    import torch

    from hyper_parallel.platform.select import get_torch_platform

    platform, calls = get_torch_platform(), []

    def recorded(name, call):
        def record(data, *args, **kwargs):
            calls.append((name, str(data.dtype), data.numel()))
            return call(data, *args, **kwargs)

        return record

    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        monkeypatch.setattr(platform, name, recorded(name, getattr(platform, name)), raising=False)

    def rank(mesh):
        fully_shard(make_mixed(), mesh=mesh, reshard_after_forward=True)(torch.ones(2, 4)).sum().backward()

    on_ranks(3, rank)
    # ceil(7/3)*4 + ceil(7/3) + ceil(3/3)*7 + ceil(3/3) + ceil(5/3)*3 + ceil(5/3); then flags, and a count per parameter
    single, double, half = 12 + 3 + 7 + 1 + 6 + 2, 3, 1
    gathers = [("torch.float32", single + 3), ("torch.float64", double + 3), ("torch.bfloat16", half + 3)]
    reduces = [("torch.float32", 3 * (single + 6 + 3)), ("torch.float64", 3 * (double + 1 + 3))]
    expected = [("all_gather_into_tensor", *each) for each in gathers] * 2
    expected += [("reduce_scatter_tensor", *each) for each in reduces]
    assert sorted(calls) == sorted(expected * 3)


def on_meta(place, notation):
    """The message about a parameter that is not on a device yet."""
    return (
        f"fully_shard: parameter {place} was sharded on the meta device, and has not been replaced by {notation} on a "
        "device; call module.to_empty(device=...), and initialise or load all values, before the first forward"
    )


def test_modules_of_the_meta_device_are_made_after_sharding():
    """Values drawn shard by shard are equal for every number of ranks, and training is that of one device."""

    def rank(mesh):
        import torch

        from hyper_parallel import manual_seed

        manual_seed(3)
        with torch.device("meta"):
            model = make_mixed()
        for each in (model.fc1, model):
            fully_shard(each, mesh=mesh)
        stale = torch.optim.SGD(model.parameters(), lr=0.1)
        messages = []
        with pytest.raises(PlanError) as caught:
            model(torch.ones(2, 4))
        messages.append(str(caught.value))
        model.to_empty(device="cpu")
        for each in model.modules():
            if hasattr(each, "reset_parameters"):
                each.reset_parameters()
        first = [parameter.full_tensor().clone() for parameter in model.parameters()]
        trained_beside(model, mesh)
        with pytest.raises(PlanError) as caught:
            stale.step()
        messages.append(str(caught.value))
        return messages, first

    results = [on_ranks(world, rank)[0] for world in (1, 2, 3)]
    assert results[0][0] == results[1][0] == results[2][0]
    assert results[0][0] == [
        on_meta("weight of Linear", "f32[3@dp, 7]"),
        (
            "optimizer step: parameter 0 of group 0 is Mixed.gain from before fully_shard, which no longer trains; "
            "build the optimizer after fully_shard"
        ),
    ]
    for other in results[1:]:
        for mine, theirs in zip(results[0][1], other[1], strict=True):
            assert mine.equal(theirs)


def test_values_of_the_meta_device_that_do_not_fit():
    """Parameters that are made one by one, in another dtype, as plain tensors, or without their tie are refused."""

    def rank(mesh):
        import torch
        from torch import nn

        def sharded():
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
                model[1].weight = model[0].weight
            return fully_shard(model, mesh=mesh)

        def refused(model):
            with pytest.raises(PlanError) as caught:
                model(torch.ones(2, 4))
            return str(caught.value)

        messages = []
        model = sharded()
        model.to_empty(device="cpu")
        messages.append(refused(model))
        model[1].weight = model[0].weight
        bias, model[1].bias = model[1].bias, None
        messages.append(refused(model))
        model[1].bias = nn.Parameter(torch.ones(4))
        messages.append(refused(model))
        model[1].bias = bias
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        output = model(torch.ones(2, 4))
        assert output.tolist() == [[21.0] * 4] * 2
        model = sharded()
        model.to_empty(device="cpu").double()
        model[1].weight = model[0].weight
        messages.append(refused(model))
        return messages

    assert on_ranks(2, rank)[0] == [
        (
            "fully_shard: parameters weight of Linear, weight of Linear were tied on the meta device and are no "
            "longer; assign the first to the other places, before the optimizer is built"
        ),
        on_meta("bias of Linear", "f32[4@dp]"),
        on_meta("bias of Linear", "f32[4@dp]"),
        on_meta("weight of Linear", "f32[4@dp, 4]"),
    ]


def test_pytorch_counts_the_collectives_of_each_rank():
    """CommDebugMode sees those of its rank, by module, on simulated ranks, and no modules of other ranks."""
    import torch
    from torch.distributed.tensor.debug import CommDebugMode

    def rank(mesh):
        model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        counts = []
        for _ in range(3):
            with CommDebugMode() as mode:
                model(torch.ones(2, 5)).sum().backward()
            counts.append({str(packet): count for packet, count in mode.get_comm_counts().items()})
            modules = {name for name in mode.advanced_module_tracker.module_helper_dict if name != "Global"}
            assert modules == {"Sequential", "Sequential.0", "Sequential.1", "Sequential.2"}
        assert counts == [{"c10d._allgather_base_": 3, "c10d._reduce_scatter_base_": 2}] * 3

    on_ranks(3, rank)
