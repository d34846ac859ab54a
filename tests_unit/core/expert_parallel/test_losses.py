"""Auxiliary losses of a router: the papers' formulas over the global batch."""

from __future__ import annotations

import pytest

from hyper_parallel import load_balancing_loss, router_z_loss
from hyper_parallel.errors import PlanError

pytestmark = pytest.mark.platforms("torch")


def test_the_formulas():
    """They are those of the papers, written out; an even spread has the loss 1, the worst one E."""
    import torch

    logits = torch.randn(11, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    probabilities = logits.softmax(-1)
    experts = probabilities.topk(2).indices
    expected = 0
    for expert in range(5):
        expected += 5 * (experts == expert).sum() / 22 * probabilities[:, expert].sum() / 11
    torch.testing.assert_close(load_balancing_loss(probabilities, experts), expected)
    torch.testing.assert_close(router_z_loss(logits), (logits.exp().sum(-1).log() ** 2).sum() / 11)
    ones = torch.eye(5)
    torch.testing.assert_close(load_balancing_loss(ones, torch.arange(5)[:, None]), torch.tensor(1.0))
    torch.testing.assert_close(load_balancing_loss(ones[[3, 3]], torch.full((2, 1), 3)), torch.tensor(5.0))


def test_wrong_shapes_are_refused():
    """Tensors of other dims, of other numbers of tokens, or without tokens."""
    import torch

    with pytest.raises(PlanError) as caught:
        load_balancing_loss(torch.ones(3, 4), torch.zeros(2, 1, dtype=torch.int64))
    assert str(caught.value) == (
        "load_balancing_loss: probabilities is [3, 4], experts [2, 1]; they must be [T, E] and [T, k], with no dim of "
        "size 0"
    )
    with pytest.raises(PlanError) as caught:
        router_z_loss(torch.ones(0, 4))
    assert str(caught.value) == "router_z_loss: logits is [0, 4]; it must be [T, E], with no dim of size 0"
