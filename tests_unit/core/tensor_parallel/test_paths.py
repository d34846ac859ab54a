from __future__ import annotations

import pytest

from hyper_parallel import (
    ColwiseParallel,
    NoParallel,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    record_events,
)
from hyper_parallel.core.dtensor.events import module_path
from hyper_parallel.errors import MixedTensorError

pytestmark = pytest.mark.platforms("torch")


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
        "give its module a style in the plan, such as hyper_parallel.NoParallel(use_local_output=False), as "
        "hyper_parallel.complete_plan(model, plan) does, or replicate every parameter without one: "
        "hyper_parallel.distribute_module(model, mesh)"
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
