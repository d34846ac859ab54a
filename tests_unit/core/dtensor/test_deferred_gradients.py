"""``defer_grad_reduce``: gradients of replicated parameters stay pending and are reduced once."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext

import numpy as np
import pytest

from hyper_parallel.core.dtensor import Partial, Replicate, Shard, defer_grad_reduce, record_events
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.errors import LayoutError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate

STEPS, ROWS, INNER, OUTER = 3, 7, 5, 3
# Mesh, placements of the parameters, placements of the batch.
WORLDS = [
    ((2,), [Replicate()], [Shard(0)]),
    ((3,), [Replicate()], [Shard(0)]),
    ((4,), [Replicate()], [Shard(0)]),
    ((2, 2), [Replicate(), Shard(0)], [Shard(0), Replicate()]),
]


def arrays(seed=0):
    """Micro-batches of odd and unequal sizes, a weight and a bias."""
    rng = np.random.default_rng(seed)
    batches = [rng.normal(size=(ROWS + step, INNER)).astype(np.float32) for step in range(STEPS)]
    return batches, rng.normal(size=(OUTER, INNER)).astype(np.float32), rng.normal(size=OUTER).astype(np.float32)


def dense_gradients(steps=STEPS):
    """The gradients of ``sum(linear(x, w, b) ** 2) + sum(w * w)``, summed over micro-batches, in double precision."""
    batches, w, b = (
        np.asarray(value, dtype=np.float64) if not isinstance(value, list) else value for value in arrays()
    )
    residues = [2 * (x @ w.T + b) for x in batches[:steps]]
    gw = sum(r.T @ x for r, x in zip(residues, batches[:steps], strict=True)) + 2 * steps * w
    return gw, sum(r.sum(0) for r in residues)


def placed(platform, mesh, array, placements):
    """This rank's local shard, sliced without communication."""
    layout = Layout.place(mesh, placements, array.shape)
    local = np.ascontiguousarray(array[tuple(slice(*box) for box in layout.local_box())])
    return platform.wrap(platform.from_numpy(local), layout)


def case(platform_name, world):
    """The micro-batches of this rank, and weight and bias as parameters."""
    platform = platform_named(platform_name)
    shape, weight_at, batch_at = world
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    batches, w, b = arrays()
    if platform_name == "torch":
        from torch.nn import Parameter
    else:
        from mindspore import Parameter
    parameters = [Parameter(placed(platform, mesh, value, weight_at)) for value in (w, b)]
    return [placed(platform, mesh, x, batch_at) for x in batches], *parameters


def loss_of(x, w, b):
    """A loss with one term that differs between ranks (weight and batch) and one that does not (weight alone)."""
    if x._platform.platform_type == "torch":
        from torch.nn.functional import linear
    else:
        from mindspore.mint.nn.functional import linear
    y = linear(x, w, b)
    return (y * y).sum() + (w * w).sum()


def array_of(tensor):
    """The current global value, as NumPy."""
    return tensor._platform.tensor_to_numpy(tensor.full_tensor()).copy()


def reductions(log):
    """The all-reduces of backward over ``dp``, as argument names."""
    return sorted(value.argument for value in log if value.phase == "backward" and value.axes == ("dp",))


def torch_rank(world):
    """Immediate and deferred gradients, and the reductions that they cost."""
    results = {}
    for deferring in (False, True):
        batches, w, b = case("torch", world)
        with record_events() as log, defer_grad_reduce() if deferring else nullcontext():
            for x in batches:
                loss_of(x, w, b).backward()
            inside = reductions(log)
            pending = [value.grad.placements[0] == Partial() for value in (w, b)]
        results[deferring] = ([array_of(value.grad) for value in (w, b)], inside, pending, reductions(log))
    return results


def mindspore_rank(world):
    """Immediate and deferred gradients by ``value_and_grad``, and the reductions that they cost."""
    from hyper_parallel import value_and_grad

    results = {}
    for deferring in (False, True):
        batches, w, b = case("mindspore", world)
        run = value_and_grad(functools.partial(loss_of, w=w, b=b), None, [w, b])
        with record_events() as log:
            with defer_grad_reduce() if deferring else nullcontext():
                steps = [run(x)[1] for x in batches]
                sums = [sum(rest, first) for first, *rest in zip(*steps, strict=True)]
                inside = reductions(log)
            pending = [value.placements[0] == Partial() for value in sums]
            sums = [value.reduce_partial() for value in sums]
        later = (
            [] if not deferring else [name for name, value in zip(("weight", "bias"), pending, strict=True) if value]
        )
        results[deferring] = ([array_of(value) for value in sums], inside, pending, sorted(inside + later))
    return results


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: "x".join(map(str, world[0])))
def test_gradients_are_reduced_once_and_equal_those_of_the_dense_model(platform_name, world):
    """Several micro-batches in a block cost one all-reduce per parameter, and gradients equal the dense model's."""
    on_rank = torch_rank if platform_name == "torch" else mindspore_rank
    for results in simulate(on_rank, math.prod(world[0]), platform_name, (world,)):
        for deferring in (False, True):
            grads, inside, pending, reduced = results[deferring]
            for got, wanted in zip(grads, dense_gradients(), strict=True):
                np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)
            assert pending == [deferring] * 2
            assert inside == ([] if deferring else sorted(["bias", "weight"] * STEPS))
            assert reduced == sorted(["bias", "weight"] * (1 if deferring else STEPS))


@pytest.mark.platforms("torch")
def test_uses_that_differ_along_different_axes_add_up():
    """A parameter with partial gradients along either axis, and along none, is reduced once over both."""
    from torch.nn import Parameter

    def rank():
        platform = platform_named("torch")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        batches, w, b = arrays()
        w, b = (Parameter(placed(platform, mesh, value, [Replicate(), Replicate()])) for value in (w, b))
        places = [[Shard(0), Replicate()], [Replicate(), Shard(0)], [Replicate(), Replicate()]]
        with record_events() as log:
            with defer_grad_reduce():
                for x, place in zip(batches, places, strict=True):
                    loss_of(placed(platform, mesh, x, place), w, b).backward()
                pending = w.grad.placements
            return pending, [array_of(value.grad) for value in (w, b)], [(value.argument, value.axes) for value in log]

    for pending, grads, events in simulate(rank, 4, "torch"):
        assert pending == (Partial(), Partial())
        assert sorted(events) == [("bias", ("dp", "tp")), ("weight", ("dp", "tp"))]
        for got, wanted in zip(grads, dense_gradients(), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


# -- what may go wrong -------------------------------------------------------------------------------------------------

WORLD = WORLDS[0]


def on_two(rank):
    """Run ``rank`` on two simulated ranks of PyTorch, assert equal results, and return one of them."""
    first, second = simulate(rank, 2, "torch")
    np.testing.assert_equal(first, second)
    return first


@pytest.mark.platforms("torch")
def test_a_step_on_a_pending_gradient_names_the_parameter():
    """Inside the block an optimizer's step is refused, naming the parameter if it has a name; afterwards it works."""
    import torch

    def rank():
        (x, *_), w, b = case("torch", WORLD)
        named, numbered = torch.optim.SGD([("head.weight", w)], lr=0.1), torch.optim.AdamW([w, b], lr=0.1)
        message = []
        with defer_grad_reduce():
            loss_of(x, w, b).backward()
            for optimizer in (named, numbered):
                with pytest.raises(LayoutError) as error:
                    optimizer.step()
                message.append(str(error.value))
        named.step()
        return message, array_of(w)

    message, stepped = on_two(rank)
    rest = (
        " (weight of linear) is still f32[3, 5] + Partial(sum)@dp; step after defer_grad_reduce() has ended, or reduce "
        "it first: grad = grad.reduce_partial()"
    )
    assert message == [
        f"optimizer step: the gradient of head.weight{rest}",
        f"optimizer step: the gradient of parameter 0 of group 0{rest}",
    ]
    np.testing.assert_allclose(stepped, arrays()[1] - 0.1 * dense_gradients(1)[0], rtol=2e-5, atol=2e-5)


@pytest.mark.platforms("mindspore")
def test_a_step_on_a_pending_gradient_is_refused_on_mindspore():
    """MindSpore's optimizers, compiled or not, refuse a gradient that is still Partial, and name the parameter."""
    import mindspore
    from mindspore.experimental import optim

    from hyper_parallel import value_and_grad

    def rank():
        (x, *_), w, b = case("mindspore", WORLD)
        w.name, b.name = "head.weight", "head.bias"
        with defer_grad_reduce():
            grads = value_and_grad(functools.partial(loss_of, w=w, b=b), None, [w, b])(x)[1]
            raw = mindspore.grad(lambda x: loss_of(x, w, b), None, [w])(x)  # plain, and hence complete
        message = []
        for optimizer in (mindspore.nn.Momentum([w, b], 0.1, 0.9), optim.AdamW([w, b], lr=0.1)):
            with pytest.raises(LayoutError) as error:
                optimizer(tuple(grads))
            message.append(str(error.value))
        return message, raw[0].asnumpy()

    for message, raw in simulate(rank, 2, "mindspore"):
        wanted = (
            "optimizer step: the gradient of head.weight is still f32[3, 5] + Partial(sum)@dp; step after "
            "defer_grad_reduce() has ended, or reduce it first: grad = grad.reduce_partial()"
        )
        assert message == [wanted] * 2
        np.testing.assert_allclose(raw, dense_gradients(1)[0], rtol=2e-5, atol=2e-5)


def interrupted(x, w, b):
    """Leave a block by an exception after a backward pass."""
    with defer_grad_reduce():
        loss_of(x, w, b).backward()
        raise ZeroDivisionError


@pytest.mark.platforms("torch")
def test_a_block_left_by_an_exception_communicates_nothing():
    """After an exception the gradient stays Partial and a step is refused, until it is cleared or reduced."""
    import torch

    def rank():
        (x, *_), w, b = case("torch", WORLD)
        optimizer = torch.optim.SGD([w, b], lr=0.1)
        with record_events() as log, pytest.raises(ZeroDivisionError):
            interrupted(x, w, b)
        assert reductions(log) == []
        with pytest.raises(LayoutError, match="gradient of parameter 0 of group 0"):
            optimizer.step()
        w.grad = w.grad.reduce_partial()
        reduced = array_of(w.grad)
        for nothing in (False, True):
            with pytest.raises(ZeroDivisionError):
                interrupted(x, w, b)
            optimizer.zero_grad(set_to_none=nothing)
            assert w.grad is None or not array_of(w.grad).any()
        optimizer.step()
        del w.grad
        return reduced, array_of(w)

    reduced, kept = on_two(rank)
    np.testing.assert_allclose(reduced, dense_gradients(1)[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(kept, arrays()[1])


@pytest.mark.platforms("torch")
def test_views_and_graphs_belong_to_the_block_that_made_them():
    """Cached views do not cross the border of a block in either direction; graphs may."""

    def rank():
        (x, *_), w, b = case("torch", WORLD)
        with record_events() as log:
            loss_of(x, w, b).backward()  # keeps a view, whose backward reduces
            outside = reductions(log)
            early = loss_of(x, w, b)
            with defer_grad_reduce():
                with defer_grad_reduce():  # an inner block ends nothing
                    loss_of(x, w, b).backward()
                inside = reductions(log)
                early.backward()
                early_too = reductions(log)
                late = loss_of(x, w, b)
            after = reductions(log)
            late.backward()
            loss_of(x, w, b).backward()
            return [outside, inside, early_too, after, reductions(log)], array_of(w.grad)

    seen, grad = on_two(rank)
    pair = ["bias", "weight"]
    assert seen == [sorted(pair * times) for times in (1, 1, 2, 3, 5)]
    np.testing.assert_allclose(grad, 5 * dense_gradients(1)[0], rtol=2e-5, atol=2e-5)


@pytest.mark.platforms("torch")
def test_whoever_must_see_true_gradients_does():
    """Hooks, ``torch.autograd.grad``, second derivatives and inputs get reduced gradients inside the block."""
    import torch

    def rank():
        (x, *_), w, b = case("torch", WORLD)
        x = x.detach().requires_grad_()
        hooked = []
        with defer_grad_reduce():
            handle = w.register_hook(lambda grad: hooked.append(array_of(grad)))
            loss_of(x, w, b).backward()
            handle.remove()
            placements = [value.grad.placements for value in (x, w, b)]
            (asked,) = torch.autograd.grad(loss_of(x, w, b), [w])
            (twice,) = torch.autograd.grad(loss_of(x, w, b), [w], create_graph=True)
            (second,) = torch.autograd.grad((twice * twice).sum(), [b])
            assert b.grad is b.grad
            b.grad.mul_(2)  # as clipping does: a write is not lost
            local_grad = torch.autograd.grad(loss_of(x, w, b), [w.to_local()], allow_unused=True)[0]
            b.requires_grad_(False)
        return (
            placements,
            hooked[0],
            array_of(asked),
            array_of(w.grad),
            array_of(b.grad),
            array_of(second),
            local_grad.numpy(),
        )

    placements, hooked, asked, accumulated, written, second, local_grad = on_two(rank)
    assert placements == [(Shard(0),), (Replicate(),), (Partial(),)]
    gw, gb = dense_gradients(1)
    for got in (hooked, asked, accumulated, local_grad):
        np.testing.assert_allclose(got, gw, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(written, 2 * gb, rtol=2e-5, atol=2e-5)
    x = arrays()[0][0].astype(np.float64)
    np.testing.assert_allclose(second, 4 * gw @ x.sum(0), rtol=2e-5, atol=2e-5)


@pytest.mark.platforms("torch")
def test_a_hook_sees_passes_after_it_only():
    """A gradient that was pending before a hook was registered is added without calling the hook."""

    def rank():
        (x, *_), w, b = case("torch", WORLD)
        seen = []
        with defer_grad_reduce():
            loss_of(x, w, b).backward()
            hook = w.register_hook(lambda grad: grad * 3)
            later = b.register_post_accumulate_grad_hook(lambda value: seen.append(array_of(value.grad)))
        once = array_of(w.grad)
        with defer_grad_reduce():
            loss_of(x, w, b).backward()
        hook.remove()
        later.remove()
        return once, array_of(w.grad), array_of(b.grad), len(seen)

    once, after, bias, seen = on_two(rank)
    gw, gb = dense_gradients(1)
    np.testing.assert_allclose(once, gw, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(after, 4 * gw, rtol=2e-5, atol=4e-5)
    np.testing.assert_allclose(bias, 2 * gb, rtol=2e-5, atol=2e-5)
    assert seen == 1


@pytest.mark.platforms("torch")
def test_copies_have_no_pending_gradient():
    """A deepcopy or pickle made inside a block has no gradient; the original's gradient is complete."""
    import copy
    import pickle

    def rank():
        (x, *_), w, b = case("torch", WORLD)
        with defer_grad_reduce():
            loss_of(x, w, b).backward()
            copies = [copy.copy(w), copy.deepcopy(w), pickle.loads(pickle.dumps(w))]  # noqa: S301 - our own bytes
            results = [value.grad for value in copies]
            loss_of(x, copies[1], b).backward()
        return results, array_of(w.grad), array_of(copies[1].grad)

    results, *grads = on_two(rank)
    assert results == [None] * 3
    for got in grads:
        np.testing.assert_allclose(got, dense_gradients(1)[0], rtol=2e-5, atol=2e-5)


@pytest.mark.platforms("mindspore")
def test_hooks_of_mindspore_parameters_see_true_gradients():
    """A parameter with a hook reduces its gradient inside the block; without the hook the gradient stays pending."""
    from hyper_parallel import value_and_grad

    def rank():
        (x, *_), w, b = case("mindspore", WORLD)
        hook = w.register_hook(lambda grad: grad * 3)
        run = value_and_grad(functools.partial(loss_of, w=w, b=b), None, [w, b])
        with defer_grad_reduce():
            hooked = run(x)[1]
            hook.remove()
            free = run(x)[1]
        return [value[0].placements[0] == Partial() for value in (hooked, free)], *map(array_of, (hooked[0], free[0]))

    for waiting, hooked, free in simulate(rank, 2, "mindspore"):
        assert waiting == [False, True]
        np.testing.assert_allclose(hooked, 3 * dense_gradients(1)[0], rtol=2e-5, atol=6e-5)
        np.testing.assert_allclose(free, dense_gradients(1)[0], rtol=2e-5, atol=2e-5)
