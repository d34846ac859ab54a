"""Bytes that autograd keeps for backward."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.verify.frameworks.torch.saved_tensors import counted_for_backward

pytestmark = pytest.mark.platforms("torch")


def test_each_storage_is_counted_once_and_weights_are_not():
    """Views and several uses of one storage count once; parameters and buffers do not; backward gives them back."""
    model = torch.nn.Linear(6, 4)
    x = torch.ones(8, 6)
    with counted_for_backward(model) as most:
        hidden = model(x)
        assert most() == 8 * 6 * 4
        hidden = torch.sin(hidden) * torch.cos(hidden)  # saved: hidden, twice, and both factors
        assert most() == (8 * 6 + 3 * 8 * 4) * 4
        hidden.sum().backward()
        first = most()
        (model(x) ** 2).sum().backward()
        assert most() == first
    assert model.weight.grad is not None


def test_tensors_without_values_are_counted():
    """Storages on the meta device are distinguished, although they have no address."""
    with torch.device("meta"):
        model, x = torch.nn.Linear(6, 4), torch.ones(8, 6)
        with counted_for_backward(model) as most:
            torch.sin(model(x)).sum().backward()
    assert most() == (8 * 6 + 8 * 4) * 4
