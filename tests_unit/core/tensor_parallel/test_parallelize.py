from __future__ import annotations

import warnings
from weakref import WeakValueDictionary

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    NoParallel,
    ParallelStyle,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    record_events,
)
from hyper_parallel.core.dtensor.events import module_path
from hyper_parallel.errors import MixedTensorError, PlanError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")

NAMES = ("dp", "tp")
MLP_PLAN = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
GRIDS = [(2, 2), (2, 3), (3, 2)]


def global_plan():
    """An MLP between DTensors."""
    return {"fc1": ColwiseParallel(use_local_output=False), "fc2": RowwiseParallel(use_local_output=False)}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_column_then_row_equals_dense(twin, world, bias):
    """Output and every gradient are the dense ones for plain inputs, uneven widths and any world; no factor."""
    ref = twin.Twin(twin.randomized(twin.MLP(7, 10, 5, bias=bias)), twin.random(4, 7))

    def rank(mesh):
        model = parallelize_module(ref.copy(), mesh, dict(MLP_PLAN))
        x = ref.inputs[0].detach().clone().requires_grad_()
        y = model(x)
        assert not isinstance(y, DTensor)
        twin.same(y, ref.output, "output")
        y.backward(ref.cotangent)
        twin.same(x.grad, ref.inputs[0].grad, "gradient of the input")
        ref.assert_gradients(model)

    twin.on_mesh((world,), rank)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("world", [2, 3])
def test_optimizer_steps_equal_dense(twin, world, kind):
    """Momentum and Adam states live on the shards and give the dense weights, step after step."""
    ref = twin.Twin(twin.randomized(twin.MLP(7, 10, 5)), twin.random(4, 7))

    def rank(mesh):
        ref.assert_trains(
            lambda model: parallelize_module(model, mesh, dict(MLP_PLAN)),
            lambda model: model(ref.inputs[0].detach()).backward(ref.cotangent),
            kind,
        )

    twin.on_mesh((world,), rank)


@pytest.mark.untraced
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_data_and_tensor_parallel_equals_dense(twin, grid, kind):
    """A sharded batch over dp and sharded weights over tp need one call; gradients over dp come out whole."""
    ref = twin.Twin(twin.randomized(twin.Block()), twin.random(5, 3, 7))
    batch = [Shard(0), Replicate()]

    def rank(mesh):
        def make(model):
            return parallelize_module(model, mesh, {"mlp": global_plan()})

        def run(model):
            x = distribute_tensor(ref.inputs[0].detach().requires_grad_(), mesh, batch)
            y = model(x)
            y.backward(distribute_tensor(ref.cotangent, mesh, batch))
            return x, y

        model = make(ref.copy())
        x, y = run(model)
        assert y.placements == (Shard(0), Replicate())
        twin.same(y, ref.output, "output")
        twin.same(x.grad, ref.inputs[0].grad, "gradient of the input")
        ref.assert_gradients(model)
        ref.assert_trains(make, run, kind)

    twin.on_mesh(grid, rank, NAMES)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_local_sequence_parallel_block_equals_dense(twin, world):
    """Norm weights and their gradients are replicated, although each rank has a shard of an uneven sequence."""
    ref = twin.Twin(twin.randomized(twin.Block()), twin.random(2, 5, 7))
    plan = {
        "norm": SequenceParallel(),
        "mlp.fc1": ColwiseParallel(input_layouts=Shard(1)),
        "mlp.fc2": RowwiseParallel(output_layouts=Shard(1)),
    }

    def rank(mesh):
        model = parallelize_module(ref.copy(), mesh, plan)
        x = twin.local_shard(ref.inputs[0], mesh, [Shard(1)]).requires_grad_()
        with record_events() as log:
            y = model(x)
            y.backward(twin.local_shard(ref.cotangent, mesh, [Shard(1)]))
        twin.same(twin.gather(y, mesh, [Shard(1)], ref.output.shape), ref.output, "output")
        twin.same(twin.gather(x.grad, mesh, [Shard(1)], (*x.shape[:1], 5, 7)), ref.inputs[0].grad, "input gradient")
        ref.assert_gradients(model)
        return log.collectives("forward"), {event.module for event in log if event.phase == "forward"}

    collectives, modules = twin.on_mesh((world,), rank)[0]
    assert collectives == ["all_gather", "reduce_scatter"]
    assert modules == {"mlp.fc1", "mlp.fc2"}


def test_globs_nested_mappings_and_the_module_itself(twin):
    """A segment of a path may be a glob, a mapping may hold mappings, and one style may be the whole plan."""
    from torch import nn

    def rank(mesh):
        layers = nn.ModuleDict({"layers": nn.ModuleList([twin.MLP(), twin.MLP()]), "head": nn.Linear(5, 6)})
        parallelize_module(
            layers, mesh, {"layers.*": {"fc[1]": ColwiseParallel(), "fc2": RowwiseParallel()}, "head": NoParallel()}
        )
        first = parallelize_module(nn.Linear(5, 6), mesh, ColwiseParallel())
        second = parallelize_module(nn.Linear(5, 6), mesh, {"": RowwiseParallel()})
        weights = [value for _, value in sorted(layers.named_parameters()) if value.ndim == 2]
        return [value.placements[0] for value in [*weights, first.weight, second.weight]]

    column, row = Shard(0), Shard(1)
    assert twin.on_mesh((2,), rank)[0] == [Replicate(), column, row, column, row, column, row]


def test_the_current_mesh_is_the_default(twin):
    """The mesh defaults to that of ``with mesh:``; without either, or without a module, an error is raised."""
    from torch import nn

    def rank(mesh):
        with mesh:
            assert parallelize_module(nn.Linear(4, 4), parallelize_plan=ColwiseParallel()).weight.device_mesh is mesh
        with pytest.raises(ValueError, match="none was given and there is no current mesh"):
            parallelize_module(nn.Linear(4, 4), parallelize_plan=ColwiseParallel())
        with pytest.raises(TypeError) as caught:
            parallelize_module(nn.Linear, mesh, ColwiseParallel())
        wanted = "parallelize_module: module must be a torch.nn.Module or a mindspore.nn.Cell, got type"
        assert str(caught.value) == wanted

    twin.on_mesh((2,), rank)


def test_a_plan_without_styles_needs_no_axis_for_them():
    """On a mesh without an axis 'tp' an empty plan replicates every parameter; a style there is refused."""
    from torch import nn

    def rank():
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "cp"))
        model = parallelize_module(nn.Linear(3, 4), mesh, {})
        with pytest.raises(ValueError, match="parallel styles act on the mesh axis 'tp'"):
            parallelize_module(nn.Linear(3, 4), mesh, ColwiseParallel())
        return [value.placements for value in model.parameters()]

    assert simulate(rank, 6, platform="torch") == [[(Replicate(), Replicate())] * 2] * 6


def test_values_come_from_the_source_rank(twin):
    """All ranks get the weights of ``src_data_rank``; with None each rank keeps its own."""
    import torch
    from torch import nn

    def rank(mesh):
        layer = nn.Linear(3, 4)
        with torch.no_grad():
            layer.weight.fill_(mesh.rank + 1)
        own = nn.Linear(3, 4)
        own.load_state_dict(layer.state_dict())
        parallelize_module(layer, mesh, ColwiseParallel(), src_data_rank=1)
        parallelize_module(own, mesh, ColwiseParallel(), src_data_rank=None)
        return layer.weight.to_local().mean().item(), own.weight.to_local().mean().item()

    assert twin.on_mesh((2,), rank) == [(2.0, 1.0), (2.0, 2.0)]


def test_tied_weights_stay_one_parameter(twin):
    """A weight under two paths is one object before and after, sharded once; the optimizer sees it once."""
    from torch import nn

    def rank(mesh):
        model = nn.ModuleDict(
            {"tok": nn.Embedding(11, 6), "mid": nn.Linear(6, 6), "head": nn.Linear(6, 11, bias=False)}
        )
        model["head"].weight = model["tok"].weight
        parallelize_module(model, mesh, {"tok": RowwiseParallel(), "head": ColwiseParallel()})
        assert model["head"].weight is model["tok"].weight
        assert model["tok"].weight.placements == (Shard(0),)
        assert isinstance(model["tok"].weight, nn.Parameter)
        return len(list(model.parameters()))

    assert twin.on_mesh((3,), rank) == [3, 3, 3]


def tied_model():
    """An embedding, and a head with its weight."""
    from torch import nn

    model = nn.ModuleDict({"tok": nn.Embedding(11, 6), "head": nn.Linear(6, 11, bias=False)})
    model["head"].weight = model["tok"].weight
    return model


UNTIED = (
    "{}weight is tied to the weight of {}, which an earlier call has placed and this call would not replace; give "
    "both modules their styles in one call, or give each module its own parameter before the first call"
)


def untying(module, mesh, plan):
    """Why a plan is refused; nothing is changed."""
    before = dict(module.named_parameters())
    with pytest.raises(PlanError) as caught:
        parallelize_module(module, mesh, plan)
    assert all(before[name] is parameter for name, parameter in module.named_parameters())
    head, _, problem = str(caught.value).partition("\n  - ")
    assert head == "the plan does not match the module (1 problem); no parameter was changed:"
    return problem


def test_calls_for_each_layer_do_not_untie_a_weight(twin):
    """A call that would make a second parameter of a tied weight is refused, whichever layer the earlier call had."""

    def rank(mesh):
        model = tied_model()
        parallelize_module(model["tok"], mesh, RowwiseParallel())
        refusals = [
            untying(model["head"], mesh, ColwiseParallel()),
            untying(model, mesh, {"head": ColwiseParallel()}),
            untying(model, mesh, {"tok": NoParallel(), "head": NoParallel()}),
        ]
        model["head"].weight = model["tok"].weight  # tied again: one parameter with the layout that the style wants
        parallelize_module(model["head"], mesh, ColwiseParallel())
        assert model["head"].weight is model["tok"].weight
        model = parallelize_module(tied_model(), mesh, {"tok": NoParallel()})
        refusals.append(untying(model["head"], mesh, ColwiseParallel()))
        parallelize_module(model["head"], mesh, NoParallel())  # nothing to replace
        assert model["head"].weight is model["tok"].weight
        return refusals

    assert twin.on_mesh((2,), rank)[0] == [
        UNTIED.format("", "Embedding"),
        UNTIED.format("head.", "tok (Embedding)"),
        UNTIED.format("head.", "tok (Embedding)"),
        UNTIED.format("", "tok (Embedding)"),
    ]


def test_on_several_axes_every_parameter_is_placed(twin):
    """On a mesh of several axes a call also replaces what no style covers, which must not be tied elsewhere either."""

    def rank(mesh):
        model = tied_model()
        parallelize_module(model["tok"], mesh, {})
        return untying(model["head"], mesh, {})

    assert twin.on_mesh((1, 2), rank, NAMES)[0] == UNTIED.format("", "Embedding")


def test_a_weight_may_be_used_again_for_another_model(twin):
    """What was tied does not matter once nothing refers to the other module, even if a cycle keeps it in memory."""
    import copy
    import io

    def rank(mesh):
        model, other = tied_model(), tied_model()
        other["head"].weight = model["head"].weight
        parallelize_module(model["tok"], mesh, RowwiseParallel())
        model["tok"].myself = [model["tok"]]
        copied = copy.deepcopy(model["head"])
        parallelize_module(copied, mesh, ColwiseParallel())  # a copy is tied to nothing
        file = io.BytesIO()
        torch.save(model["head"].weight, file)
        file.seek(0)
        model["head"].weight = torch.load(file, weights_only=True)
        parallelize_module(model["head"], mesh, ColwiseParallel())
        del model
        parallelize_module(other["head"], mesh, ColwiseParallel())
        return other["head"].weight.placements

    assert twin.on_mesh((2,), rank) == [(Shard(0),)] * 2


def test_a_tied_weight_follows_its_only_styled_path(twin):
    """A style on one of the paths changes the parameter under the other path, too."""
    from torch import nn

    def rank(mesh):
        model = nn.ModuleDict({"tok": nn.Embedding(11, 6), "head": nn.Linear(6, 11, bias=False)})
        model["head"].weight = model["tok"].weight
        parallelize_module(model, mesh, {"tok": RowwiseParallel()})
        assert model["head"].weight is model["tok"].weight

    twin.on_mesh((2,), rank)


def test_frozen_parameters_stay_frozen(twin):
    """parallelize_module keeps ``requires_grad`` of parameters."""
    from torch import nn

    def rank(mesh):
        layer = nn.Linear(3, 4)
        layer.weight.requires_grad_(False)
        parallelize_module(layer, mesh, ColwiseParallel())
        return layer.weight.requires_grad, layer.bias.requires_grad, layer.in_features

    assert twin.on_mesh((2,), rank)[0] == (False, True, 3)


def test_what_no_style_covers(twin):
    """A parameter without style stays plain on one axis and is replicated on several axes."""

    def rank(mesh):
        model = parallelize_module(twin.Block(), mesh, {"mlp": global_plan()})
        return isinstance(model.norm.weight, DTensor)

    assert twin.on_mesh((2,), rank) == [False] * 2
    assert twin.on_mesh((1, 2), rank, NAMES) == [True] * 2


def test_a_style_written_for_pytorch_works(twin):
    """A subclass with only ``_apply`` works, and receives ``src_data_rank``."""

    class Mark(ParallelStyle):
        def _apply(self, module, device_mesh):
            module.marked = (device_mesh, self.src_data_rank)
            return module

    def rank(mesh):
        model = parallelize_module(twin.MLP(), mesh, {"fc1": Mark()}, src_data_rank=1)
        assert model.fc1.marked == (mesh, 1)

    twin.on_mesh((2,), rank)


def test_a_style_has_both_spellings(twin):
    """A style with ``apply`` has ``_apply`` too, which PyTorch's own code calls."""

    class Mark(ParallelStyle):
        def apply(self, module, device_mesh):
            return module, device_mesh

    assert Mark()._apply("module", "mesh") == ("module", "mesh")


def test_an_incomplete_style_cannot_be_made():
    """ParallelStyle is abstract: an incomplete subclass cannot be instantiated."""

    class Nothing(ParallelStyle):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing()


def test_no_plan_is_a_warning(twin):
    """Without a plan the module is unchanged and a warning is given, as in PyTorch."""

    def rank(mesh):
        with pytest.warns(UserWarning, match="no parallelize_plan given; the module stays as it is"):
            parallelize_module(twin.MLP(), mesh)

    twin.on_mesh((2,), rank)


def test_a_wrong_plan_touches_nothing(twin):
    """All problems come in one error, before any weight changes."""

    def rank(mesh):
        model = twin.MLP()
        with pytest.raises(PlanError) as caught:
            parallelize_module(
                model, mesh, {"fc1": ColwiseParallel(), "fc3": RowwiseParallel(), "act": ColwiseParallel()}
            )
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        return str(caught.value)

    assert twin.on_mesh((2,), rank)[0] == (
        "the plan does not match the module (2 problems); no parameter was changed:\n  - 'fc3' (RowwiseParallel) "
        "matches no module; children of the module: fc1, act, fc2\n  - act: ColwiseParallel supports linear and "
        "embedding layers, not GELU\n  - note: linear layer fc2 is not sharded, although its sibling layers are"
    )


def test_a_linear_left_whole_beside_sharded_ones_is_a_warning(twin):
    """A replicated linear layer beside sharded ones gives a warning."""

    def rank(mesh):
        with pytest.warns(UserWarning, match="linear layer fc2 is not sharded, although its sibling layers are"):
            parallelize_module(twin.MLP(), mesh, {"fc1": ColwiseParallel()})
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="parallelize_module")
            parallelize_module(twin.MLP(), mesh, dict(MLP_PLAN))

    twin.on_mesh((2,), rank)


def test_a_later_plan_reshards_what_is_on_the_mesh(twin):
    """A replicated parameter may be sharded by a later call: nothing is communicated, nothing is lost."""

    def rank(mesh):
        model = twin.MLP()
        before = model.fc1.weight.detach().clone()
        parallelize_module(model, mesh, {"fc1": NoParallel(), "fc2": NoParallel()}, src_data_rank=None)
        parallelize_module(model.fc1, mesh, ColwiseParallel())
        assert model.fc1.weight.placements == (Shard(0),)
        return twin.whole(model.fc1.weight).equal(before)

    def seeded(mesh):
        import torch

        torch.manual_seed(0)
        return rank(mesh)

    assert all(twin.on_mesh((3,), seeded))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators of this thread have made and that are not freed yet.

    Attributes:
        peak: most bytes at any time.
    """

    def __init__(self):
        super().__init__()
        self._storages, self.peak = WeakValueDictionary(), 0

    def now(self):
        """Bytes in use."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, and note the storages of what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._storages[leaf.untyped_storage()._cdata] = leaf.untyped_storage()
        self.peak = max(self.peak, self.now())
        return result


@pytest.mark.parametrize("source", [0, None])
def test_memory_holds_the_whole_model_and_one_layer(source):
    """Whole weights are freed layer by layer: the peak is the model and one layer, and shards alone are left."""
    width, layers = 6, 8

    def rank(mesh):
        counted = LiveBytes()
        with counted:
            model = nn.Sequential(*[nn.Linear(width, 2 * width, bias=False) for _ in range(layers)])
            parallelize_module(model, mesh, {"*": ColwiseParallel()}, src_data_rank=source)
        return mesh.rank, counted.peak, counted.now(), model  # which lives on until all ranks have counted

    layer = 2 * width * width * 4
    ranks = simulate(lambda: rank(init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))), 3, platform="torch")
    for number, peak, left, _ in ranks:
        # Pieces that rank 0 sends are made by its operators, and are then the memory of the rank that holds them.
        sent = 2 * layers * layer // 3 if source == number else 0
        assert layers * layer < peak <= (layers + 1) * layer
        assert left == layers * layer // 3 + sent


def deep(twin, inner):
    """Modules two levels down."""
    from torch import nn

    return nn.ModuleDict({"block": nn.ModuleDict({"inner": inner, "fc": nn.Linear(7, 10)})})


def test_events_carry_the_path_of_the_module_that_runs(twin):
    """Forward and backward events of a layer have its path, at any depth."""

    def rank(mesh):
        model = twin.randomized(deep(twin, twin.MLP()))
        parallelize_module(
            model, mesh, {"block.fc": ColwiseParallel(use_local_output=False), "block.inner": NoParallel()}
        )
        x = distribute_tensor(twin.random(5, 7).requires_grad_(), mesh, [Shard(0)])
        with record_events() as log:
            y = model["block"]["fc"](x)
            y.backward(distribute_tensor(twin.random(5, 10), mesh, [Shard(1)]))
            assert module_path() == ""
        return [(event.phase, event.module) for event in log]

    assert twin.on_mesh((2,), rank)[0] == [("forward", "block.fc"), ("backward", "block.fc")]


def test_nested_modules_restore_the_outer_path(twin):
    """After a submodule the outer path is restored, also when the submodule raises."""
    from torch import nn

    seen = []

    class Inner(nn.Module):
        def forward(self, x, fail=False):
            seen.append(module_path())
            if fail:
                raise ZeroDivisionError
            return x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.fc = Inner(), nn.Linear(2, 2)

        def forward(self, x):
            self.inner(x)
            try:
                self.inner(x, fail=True)
            except ZeroDivisionError:
                seen.append(module_path())
            return x

    def rank(mesh):
        model = nn.ModuleDict({"outer": Outer()})
        parallelize_module(model, mesh, {"outer.fc": ColwiseParallel()})
        with record_events():
            model["outer"](twin.random(1))
            seen.append(module_path())
        model["outer"](twin.random(1))

    twin.on_mesh((1,), rank)
    inner, outer = "outer.inner", "outer"
    assert seen == [inner, inner, outer, "", "", "", ""]


def test_recording_that_begins_inside_a_forward(twin):
    """A log that is opened inside a forward does not break the stack of module paths."""
    from torch import nn

    class Recording(nn.Linear):
        def forward(self, x):
            log = record_events()
            log.__enter__()
            return super().forward(x)

    def rank(mesh):
        model = nn.ModuleDict({"fc": Recording(2, 2)})
        parallelize_module(model, mesh, {"fc": NoParallel(input_layout=Replicate())})
        model["fc"](twin.random(1, 2).float())
        return module_path()

    assert twin.on_mesh((1,), rank) == [""]


def test_a_copy_of_a_model_keeps_its_paths(twin):
    """Errors of a deep copy of a model have the original's module paths."""
    import copy

    def rank(mesh):
        model = copy.deepcopy(parallelize_module(twin.MLP(), mesh, {"fc1": NoParallel(), "fc2": NoParallel()}))
        with pytest.raises(ValueError, match=r"fc2 \(Linear\)"):
            model.fc2(1)

    twin.on_mesh((1,), rank)


def test_the_outermost_root_names_a_module(twin):
    """A block parallelized by itself, then within its model, has the path in the model."""
    from hyper_parallel.core.dtensor.parameter_paths import module_label

    def rank(mesh):
        block = twin.Block()
        parallelize_module(block, mesh, {"mlp.fc1": NoParallel()})
        before = module_label(block.mlp.fc1)
        parallelize_module(deep(twin, block), mesh, {"block.fc": NoParallel()})
        parallelize_module(block.mlp, mesh, {"fc2": NoParallel()})
        return before, module_label(block.mlp.fc1), module_label(block)

    expected = ("mlp.fc1 (Linear)", "block.inner.mlp.fc1 (Linear)", "block.inner (Block)")
    assert twin.on_mesh((1,), rank)[0] == expected


def refused(block, x, styles, mesh):
    """Why a block is refused that a plan leaves in part plain."""
    model = parallelize_module(block, mesh, styles)
    with pytest.raises(MixedTensorError) as caught:
        model(x)
    return str(caught.value)


def test_a_plain_tensor_among_dtensors_is_told_with_the_entry_of_the_plan(twin):
    """The entry that made the DTensor is named, and what makes its output plain where it is whole; no other mesh's."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp, self.norm = twin.MLP(6, 9, 6), nn.LayerNorm(6)

        def forward(self, x):
            return self.norm(x + self.mlp(x))

    styles = {"mlp.fc1": ColwiseParallel(), "mlp.*2": RowwiseParallel(use_local_output=False)}
    sharded = {**styles, "mlp.*2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}
    converted = {"mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())}

    def rank(mesh):
        x = twin.random(3, 6).float()
        distributed = distribute_tensor(x, mesh, [Replicate()])
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        return (
            refused(Block(), distributed, converted, mesh),
            refused(Block(), x, styles, mesh),
            refused(Block(), distributed, sharded, mesh),
            refused(Block(), distribute_tensor(x, other, [Replicate()]), {}, other),
        )

    first, residual, parameter, elsewhere = twin.on_mesh((2,), rank)[0]
    plain = (
        "argument {} is a plain parameter [{}], but other operands are DTensors on DeviceMesh(cpu, {}, ranks=[0, 1]); "
        "give its module a style in the plan, such as hyper_parallel.NoParallel(use_local_output=False); "
        "hyper_parallel.complete_plan(model, plan) adds the styles that a plan lacks, and "
        "hyper_parallel.distribute_module(model, mesh) replicates every parameter that has no style"
    )
    output = (
        "; the last DTensor that a style returned is the output of mlp.fc2 (Linear), entry 'mlp.*2' (RowwiseParallel) "
        "of the plan"
    )
    assert first == plain.format("weight", "9, 6", "2")
    assert residual == (
        "argument y is a plain tensor [3, 6], but other operands are DTensors on DeviceMesh(cpu, 2, ranks=[0, 1]); "
        "y = hyper_parallel.DTensor.from_local(y, mesh, [Replicate()]) if every rank holds the same values; if it is a "
        "local shard that a parallel style returned, give that style use_local_output=False"
        f"{output}, where use_local_output=True makes it a plain tensor"
    )
    assert parameter == plain.format("weight", "6", "2") + output
    assert elsewhere == plain.format("weight", "9, 6", "x=2")
