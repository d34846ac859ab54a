"""Clipping, and operators that take numbers, on DTensors beside plain tensors: MindSpore's values and gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import RankFailedError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

RANDOM = np.random.default_rng(8)
ARRAYS = [RANDOM.standard_normal(shape).astype(np.float32) for shape in ((7, 5), (5,), (3, 4), (6,))]
LABELS = np.array([0, 3, 1, 4, 2, 0, 1], np.int32)


def _mesh():
    import mindspore

    from hyper_parallel.platform.select import platform_named

    del mindspore
    return init_device_mesh("cpu", (platform_named("mindspore").get_world_size(),), mesh_dim_names=("tp",))


def _whole(value):
    return np.array(value.asnumpy())


def _clippings():
    from mindspore import ops

    return {
        "global norm": lambda xs: ops.clip_by_global_norm(xs, 0.7),
        "global norm, not reached": lambda xs: ops.clip_by_global_norm(xs, 100.0),
        "norm": lambda xs: ops.clip_by_norm(xs, 0.7),
        "largest": lambda xs: ops.clip_by_norm(xs, 0.7, float("inf")),
        "of one": lambda xs: [ops.clip_by_norm(xs[0], 0.7)],
        "values": lambda xs: ops.clip_by_value(xs, -0.2, 0.3),
    }


@pytest.mark.parametrize("world", [2, 3, 4])
def test_clipping_of_mixed_gradients_is_that_of_whole_ones(world):
    """DTensors of several layouts and plain tensors are clipped by one norm; each keeps its kind."""

    def rank():
        from mindspore import Tensor

        mesh, placements = _mesh(), ([Shard(0)], [Replicate()], [Shard(1)], None)
        plain = [Tensor(array) for array in ARRAYS]
        mixed = [
            tensor if place is None else distribute_tensor(tensor, mesh, place)
            for tensor, place in zip(plain, placements, strict=True)
        ]
        for name, clip in _clippings().items():
            ours, expected = clip(mixed), clip(plain)
            assert [type(clipped) for clipped in ours] == [type(tensor) for tensor in mixed[: len(ours)]], name
            for clipped, whole in zip(ours, expected, strict=True):
                np.testing.assert_allclose(_whole(clipped), _whole(whole), rtol=1e-5, atol=1e-7, err_msg=name)

    simulate(rank, world, "mindspore")


def test_a_norm_that_is_not_finite_raises_where_asked_for():
    """``error_if_nonfinite`` raises on DTensors, too."""

    def rank():
        from mindspore import Tensor, ops

        x = distribute_tensor(Tensor(np.array([1.0, np.inf, 2.0], np.float32)), _mesh(), [Shard(0)])
        ops.clip_by_norm(x, 1.0, 2.0, error_if_nonfinite=True)

    with pytest.raises(RankFailedError, match=r"the total norm of order 2\.0 from input is non-finite"):
        simulate(rank, 2, "mindspore")


def test_another_order_of_the_norm_is_refused():
    """MindSpore's norms of other orders add signed powers."""

    def rank():
        from mindspore import Tensor, ops

        ops.clip_by_norm(distribute_tensor(Tensor(ARRAYS[0]), _mesh(), [Shard(0)]), 1.0, 3)

    with pytest.raises(RankFailedError, match=r"ops\.clip_by_norm: norm_type=3\.0 has no sharding rule, norm_"):
        simulate(rank, 2, "mindspore")


def test_norms_along_dims_are_refused():
    """MindSpore's kernel is wrong for them."""

    def rank():
        from mindspore import Tensor, nn

        nn.ClipByNorm(1)(distribute_tensor(Tensor(ARRAYS[0]), _mesh(), [Shard(0)]), Tensor(0.4))

    with pytest.raises(RankFailedError, match=r"operator ClipByNorm: axis=1 has no sharding rule, axis=\(\) has"):
        simulate(rank, 2, "mindspore")


def _functions(bound, labels, target):
    from mindspore import nn, ops

    sparse = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    dense = nn.SoftmaxCrossEntropyWithLogits(reduction="mean")
    return {
        "fmod": lambda x: ops.fmod(x, 0.3),
        "fmod of two": lambda x: ops.fmod(x, x * 0.4 + 2),
        "div, towards zero": lambda x: ops.div(x, 0.3, rounding_mode="trunc"),
        "div, floor": lambda x: ops.div(x, 0.3, rounding_mode="floor"),
        "xdivy": lambda x: ops.xdivy(x, 2.0),
        "xdivy of a number": lambda x: ops.xdivy(3.0, x),
        "clip by norm": lambda x: nn.ClipByNorm()(x, bound),
        "sparse mean": lambda x: sparse(x, labels),
        "dense mean": lambda x: dense(x, target),
        "sum": lambda x: x.sum(axis=0, dtype=x.dtype, keepdims=True),
    }


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate()], ids=str)
def test_values_and_gradients_are_those_of_the_whole(place):
    """Operators with numbers, norms along dims and losses of labels."""

    def rank():
        import mindspore as ms
        from mindspore import Tensor, ops

        mesh = _mesh()
        whole, bound, labels = Tensor(ARRAYS[0]), Tensor(0.4, ms.float32), Tensor(LABELS)
        target = ops.cast(ops.one_hot(labels, 5), whole.dtype)
        rows = Replicate() if place == Shard(1) else place
        arguments = (distribute_tensor(labels, mesh, [rows]), distribute_tensor(target, mesh, [place]))
        expected, x = _functions(bound, labels, target), distribute_tensor(whole, mesh, [place])
        for name, function in _functions(bound, *arguments).items():
            np.testing.assert_allclose(_whole(function(x)), _whole(expected[name](whole)), 1e-5, 1e-6, err_msg=name)
            ours, gradient = (
                ms.grad(lambda x, call=call: call(x).sum())(value)
                for call, value in ((function, x), (expected[name], whole))
            )
            np.testing.assert_allclose(_whole(ours), _whole(gradient), 1e-4, 1e-5, err_msg=f"gradient of {name}")

    simulate(rank, 3, "mindspore")


OLDER_RANDOM = np.random.default_rng(3)
OLDER_ARRAYS = [OLDER_RANDOM.standard_normal(shape).astype(np.float32) for shape in ((5, 4), (5, 4), (4, 3))]
CONDITION = OLDER_RANDOM.random((5, 4)) > 0.5
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
        plain = [mindspore.Tensor(array) for array in (*OLDER_ARRAYS, CONDITION, ROWS)]
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
        x, condition = (mindspore.Tensor(CONDITION), mindspore.Tensor(OLDER_ARRAYS[0] > 0))
        ours = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (x, condition)]
        assert (
            ours[0].where(ours[1], True).full_tensor().asnumpy().tolist() == x.where(condition, True).asnumpy().tolist()
        )
        close = ours[0].isclose(x2=ours[1]).full_tensor().asnumpy()
        assert close.tolist() == ((OLDER_ARRAYS[0] > 0) == CONDITION).tolist()

    simulate(rank, 2, "mindspore")
