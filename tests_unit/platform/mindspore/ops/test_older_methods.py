"""Methods in older spellings, and ``where`` as a method, on DTensors beside plain tensors: values and gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

RANDOM = np.random.default_rng(3)
ARRAYS = [RANDOM.standard_normal(shape).astype(np.float32) for shape in ((5, 4), (5, 4), (4, 3))]
CONDITION = RANDOM.random((5, 4)) > 0.5
ROWS = np.array([0, 2, 3])


class Inputs(NamedTuple):
    """What a call works on: three tensors, a condition and rows."""

    x: Any
    y: Any
    w: Any
    c: Any
    rows: Any


def _calls():
    """Each method as a call."""
    return {
        "chunk": lambda t: t.x.chunk(2, axis=1)[0] * t.y.chunk(2, axis=1)[1],
        "split": lambda t: t.x.split([1, 3], axis=1)[1] * t.y.split(3, axis=1)[0],
        "expand_as": lambda t: t.x.unsqueeze(dim=0).expand_as(x=(t.x * t.y).unsqueeze(dim=0)),
        "flatten": lambda t: (t.x * t.y).flatten(order="C") * (t.x - t.y).flatten(order="F"),
        "index_select": lambda t: t.x.index_select(axis=1, index=t.rows) * t.y[:, :3],
        "matmul": lambda t: (t.x * t.y).matmul(tensor2=t.w),
        "nansum": lambda t: (t.x * t.y).nansum(axis=1),
        "narrow": lambda t: t.x.narrow(axis=1, start=1, length=2) * t.y[:, :2],
        "remainder": lambda t: t.x.remainder(divisor=t.y),
        "select": lambda t: t.x.select(t.c, t.y),
        "sub": lambda t: t.x.sub(y=t.y) * t.y,
        "tile": lambda t: (t.x * t.y).tile(reps=(2, 1)),
        "view_as": lambda t: t.x.view_as(other=t.y) * t.y,
        "where": lambda t: t.x.where(condition=t.c, y=t.y),
        "where, positional": lambda t: t.x.where(t.c, t.y),
        "where, a number": lambda t: t.x.where(t.c, 0.5) * t.y,
    }  # fmt: skip


@pytest.mark.parametrize("world", [2, 3])
def test_methods_are_those_of_plain_tensors(world):
    """Values, and gradients of every input for a random cotangent, in each spelling of a method."""

    def rank():
        import mindspore

        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        plain = [mindspore.Tensor(array) for array in (*ARRAYS, CONDITION, ROWS)]
        places = (Shard(0), Shard(1), Replicate(), Shard(0), Replicate())
        ours = [distribute_tensor(tensor, mesh, [place]) for tensor, place in zip(plain, places, strict=True)]
        for name, call in _calls().items():
            expected = call(Inputs(*plain))
            cotangent = np.random.default_rng(1).standard_normal(expected.shape).astype(np.float32)

            def loss(*inputs, call=call, cotangent=cotangent):
                weights = mindspore.Tensor(cotangent)
                output = call(Inputs(*inputs))
                if isinstance(inputs[0], DTensor):
                    weights = distribute_tensor(weights, mesh, [Replicate()])
                return (output * weights).sum()

            differentiate = mindspore.grad(loss, grad_position=(0, 1, 2))
            for mine, whole in zip(
                [call(Inputs(*ours)), *differentiate(*ours)], [expected, *differentiate(*plain)], strict=True
            ):
                np.testing.assert_allclose(
                    mine.full_tensor().asnumpy(), whole.asnumpy(), rtol=1e-4, atol=1e-5, err_msg=name
                )

    simulate(rank, world, "mindspore")


def test_conditions_are_not_taken_for_values():
    """``x.where(condition, y)`` of boolean tensors, in which a swapped condition would go unnoticed by dtypes."""

    def rank():
        import mindspore

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x, condition = (mindspore.Tensor(CONDITION), mindspore.Tensor(ARRAYS[0] > 0))
        ours = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (x, condition)]
        assert (
            ours[0].where(ours[1], True).full_tensor().asnumpy().tolist() == x.where(condition, True).asnumpy().tolist()
        )
        close = ours[0].isclose(x2=ours[1]).full_tensor().asnumpy()
        assert close.tolist() == ((ARRAYS[0] > 0) == CONDITION).tolist()

    simulate(rank, 2, "mindspore")
