"""Bounds from repetitions that are changed in the last place: correct plans pass, and no fault is hidden."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.engine.noise import MULTIPLE
from hyper_parallel.verify.model import verify_model
from hyper_parallel.verify.model_case import ModelCase
from hyper_parallel.verify.perturbation import (
    Perturbation,
    allowed_errors,
    describe,
    largest_changes,
    perturb_outputs,
    perturbations,
)

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
        "weight": 3 * 3 * 8,
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


def test_changes_are_of_one_unit_antithetic_and_reproducible():
    """Both runs of a pair change each value by a unit in the last place, in opposite directions, always the same."""
    first, second = perturbations(7)[:2]
    ones = np.ones((5, 3))
    assert (first.pair, first.sign, second.pair, second.sign) == (0, 1, 0, -1)
    changed = first.changed("weight a", ones)
    assert set(np.abs(changed - 1).ravel()) == {2.0**-52}
    np.testing.assert_array_equal(changed + second.changed("weight a", ones), 2 * ones)
    np.testing.assert_array_equal(changed, Perturbation(7, 0, 1).changed("weight a", ones))
    assert (changed != first.changed("weight b", ones)).any()
    assert first.changed("tokens", np.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype, unit", [("float64", 2.0**-52), ("float32", 2.0**-23), ("bfloat16", 2.0**-7)])
def test_tensors_are_changed_differentiably(dtype, unit):
    """A tensor of any precision is changed by its own unit, its gradient likewise; numbers of tokens stay."""
    import torch

    platform, perturbation = get_torch_platform(), Perturbation(0, 0, 1)
    x = torch.ones(4, 3, dtype=getattr(torch, dtype), requires_grad=True)
    changed = perturbation.changed_tensor(platform, "x", x)
    assert changed.dtype is x.dtype
    changed.sum().backward()
    assert set((x.grad.double() - 1).abs().flatten().tolist()) == {unit}
    tokens = torch.arange(3)
    assert perturbation.changed_tensor(platform, "x", tokens) is tokens


def test_every_module_returns_a_changed_output():
    """Outputs of modules are changed wherever they are tensors, a shared module's once per call."""
    import torch
    from torch import nn

    class Pair(nn.Module):
        def forward(self, x):
            return x, 1

    identity = nn.Identity()
    model = nn.Sequential(identity, identity, Pair())
    perturb_outputs(get_torch_platform(), model, Perturbation(0, 0, 1))
    x = torch.ones(50, dtype=torch.float64)
    output, count = model(x)
    assert count == 1
    assert set(((output - x) / 2.0**-52).round().int().abs().tolist()) <= {0, 1, 2}
    assert not torch.equal(output, x)


def test_what_is_allowed():
    """A tensor may be off by the multiple of its largest change, or of its own unit; integers have no bound."""
    values = {("output", "a"): np.array([1.0, -4.0]), ("weight", "w"): np.array([1e-3]), ("buffer", "n"): np.array([3])}
    values["gradient", "none"] = None
    repeated = {("output", "a"): np.array([1.0, -4.0 + 1e-15]), ("weight", "w"): np.array([1e-3 + 1e-9])}
    changes = [largest_changes(values, {**repeated, ("buffer", "n"): np.array([4])})]
    allowed = allowed_errors(values, changes)
    assert allowed == {
        ("output", "a"): MULTIPLE * max(4 * 2.0**-52, np.spacing(4.0) * 1),
        ("weight", "w"): MULTIPLE * (1e-3 + 1e-9 - 1e-3),
    }
    assert largest_changes({("output", "a"): np.ones(2)}, {("output", "a"): np.ones(3)}) == {("output", "a"): np.inf}
    assert "in the last place of float32" in describe("float32")
