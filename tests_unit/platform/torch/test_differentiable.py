from __future__ import annotations

import pytest

from hyper_parallel.platform.select import get_torch_platform

pytestmark = pytest.mark.platforms("torch")


def test_vjp_pulls_back_every_cotangent():
    """The product sums over all outputs, under the cotangents given."""
    import torch

    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    seeds = [torch.tensor([1.0, -1.0]), torch.tensor([2.0, 5.0])]
    outs, grads = get_torch_platform().vjp(lambda a, b: [a * b, a + b], [x, y], seeds, [True, True])
    assert [one.tolist() for one in outs] == [[3, 8], [4, 6]]
    assert [one.tolist() for one in grads] == [[5, 1], [3, 3]]


def test_unwanted_and_unused_inputs_differ():
    """An input that is not wanted has None, one that does not matter has zeros, and the inputs stay untouched."""
    import torch

    inputs = [torch.ones(2), torch.ones(2), torch.ones(2)]
    _, grads = get_torch_platform().vjp(lambda a, b, _: [a * b], inputs, [torch.ones(2)], [True, False, True])
    assert grads[0].tolist() == [1, 1]
    assert grads[1] is None
    assert grads[2].tolist() == [0, 0]
    assert not any(one.requires_grad for one in inputs)


def test_seeds_may_wait_for_the_outputs():
    """Seeds may be a function of the outputs; an output without a seed, or without gradient, is left out."""
    import torch

    x = torch.tensor([1.0, 2.0])
    _, grads = get_torch_platform().vjp(
        lambda a: [a * a, a.argmax()], [x], lambda outs: [torch.full_like(outs[0], 2.0), None], [True]
    )
    assert grads[0].tolist() == [4, 8]
    assert get_torch_platform().vjp(lambda a: [a > 0], [x], [None], [True])[1][0].tolist() == [0, 0]
