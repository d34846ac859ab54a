from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.shard import dispatch
from hyper_parallel.core.shard.custom.dfunction import DFunction, ReplicatedOp
from hyper_parallel.core.shard.custom.distributed_op import DistributedOp
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


class Axpy(DFunction):
    """``x * factor + y``, whose layouts are those of addition."""

    _op_name = "axpy_of_a_test"

    @staticmethod
    def forward(ctx, x, factor, y, label="none"):
        """Save the factor; ``label`` must arrive unchanged."""
        assert label in {"none", "given"}
        ctx.factor = factor
        return x * factor + y

    @staticmethod
    def backward(ctx, grad):
        """One gradient per argument of forward."""
        return grad * ctx.factor, None, grad, None


class Product(DFunction):
    """A multiplication under the library's own rule."""

    _op_name = "mul"

    @staticmethod
    def forward(ctx, x, y):
        """Save both."""
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        """The product rule."""
        x, y = ctx.saved_tensors
        return grad * y, grad * x


class Nameless(DFunction):
    """A function without ``_op_name``."""

    @staticmethod
    def forward(ctx, x):
        """Nothing."""
        del ctx
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        """Nothing."""
        del ctx
        return grad


class Unknown(Nameless):
    """A function whose ``_op_name`` has no rule."""

    _op_name = "nobody knows it"


@pytest.fixture
def axpy():
    """The user's rule for ``Axpy``: the output is laid out as the operands."""

    class Rule(DistributedOp):
        def infer_layout(self, layouts, extra_args=None):  # noqa: ARG002 - the signature is the library's
            return layouts[0]

    rule = Rule("axpy_of_a_test")
    yield rule
    rule.unregister()


def sharded(mesh, place):
    """A sharded DTensor of four ones."""
    import torch

    layout = Layout.place(mesh, [place], (4,))
    return get_torch_platform().wrap(torch.ones(layout.local_shape), layout).requires_grad_()


def on_ranks(function):
    """``function(mesh)`` on two ranks."""
    return simulate(lambda: function(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))), 2, "torch")


def text_of(kind, function):
    """The text of the error that ``function`` raises."""
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


@pytest.mark.parametrize("arguments", [
    lambda x, y: ((x, 2.0, y), {}), lambda x, y: ((x,), {"y": y, "factor": 2.0}),
    lambda x, y: ((), {"label": "given", "y": y, "x": x, "factor": 2.0}),
])  # fmt: skip
def test_arguments_arrive_as_given(axpy, arguments):
    """Forward and backward are the same for positional and named arguments, on plain tensors and DTensors."""
    import torch

    x, y = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    args, kwargs = arguments(x, y)
    Axpy.apply(*args, **kwargs).sum().backward()
    assert (x.grad.tolist(), y.grad.tolist()) == ([2.0] * 4, [1.0] * 4)

    def on_rank(mesh):
        x, y = sharded(mesh, Shard(0)), sharded(mesh, Shard(0))
        args, kwargs = arguments(x, y)
        out = Axpy.apply(*args, **kwargs)
        assert out.placements == (Shard(0),)
        out.sum().backward()
        return out.tolist(), x.grad.tolist(), y.grad.tolist()

    assert on_ranks(on_rank)[1] == ([3.0] * 4, [2.0] * 4, [1.0] * 4)


@pytest.mark.parametrize("mesh", [(3,), (2, 2)])
def test_the_librarys_rules_serve(mesh):
    """A DFunction with a canonical name has the values and gradients of one device for every layout."""
    import numpy as np

    x, y = np.random.default_rng(0).standard_normal((2, 5, 3))
    report = check_function(Product.apply, [x, y], mesh, platform="torch", limit=40)
    assert report.wrong == report.rejected == []
    assert report.ok


def localizing():
    """Functions whose rules replace arguments of the local call, with parameter names of their own."""
    import torch

    class Reshape(DFunction):
        _op_name = "view"

        @staticmethod
        def forward(ctx, a, sizes):
            ctx.sizes = a.shape
            return a.reshape(sizes) * 1

        @staticmethod
        def backward(ctx, grad):
            return grad.reshape(ctx.sizes), None

    class Triangle(DFunction):
        _op_name = "tril"

        @staticmethod
        def forward(ctx, a, offset=0):
            ctx.offset = offset
            return torch.tril(a, offset)

        @staticmethod
        def backward(ctx, grad):
            return torch.tril(grad, ctx.offset), None

    class Rows(DFunction):
        _op_name = "embedding"

        @staticmethod
        def forward(ctx, index, table):
            ctx.index, ctx.rows = index, table.shape[0]
            return table[index]

        @staticmethod
        def backward(ctx, grad):
            gradient = torch.zeros(ctx.rows, grad.shape[-1], dtype=grad.dtype)
            return None, gradient.index_add(0, ctx.index.reshape(-1), grad.flatten(0, -2))

    return Reshape, Triangle, Rows


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)])
def test_rules_that_replace_arguments_serve(mesh):
    """Each rank's call gets its own sizes and offsets; a function without parameters for them is refused."""
    import numpy as np

    rng = np.random.default_rng(0)
    reshape, triangle, rows = localizing()
    for function, *arrays in (
        (lambda x: reshape.apply(x, (12,)), rng.standard_normal((4, 3))),
        (lambda x: reshape.apply(x, (2, 2, 3)), rng.standard_normal((4, 3))),
        (triangle.apply, rng.standard_normal((5, 4))),
    ):
        report = check_function(function, arrays, mesh, platform="torch", limit=16)
        assert report.wrong == report.rejected == []
        assert report.ok
    operands = [rng.integers(0, 5, (4, 3)), rng.standard_normal((5, 3))]
    report = check_function(rows.apply, operands, mesh, platform="torch", limit=16)
    assert report.ok, report.wrong
    assert not report.all_held
    text = (
        "Rows: with this layout operator embedding passes rank-dependent values in window, which Rows.forward "
        "does not take; redistribute the operands first"
    )
    assert {reason.partition(": ")[2] for reason in report.rejected} == {text}


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)])
def test_arguments_of_its_own_reach_every_rank(mesh):
    """If the rule replaces arguments of the local call, those that only ``forward`` has arrive unchanged."""
    import numpy as np
    import torch

    class Scaled(DFunction):
        _op_name = "tril"

        @staticmethod
        def forward(ctx, a, offset=0, scale=1.0, *, shift=0.0):
            ctx.offset, ctx.scale = offset, scale
            return torch.tril(a, offset) * scale + torch.tril(torch.full_like(a, shift), offset)

        @staticmethod
        def backward(ctx, grad):
            return torch.tril(grad, ctx.offset) * ctx.scale, None, None, None

    x = np.random.default_rng(0).standard_normal((5, 4))
    for call in (lambda x: Scaled.apply(x, 0, 3.0), lambda x: Scaled.apply(x, scale=3.0, offset=-1)):
        report = check_function(call, [x], mesh, platform="torch", limit=16)
        assert report.wrong == report.rejected == []
        assert report.ok
    shifted = check_function(
        lambda x: Scaled.apply(x, 1, shift=2.0), [x], mesh, platform="torch", placements=[[(Shard(0),) * len(mesh)]]
    )
    assert shifted.wrong == shifted.rejected == []


def test_what_cannot_be():
    """Without ``_op_name``, a rule or a tensor, apply raises an error that names the class."""

    def on_rank(mesh):
        x = sharded(mesh, Replicate())
        return [
            text_of(ValueError, lambda: Nameless.apply(x)),
            text_of(UnsupportedOperatorError, lambda: Unknown.apply(x)),
            text_of(TypeError, lambda: Nameless.apply(1.0)),
        ]

    assert on_ranks(on_rank)[0] == [
        "Nameless: DTensor arguments need the class attribute _op_name, the operator whose rule applies",
        "Unknown: no rule is registered for _op_name 'nobody knows it'; register a DistributedOp of that name",
        "Nameless.apply: no tensor among the arguments",
    ]


def test_gradients_are_as_many_as_arguments():
    """A missing forward or backward, and more gradients than arguments, are errors."""

    class Nothing(DFunction):
        _op_name = "exp"

    class More(DFunction):
        _op_name = "exp"

        @staticmethod
        def forward(ctx, x):
            del ctx
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            del ctx
            return grad, grad

    def body():
        import torch

        mesh = init_device_mesh("cpu", (2,))
        x = get_torch_platform().wrap(torch.zeros(2, requires_grad=True), Layout.place(mesh, [Shard(0)], (4,)))
        with pytest.raises(RuntimeError) as caught:
            More.apply(x).sum().backward()
        for half in (Nothing.forward, Nothing.backward):
            with pytest.raises(NotImplementedError):
                half(None, x)
        return str(caught.value)

    assert simulate(body, 2, "torch") == ["More.backward returned 2 gradients, forward has 1 arguments"] * 2


def test_plans_are_kept(monkeypatch):
    """Fifty calls of a function under a canonical name are planned once on each rank."""
    planned = []
    original = dispatch.plan_call
    monkeypatch.setattr(dispatch, "plan_call", lambda *args, **how: planned.append(1) or original(*args, **how))

    class Twice(Product):
        """A class that has no plans yet."""

    def on_rank(mesh):
        x = sharded(mesh, Shard(0))
        return [Twice.apply(x, x).to_local().tolist() for _ in range(50)][-1]

    assert on_ranks(on_rank) == [[1.0, 1.0]] * 2
    assert len(planned) == 2


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
