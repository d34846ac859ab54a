"""MindSpore's composite functions of a user's module reach other ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.transport.serialization import pack, unpack
from hyper_parallel.verify.simulate import bind_imported

pytestmark = pytest.mark.platforms("mindspore")


@pytest.fixture
def clipped():
    """A graph of functions by type, as scripts define it at the top of their module, that calls itself for lists."""
    from mindspore import ops

    clip = ops.MultitypeFuncGraph("clip")

    @clip.register("Number", "Tensor")
    def clip_tensor(limit, gradient):
        return ops.clip_by_value(gradient, -limit, limit)

    @clip.register("Number", "List")
    def clip_list(limit, gradients):
        return [clip(limit, gradient) for gradient in gradients]

    return clip


def test_functions_by_type_and_maps_are_pickled(clipped):
    """A graph of functions, one that calls itself, maps of it and GradOperation do the same in another process."""
    import mindspore as ms
    from mindspore import ops

    bind_imported("mindspore")
    values = ms.Tensor([-3.0, 0.5, 2.0])
    graph, mapped, plain = unpack(pack((clipped, ops.HyperMap(clipped), ops.Map())))
    assert graph(1.5, values).asnumpy().tolist() == [-1.5, 0.5, 1.5]
    assert [out.asnumpy().tolist() for out in graph(1.0, [values, values * 2])] == [[-1, 0.5, 1], [-1, 1, 1]]
    ((out,),) = mapped(((1.5,),), ((values,),))
    assert out.asnumpy().tolist() == [-1.5, 0.5, 1.5]
    assert [out.asnumpy().tolist() for out in plain(ops.partial(clipped, 1.0), (values,))] == [[-1.0, 0.5, 1.0]]
    gradient = unpack(pack(ops.GradOperation(get_all=True, sens_param=True)))
    assert (gradient.get_all, gradient.get_by_list, gradient.sens_param) == (True, False, True)
    first, second = gradient(lambda x, y: x * y)(values, values + 1, values - 1)
    np.testing.assert_array_equal(first.asnumpy(), ((values + 1) * (values - 1)).asnumpy())
    np.testing.assert_array_equal(second.asnumpy(), (values * (values - 1)).asnumpy())


@pytest.mark.parametrize("world", [2, 3])
def test_a_body_that_maps_over_dtensors_reaches_its_ranks(clipped, world):
    """Rank processes get the graph and the map that a body holds, and clip shards of uneven sizes by them."""
    from mindspore import Tensor, ops

    import hyper_parallel as hp
    from hyper_parallel.verify.simulate import simulate

    hyper_map = ops.HyperMap()
    values = np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32)

    def body():
        mesh = hp.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        x = hp.distribute_tensor(Tensor(values), mesh, [hp.Shard(0)])
        return [out.full_tensor().asnumpy() for out in hyper_map(ops.partial(clipped, 0.5), (x, x * 2))]

    for outputs in simulate(body, world, "mindspore"):
        np.testing.assert_array_equal(outputs[0], values.clip(-0.5, 0.5))
        np.testing.assert_array_equal(outputs[1], (values * 2).clip(-0.5, 0.5))
