"""Operators with thresholds are recorded by distance and side, and mirror the numbers whose side is replaced."""

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.verify.frameworks.torch.thresholds import OPERATORS, sided

pytestmark = pytest.mark.platforms("torch")

EDGES = torch.tensor([-0.5, 0.0, 0.75])
CASES = {
    "relu": (torch.relu, (), {}, 0.0),
    "abs": (torch.abs, (), {}, 0.0),
    "sign": (torch.sign, (), {}, 0.0),
    "leaky_relu": (F.leaky_relu, (0.2,), {}, 0.0),
    "gt": (torch.gt, (0.25,), {}, 0.25),
    "__le__": (torch.Tensor.__le__, (0.25,), {}, 0.25),
    "lt": (torch.lt, (), {"other": torch.full((4, 5), 0.25)}, 0.25),
    "maximum": (torch.maximum, (torch.full((4, 5), 0.25),), {}, 0.25),
    "clamp": (torch.clamp, (), {"min": -3.0, "max": 0.25}, 0.25),
    "hardtanh": (F.hardtanh, (-4.0, 0.25), {}, 0.25),
    "relu6": (F.relu6, (), {}, 0.0),
    "bucketize": (torch.bucketize, (EDGES,), {}, 0.75),
}


def jump(numbers, result):
    """Return what jumps at a threshold: the result, or its gradient by the numbers."""
    if not result.requires_grad:
        return result.detach().clone()
    (gradient,) = torch.autograd.grad(result.sum(), numbers)
    return gradient if gradient.any() else result.detach()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("above", [True, False])
def test_a_mirrored_number_has_the_other_side_and_moves_no_farther_than_across(name, above):
    """The number next to the threshold gets what is on its other side, and every other number keeps its own."""
    plain, args, kwargs, threshold = CASES[name]
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randn(4, 5, generator=generator) + 1.5
    numbers[2, 3] = threshold + (1e-6 if above else -1e-6)
    numbers.requires_grad_()
    seen = []

    def keep(operator, distance, side):
        seen.append((operator, distance, side))

    own = jump(numbers, sided(plain, name, keep, (numbers, *args), kwargs))
    ((operator, distance, side),) = seen
    assert (operator, bool(side[2, 3])) == (name, above)
    assert distance[2, 3] < 1e-5

    def other(_operator, _distance, side):
        side = side.clone()
        side[2, 3] = not above
        return side

    mirrored = jump(numbers, sided(plain, name, other, (numbers, *args), kwargs))
    changed = mirrored != own
    assert changed[2, 3]
    assert int(changed.sum()) == 1


def test_a_number_on_the_threshold_can_be_taken_above_it():
    """Zero is not above zero; where the reference's number is, ReLU lets the gradient through."""
    numbers = torch.zeros(3, requires_grad=True)
    above = torch.tensor([True, False, True])
    result = sided(torch.relu, "relu", lambda *_: above, (numbers,), {})
    assert torch.equal(jump(numbers, result), above.float())


def test_in_place_relu_mirrors_in_place():
    """The numbers of ``relu_`` are its result."""
    leaf = torch.tensor([1e-6, 2.0, -1.0], requires_grad=True)
    numbers = leaf * 1
    sided(torch.relu_, "relu_", lambda *_: torch.tensor([False, True, False]), (numbers,), {})
    assert torch.equal(numbers.detach(), torch.tensor([0.0, 2.0, 0.0]))
    assert torch.equal(jump(leaf, numbers), torch.tensor([0.0, 1.0, 0.0]))


@pytest.mark.parametrize(
    "name, plain, args",
    [
        ("relu", torch.relu, (torch.arange(4),)),
        ("relu", torch.relu, (torch.randn(4),)),  # without a gradient ReLU does not jump
        ("gt", torch.gt, (torch.randn(1), 0.0)),
        ("gt", torch.gt, (torch.randn(4, 1), torch.randn(1, 3))),
        ("gt", torch.gt, (torch.randn(4, device="meta"), 0.0)),
        ("clamp", torch.clamp, (torch.randn(4, requires_grad=True), torch.zeros(4))),
        ("bucketize", torch.bucketize, (torch.randn(4), torch.empty(0))),
    ],
)
def test_what_has_no_side_is_not_recorded(name, plain, args):
    """Integers, single numbers, results that do not jump, broadcast numbers and unknown thresholds stay as they are."""

    def fail(*_):
        raise AssertionError("recorded")

    result, expected = sided(plain, name, fail, args, {}), plain(*args)
    assert result.shape == expected.shape
    assert result.is_meta or torch.equal(result, expected)


def test_every_operator_is_one_of_pytorch():
    """What is replaced exists."""
    assert all(callable(getattr(owner, name)) for owner, name in OPERATORS)
