"""Imperative gradients on MindSpore, and groups under the names of MindSpore's own functions."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel import DTensor, Partial, Shard, _versions, distribute_tensor, init_device_mesh
from hyper_parallel._versions import named
from hyper_parallel.errors import LayoutError, MeshError, PlanError, UnsupportedOnBackend
from hyper_parallel.platform.select import get_platform
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


def array(*shape, seed=0):
    """Normal float32 values from a fresh generator."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def imperative():
    """Gradients by ``backward`` on plain tensors and DTensors, accumulated, seeded and cleared."""
    import mindspore as ms
    from mindspore import Parameter, Tensor, mint, nn

    from hyper_parallel.compat.activation_checkpoint import enable_mindspore_backward_compat

    assert not hasattr(Tensor, "backward")
    enable_mindspore_backward_compat()
    enable_mindspore_backward_compat()
    mesh = init_device_mesh("npu", (3,), mesh_dim_names=("tp",))
    weight, cotangent, x = array(5, 4, seed=1), array(7, 4, seed=2), Tensor(array(7, 5, seed=3))

    class Layer(nn.Cell):
        def __init__(self, weight):
            super().__init__()
            self.weight = Parameter(weight, name="weight")
            self.frozen = Parameter(Tensor(array(4, seed=4)), name="frozen", requires_grad=False)

        def construct(self, x):
            return mint.matmul(x, self.weight) + self.frozen

    layer = Layer(Tensor(weight))
    out = layer(x)
    assert out.requires_grad
    assert out.grad_fn is not None
    assert layer.weight.grad_fn is None
    assert layer.weight.grad is None
    out.backward(Tensor(cotangent))
    expected = array(7, 5, seed=3).T @ cotangent
    np.testing.assert_allclose(layer.weight.grad.asnumpy(), expected, rtol=1e-5, atol=1e-5)
    loss = (layer(x) * Tensor(cotangent)).sum()
    loss.backward(Tensor([0.5], ms.float32))  # of one element, as MindFormers seeds
    np.testing.assert_allclose(layer.weight.grad.asnumpy(), 1.5 * expected, rtol=1e-5, atol=1e-5)
    assert layer.frozen.grad is None
    assert x.grad is None
    layer.weight.grad = None
    assert layer.weight.grad is None

    sharded = Parameter(distribute_tensor(Tensor(weight), mesh, [Shard(0)]), name="sharded")
    (sharded.to_local() * sharded.to_local()).sum().backward()
    gradient = sharded.grad
    assert isinstance(gradient, DTensor)
    assert gradient.layout is sharded.layout
    np.testing.assert_allclose(gradient.full_tensor().asnumpy(), 2 * weight, rtol=1e-6)
    sharded.grad = gradient
    with pytest.raises(
        PlanError, match=r"^grad: f32\[5, 4@tp\] does not have the layout of its tensor, f32\[5@tp, 4\]$"
    ):
        sharded.grad = distribute_tensor(Tensor(weight), mesh, [Shard(1)])
    partial = DTensor.from_local(Tensor([1.0], ms.float32), mesh, [Partial()])
    with pytest.raises(LayoutError, match=r"^backward: f32\[1\] \+ Partial\(sum\)@tp has partial values; reduce them "):
        partial.backward()
    with pytest.raises(PlanError, match=r"^grad: f32\[5@tp, 4\] does not have the layout of its tensor, a Tensor$"):
        x.grad = gradient
    x.requires_grad = True
    (x * x).sum().backward(inputs=[x])
    np.testing.assert_allclose(x.grad.asnumpy(), 2 * array(7, 5, seed=3), rtol=1e-6)
    return True


def test_backward_adds_gradients_to_leaves():
    """``backward`` adds to ``grad`` of leaves alone; of a DTensor it is one in its layout."""
    assert simulate(imperative, 3, platform="mindspore") == [True] * 3


def test_nothing_is_left_after_a_run():
    """Simulated ranks begin without the attributes that an earlier run has added."""
    for _ in range(2):
        assert simulate(imperative, 3, platform="mindspore") == [True] * 3


GRADIENTS = ("_grad", "_grad_node", "_is_leaf", "_requires_grad", "requires_grad_")


@pytest.mark.parametrize("api", ["_c_expression.run_backward", *(f"Tensor.{name}" for name in GRADIENTS)])
def test_a_mindspore_that_lacks_what_backward_needs_is_refused_at_once(api, monkeypatch):
    """Asked for ``backward``, a MindSpore without a name that it needs is refused by that name, and nothing changes."""
    import mindspore
    from mindspore import Tensor

    from hyper_parallel.compat.activation_checkpoint import enable_mindspore_backward_compat
    from hyper_parallel.platform.mindspore import imperative as module
    from hyper_parallel.platform.mindspore.versions import NAMES, pynative_executor

    monkeypatch.setattr(mindspore, "__version__", "2.9.1")
    monkeypatch.setattr(_versions, "named", lambda path: None if path == f"mindspore.{api}" else named(path))
    monkeypatch.setattr(NAMES, "_found", {})
    monkeypatch.setattr(module, "run_backward", NAMES.find("run_backward"))
    recorded = pynative_executor.grad_flag()
    with pytest.raises(UnsupportedOnBackend) as raised:
        enable_mindspore_backward_compat()
    assert str(raised.value) == (
        f"backward() on MindSpore needs mindspore.{api}, which MindSpore 2.9.1 does not have; it is in MindSpore 2.10"
    )
    assert not hasattr(Tensor, "backward")
    assert pynative_executor.grad_flag() is recorded


def transposed():
    """Gradients of a weight that is used transposed, over three passes and added to one that was set."""
    from mindspore import Parameter, Tensor, mint

    get_platform().enable_imperative_gradients()
    weight, x, cotangent = Parameter(Tensor(array(4, 5)), name="w"), Tensor(array(3, 5, seed=1)), array(3, 4, seed=2)
    for count in (1, 2, 3):
        mint.matmul(x, mint.transpose(weight, 0, 1)).backward(Tensor(cotangent))
        expected = count * (cotangent.T @ array(3, 5, seed=1))
        np.testing.assert_allclose(weight.grad.asnumpy(), expected, rtol=1e-5, atol=1e-5)
    weight.grad = Tensor(array(5, 4, seed=3)).swapaxes(0, 1)
    mint.matmul(x, mint.transpose(weight, 0, 1)).backward(Tensor(cotangent))
    expected = array(5, 4, seed=3).T + cotangent.T @ array(3, 5, seed=1)
    np.testing.assert_allclose(weight.grad.asnumpy(), expected, rtol=1e-5, atol=1e-5)
    return True


def test_gradients_of_views_add_up():
    """A gradient that is a transposed view adds to the one before by its indices, not by the order in memory."""
    assert simulate(transposed, 2, platform="mindspore") == [True] * 2


def groups():
    """Groups of a mesh in MindSpore's own functions and in this library's."""
    from mindspore import Tensor, mint, ops

    platform = get_platform()
    mesh = init_device_mesh("npu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = mesh.get_rank()
    for axis in ("dp", "tp"):
        group = mesh[axis].get_group()
        assert isinstance(group, str)
        assert mesh.get_group(axis) == group
        assert mint.distributed.get_process_group_ranks(group) == mesh.get_rank_list_along_axis(axis)
        assert platform.get_process_group_ranks(group) == mesh.get_rank_list_along_axis(axis)
        value = Tensor([float(rank)])
        mint.distributed.all_reduce(value, group=group)
        assert value.asnumpy() == sum(mesh.get_rank_list_along_axis(axis))
        twice = platform.differentiable_all_reduce(Tensor([float(rank)]), "sum", group)
        assert twice.asnumpy() == value.asnumpy()
        assert platform.create_group(mesh.get_rank_list_along_axis(axis)) == group
    ops.communication.set_comm_ops_inplace(False)
    gathered, _ = ops.communication.all_gather_into_tensor(None, Tensor([float(rank)]), group=mesh.get_group("tp"))
    assert gathered.asnumpy().tolist() == mesh.get_rank_list_along_axis("tp")
    own = mint.distributed.new_group([0, 3]) if rank in (0, 3) else None
    if own is not None:
        assert platform.get_process_group_ranks(own) == [0, 3]
        platform.mark_created_groups(own)
        assert platform.get_created_group([3, 0]) == own
        platform.destroy_process_group(own)
        with pytest.raises(
            MeshError, match=r"is not a group of this world, or was destroyed; known are the groups of "
        ):
            platform.get_process_group_ranks(own)
    return True


def test_groups_are_the_names_that_mindspore_takes():
    """``get_group`` returns a string that MindSpore's functions and this library's take, on simulated ranks as well."""
    assert simulate(groups, 4, platform="mindspore") == [True] * 4


def distributed_leaves():
    """Leaves and results, distributed while ``backward`` is enabled, and inside of a differentiated function."""
    import mindspore as ms
    from mindspore import Parameter, Tensor

    from hyper_parallel import Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.compat.activation_checkpoint import enable_mindspore_backward_compat
    from hyper_parallel.errors import ArgumentTypeError

    enable_mindspore_backward_compat()
    mesh = init_device_mesh("cpu", (3,))
    weight = Parameter(Tensor(np.ones((4, 5), np.float32)), name="weight")
    placed = Parameter(distribute_tensor(weight, mesh, [Shard(0)]), name="placed")
    (placed.to_local() * 3).sum().backward()
    np.testing.assert_array_equal(placed.grad.full_tensor().asnumpy(), np.full((4, 5), 3))
    assert weight.grad is None
    with pytest.raises(ArgumentTypeError, match=r"^distribute_tensor: the tensor \[4, 5\] is part of a graph"):
        distribute_tensor(weight * 2, mesh, [Shard(0)])
    with pytest.raises(ArgumentTypeError, match=r"^distribute_tensor: the tensor \[4, 5\] is part of a graph"):
        ms.grad(lambda w: distribute_tensor(w, mesh, [Shard(0)]).to_local().sum())(weight)
    return True


def test_leaves_are_distributed_while_backward_is_enabled():
    """A leaf may be distributed, which gets a gradient of its own; a result may not, nor what a function is of."""
    assert all(simulate(distributed_leaves, 3, "mindspore"))
