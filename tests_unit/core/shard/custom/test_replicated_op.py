"""Operators that run replicated: their writes reach the operand, or are refused."""

from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.shard.custom.replicated_op import ReplicatedOp
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def announced(function):
    """A user's function that calls ``__torch_function__`` as PyTorch's own functions do."""
    import torch

    def call(*args):
        if torch.overrides.has_torch_function(args):
            return torch.overrides.handle_torch_function(call, args, *args)
        return function(*args)

    call.__name__ = call.__qualname__ = function.__name__
    return call


def adds_quietly(x, total):
    """Write in place with neither a name nor a schema that declares it."""
    total.add_(x.sum())
    return x.mul(2)


def adds_up_(x, y):
    """Write in place, as the trailing underscore declares."""
    x.add_(y)


def test_writes_arrive_in_what_is_whole_or_are_refused():
    """An undeclared write into a gathered copy is detected and refused; so is a write into a view of a copy."""
    import torch

    def refused(call):
        with pytest.raises(UnsupportedOperatorError) as caught:
            call()
        return str(caught.value)

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        quiet, named = announced(adds_quietly), announced(adds_up_)
        x, total, split = (
            distribute_tensor(torch.ones(size), mesh, places)
            for size, places in ((3, [Shard(0)]), (1, None), (3, [Shard(0)]))
        )
        copied = distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)]).view(6)
        doubled = quiet(x, total)
        kept = named(total, total)
        return (
            doubled.full_tensor().tolist(),
            total.full_tensor().tolist(),
            kept is total,
            refused(lambda: quiet(total, split)),
            refused(lambda: named(split, x)),
            refused(lambda: named(copied, copied)),
        )

    ops = [ReplicatedOp(name) for name in ("adds_quietly", "adds_up_")]
    try:
        outcome = simulate(body, 2, platform="torch")[0]
    finally:
        for operator in ops:
            operator.unregister()
    gathered_first = (
        "was written in place, but had to be gathered first, so the write is lost; use x = x.redistribute() first"
    )
    must_be_replicated = "adds_up_: operands written in place must be replicated; use x = x.redistribute() first"
    copy = (
        "it is a copy: view(x=f32[3@tp, 2]) had to redistribute x to f32[3, 2], so a write would be lost; "
        "write to x itself"
    )
    assert outcome == (
        [2.0, 2.0, 2.0],
        [8.0],
        True,
        f"adds_quietly: an operand f32[3@tp] {gathered_first}",
        must_be_replicated,
        f"adds_up_: an operand cannot be written to: {copy}",
    )
