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


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.sweep), 3])  # 3 leaves unequal shares
def test_masters_of_half_precision_weights_are_compared(world):
    """Weights that only an optimizer has are compared with their gradients and states if they get gradients."""
    report = verify_program(mixed, world, upcast=False)
    assert not report.verdict.differences, report.text()
    counts = report.verdict.counts
    assert (counts["gradient"], counts["state"], counts["weight"]) == (12 * world, 36 * world, 32 * world)
    wrong = verify_program(functools.partial(mixed, reduces=False), world, upcast=False)
    assert (wrong.verdict.first.kind, wrong.verdict.first.name) == ("gradient", "optimizer 0, parameter 2")


def train_by_hand(zero="module", lasts=True, halves=False, dtype=torch.float32):
    """Train without an optimizer: Adam, whose flat moments the ranks share; the last elements may be left out.

    It updates a float32 copy of the weights.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    parameters = list(model.to(dtype).parameters())
    values = torch.cat([each.detach().float().flatten() for each in parameters])
    size = values.numel()
    part = -(-size // world)
    low, high = rank * part, min(size, (rank + 1) * part)
    first, second = torch.zeros(high - low), torch.zeros(high - low)
    for step in range(1, 4):
        x, g = torch.randn(11, 5).tensor_split(world)[rank], torch.randn(11, 3).tensor_split(world)[rank]
        for rows in (slice(0, 2), slice(2, None)) if halves else (slice(None),):
            (model(x[rows].to(dtype)) * g[rows]).sum().backward()
        flat = torch.cat([each.grad.float().flatten() for each in parameters])
        dist.all_reduce(flat)
        if zero == "module":
            model.zero_grad()
        else:
            for each in parameters:
                each.grad = None
        first.lerp_(flat[low:high], 0.1)
        second.lerp_(flat[low:high].square(), 0.05)
        corrected = (second / (1 - 0.95**step)).sqrt() + 1e-8
        values[low:high] -= 0.01 * first / (1 - 0.9**step) / corrected
        for owner in range(world):
            end = min(size, (owner + 1) * part) - (0 if lasts or owner < world - 1 or world == 1 else 2)
            own = values[owner * part : end].clone()
            dist.broadcast(own, owner)
            values[owner * part : end] = own
        for each, value in zip(parameters, values.split([each.numel() for each in parameters]), strict=True):
            each.data.copy_(value.view_as(each))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("zero, halves", [("module", False), ("none", True)])
def test_steps_without_an_optimizer_are_compared(world, zero, halves):
    """A step is seen where weights have changed after a backward, and its gradients before they are dropped."""
    report = verify_program(functools.partial(train_by_hand, zero, halves=halves), world)
    assert report.ok, report.text()
    assert report.verdict.counts["weight"] == 4 * 4 * world
    assert report.verdict.counts["gradient"] == 4 * 3 * world


@pytest.mark.parametrize("world", [2, 3])
def test_steps_without_an_optimizer_in_half_precision(world):
    """Weights that hardly say whether a gradient was reduced leave the ranks' own gradients right, if their sum is."""
    report = verify_program(functools.partial(train_by_hand, "none", dtype=torch.bfloat16), world)
    assert report.ok, report.text()
    assert report.verdict.counts["gradient"] == 4 * 3 * world


def test_elements_that_no_rank_updates_by_hand_are_an_error():
    """What a hand-written update leaves out is reported as the first weight that differs."""
    report = verify_program(functools.partial(train_by_hand, lasts=False), 3, steps=2)
    first = report.verdict.differences[0]
    assert (first.kind, first.name, first.ranks, first.step) == ("weight", "2.bias", (0, 1), 0)
    assert first.cause.kind == "not-updated"


def reduce_half(dtype, divides=True):
    """Train on gradients that ranks reduce in half precision, small sums of large parts among them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x, g = torch.randn(12, 5).tensor_split(world)[rank], torch.randn(12, 3).tensor_split(world)[rank]
        (model(x) * g).sum().backward()
        for parameter in model.parameters():
            gradient = parameter.grad.to(dtype)
            dist.all_reduce(gradient)
            parameter.grad.copy_(gradient).div_(1 if divides else world)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_reduced_in_half_precision_may_be_off_by_its_rounding(world, dtype):
    """Each rank rounds its part of a sum, which is not an error where the sum is small; a wrong divisor is one."""
    report = verify_program(functools.partial(reduce_half, dtype), world, upcast=False)
    assert report.ok, report.text()
    report = verify_program(functools.partial(reduce_half, dtype, divides=False), world, upcast=False)
    assert report.verdict.first.kind == "gradient"
    assert report.verdict.first.cause.kind == "average-for-sum"
