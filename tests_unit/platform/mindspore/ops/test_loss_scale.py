"""Loss scaling of ``mindspore.amp`` over DTensors: every rank gets the decision and the values of a single device."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

PLACEMENTS = [Replicate(), Shard(0), Shard(1), Partial()]


def _distributed(array, mesh, placement):
    from mindspore import Tensor

    return distribute_tensor(Tensor(array), mesh, [Replicate()]).redistribute(mesh, [placement])


def _decisions(container):
    """What ``all_finite`` says of two DTensors and a plain tensor, for every place of an overflow."""
    from mindspore import Tensor, amp

    from hyper_parallel.platform.select import platform_named

    mesh = init_device_mesh("cpu", (platform_named("mindspore").get_world_size(),), mesh_dim_names=("tp",))
    random = np.random.default_rng(5)
    decisions = []
    for overflow in (None, np.inf, -np.inf, np.nan):
        for place in PLACEMENTS:
            for row in range(4):
                arrays = [random.standard_normal((4, 3)).astype(np.float32) for _ in range(2)]
                if overflow is not None:
                    arrays[row % 2][row, row % 3] = overflow
                values = [_distributed(arrays[0], mesh, place), _distributed(arrays[1], mesh, Shard(0))]
                finite = amp.all_finite(container([*values, Tensor(np.ones(2, np.float32))]))
                decisions.append((bool(finite) is (overflow is None), type(finite) is Tensor, str(finite.dtype)))
    values = [_distributed(arrays[0] * 0, mesh, Shard(0)), Tensor(np.array([np.inf], np.float32))]
    decisions.append((not bool(amp.all_finite(container(values))), True, "Bool"))
    own = Tensor(np.array([np.inf if mesh.get_local_rank() else 0], np.float32))  # plain, and of one rank alone
    decisions.append((not bool(amp.all_finite(container([values[0], own]))), True, "Bool"))
    return decisions


@pytest.mark.parametrize("world, container", [(2, list), (3, tuple)])
def test_an_overflow_on_one_rank_is_seen_by_all(world, container):
    """``all_finite`` is a plain bool tensor, equal on all ranks, whichever rank holds the overflow."""
    for decisions in simulate(_decisions, world, "mindspore", (container,)):
        assert set(decisions) == {(True, True, "Bool")}


def _scaled_and_unscaled():
    from mindspore import Tensor, amp

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    array = np.random.default_rng(6).standard_normal((5, 3)).astype(np.float32)
    scaler = amp.DynamicLossScaler(8, 2, 50)
    values = [_distributed(array, mesh, place) for place in PLACEMENTS]
    nest = (*values, [values[1], Tensor(array)])
    results = {}
    for name, run in (("scale", scaler.scale), ("unscale", scaler.unscale)):
        factor = 8 if name == "scale" else 1 / 8
        scaled = run(nest)
        leaves = [*scaled[:-1], *scaled[-1], run(values[1])]
        plain = run((Tensor(array), [Tensor(array)]))
        results[name] = (
            [np.array_equal(leaf.asnumpy(), array * np.float32(factor)) for leaf in leaves],
            [isinstance(leaf, DTensor) for leaf in leaves],
            type(scaled) is type(plain) and type(scaled[-1]) is type(plain[-1]),
        )
    return results


def test_scaling_keeps_layouts_and_nesting():
    """``scale`` and ``unscale`` are those of whole tensors, nested as MindSpore nests them."""
    expected = ([True] * 7, [True] * 5 + [False, True], True)
    for results in simulate(_scaled_and_unscaled, 2, "mindspore"):
        assert results == {"scale": expected, "unscale": expected}


def _step_with_overflow():
    """One mixed precision step: loss scaled inside the transform, gradients unscaled, the scale adjusted."""
    import mindspore
    from mindspore import Parameter, Tensor, amp, ops

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    array = np.random.default_rng(7).standard_normal((4, 3)).astype(np.float32)
    plain, weight = Tensor(array), Parameter(distribute_tensor(Tensor(array), mesh, [Shard(0)]), name="w")
    results = []
    whole = distribute_tensor(plain, mesh, [Replicate()])
    for value, parameter in ((plain, Parameter(plain, name="p")), (whole, weight)):
        scaler = amp.DynamicLossScaler(8, 2, 1)

        def scaled_loss(x, parameter=parameter, scaler=scaler):
            return scaler.scale(ops.sin(x * parameter).sum())

        step = mindspore.value_and_grad(scaled_loss, None, [parameter])
        loss, grads = step(value)
        grads = scaler.unscale(grads)
        scaler.adjust(amp.all_finite(grads))
        results.append((scaler.unscale(loss).asnumpy(), grads[0].asnumpy(), float(scaler.scale_value.asnumpy().item())))
    return results


def test_a_step_is_that_of_a_single_device():
    """Loss, gradient and next scale of a scaled step."""
    for plain, distributed in simulate(_step_with_overflow, 2, "mindspore"):
        np.testing.assert_allclose(distributed[0], plain[0], rtol=1e-6)
        np.testing.assert_allclose(distributed[1], plain[1], rtol=1e-6)
        assert distributed[2] == plain[2]
