from __future__ import annotations

from typing import NamedTuple

import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    parallelize_module,
)

pytestmark = pytest.mark.platforms("torch")


# -- inputs ------------------------------------------------------------------------------------------------------------


def probe(twin):
    """A module that records its arguments."""
    from torch import nn

    class Probe(nn.Module):
        def forward(self, *args, **kwargs):
            self.seen = (args, kwargs)
            return args[0] if args else None

    return nn.ModuleDict({"attn": Probe()})


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("local", [True, False])
def test_only_annotated_inputs_are_converted(twin, world, local):
    """All positional and keyword inputs reach the module; None in a description leaves an input unchanged."""
    x, mask = twin.random(2, 5, 7), twin.random(5, 5)
    style = PrepareModuleInput(
        input_layouts=(Shard(1), None),
        desired_input_layouts=(Replicate(), None),
        input_kwarg_layouts={"mask": Replicate()},
        desired_input_kwarg_layouts={"mask": Shard(0)},
        use_local_output=local,
    )

    def rank(mesh):
        model = parallelize_module(probe(twin), mesh, {"attn": style})
        model["attn"](twin.local_shard(x, mesh, [Shard(1)]), "as it is", mask=mask, flag=True)
        (first, second), kwargs = model["attn"].seen
        assert second == "as it is"
        assert kwargs["flag"] is True
        assert isinstance(first, DTensor) is not local
        twin.same(first, x, "input 0")
        wanted = twin.local_shard(mask, mesh, [Shard(0)]) if local else mask
        twin.same(kwargs["mask"], wanted, "mask")

    twin.on_mesh((world,), rank)


def test_the_gradient_of_a_gathered_input_is_scattered(twin):
    """All-gather forward, and each rank gets its shard of the gradient."""
    ref = twin.Twin(twin.randomized(twin.Block()), twin.random(2, 5, 7))
    sharded = [Shard(1)]
    plan = {
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "norm": SequenceParallel(),
        "mlp.fc1": ColwiseParallel(),
        "mlp.fc2": RowwiseParallel(output_layouts=Shard(1)),
    }

    def rank(mesh):
        model = parallelize_module(ref.copy(), mesh, plan)
        x = twin.local_shard(ref.inputs[0], mesh, sharded).requires_grad_()
        y = model(x)
        y.backward(twin.local_shard(ref.cotangent, mesh, sharded))
        twin.same(twin.gather(x.grad, mesh, sharded, (2, 5, 7)), ref.inputs[0].grad, "gradient of the input")
        ref.assert_gradients(model)

    twin.on_mesh((3,), rank)


def test_a_dtensor_on_two_axes_keeps_the_other_axis(twin):
    """A single placement applies to the tp axis only."""
    x = twin.random(4, 6)

    def rank(mesh):
        style = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        model = parallelize_module(probe(twin), mesh, {"attn": style})
        out = model["attn"](distribute_tensor(x, mesh, [Shard(0), Shard(1)]))
        return out.placements

    assert twin.on_mesh((2, 2), rank, ("dp", "tp"))[0] == (Shard(0), Replicate())


def test_a_full_layout_per_input(twin):
    """An entry may be a tuple of one placement per mesh axis; then plain tensors are understood on any mesh."""
    x = twin.random(5, 6)

    def rank(mesh):
        sharded, wanted = (Shard(0), Shard(1)), (Replicate(), Shard(0))
        style = PrepareModuleInput(input_layouts=(sharded,), desired_input_layouts=(wanted,))
        model = parallelize_module(probe(twin), mesh, {"attn": style})
        out = model["attn"](twin.local_shard(x, mesh, sharded))
        twin.same(out, x, "input")
        return out.placements

    assert twin.on_mesh((2, 3), rank, ("dp", "tp"))[0] == (Replicate(), Shard(0))


@pytest.mark.parametrize("args, kwargs, message", [
    ((), {}, ("attn (Probe): 0 positional inputs, but input_layouts of PrepareModuleInput has 1 entries; give one per "
             "input, None for those to leave alone")),
    ((3,), {}, "attn (Probe): input 0 must be a tensor, got int"),
    ((None,), {}, "attn (Probe): input 0 must be a tensor, got NoneType"),
    ("x", {"mask": 1.5}, "attn (Probe): mask must be a tensor, got float"),
])  # fmt: skip
def test_a_wrong_call_names_module_and_argument(twin, args, kwargs, message):
    """A wrong count, or a non-tensor where a tensor is declared, raises a ValueError."""
    style = PrepareModuleInput(
        input_layouts=Replicate(),
        desired_input_layouts=Replicate(),
        input_kwarg_layouts={"mask": Replicate()},
        desired_input_kwarg_layouts={"mask": Replicate()},
    )

    def rank(mesh):
        model = parallelize_module(probe(twin), mesh, {"attn": style})
        arguments = (twin.random(2, 3),) if args == "x" else args
        with pytest.raises(ValueError, match="attn") as caught:
            model["attn"](*arguments, **kwargs)
        return str(caught.value)

    assert twin.on_mesh((2,), rank)[0] == message


@pytest.mark.parametrize("options, message", [
    ({"input_layouts": Shard(0)}, "PrepareModuleInput: input_layouts needs desired_input_layouts, one per input"),
    ({"desired_input_layouts": Shard(0)},
     "PrepareModuleInput: input_layouts has 0 entries, desired_input_layouts has 1"),
    ({"input_layouts": (Shard(0), None), "desired_input_layouts": Shard(0)},
     "PrepareModuleInput: input_layouts has 2 entries, desired_input_layouts has 1"),
    ({"input_kwarg_layouts": {"x": Shard(0)}},
     "PrepareModuleInput: input_kwarg_layouts names ['x'], desired_input_kwarg_layouts names []"),
])  # fmt: skip
def test_descriptions_that_do_not_match(options, message):
    """Descriptions that do not match are refused by the style's constructor."""
    with pytest.raises(ValueError, match="PrepareModuleInput") as caught:
        PrepareModuleInput(**options)
    assert str(caught.value) == message


def test_options_are_checked_and_shown():
    """``repr`` shows every option; a value that is no layout raises a TypeError."""
    style = PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None))
    assert repr(style) == (
        "PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None), "
        "input_kwarg_layouts={}, desired_input_kwarg_layouts={}, use_local_output=False)"
    )
    with pytest.raises(TypeError, match="one layout"):
        PrepareModuleInput(input_layouts=3, desired_input_layouts=Replicate())


def test_keywords_alone(twin):
    """Without a description of positional inputs any number of them passes unchanged."""

    def rank(mesh):
        style = PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"x": Replicate()})
        model = parallelize_module(probe(twin), mesh, {"attn": style})
        model["attn"](1, 2, x=twin.local_shard(twin.random(5), mesh, [Shard(0)]))
        args, kwargs = model["attn"].seen
        twin.same(kwargs["x"], twin.random(5), "x")
        return args

    assert twin.on_mesh((2,), rank)[0] == (1, 2)


# -- outputs -----------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Outputs with names."""

    y: object
    note: object


def echo():
    """A module that returns its argument."""
    from torch import nn

    class Echo(nn.Module):
        def forward(self, value):
            return value

    return nn.ModuleDict({"out": Echo()})


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("local", [True, False])
def test_an_output_is_brought_to_the_wanted_layout(twin, world, local):
    """A replicated plain output becomes a shard without communication; its gradient is whole again."""
    x = twin.random(2, 5, 7).requires_grad_()
    cotangent = twin.random(2, 5, 7, seed=4)

    def rank(mesh):
        style = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=local)
        leaf = x.detach().requires_grad_()
        y = parallelize_module(echo(), mesh, {"out": style})["out"](leaf)
        assert isinstance(y, DTensor) is not local
        y = y if local else y.to_local()
        twin.same(twin.gather(y, mesh, [Shard(1)], x.shape), x, "output")
        y.backward(twin.local_shard(cotangent, mesh, [Shard(1)]))
        twin.same(leaf.grad, cotangent, "gradient")

    twin.on_mesh((world,), rank)


@pytest.mark.parametrize("kind", [tuple, list, Pair._make])
def test_structures_keep_their_type(twin, kind):
    """Structures of outputs keep their type, and None leaves an output unchanged."""

    def rank(mesh):
        style = PrepareModuleOutput(output_layouts=(Shard(0), None), desired_output_layouts=(Replicate(), None))
        model = parallelize_module(echo(), mesh, {"out": style})
        out = model["out"](kind((twin.local_shard(twin.random(5, 2), mesh, [Shard(0)]), "note")))
        assert out[1] == "note"
        twin.same(out[0], twin.random(5, 2), "output 0")
        return type(out).__name__

    assert twin.on_mesh((2,), rank)[0] == {tuple: "tuple", list: "list"}.get(kind, "Pair")


@pytest.mark.parametrize("value, message", [
    ((1, 2), ("out (Echo): 2 outputs, but output_layouts of PrepareModuleOutput has 1 entries; give one per output, "
              "None for those to leave alone")),
    ("y", "out (Echo): output 0 must be a tensor, got str"),
])  # fmt: skip
def test_wrong_outputs_name_the_module(twin, value, message):
    """A wrong count, or a non-tensor where a tensor is declared, raises a ValueError."""

    def rank(mesh):
        style = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
        model = parallelize_module(echo(), mesh, {"out": style})
        with pytest.raises(ValueError, match="out") as caught:
            model["out"](value)
        return str(caught.value)

    assert twin.on_mesh((2,), rank)[0] == message


def test_descriptions_of_outputs_that_do_not_match():
    """Descriptions that do not match are refused by the style's constructor."""
    with pytest.raises(ValueError, match="has 2 entries, desired_output_layouts has 1"):
        PrepareModuleOutput(output_layouts=(Shard(0), None), desired_output_layouts=Shard(0))


def test_options_of_outputs_are_shown():
    """``repr`` shows every option with its default."""
    assert repr(PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())) == (
        "PrepareModuleOutput(output_layouts=(Shard(0),), desired_output_layouts=(Replicate(),), use_local_output=True)"
    )


# -- both --------------------------------------------------------------------------------------------------------------


def in_and_out(**options):
    """The style of every test here."""
    return PrepareModuleInputOutput(
        input_layouts=Shard(1),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(1),
        **options,
    )


@pytest.mark.parametrize("world", [2, 3])
def test_in_and_out_of_a_module_that_knows_no_dtensor(twin, world):
    """A plain module between sequence shards computes on the whole and equals the dense one."""
    from torch import nn

    ref = twin.Twin(twin.randomized(nn.Sequential(nn.Tanh())), twin.random(2, 5, 7))
    sharded = [Shard(1)]

    def rank(mesh):
        model = parallelize_module(ref.copy(), mesh, {"0": in_and_out(use_local_input=True)})
        x = twin.local_shard(ref.inputs[0], mesh, sharded).requires_grad_()
        y = model(x)
        twin.same(twin.gather(y, mesh, sharded, (2, 5, 7)), ref.output, "output")
        y.backward(twin.local_shard(ref.cotangent, mesh, sharded))
        twin.same(twin.gather(x.grad, mesh, sharded, (2, 5, 7)), ref.inputs[0].grad, "gradient of the input")

    twin.on_mesh((world,), rank)


def test_options_of_both_are_shown():
    """``repr`` shows every option of both halves."""
    assert repr(in_and_out()) == (
        "PrepareModuleInputOutput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), "
        "input_kwarg_layouts={}, desired_input_kwarg_layouts={}, use_local_input=False, "
        "output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),), use_local_output=True)"
    )
