"""The cause of a model's first divergence under its plan."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify import ModelCase
from hyper_parallel.verify.model.run import verify_model

pytestmark = pytest.mark.platforms("torch")

RUNS = 7  # two ranks that look at the case, a reference and its two repeats, two ranks
CAUSE = (
    "cause: missing-reduction over tp: each rank has only the value of its own shard or samples; it was not reduced "
    "over the ranks"
)


def model(dropout):
    """Return attention with a norm per head, whose weight every rank uses for other heads."""
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(12, 12, bias=False) for _ in range(4))
            self.norm = nn.LayerNorm(2, bias=False)
            nn.init.normal_(self.norm.weight)

        def forward(self, x):
            """Return the attention over six heads, or fewer on a rank."""
            q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            heads = nn.functional.scaled_dot_product_attention(q, self.norm(k), v, is_causal=True)
            return nn.functional.dropout(self.o(heads.transpose(1, 2).flatten(2)), dropout)

    return Attention().to(torch.float64)


def case(dropout=0.0):
    """Return the training of that model."""
    rng = np.random.default_rng(4)
    batches = [tuple(rng.standard_normal((2, 3, 5, 12))) for _ in range(2)]
    return ModelCase(lambda: model(dropout), batches, lambda out, batch: (out - batch[1]).square().mean())


def plan(_mesh):
    """Return a plan that forgets the norm."""
    from hyper_parallel import ColwiseParallel, RowwiseParallel

    return {"o": RowwiseParallel(), **dict.fromkeys("qkv", ColwiseParallel())}


def diverged(make_case, ranks=3, **options):
    """Return the report of that plan."""
    report = verify_model(make_case, plan, (ranks,), ("tp",), platform="torch", steps=2, **options)
    assert str(report.first).startswith("step 1, gradient of norm.weight, rank 0: "), report.text()
    return report


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_cause_is_told_with_its_numbers(ranks):
    """The gradient that nobody sums is a missing reduction, in the text, in JSON and on the page."""
    report = diverged(case, ranks)
    cause, evidence = report.explanation
    assert cause == CAUSE
    assert evidence.startswith("evidence: sum over tp of the ranks' gradients equals the reference within ")
    lines = report.text().splitlines()
    assert lines[1:3] == [f"  {cause}", f"  {evidence}"]
    assert report.json()["explanation"] == [cause, evidence]


def test_both_losses_are_shown_where_they_differ():
    """A diverged run prints the losses of both runs."""
    report = diverged(case)
    single, parallel = (line for line in report.text().splitlines() if "loss per step" in line)
    assert single == f"  loss per step, one device: {', '.join(f'{loss:.9g}' for loss in report.losses)}"
    assert parallel == f"  loss per step, in parallel: {', '.join(f'{loss:.9g}' for loss in report.parallel_losses)}"


def test_a_model_that_draws_random_numbers_is_explained():
    """Both runs draw the same numbers, so that the cause is told as in a model that draws none."""
    assert diverged(lambda: case(0.3)).explanation[0] == CAUSE


@pytest.mark.parametrize("readable", [True, False])
def test_what_may_be_the_reason_of_a_failure_is_told(readable, recwarn):
    """A run that failed lists what is probably unintended about its plan, unless the case cannot be made again.

    The list is in the report only: no warning says it again with a line of this library.
    """
    calls = []

    def once_per_rank():
        calls.append(1)
        if len(calls) > RUNS and not readable:
            raise OSError("the file is gone")
        return case()

    def plan_of_queries(_mesh):
        from hyper_parallel import ColwiseParallel, RowwiseParallel

        return {"q": ColwiseParallel(), "o": RowwiseParallel()}

    report = verify_model(once_per_rank, plan_of_queries, (2,), ("tp",), platform="torch", steps=1)
    assert report.error
    notes = [f"linear layer {name} is not sharded, although its sibling layers are" for name in "kv"]
    assert report.plan_notes == (notes if readable else [])
    assert [str(warning.message) for warning in recwarn if "parallelize_module" in str(warning.message)] == []
