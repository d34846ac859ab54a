"""AdamW on gradients that are rounding noise: a correct plan passes, and no fault is hidden."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel
from hyper_parallel.platform.contract.training import StepResult
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.adamw_noise import NoiseReplacement, noise_elements
from hyper_parallel.verify.compare import Bound
from hyper_parallel.verify.model import verify_model
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
    """A weight with a zero gradient steps equally in both runs; all is compared, and the report has the method."""
    report = report_of(lambda: case(dtype=dtype), steps=3)
    assert report.ok, report.text()
    assert report.counts == {"output": 3 * 3 * 5, "loss": 9, "gradient": 3 * 3 * 8, "weight": 3 * 3 * 8}
    if dtype == "float32":
        replaced = [line for line in report.skipped if "single device's gradient was taken" in line]
        assert [line.partition(":")[0] for line in replaced] == ["AdamW's step 1", "AdamW's step 2", "AdamW's step 3"]


@pytest.mark.parametrize("fault", ["drop-allreduce@o", "double-bias@o"])
def test_faults_are_found_under_adamw_all_the_same(fault):
    """Replacing noise hides no fault: gradients and outputs are compared before it."""
    report = report_of(case, steps=2, inject=fault)
    assert not report.ok
    assert report.first is not None
    assert report.first.step == 0


def test_noise_is_where_equal_gradients_step_apart():
    """An element is noise if its gradient is equal and its difference moves the weight too far, and only then."""
    expected = np.array([1.0, 1e-2, 1e-9, -1e-12, 0.0, 0.5])
    actual = expected + np.array([1e-12, 1e-12, 1e-12, 2e-12, 0.0, 1e-3])
    noise = noise_elements(actual, expected, error=1e-9, allowed=1e-6)
    np.testing.assert_array_equal(noise, [False, False, True, True, False, False])


def test_noise_of_a_plain_gradient_is_replaced_too():
    """The optimizer gets the single device's value, the result keeps backward's; other shapes stay unchanged."""
    import torch

    expected = {"w": np.array([1.0, 1e-9], "float32"), "v": np.ones(2, "float32"), "frozen": None}
    weights = {"w": np.ones(2), "v": np.ones(2)}
    replacement = NoiseReplacement(Bound("float32", 3, 4), 0, 0.1, expected, {}, weights)
    result = StepResult(0.5, {"w": torch.tensor([1.0, -1e-9]), "v": torch.zeros(3)})
    replaced = replacement(get_torch_platform(), result)
    assert replaced.gradients["w"].tolist() == torch.tensor([1.0, 1e-9]).tolist()
    assert result.gradients["w"].tolist() == torch.tensor([1.0, -1e-9]).tolist()
    assert replaced.gradients["v"].tolist() == [0.0] * 3
    assert (replacement.replaced, replacement.total) == (1, 2)


def test_the_report_says_how_much_was_replaced():
    """The report has the number of elements taken from the single device, and the reason."""
    replacement = NoiseReplacement(Bound("float32", 3, 4), 0, 0.1, {}, {}, {}, replaced=3, total=40)
    assert str(replacement) == (
        "for 3 of rank 0's 40 elements the single device's gradient was taken: it is equal, but so small that its "
        "rounding error decides about the step"
    )
