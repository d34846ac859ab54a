"""Gradients and states of MindSpore's optimizers beside sharded parameters."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


def _pairs():
    """The placements that local gradients and local states of a sharded parameter get, and what stays as it is."""
    from mindspore import Tensor

    from hyper_parallel import DTensor, Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.platform.mindspore.optimizers import _like, in_dual_layout

    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    weight = distribute_tensor(Tensor(np.arange(15.0).reshape(5, 3)), mesh, [Shard(0)])
    local = Tensor(np.ones(tuple(weight.to_local().shape)))
    gradient, state = in_dual_layout(weight, local), _like(weight, local)
    plain = Tensor(np.ones(()))
    assert in_dual_layout(weight, gradient) is gradient
    assert in_dual_layout(plain, local) is local
    assert _like(weight, state) is state
    assert _like(weight, plain) is plain
    assert all(isinstance(value, DTensor) and value.shape == (5, 3) for value in (gradient, state))
    return repr(gradient.placements), repr(state.placements), state.full_tensor().asnumpy()


def test_local_gradients_and_states_are_shards_of_their_parameter():
    """A rank's gradient or moment of a shard is a DTensor of the parameter's layout; a step counter stays plain."""
    for gradient, state, whole in simulate(_pairs, 3, platform="mindspore"):
        assert (gradient, state) == ("(Shard(0),)", "(Shard(0),)")
        np.testing.assert_array_equal(whole, np.ones((5, 3)))
