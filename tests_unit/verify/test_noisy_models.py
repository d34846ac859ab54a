"""Bounds of a model whose gradient is only rounding noise: correct plans pass, and no fault is hidden."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel
from hyper_parallel.verify.model.run import verify_model
from hyper_parallel.verify.model_case import ModelCase

pytestmark = pytest.mark.platforms("torch")


def attention(dtype="float32"):
    """Return an attention layer whose key bias cancels in softmax, so that its true gradient is zero."""
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.q, self.k, self.v = (nn.Linear(6, 12) for _ in range(3))
            self.o = nn.Linear(12, 6)

        def forward(self, x):
            q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            scores = torch.softmax(q @ k.transpose(-1, -2), -1)
            return self.o((scores @ v).transpose(1, 2).flatten(2))

    return Attention().to(getattr(torch, dtype))


def case(dtype="float32"):
    """Return the layer with data and a loss."""
    import torch

    rng = np.random.default_rng(1)
    batches = [tuple(rng.standard_normal((2, 5, 6)).astype(dtype) for _ in range(2)) for _ in range(3)]
    return ModelCase(
        lambda: attention(dtype),
        batches,
        lambda output, batch: torch.nn.functional.mse_loss(output, batch[-1]),
        optimizer="adamw",
        learning_rate=0.05,
    )


def plan(mesh):
    """Column and row parallel."""
    del mesh
    return {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}


def report_of(spec, **options):
    """Return the report on three ranks."""
    return verify_model(spec, plan, (3,), ("tp",), platform="torch", name="attention", **options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_adamw_on_a_gradient_that_is_zero_but_for_rounding(dtype):
    """A weight whose gradient is only rounding noise steps as the noise says, which the repetitions show."""
    report = report_of(lambda: case(dtype=dtype), steps=3)
    assert report.ok, report.text()
    assert report.counts == {
        "output": 3 * 3 * 5,
        "loss": 9,
        "gradient": 3 * 3 * 8,
        "weight": 3 * 4 * 8,
        "state": 3 * 3 * 8 * 3,
        "rate": 9,
    }
    assert report.skipped == []


@pytest.mark.parametrize("fault", ["drop-allreduce@o", "double-bias@o"])
def test_faults_are_found_under_adamw_all_the_same(fault):
    """The wide bound of such a weight hides no fault elsewhere."""
    report = report_of(case, steps=2, inject=fault)
    assert not report.ok
    assert report.first is not None
    assert report.first.step == 0
