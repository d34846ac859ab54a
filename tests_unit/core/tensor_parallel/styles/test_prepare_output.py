from __future__ import annotations

from typing import NamedTuple

import pytest

from hyper_parallel import DTensor, PrepareModuleOutput, Replicate, Shard, parallelize_module

pytestmark = pytest.mark.platforms("torch")


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
        y.backward(twin.piece(cotangent, mesh, [Shard(1)]))
        twin.same(leaf.grad, cotangent, "gradient")

    twin.on_mesh((world,), rank)


@pytest.mark.parametrize("kind", [tuple, list, Pair._make])
def test_structures_keep_their_type(twin, kind):
    """Outputs are converted one by one; None leaves one alone."""

    def rank(mesh):
        style = PrepareModuleOutput(output_layouts=(Shard(0), None), desired_output_layouts=(Replicate(), None))
        model = parallelize_module(echo(), mesh, {"out": style})
        out = model["out"](kind((twin.piece(twin.random(5, 2), mesh, [Shard(0)]), "note")))
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
    """A wrong count, or no tensor where one is declared, is a ValueError."""

    def rank(mesh):
        style = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
        model = parallelize_module(echo(), mesh, {"out": style})
        with pytest.raises(ValueError, match="out") as caught:
            model["out"](value)
        return str(caught.value)

    assert twin.on_mesh((2,), rank)[0] == message


def test_descriptions_that_do_not_match():
    """Refused when the style is made."""
    with pytest.raises(ValueError, match="has 2 entries, desired_output_layouts has 1"):
        PrepareModuleOutput(output_layouts=(Shard(0), None), desired_output_layouts=Shard(0))


def test_options_are_shown():
    """``repr`` shows every option with its default."""
    assert repr(PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())) == (
        "PrepareModuleOutput(output_layouts=(Shard(0),), desired_output_layouts=(Replicate(),), use_local_output=True)"
    )
