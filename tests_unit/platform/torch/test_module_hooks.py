"""Backward hooks of modules see and return whole gradients, whatever the layout of what goes in and comes out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.errors import LayoutError, MixedTensorError, UnsupportedOperatorError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def numbers(*shape, seed=0):
    """Random values, equal on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on_ranks(function, *shape):
    """``function(place)`` on every rank; ``place(values, placement)`` distributes them along every axis."""

    def rank():
        mesh = init_device_mesh("cpu", shape)
        return function(lambda value, placement: distribute_tensor(value.clone(), mesh, [placement] * len(shape)))

    return simulate(rank, math.prod(shape), "torch")


def assert_as_on_one_device(function, *shape):
    """``function(place)`` returns equal tensors on every rank and on one device."""

    def whole(value):
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach()

    wanted = [whole(value) for value in function(lambda value, _: value.clone())]
    for results in on_ranks(lambda place: [whole(value) for value in function(place)], *shape):
        torch.testing.assert_close(results, wanted)


class Two(nn.Module):
    """Two tensors and a number in, two tensors and a number out."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x, count, y):
        """Compute them."""
        return (x @ self.weight) * y, count, x.sum()


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)])
@pytest.mark.parametrize("first, second", [(R, S1), (S0, R), (S1, S0)])
def test_hooks_see_and_change_whole_gradients(shape, first, second):
    """Both kinds of hooks get DTensors of the gradients, in their order; what they return goes on."""

    def run(place):
        module, seen = Two(place(numbers(5, 5), R)), []
        x, y = (place(numbers(5, 5, seed=seed), at).requires_grad_() for seed, at in ((1, first), (2, second)))

        def before(_, outputs):
            seen.extend((outputs[0], outputs[2]))
            return outputs[0] * 3, None, outputs[2]

        def after(_, inputs, outputs):
            assert inputs[1] is None
            assert outputs[1] is None
            seen.extend((inputs[0], inputs[2], outputs[0]))
            return inputs[0] * inputs[2], None, inputs[2] + 1

        module.register_full_backward_pre_hook(before)
        module.register_full_backward_hook(lambda *_: None)
        module.register_full_backward_hook(after)
        product, _, total = module(x * 2, 7, y)
        ((product * place(numbers(5, 5, seed=3), S0)).sum() + total * total).backward()
        return [*seen, x.grad, y.grad, module.weight.grad]

    assert_as_on_one_device(run, *shape)


@pytest.mark.parametrize("world", [2, 3])
def test_hooks_of_parallelized_modules(world):
    """A layer's hook sees the gradient of its input as the style lays it out; parameters have their gradients."""
    whole = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    copies = {name: value.detach().clone() for name, value in whole.state_dict().items()}

    def run(parallelize):
        model, seen = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double(), []
        model.load_state_dict(copies)
        parallelize(model)
        x = numbers(4, 5).requires_grad_()
        for layer in model:
            layer.register_full_backward_hook(lambda _, inputs, __: seen.append(inputs[0]))
        model(x).square().sum().backward()
        return [*seen, x.grad, *(parameter.grad for parameter in model.parameters())]

    wanted = run(lambda model: model)

    def rank():
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        found = run(lambda model: parallelize_module(model, init_device_mesh("cpu", (world,)), plan))
        return [(value.full_tensor() if isinstance(value, DTensor) else value).detach() for value in found]

    for results in simulate(rank, world, "torch"):
        torch.testing.assert_close(results, wanted)


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_hooks_see_the_gradient_of_pending_values(op):
    """The gradient of a pending sum, average or maximum is that of the value that it stands for."""

    def rank():
        mesh = init_device_mesh("cpu", (3,))
        local = (numbers(4) + mesh.rank).requires_grad_()
        seen, module = [], nn.Identity()
        module.register_full_backward_hook(lambda _, inputs, outputs: seen.extend((*inputs, *outputs)))
        y = module(DTensor.from_local(local, mesh, [Partial(op)]))
        (y * distribute_tensor(numbers(4, seed=1), mesh, [R])).sum().backward()
        return [value.full_tensor() for value in seen], local.grad

    for number, (seen, gradient) in enumerate(simulate(rank, 3, "torch")):
        cotangent = numbers(4, seed=1)
        torch.testing.assert_close(seen, [cotangent, cotangent])
        share = {"sum": 1.0, "avg": 1 / 3, "max": float(number == 2)}[op]
        torch.testing.assert_close(gradient, cotangent * share)


def test_inputs_without_gradients_and_named_tuples():
    """Without a gradient in sight nothing is hooked; inputs that need none stay what they are."""

    def run(place):
        module = Two(place(numbers(3, 3), S0))
        seen = []
        module.register_full_backward_hook(lambda _, inputs, outputs: seen.extend((inputs[2], outputs[0])))
        x, y = place(numbers(3, 3, seed=1), S1), place(numbers(3, 3, seed=2), S1).requires_grad_()
        with torch.no_grad():
            module(x, 1, y)
        module(x, 1, y)[0].square().sum().backward()
        return [*seen, y.grad, module.weight.grad]

    assert_as_on_one_device(run, 2)


def test_what_hooks_may_not_return():
    """Plain gradients of DTensors and the reverse, gradients of another shape, and old hooks are refused."""

    def refused(place, hook, *, old=False):
        module = Two(place(numbers(4, 4), R))
        register = module.register_backward_hook if old else module.register_full_backward_hook
        register(hook)
        x = place(numbers(4, 4, seed=1), S0).requires_grad_()
        try:
            module(x, 0, x)[0].sum().backward()
        except (MixedTensorError, LayoutError, UnsupportedOperatorError) as error:
            return str(error)
        return None

    def rank(place):
        mixed = nn.Bilinear(2, 2, 2)
        mixed.register_full_backward_hook(lambda _, inputs, __: (inputs[0], place(torch.ones(2), R)))
        plain = torch.ones(2, requires_grad=True)
        mixed.forward = lambda x, y: x * y.sum().item()
        with pytest.raises(MixedTensorError, match="gradient 1 is a DTensor, the argument is a Tensor"):
            mixed(place(torch.ones(2), R).requires_grad_(), plain).sum().backward()
        scaled = nn.Bilinear(2, 2, 2)
        scaled.register_full_backward_hook(lambda _, inputs, __: inputs)
        scaled.forward = lambda x, y: (x * 2, y * 3)
        parts = scaled(place(torch.ones(2), R).requires_grad_(), plain)
        (parts[0].sum().full_tensor() + parts[1].sum()).backward()
        assert plain.grad.tolist() == [3.0, 3.0]
        single = nn.ReLU()
        single.register_backward_hook(print)
        with pytest.raises(UnsupportedOperatorError, match=r"^register_backward_hook of ReLU: "):
            single(place(torch.ones(2), R).requires_grad_())
        return [
            refused(place, lambda _, inputs, __: (inputs[0].full_tensor(), None, None)),
            refused(place, lambda _, inputs, __: (inputs[0][:2], None, None)),
            refused(place, print, old=True),
        ]

    texts = on_ranks(rank, 2)[0]
    old = "register_backward_hook of Two: its hook would see gradients of the last local operation, and not of the "
    assert texts == [
        "backward hook of Two: gradient 0 of a DTensor must be a DTensor, got Tensor",
        "backward hook of Two: gradient 0 has shape [2, 4], the tensor has [4, 4]",
        f"{old}DTensors that go in and come out; use register_full_backward_hook",
    ]
    module = nn.ReLU()
    module.register_backward_hook(lambda *_: None)
    module(torch.ones(2, requires_grad=True) * 1).sum().backward()
