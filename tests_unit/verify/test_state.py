"""What is not trained counts too: frozen parameters and buffers are compared after every step."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel
from hyper_parallel.verify.compare import Bound, Comparison
from hyper_parallel.verify.model import verify_model
from hyper_parallel.verify.model_case import InputError, ModelCase

pytestmark = pytest.mark.platforms("torch")


def model(spoiled=None, dtype="float64"):
    """Two linear layers, the first frozen, and a counting buffer; `spoiled` is changed where ranks are parallel."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 3)
            self.up.weight.requires_grad_(False)
            self.register_buffer("seen", torch.zeros(2))
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

        def forward(self, x):
            parallel = isinstance(self.up.weight, DTensor)
            with torch.no_grad():
                self.seen += 1 + (spoiled == "buffer" and parallel)
                if spoiled == "frozen" and parallel:
                    self.up.weight.to_local().add_(0.5)
            return self.down(torch.tanh(self.up(x)))

    return Net().to(getattr(torch, dtype))


def verified(**options):
    """The report of two steps on three ranks."""
    import torch

    rng = np.random.default_rng(0)
    dtype = options.get("dtype", "float64")
    batches = [(rng.standard_normal((4, 5)), rng.standard_normal((4, 3))) for _ in range(2)]
    if dtype != "float64":
        batches = [tuple(torch.tensor(one, dtype=getattr(torch, dtype)) for one in batch) for batch in batches]
    case = ModelCase(lambda: model(**options), batches, lambda out, batch: ((out - batch[-1]) ** 2).mean())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return verify_model(lambda: case, lambda _: plan, (3,), ("tp",), platform="torch", steps=2)


def test_frozen_parameters_and_buffers_are_compared():
    """All of them hold in a right plan, infinities of a mask included."""
    report = verified()
    assert report.ok, report.text()
    assert (report.counts["weight"], report.counts["gradient"], report.counts["buffer"]) == (24, 18, 12)


@pytest.mark.parametrize("spoiled, name", [("frozen", "up.weight"), ("buffer", "seen")])
def test_a_change_that_no_gradient_shows_is_found(spoiled, name):
    """A frozen weight or a buffer that goes its own way on the ranks is a divergence of its own."""
    report = verified(spoiled=spoiled)
    assert not report.ok
    assert name in {one.name for one in report.checks if not one.ok}


def test_half_precision_is_refused():
    """bfloat16 would be judged by a bound that says nothing; the message says what to do."""
    with pytest.raises(InputError) as caught:
        verified(dtype="bfloat16")
    assert str(caught.value) == (
        "SPEC: parameter up.weight is bfloat16, in which rounding hides what a wrong plan does; build the model in "
        "float64 or float32, where the same plan does the same"
    )


def test_infinities_of_a_buffer_must_be_the_same_ones():
    """A buffer may hold values that are not finite, in the same places; a weight may not."""
    comparison = Comparison(Bound("float64", 4, 2), 0)
    mask = np.array([0.0, -np.inf, 3.0])
    comparison.compare("buffer", "", "same", 0, mask, mask)
    comparison.compare("buffer", "", "moved", 0, mask[::-1].copy(), mask)
    comparison.compare("buffer", "", "sign", 0, -mask, mask)
    comparison.compare("buffer", "", "finite", 0, mask + np.array([0.0, 0.0, 1e-3]), mask)
    comparison.compare("weight", "", "weight", 0, mask, mask)
    assert [one.name for one in comparison.checks if one.ok] == ["same"]
