from __future__ import annotations

import pytest

from hyper_parallel import PrepareModuleInputOutput, Replicate, Shard, parallelize_module

pytestmark = pytest.mark.platforms("torch")


def style(**options):
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

    ref = twin.Twin(twin.settle(nn.Sequential(nn.Tanh())), twin.random(2, 5, 7))
    held = [Shard(1)]

    def rank(mesh):
        model = parallelize_module(ref.copy(), mesh, {"0": style(use_local_input=True)})
        x = twin.piece(ref.inputs[0], mesh, held).requires_grad_()
        y = model(x)
        twin.same(twin.gather(y, mesh, held, (2, 5, 7)), ref.output, "output")
        y.backward(twin.piece(ref.cotangent, mesh, held))
        twin.same(twin.gather(x.grad, mesh, held, (2, 5, 7)), ref.inputs[0].grad, "gradient of the input")

    twin.on_mesh((world,), rank)


def test_options_are_shown():
    """``repr`` shows every option of both halves."""
    assert repr(style()) == (
        "PrepareModuleInputOutput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), "
        "input_kwarg_layouts={}, desired_input_kwarg_layouts={}, use_local_input=False, "
        "output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),), use_local_output=True)"
    )
