from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard.custom.distributed_op import DistributedOp, user_op
from hyper_parallel.errors import LayoutError, ShardMismatchError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

R, S0 = Replicate(), Shard(0)


def scaled(x, w, factor=1.0):
    """A rule as users write it: rows of ``x`` times ``w``."""
    return x * w * factor


@pytest.fixture
def register():
    """Registers operators, and unregisters them after the test."""
    registered = []

    def register(operator, name="scaled"):
        registered.append(operator(name))
        return registered[-1]

    yield register
    for layout in registered:
        layout.unregister()


def run(user, *args, size=6, **kwargs):
    """``user`` on a tensor sharded by rows and a replicated one, on two ranks: results of ``after``, or error texts."""

    def on_rank():
        import torch

        platform, mesh = get_torch_platform(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layout = Layout.place(mesh, [S0], (size, 2))
        x = platform.wrap(torch.ones(layout.local_shape), layout).requires_grad_()
        w = platform.wrap(torch.full((2,), 3.0), Layout.place(mesh, [R], (2,))).requires_grad_()
        try:
            out = user.run(platform.dispatcher, scaled, (x, w, *args), kwargs)
            out.sum().backward()
        except (LayoutError, ShardMismatchError, NotImplementedError) as error:
            return str(error)
        return out, x.grad, w.grad

    return simulate(on_rank, 2, "torch")


class Rows(DistributedOp):
    """The output is laid out as ``x`` is."""

    def infer_layout(self, layouts, extra_args=None):
        """The layout of the first operand."""
        self.seen = (layouts, extra_args)
        return layouts[0]


def test_a_users_rule_is_enough(register):
    """infer_layout gives right values, and a replicated operand gets its gradient summed over all ranks."""
    import torch

    user = register(Rows)
    out, x_grad, w_grad = run(user, 2.0)[1]
    assert torch.equal(out.detach().to_local(), torch.full((3, 2), 6.0))
    assert torch.equal(x_grad.to_local(), torch.full((3, 2), 6.0))
    assert torch.equal(w_grad.to_local(), torch.full((2,), 12.0))
    layouts, extra = user.seen
    assert [layout.shape for layout in layouts] == [(6, 2), (2,)]
    assert extra == (2.0,)


def test_arguments_by_name_are_not_confused(register):
    """Keyword arguments are part of the call, whatever was called before."""
    user = register(Rows)
    outputs = [run(user, factor=factor)[0][0].detach() for factor in (2.0, 5.0, 2.0)]
    assert [float(layout.to_local()[0, 0]) for layout in outputs] == [6.0, 15.0, 6.0]


def test_the_other_doors(register):
    """`preprocess` rewrites arguments, `get_expand_impl` replaces the function, `wrap_output` changes the result."""

    class Doors(Rows):
        def preprocess(self, args, kwargs):
            return (*args[:2], 5.0), kwargs

        def get_expand_impl(self, func, outputs, layouts, extra_args):
            assert func is scaled
            assert extra_args == (5.0,)
            assert outputs == (layouts[0],)
            return lambda x, w, factor: func(x, w, factor + 1.0)

        def wrap_output(self, output, layouts):
            assert [layout.placements for layout in layouts] == [(S0,), (R,)]
            return output * 2.0

    assert float(run(register(Doors))[0][0].detach().to_local()[0, 0]) == 36.0


def test_layouts_without_a_shape_are_even(register):
    """An output layout without a shape has that of even shards; with uneven operands it is refused."""

    class Bare(DistributedOp):
        def infer_layout(self, layouts, extra_args=None):  # noqa: ARG002 - the signature is the library's
            return layouts[0].with_shape(None)

    user = register(Bare)
    assert run(user, 2.0)[0][0].shape == (6, 2)
    assert run(user, 2.0, size=5)[0] == (
        "scaled(x=f32[5@tp, 2], w=f32[2]): scaled: infer_layout returned Layout([?@tp, ?] on "
        "DeviceMesh(cpu, tp=2, ranks=[0, 1])) without a global shape, which cannot be derived from uneven shards; "
        "use layout.with_shape(...)"
    )


def test_wrong_answers(register):
    """A layout that contradicts the result, a result that is not a layout and a missing method are errors."""

    class Wrong(DistributedOp):
        def infer_layout(self, layouts, extra_args=None):  # noqa: ARG002 - the signature is the library's
            return Layout.of(layouts[0].mesh, ((), ()), (), layouts[0].shape)

    class Text(DistributedOp):
        def infer_layout(self, layouts, extra_args=None):  # noqa: ARG002 - the signature is the library's
            return ("tp",)

    wrong, text, missing = register(Wrong, "wrong"), register(Text, "text"), register(DistributedOp, "missing")
    assert run(wrong)[0] == (
        "wrong(x=f32[6@tp, 2], w=f32[2]): the local call returned [3, 2], the plan says [6, 2] of [6, 2]; "
        "this is a bug in the rule; please report it"
    )
    assert run(text)[0] == (
        "text(x=f32[6@tp, 2], w=f32[2]): text: infer_layout must return a Layout or a sequence of them, got ('tp',)"
    )
    assert run(missing)[0] == "DistributedOp.infer_layout is not implemented"


def test_names_are_taken_once(register):
    """A name that has a rule, the library's or a user's, is refused; after unregister it is free."""
    first = register(Rows)
    for name in ("scaled", "linear"):
        with pytest.raises(ValueError, match=name) as caught:
            Rows(name)
        assert str(caught.value) == f"DistributedOp: operator {name!r} already has a rule"
    assert user_op("scaled") is first
    first.unregister()
    assert user_op("scaled") is None
    assert register(Rows) is user_op("scaled")


def test_outputs_may_be_partial(register):
    """An output may be Partial, and is reduced where a use needs it."""

    class Total(DistributedOp):
        def infer_layout(self, layouts, extra_args=None):  # noqa: ARG002 - the signature is the library's
            return Layout.place(layouts[0].mesh, [Partial()], (2,))

        def get_expand_impl(self, func, outputs, layouts, extra_args):  # noqa: ARG002 - as above
            return lambda x, w, factor: func(x, w, factor).sum(0)

    def on_rank_value(result):
        out, x_grad, w_grad = result
        assert out.placements == (Partial(),)
        return x_grad.to_local().tolist()[0], w_grad.to_local().tolist()

    assert on_rank_value(run(register(Total), 2.0)[0]) == ([6.0, 6.0], [12.0, 12.0])


def test_operands_in_lists_and_functions_without_signature(register):
    """Tensors in a list are operands; a function without a signature is called by position."""

    class Whole(DistributedOp):
        def infer_layout(self, layouts, extra_args=None):
            self.seen = [layout.placements for layout in layouts], extra_args
            return layouts[0]

    class Mute:
        __signature__ = "none"  # inspect.signature refuses it

        def __call__(self, xs, factor):
            return (xs[0] + xs[1]) * factor

    mute = Mute()
    user = register(Whole, "mute")

    def on_rank():
        import torch

        platform, mesh = get_torch_platform(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layout = Layout.place(mesh, [S0], (6, 2))
        x, y = (platform.wrap(torch.full(layout.local_shape, float(number)), layout) for number in (1, 2))
        return user.run(platform.dispatcher, mute, ([x, y], 4.0), {}).full_tensor()

    assert simulate(on_rank, 2, "torch")[0].tolist() == [[12.0, 12.0]] * 6
    assert user.seen == ([(S0,), (S0,)], (4.0,))
