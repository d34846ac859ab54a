from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.shard.custom.distributed_op import DistributedOp
from hyper_parallel.errors import LayoutError, MixedTensorError, UnsupportedOperatorError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.platform.torch import intercept
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def spread(whole, mesh, *placements):
    """A leaf DTensor of the global tensor ``whole``."""
    layout = Layout.place(mesh, placements, tuple(whole.shape))
    box = tuple(slice(*bounds) for bounds in layout.local_box())
    return get_torch_platform().wrap(whole[box].clone(), layout)


def on_ranks(function, world=2):
    """``function(mesh)`` on every rank of a one-axis mesh."""
    return simulate(lambda: function(init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))), world, "torch")


def test_one_interception_per_process():
    """Interception always uses the platform's one dispatcher."""
    platform = get_torch_platform()
    assert intercept.interception().dispatcher is platform.dispatcher
    assert intercept.interception() is intercept.interception()


def test_composite_functions_decompose():
    """A function without a rule decomposes into operators with rules and stays differentiable."""
    import numpy as np
    import torch

    assert torch.nn.functional.softsign not in intercept.interception().functions
    x = np.random.default_rng(0).standard_normal((5, 3))
    report = check_function(torch.nn.functional.softsign, [x], (3,), platform="torch", partial=())
    assert report.wrong == report.rejected == []
    assert report.ok


def test_an_unknown_operator_says_what_to_do():
    """An operator without a rule raises UnsupportedOperatorError with the layouts and both fixes."""
    import torch

    def on_rank(mesh):
        x = spread(torch.ones(4, 4), mesh, Shard(0))
        with pytest.raises(NotImplementedError) as caught:
            torch.ops.aten._to_sparse(x)
        assert isinstance(caught.value, UnsupportedOperatorError)
        return str(caught.value)

    assert on_ranks(on_rank)[0] == (
        "operator aten._to_sparse.default has no sharding rule (layouts: f32[4@tp, 4]); "
        "add one with hyper_parallel.DistributedOp, or run it replicated: "
        "hyper_parallel.ReplicatedOp('aten._to_sparse.default')"
    )


def test_only_what_helps_is_advised():
    """Running replicated is not advised for operators that write or sample random numbers."""
    import torch

    def on_rank(mesh):
        x = spread(torch.ones(4, 4), mesh, Shard(0))
        result = []
        for call in (
            lambda: torch.ops.aten._amp_update_scale_(x, x, x, 2.0, 0.5, 1),
            lambda: torch.ops.aten._sample_dirichlet(x),
        ):
            with pytest.raises(UnsupportedOperatorError) as caught:
                call()
            result.append(str(caught.value))
        return result

    shown = "f32[4@tp, 4]"
    assert on_ranks(on_rank)[0] == [
        (
            f"operator aten._amp_update_scale_.default has no sharding rule (layouts: {shown}, {shown}, {shown}); "
            "add one with hyper_parallel.DistributedOp"
        ),
        (
            f"operator aten._sample_dirichlet.default has no sharding rule (layouts: {shown}); "
            "add one with hyper_parallel.DistributedOp"
        ),
    ]


def test_users_operators_come_before_decomposition():
    """A function that a user gave a rule under its name is dispatched by it."""
    import torch

    class Softsign(DistributedOp):
        def infer_layout(self, layouts, extra_args=None):
            assert extra_args == ()
            return layouts[0]

    user = Softsign("softsign")
    try:

        def on_rank(mesh):
            x = spread(torch.arange(5.0), mesh, Shard(0))
            out = torch.nn.functional.softsign(x)
            assert out.layout is x.layout
            return out.full_tensor()

        assert torch.equal(on_ranks(on_rank)[0], torch.nn.functional.softsign(torch.arange(5.0)))
    finally:
        user.unregister()


def test_nothing_comes_back_plain():
    """Operators return DTensors, Python numbers only where PyTorch does."""
    import torch

    def on_rank(mesh):
        x = spread(torch.ones(4, 4), mesh, Replicate())
        for out in (x + 1.0, 1.0 + x, x.sum(), torch.add(x, x), x.view(16), -x, x[0]):
            assert isinstance(out, DTensor)
        assert torch.is_tensor(x)
        assert x.is_floating_point()

    on_ranks(on_rank)


def test_out_takes_several_results():
    """`out=` works for functions with a rule and decomposed ones; several outputs have PyTorch's type."""
    import torch

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)])
        low, high = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
        result = torch.aminmax(x, dim=1, out=(low, high))
        power = torch.zeros_like(x, dtype=torch.float64)
        torch.float_power(x, 2, out=power)
        return (
            type(result).__name__,
            result.min is low,
            high.full_tensor().tolist(),
            torch.equal(power.full_tensor(), torch.arange(15.0).reshape(5, 3).double() ** 2),
        )

    assert simulate(run, 2, "torch") == [("aminmax_out", True, [2.0, 5.0, 8.0, 11.0, 14.0], True)] * 2


def test_what_out_cannot_be():
    """`out=` must be one DTensor per result, of its shape, and of a dtype that can represent it."""
    import torch

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        messages = []
        for call in (
            lambda: intercept.function(torch.aminmax, (), (x,), {"dim": 1, "out": x}),  # as Python code may call it
            lambda: torch.add(x, x, out=torch.zeros(4, 3)),
            lambda: torch.add(x, x, out=torch.zeros_like(x[0])),
            lambda: torch.add(x, x, out=torch.zeros_like(x, dtype=torch.int64)),
        ):
            with pytest.raises((UnsupportedOperatorError, LayoutError)) as raised:
                call()
            messages.append(str(raised.value))
        return messages

    assert simulate(run, 2, "torch")[0] == [
        "aminmax: out must be 2 DTensors, got TorchDTensor; write y = aminmax(...) instead",
        "add: out must be one DTensor, got Tensor; write y = add(...) instead",
        "add: out has shape [3], the result has [4, 3]",
        "add: out has dtype torch.int64, and the result's torch.float32 can't be cast to it",
    ]


def test_methods_that_write_keep_layout_shape_and_dtype():
    """In-place methods such as `cumprod_` keep layout, shape and dtype, with right gradients, or are refused."""
    import torch

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        values = torch.arange(1.0, 7.0).reshape(2, 3)
        leaf = distribute_tensor(values.clone().requires_grad_(), mesh, [Shard(1)])
        x = leaf * 1
        before = x.placements
        x.cumprod_(1).sum().backward()
        plain = values.clone().requires_grad_()
        (plain * 1).cumprod_(1).sum().backward()
        with pytest.raises(LayoutError) as raised:
            (leaf.detach() * 1)[0].addbmm_(x.detach().reshape(1, 2, 3), x.detach().reshape(1, 3, 2))
        return x.placements == before, torch.equal(leaf.grad.full_tensor(), plain.grad), str(raised.value)

    result = simulate(run, 2, "torch")
    assert [facts[:2] for facts in result] == [(True, True)] * 2
    assert result[0][2] == "addbmm(bias=f32[3@tp], x=f32[1, 2, 3@tp], y=f32[1, 3, 2]): [3] does not broadcast to [2, 2]"


def test_switches_between_two_functions_are_opened():
    """`meshgrid` and `unique`, which dispatch through private functions, are intercepted."""
    import torch

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])
        first, second = torch.meshgrid(x, x, indexing="ij")
        return torch.equal(first.full_tensor(), second.full_tensor().T)

    assert simulate(run, 2, "torch") == [True] * 2


@pytest.mark.parametrize(
    "name, arguments, instead",
    [
        ("squeeze_", (1,), "x = x.squeeze(...)"),
        ("unsqueeze_", (0,), "x = x.unsqueeze(...)"),
        ("transpose_", (0, 1), "x = x.transpose(...)"),
        ("resize_", (2, 3), "x = x.new_empty(...)"),
    ],
)
def test_a_shape_does_not_change_in_place(name, arguments, instead):
    """A call that would change a DTensor's shape in place is refused with an alternative and changes nothing."""
    import torch

    def on_rank(mesh):
        x = spread(torch.ones(5, 1, 3), mesh, Shard(0))
        with pytest.raises(UnsupportedOperatorError) as caught:
            getattr(x, name)(*arguments)
        assert tuple(x.shape) == (5, 1, 3)
        return str(caught.value)

    assert on_ranks(on_rank)[0] == (
        f"{name}() of a DTensor (f32[5@tp, 1, 3]): the shape of a DTensor cannot change in place; "
        f"write {instead} instead"
    )


def test_arrays_and_lists_are_not_guessed():
    """A NumPy array as operand, and a list of DTensors as data, are refused with the fix."""
    import numpy as np
    import torch

    def on_rank(mesh):
        x = spread(torch.ones(5, 3), mesh, Shard(0))
        with pytest.raises(MixedTensorError) as first:
            np.ones(3) * x
        with pytest.raises(TypeError) as second:
            torch.tensor([x.sum(), x.sum()])
        return str(first.value), str(second.value)

    assert on_ranks(on_rank)[0] == (
        (
            "__rmul__: a ndarray [3] was mixed with DTensors; convert it to a tensor of the framework, and distribute "
            "it: hyper_parallel.distribute_tensor(tensor, mesh, placements)"
        ),
        "len() of a 0-d tensor (to make one tensor of several DTensors, call torch.stack)",
    )


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_where_of_a_condition_alone(placement):
    """``torch.where(condition)`` returns replicated indices, as ``nonzero`` does."""
    import torch

    whole = torch.arange(15.0).reshape(5, 3) % 4 > 1

    def on_rank(mesh):
        result = torch.where(spread(whole, mesh, placement))
        return [indices.to_local().tolist() for indices in result]

    assert on_ranks(on_rank, 3) == [[indices.tolist() for indices in torch.where(whole)]] * 3


def test_tensors_made_in_inference_mode_are_computed_with_as_others():
    """Functions that PyTorch composes of others run on them, in and after the mode; writes in place stay possible."""
    import torch

    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    calls = [
        lambda x: torch.nn.functional.pad(x[:, None], (1, 1), mode="circular"),
        lambda x: torch.nn.functional.poisson_nll_loss(x, x),
        lambda x: torch.tensordot(x, x.T, 1),
        lambda x: torch.diff(x, prepend=x),
        lambda x: torch.vsplit(x.mul_(2), 2)[1],
    ]

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        for call in calls:
            for place in (Replicate(), Shard(0), Shard(1)):
                with torch.inference_mode():
                    x = distribute_tensor(values.clone(), mesh, [place])
                    y = call(x)
                    plain = values.clone()
                    torch.testing.assert_close(y.full_tensor(), call(plain))
                    torch.testing.assert_close(x.full_tensor(), plain)
                torch.testing.assert_close((y * 1).full_tensor(), call(values.clone()))

    simulate(rank, 2, "torch")


def test_a_moved_view_is_stale_after_a_write_in_inference_mode():
    """A view that had to be a copy is refused once its operand is written, though nothing has a version counter."""
    import torch

    def rank():
        with torch.inference_mode():
            x = distribute_tensor(torch.arange(12.0).reshape(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
            part = torch.vsplit(x, 2)[1]
            assert part.full_tensor().tolist() == [[6, 7, 8], [9, 10, 11]]
            x.mul_(2)
            with pytest.raises(
                UnsupportedOperatorError, match=r"^a view of a tensor that was written since is stale: "
            ):
                part.full_tensor()

    simulate(rank, 2, "torch")
