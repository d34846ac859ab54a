"""Functions that MindSpore compiles or transforms must not reach DTensors without seeing them as such."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_module, distribute_tensor
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

X = np.linspace(-1, 2, 15, dtype=np.float32).reshape(5, 3)
NET = {}  # a global of this module that a compiled function names


class Keeper:
    """An object that keeps a tensor."""

    def __init__(self, kept):
        self.kept = kept


def _functions(net, tensor):
    """Functions that reach a DTensor, each in another way."""
    from functools import partial

    keeper, listed = Keeper(tensor), [{"deep": (tensor,)}]
    NET["net"] = net
    return {
        "closure over a cell": lambda x: net(x),  # noqa: PLW0108 - a closure is meant
        "closure over a parameter": lambda x, weight=net.weight: (x * weight).sum(),
        "closure over a tensor": lambda x: (x * tensor).sum(),
        "object": lambda x: (x * keeper.kept).sum(),
        "containers": lambda x: (x * listed[0]["deep"][0]).sum(),
        "global": lambda x: NET["net"](x) + 1,
        "bound method": net.construct,
        "partial": partial(lambda weight, x: (x * weight).sum(), tensor),
    }


def _first(tensors):
    return tensors[0]


def _refusals():
    import mindspore as ms
    from mindspore import Tensor, nn

    from hyper_parallel.platform.mindspore.captured import reaches_dtensor
    from hyper_parallel.platform.select import platform_named

    mesh = init_device_mesh("cpu", (platform_named("mindspore").get_world_size(),), mesh_dim_names=("tp",))
    net, plain = nn.Dense(3, 4), nn.Dense(3, 4)
    distribute_module(net, mesh)
    functions = _functions(net, distribute_tensor(Tensor(X), mesh, [Shard(0)]))
    function = functions["closure over a tensor"]
    doors = {
        "jit": lambda: ms.jit(function)(Tensor(X)),
        "bytecode": lambda: ms.jit(function, capture_mode="bytecode")(Tensor(X)),
        "vmap": lambda: ms.vmap(function)(Tensor(X[None])),
        "jvp": lambda: ms.jvp(function, Tensor(X), Tensor(X)),
        "jacrev": lambda: ms.jacrev(function)(Tensor(X)),
        "jacfwd": lambda: ms.jacfwd(function)(Tensor(X)),
    }
    sharded = ms.mutable((distribute_tensor(Tensor(X), mesh, [Shard(0)]),))
    doors["a mutable tuple"] = lambda: ms.jit(_first)(sharded)
    doors["export of a function"] = lambda: ms.export(
        ms.jit(function), Tensor(X), file_name="unwritten", file_format="MINDIR"
    )
    messages = {}
    for name, door in doors.items():
        with pytest.raises(UnsupportedOperatorError) as caught:
            door()
        messages[name] = str(caught.value)

    def double(x):
        return x * 2

    free = reaches_dtensor(lambda x: plain(x)), reaches_dtensor(double)  # noqa: PLW0108
    return {name: reaches_dtensor(value) for name, value in functions.items()}, messages, free


@pytest.mark.parametrize("world", [2, 3])
def test_compiled_functions_that_reach_dtensors_are_refused(world):
    """Every transform that compiles looks at what its function captures; plain functions capture nothing."""
    for reached, messages, free in simulate(_refusals, world, platform="mindspore"):
        assert reached == dict.fromkeys(reached, True)
        refusal = (
            "a function compiled by ms.jit: it would see this rank's shards as if they were complete; call it "
            "uncompiled, or on x.to_local() by local_map"
        )
        assert set(messages.values()) == {refusal}
        assert free == (False, False)


def _graphs(folder):
    import mindspore as ms
    from mindspore import Tensor, nn

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = distribute_tensor(Tensor(X), mesh, [Shard(0)])

    class Capturing(nn.Cell):
        def construct(self, x):
            return x * weight

    net = nn.Dense(3, 4)
    distribute_module(net, mesh)
    cells = {"parameters": net, "a cell inside": nn.SequentialCell(net), "a captured tensor": Capturing()}
    x = Tensor(X[:, :3])

    doors = {
        "compile": lambda cell: cell.compile(x),
        "export": lambda cell: ms.export(cell, x, file_name=f"{folder}/net", file_format="MINDIR"),
    }
    messages = set()
    for door in doors.values():
        for cell in cells.values():
            with pytest.raises(UnsupportedOperatorError) as caught:
                door(cell)
            messages.add(str(caught.value))
    return messages


def test_cells_that_reach_dtensors_are_not_compiled(tmp_path):
    """``compile`` and ``export`` look at parameters, cells inside and what ``construct`` captures."""
    refusal = (
        "a Cell compiled to a graph: it would see this rank's shards as if they were complete; "
        "call it, which runs it uncompiled, or export plain tensors"
    )
    assert simulate(_graphs, 2, "mindspore", (str(tmp_path),)) == [{refusal}] * 2
    assert not list(tmp_path.iterdir())


def _truncates(integers):
    """Whether MindSpore itself divides integers as DTensors of integers are divided."""
    from mindspore import ops

    try:
        ops.div(integers, integers, rounding_mode="trunc").asnumpy()
    except TypeError:
        return False
    return True


def _integers(world):
    from mindspore import Tensor, ops

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    first, second, flags = np.array([7, 5, -7, -8, 9]), np.array([2, 3, 2, 3, -4]), np.array([1, 0, 1, 1, 0], bool)

    def divided(of):
        return {
            "tensor_div": ops.tensor_div(of(first), of(second)),
            "RealDiv": ops.RealDiv()(of(first), of(second)),
        }

    def results(of):
        return {
            **(divided(of) if _truncates(Tensor(first)) else {}),
            "RealDiv of floats": ops.RealDiv()(of(first.astype(np.float32)), of(second.astype(np.float32))),
            "copy": of(flags).copy(),
            "copy of integers": of(first).copy(),
            "reduce_sum": ops.reduce_sum(of(flags)),
            "real": ops.real(of(flags)),
            "index by a copy": of(first)[of(flags).copy()],
        }

    plain = results(Tensor)
    placed = results(lambda array: distribute_tensor(Tensor(array), mesh, [Shard(0)]))
    with pytest.raises(UnsupportedOperatorError) as refused:
        ops.inv(distribute_tensor(Tensor(first), mesh, [Shard(0)]))
    return {name: (placed[name].asnumpy(), plain[name].asnumpy()) for name in plain}, str(refused.value)


@pytest.mark.parametrize("world", [2, 3])
def test_integers_and_booleans_keep_their_semantics(world):
    """Division of integers, and copies of booleans, have the dtypes and values of one device."""
    for compared, refused in simulate(_integers, world, platform="mindspore", args=(world,)):
        for name, (actual, expected) in compared.items():
            assert actual.dtype == expected.dtype, name
            np.testing.assert_array_equal(actual, expected, err_msg=name)
        assert refused == "operator Inv has no sharding rule for Int64; cast to a floating-point dtype first"
