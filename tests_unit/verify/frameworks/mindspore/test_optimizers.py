"""States of MindSpore's optimizers beside sharded parameters."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


def _state():
    """The placements that a local state of a sharded parameter gets, and what stays as it is."""
    from mindspore import Tensor

    from hyper_parallel import DTensor, Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.verify.frameworks.mindspore.optimizers import _like

    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    weight = distribute_tensor(Tensor(np.arange(15.0).reshape(5, 3)), mesh, [Shard(0)])
    local = Tensor(np.ones(tuple(weight.to_local().shape)))
    state = _like(weight, local)
    plain = Tensor(np.ones(()))
    assert _like(weight, state) is state
    assert _like(weight, plain) is plain
    assert isinstance(state, DTensor)
    assert state.shape == (5, 3)
    return repr(state.placements), state.full_tensor().asnumpy()


def test_local_states_are_shards_of_their_parameter():
    """A rank's moment of a shard is a DTensor of the parameter's layout; a step counter stays plain."""
    for state, whole in simulate(_state, 3, platform="mindspore"):
        assert state == "(Shard(0),)"
        np.testing.assert_array_equal(whole, np.ones((5, 3)))
