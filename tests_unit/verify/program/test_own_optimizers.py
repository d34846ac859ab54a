"""Programs whose optimizers reduce gradients in their step, or keep weights of their own, are verified."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hyper_parallel.verify import verify_program

pytestmark = pytest.mark.platforms("torch")


class Averaging(torch.optim.Optimizer):
    """Adam on averages of the ranks' gradients, which it makes in its step; the last parameter may be forgotten."""

    def __init__(self, params, *, lr, forgets):
        super().__init__(params, {"lr": lr})
        self.forgets = forgets

    @torch.no_grad()
    def step(self):
        """Average, and update."""
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"], 1):
                gradient, state = parameter.grad.clone(), self.state[parameter]
                if not (self.forgets and place == len(group["params"])):
                    dist.all_reduce(gradient)
                    gradient /= dist.get_world_size()
                square = state.setdefault("square", torch.zeros_like(gradient)).lerp_(gradient.square(), 0.1)
                parameter.sub_(group["lr"] * gradient / (square.sqrt() + 1e-3))


def train(lr=0.01, forgets=False):
    """Train by an optimizer that reduces in its step; a rank's loss is the sum of its part, times the world's size."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = Averaging(model.parameters(), lr=lr, forgets=forgets)
    for _ in range(3):
        x, g = torch.randn(11, 5).tensor_split(world)[rank], torch.randn(11, 3).tensor_split(world)[rank]
        (model(x) * g).sum().mul(world).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gradients_that_the_optimizer_reduces_are_compared_as_their_mean(world):
    """The ranks' gradients are no error if their mean is the reference's and the weights after the step are right."""
    report = verify_program(train, world)
    assert report.ok, report.text()
    assert report.verdict.counts["gradient"] == 12 * world
    assert (
        "gradients of *.weight, *.bias: compared as the mean over world; the optimizer reduces them in its step, and "
        "the weights after it are right" in report.verdict.notes
    )


def test_a_gradient_that_the_optimizer_forgets_is_a_missing_reduction():
    """A parameter whose weight is wrong after the step differs by its gradient, the others do not."""
    report = verify_program(functools.partial(train, forgets=True), 3)
    first = report.verdict.first
    assert (first.kind, first.name, first.cause.kind) == ("gradient", "2.bias", "missing-reduction")
    assert {each.name for each in report.verdict.differences if each.kind == "gradient" and each.step == 0} == {
        "2.bias"
    }


def test_weights_that_hardly_move_say_nothing_about_gradients():
    """Where the learning rate is tiny, right weights are no sign of right gradients, which differ."""
    report = verify_program(functools.partial(train, lr=1e-9), 2)
    assert (report.verdict.first.kind, report.verdict.first.cause.kind) == ("gradient", "missing-reduction")


def mixed(reduces=True):
    """Train weights in bfloat16 whose float32 masters an optimizer has."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
    masters = [value.detach().float().requires_grad_() for value in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.01)
    for _ in range(3):
        x, y = torch.randn(12, 5).bfloat16(), torch.randint(4, (12,))
        F.cross_entropy(model(x.chunk(world)[rank]).float(), y.chunk(world)[rank]).backward()
        for value, master in zip(model.parameters(), masters, strict=True):
            master.grad = value.grad.float() / world
            if reduces or master is not masters[2]:
                dist.all_reduce(master.grad)
            value.grad = None
        optimizer.step()
        with torch.no_grad():
            for value, master in zip(model.parameters(), masters, strict=True):
                value.copy_(master)


@pytest.mark.parametrize("world", [2, 3])
def test_masters_of_half_precision_weights_are_compared(world):
    """Weights that only an optimizer has are compared with their gradients and states if they get gradients."""
    report = verify_program(mixed, world, upcast=False)
    assert not report.verdict.differences, report.text()
    counts = report.verdict.counts
    assert (counts["gradient"], counts["state"], counts["weight"]) == (12 * world, 36 * world, 32 * world)
    wrong = verify_program(functools.partial(mixed, reduces=False), world, upcast=False)
    assert (wrong.verdict.first.kind, wrong.verdict.first.name) == ("gradient", "optimizer 0, parameter 2")
