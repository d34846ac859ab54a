from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import LayoutError, MixedTensorError, UnsupportedOperatorError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def values(*shape, seed=0):
    """Random global values, equal on every rank."""
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spread(whole, mesh, *placements):
    """A leaf DTensor of the global tensor ``whole``."""
    layout = Layout.place(mesh, placements, tuple(whole.shape))
    box = tuple(slice(*bounds) for bounds in layout.local_box())
    return get_torch_platform().wrap(whole[box].clone(), layout)


def on_ranks(function, world):
    """``function(mesh)`` on every rank of a one-axis mesh."""
    return simulate(lambda: function(init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))), world, "torch")


def assert_whole(result, wanted):
    """The global value of the DTensor ``result`` is ``wanted``."""
    import torch

    torch.testing.assert_close(result.detach().full_tensor(), wanted)


def text_of(kind, function):
    """The text of the error that ``function`` raises."""
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def functions():
    """Custom autograd functions in PyTorch's styles."""
    import torch

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y, factor):
            ctx.save_for_backward(x, y)
            ctx.factor = factor
            return x * y, (x + y) * factor

        @staticmethod
        def backward(ctx, first, second):
            x, y = ctx.saved_tensors
            assert ctx.needs_input_grad == (True, True, False)
            return first * y + second * ctx.factor, first * x + second * ctx.factor, None

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.exp()

        @staticmethod
        def setup_context(ctx, inputs, output):  # noqa: ARG004 - PyTorch's signature
            ctx.save_for_backward(output)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x.mul_(2.0)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            del ctx
            return grad * 2.0

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            del ctx
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            del ctx
            return grad.to_local()

    return Pair, Exp, Double, Plain


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)])
def test_custom_functions_mean_the_same_on_dtensors(mesh):
    """Forward and backward of torch.autograd.Function get global tensors: values and gradients are the plain ones."""
    pair, exp, _, _ = functions()
    x, y = values(5, 3).numpy(), values(5, 3, seed=1).numpy()
    both = check_function(lambda a, b: pair.apply(a, b, 3.0), [x, y], mesh, platform="torch", limit=20)
    assert both.wrong == both.rejected == []
    assert both.ok
    single = check_function(exp.apply, [x], mesh, platform="torch", partial=("sum", "avg", "max"), limit=20)
    assert single.wrong == single.rejected == []
    assert single.ok


def test_custom_functions_that_write():
    """mark_dirty writes the local tensor and returns the argument itself, with the right gradient."""
    import torch

    double = functions()[2]

    def on_rank(mesh):
        x = spread(values(5), mesh, S0).requires_grad_()
        hidden = x * 1.0
        assert double.apply(hidden) is hidden
        hidden.sum().backward()
        assert_whole(x.grad, torch.full((5,), 2.0))

    on_ranks(on_rank, 2)


def test_custom_functions_watch_what_they_saved():
    """A saved tensor that was written later raises PyTorch's own error."""
    exp = functions()[1]

    def on_rank(mesh):
        out = exp.apply(spread(values(4), mesh, S0).requires_grad_())
        out.mul_(2.0)
        return text_of(RuntimeError, lambda: out.sum().backward())

    assert "modified by an inplace operation" in on_ranks(on_rank, 2)[0]


def test_custom_functions_differentiate_twice():
    """Tensors saved by a custom function keep their graph, so that it has second derivatives."""
    import torch

    pair, x = functions()[0], values(4)
    plain = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(pair.apply(plain, plain * 2.0, 1.0)[0].sum(), plain, create_graph=True)
    first.square().sum().backward()

    def on_rank(mesh):
        sharded = spread(x, mesh, S0).requires_grad_()
        (grads,) = torch.autograd.grad(pair.apply(sharded, sharded * 2.0, 1.0)[0].sum(), sharded, create_graph=True)
        grads.square().sum().backward()
        assert_whole(sharded.grad, plain.grad)

    on_ranks(on_rank, 3)


def test_custom_functions_that_cannot_be():
    """Plain gradients and names are refused; plain tensors go PyTorch's own way."""
    import torch

    pair, exp, _, plain = functions()
    assert type(exp.apply(values(3).requires_grad_())) is torch.Tensor

    def on_rank(mesh):
        x = spread(values(4, 3), mesh, S0).requires_grad_()
        return [
            text_of(MixedTensorError, lambda: plain.apply(x).sum().backward()),
            text_of(TypeError, lambda: pair.apply(x, y=x, factor=2.0)),
            text_of(TypeError, lambda: pair.apply(values(4, 3), y=x, factor=2.0)),
        ]

    assert on_ranks(on_rank, 2)[0] == [
        "Plain.backward: gradient 0 of a DTensor must be a DTensor, got Tensor",
        "Pair.apply: with DTensors give every argument by position, got y, factor by name",
        "Pair.apply: with DTensors give every argument by position, got y, factor by name",
    ]


def test_outputs_without_gradient():
    """An output that a custom function marks as not differentiable needs no gradient; the others have theirs."""
    import torch

    class Largest(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            signs = x.sign()
            ctx.mark_non_differentiable(signs)
            return x * x, signs

        @staticmethod
        def backward(ctx, grad, _):
            return 2.0 * grad * ctx.saved_tensors[0]

    x, seed = values(5), values(5, seed=1)
    plain = x.clone().requires_grad_()
    Largest.apply(plain)[0].backward(seed)

    def on_rank(mesh):
        sharded = spread(x, mesh, S0).requires_grad_()
        squares, signs = Largest.apply(sharded)
        assert squares.requires_grad
        assert not signs.requires_grad
        squares.backward(spread(seed, mesh, S0))
        assert_whole(signs, x.sign())
        assert_whole(sharded.grad, plain.grad)

    on_ranks(on_rank, 3)


def test_gradients_that_do_not_fit_their_arguments():
    """Backward must return a gradient per argument, plain for plain tensors; a returned argument is itself."""
    import torch

    class Fewer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.set_materialize_grads(False)
            return x * y

        @staticmethod
        def backward(ctx, grad):
            del ctx
            return grad

    class Mixed(Fewer):
        @staticmethod
        def forward(ctx, x, y):
            del ctx
            return x * float(y if isinstance(y, float) else y.sum())

        @staticmethod
        def backward(ctx, grad):
            del ctx
            return grad, grad

    class Passes(Fewer):
        @staticmethod
        def forward(ctx, x, y):
            del ctx, y
            return 3, x.view_as(x)

        @staticmethod
        def backward(ctx, _, grad):
            del ctx
            return grad * 2.0, None

    def on_rank(mesh):
        x = spread(values(4), mesh, S0).requires_grad_()
        plain = torch.ones(4, requires_grad=True)
        number, same = Passes.apply(x, plain)
        same.sum().backward()
        assert number == 3
        assert_whole(x.grad, torch.full((4,), 2.0))
        return [
            text_of(RuntimeError, lambda: Fewer.apply(x, x).sum().backward()),
            text_of(MixedTensorError, lambda: Mixed.apply(x, plain).sum().backward()),
            text_of(LayoutError, lambda: Mixed.apply(x, 2.0).sum().backward()),
        ]

    assert on_ranks(on_rank, 2)[0] == [
        "Fewer.backward returned 1 gradients for 2 arguments",
        "Mixed.backward: gradient 1 is a DTensor, the argument is a Tensor; return what to_local() gives",
        "Mixed.backward: gradient 1 is a DTensor, the argument is a float; return what to_local() gives",
    ]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_grad_and_backward_take_dtensors(world):
    """torch.autograd.grad and backward take DTensor outputs, inputs and cotangents."""
    import torch
    import torch.nn.functional as F

    x, w, seed = values(5, 3), values(4, 3, seed=1), values(5, 4, seed=2)
    plain_x, plain_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    F.linear(plain_x, plain_w).backward(seed)

    def on_rank(mesh):
        for place in (R, S0, S1):
            sharded, weight = spread(x, mesh, place).requires_grad_(), spread(w, mesh, S0).requires_grad_()
            out = F.linear(sharded, weight)
            grads = torch.autograd.grad(out, [sharded, weight], [spread(seed, mesh, S1)], retain_graph=True)
            assert sharded.grad is None
            torch.autograd.backward([out], [spread(seed, mesh, R)], inputs=[weight])
            assert sharded.grad is None
            for grad, wanted in zip([*grads, weight.grad], [plain_x.grad, plain_w.grad, plain_w.grad], strict=True):
                assert_whole(grad, wanted)
        unused = spread(x, mesh, S0).requires_grad_()
        assert torch.autograd.grad(sharded.sum(), [sharded, unused], allow_unused=True)[1] is None

    on_ranks(on_rank, world)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_backward_that_does_not_dispatch_takes_dtensors(world, monkeypatch):
    """``torch.autograd.backward`` of PyTorch 2.10 and 2.11, without ``__torch_function__``, once patched."""
    import torch

    from hyper_parallel.platform.torch import intercept
    from hyper_parallel.platform.torch.autograd import dispatched_backward

    def old(tensors, grad_tensors=None, retain_graph=None, create_graph=False, grad_variables=None, inputs=None):
        with torch._C.DisableTorchFunction():
            torch.autograd.backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)

    monkeypatch.setattr(intercept, "GRAPH_FUNCTIONS", dict(intercept.GRAPH_FUNCTIONS))
    patched = dispatched_backward(old)
    x, seed = values(5, 3), values(5, 3, seed=2)
    plain = x.clone().requires_grad_()
    patched(plain.exp(), seed)
    torch.testing.assert_close(plain.grad, seed * x.exp())

    def on_rank(mesh):
        for place in (R, S0, S1):
            sharded, other = spread(x, mesh, place).requires_grad_(), spread(x, mesh, S0).requires_grad_()
            out = sharded.exp() * other
            patched([out], [spread(seed, mesh, S1)], retain_graph=True, inputs=[other])
            assert sharded.grad is None
            patched(out, spread(seed, mesh, R), inputs=sharded)
            assert_whole(other.grad, seed * x.exp())
            assert_whole(sharded.grad, seed * x * x.exp())

    on_ranks(on_rank, world)


@pytest.mark.parametrize("world", [2, 3])
def test_second_derivatives(world):
    """The gradient of a gradient penalty is that of one device for every placement."""
    import torch
    import torch.nn.functional as F

    x, w = values(5, 3), values(4, 3, seed=1)

    def penalty(sharded, weight):
        (grads,) = torch.autograd.grad(F.linear(sharded, weight).square().sum(), weight, create_graph=True)
        grads.square().sum().backward()
        return sharded.grad, weight.grad

    wanted = penalty(x.clone().requires_grad_(), w.clone().requires_grad_())

    def on_rank(mesh):
        for places in ((S0, R), (R, S0), (S1, S1), (S0, S0), (R, S1)):
            sharded, weight = (spread(whole, mesh, place) for whole, place in zip((x, w), places, strict=True))
            for grads, plain in zip(penalty(sharded.requires_grad_(), weight.requires_grad_()), wanted, strict=True):
                assert_whole(grads, plain)

    on_ranks(on_rank, world)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    """Checkpointing gives the same gradients in both of PyTorch's modes."""
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint

    x, w = values(5, 3), values(4, 3, seed=1)
    plain_x, plain_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    F.linear(plain_x, plain_w).relu().sum().backward()

    def on_rank(mesh):
        sharded, weight = spread(x, mesh, S0).requires_grad_(), spread(w, mesh, R).requires_grad_()
        checkpoint(lambda tensor: F.linear(tensor, weight).relu(), sharded, use_reentrant=reentrant).sum().backward()
        assert_whole(sharded.grad, plain_x.grad)
        assert_whole(weight.grad, plain_w.grad)

    on_ranks(on_rank, 2)


def test_what_grad_cannot_do():
    """Batched cotangents, gradients that skipped a gathered tensor, and lists of unequal lengths are refused."""
    import torch
    import torch.nn.functional as F

    def on_rank(mesh):
        x = spread(values(4, 3), mesh, S0).requires_grad_()
        gathered = x.redistribute()
        out = F.linear(gathered, spread(values(4, 3), mesh, S0)).sum()
        return [
            text_of(UnsupportedOperatorError, lambda: torch.autograd.grad(out, x, out, is_grads_batched=True)),
            text_of(UnsupportedOperatorError, lambda: torch.autograd.grad(out, gathered)).partition(":")[0],
            text_of(RuntimeError, lambda: torch.autograd.grad(out, x, [out, out])),
        ]

    assert on_ranks(on_rank, 2)[0] == [
        "torch.autograd.grad: is_grads_batched is not supported for DTensors; call it once per cotangent",
        "grad",
        "grad: 1 tensors and 2 gradients given",
    ]


def test_gradients_of_partial_values_are_differentiated_once():
    """A gradient with respect to a Partial tensor is refused as soon as it could be differentiated again."""
    import torch

    def on_rank(mesh):
        x = spread(values(4, 3), mesh, P).requires_grad_()
        once = torch.autograd.grad((x * 1).square().sum(), x)[0]
        texts = [
            text_of(
                UnsupportedOperatorError,
                lambda: torch.autograd.grad((x * 1).square().sum(), [x], create_graph=True),
            )
        ]
        (x * 1).square().sum().backward(create_graph=True)
        texts.append(text_of(UnsupportedOperatorError, lambda: x.grad))
        return texts, once.placements, (once.to_local() - 2 * x.full_tensor()).abs().max().item()

    texts, placements, error = on_ranks(on_rank, 3)[0]
    refused = "cannot be differentiated again; use x = x.reduce_partial() in its place"
    assert texts == [
        f"grad: create_graph: the gradient of [4, 3] + Partial(sum)@tp {refused}",
        f"grad of f32[4, 3] + Partial(sum)@tp {refused}",
    ]
    assert placements == (R,)
    assert error < 1e-5


def test_second_derivatives_after_reduce_partial():
    """After ``x = x.reduce_partial()`` second derivatives are the dense ones."""
    import torch

    whole = values(4, 3)
    plain = whole.clone().requires_grad_()
    first = torch.autograd.grad(plain.pow(3).sum(), plain, create_graph=True)[0]
    wanted = torch.autograd.grad((first * first).sum(), plain)[0]

    def on_rank(mesh):
        x = spread(whole, mesh, S0).redistribute(mesh, [P]).detach().requires_grad_()
        reduced = x.reduce_partial()
        grads = torch.autograd.grad(reduced.pow(3).sum(), reduced, create_graph=True)[0]
        assert_whole(torch.autograd.grad((grads * grads).sum(), x)[0], wanted)

    on_ranks(on_rank, 3)


def test_internal_functions_take_no_detour():
    """The library's own custom functions skip the handling of users' custom functions."""
    import torch

    own = get_torch_platform().Function
    assert issubclass(own, torch.autograd.Function)
    assert own.apply.__func__ is not torch.autograd.Function.apply.__func__


def test_internal_functions_refuse_transforms_as_pytorch_does():
    """Inside vmap an internal function takes PyTorch's own way, which refuses a function without a vmap rule."""
    import torch

    class Same(get_torch_platform().Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, grad):
            return grad

    x = torch.randn(3, 2, requires_grad=True)
    (same,) = torch.autograd.grad(Same.apply(x), x, torch.ones(3, 2))
    assert same.equal(torch.ones(3, 2))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.vmap(Same.apply)(x)


@pytest.mark.parametrize("world", [2, 3])
def test_the_gradient_of_a_pending_value_is_differentiated_by_its_cotangent(world):
    """Each rank's summand sees the cotangent, so the cotangent's own gradient adds up over ranks."""
    import torch

    x, again = values(5, 3), values(5, 3, seed=1)

    def twice(whole, cotangent, second):
        (grads,) = torch.autograd.grad(whole.square().sum(0), whole, cotangent, create_graph=True)
        return torch.autograd.grad(grads, [whole, cotangent], second)

    seed = values(3, seed=2)
    wanted = twice(x.clone().requires_grad_(), seed.clone().requires_grad_(), again)

    def on_rank(mesh):
        for place in (R, S0):
            whole, cotangent = spread(x, mesh, S0).requires_grad_(), spread(seed, mesh, place).requires_grad_()
            for grads, plain in zip(twice(whole, cotangent, spread(again, mesh, S1)), wanted, strict=True):
                assert_whole(grads, plain)

    on_ranks(on_rank, world)
