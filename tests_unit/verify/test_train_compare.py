"""Training compared with a single device: what is compared, and which runs are refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel
from hyper_parallel.verify.model import verify_model
from hyper_parallel.verify.model_case import InputError, ModelCase

USER = Path(__file__).parent / "user"
NO_GRADIENT = (
    "SPEC: the first step gives no parameter a gradient other than zero, so nothing would be verified; the loss must "
    "depend on the model's output, without detach() or no_grad() on the way"
)
FROZEN = (
    "SPEC: none of the model's 4 parameters is floating and requires grad, so there is nothing to train; "
    "leave at least one unfrozen"
)


def user_report(platform_name, name, mesh=(2, 2), **options):
    """Return the report of one of the cases in ``user/``, with the batch split too."""
    spec, plan = (f"{USER / platform_name}_case.py:{function}" for function in (name, "plan"))
    return verify_model(spec, plan, mesh, ("dp", "tp"), platform=platform_name, **options)


def model(changed=None, dtype="float64", dropout=0.0):
    """Return two linear layers, the first frozen, and a counting buffer; `changed` is wrong on parallel ranks."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 3)
            self.drop = nn.Dropout(dropout)
            self.up.weight.requires_grad_(False)
            self.register_buffer("seen", torch.zeros(2))
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

        def forward(self, x):
            parallel = isinstance(self.up.weight, DTensor)
            with torch.no_grad():
                self.seen += 1 + (changed == "buffer" and parallel)
                if changed == "frozen" and parallel:
                    self.up.weight.to_local().add_(0.5)
            return self.down(self.drop(torch.tanh(self.up(x))))

    return Net().to(getattr(torch, dtype))


def report_of(seeds=None, **options):
    """Return the report of two steps on three ranks; every call of SPEC takes the next of `seeds`."""
    import torch

    dtype = options.get("dtype", "float64")

    def case():
        rng = np.random.default_rng(0 if seeds is None else next(seeds))
        batches = [(rng.standard_normal((4, 5)), rng.standard_normal((4, 3))) for _ in range(2)]
        if dtype != "float64":
            batches = [tuple(torch.tensor(array, dtype=getattr(torch, dtype)) for array in batch) for batch in batches]
        return ModelCase(lambda: model(**options), batches, lambda out, batch: ((out - batch[-1]) ** 2).mean())

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return verify_model(case, lambda _: plan, (3,), ("tp",), platform="torch", steps=2)


@pytest.mark.platforms("torch")
def test_frozen_parameters_and_buffers_are_compared():
    """Frozen parameters and buffers of a correct plan are compared and equal, infinities of a mask included."""
    report = report_of()
    assert report.ok, report.text()
    assert (report.counts["weight"], report.counts["gradient"], report.counts["buffer"]) == (24, 18, 12)


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("changed, name", [("frozen", "up.weight"), ("buffer", "seen")])
def test_a_change_that_no_gradient_shows_is_found(changed, name):
    """A frozen weight or a buffer that differs on the ranks is reported as a divergence of its own."""
    report = report_of(changed=changed)
    assert not report.ok
    assert name in {check.name for check in report.checks if not check.ok}


@pytest.mark.platforms("torch")
def test_half_precision_is_refused():
    """bfloat16 parameters are refused, because their bound would hide errors; the message names the cure."""
    with pytest.raises(InputError) as caught:
        report_of(dtype="bfloat16")
    assert str(caught.value) == (
        "SPEC: parameter up.weight is bfloat16, in which rounding hides what a wrong plan does; build the model in "
        "float64 or float32, where the same plan does the same"
    )


@pytest.mark.platforms("torch")
def test_active_dropout_is_refused():
    """A module that samples random numbers is refused by name with the fix, instead of calling its plan wrong."""
    with pytest.raises(InputError) as caught:
        report_of(dropout=0.5)
    assert str(caught.value) == (
        "SPEC: module drop draws random numbers in forward, and a parallel run draws others; "
        "set its dropout to 0, or put it into evaluation mode"
    )


@pytest.mark.platforms("torch")
def test_batches_that_differ_between_ranks_are_refused():
    """Batches that differ between ranks are refused, instead of calling the plan wrong."""
    with pytest.raises(InputError) as caught:
        report_of(seeds=itertools.count())
    assert str(caught.value) == (
        "SPEC: the batch of step 1 on rank 1 is not that of rank 0; every rank calls SPEC, so draw batches from a "
        "generator with a fixed seed, such as numpy.random.default_rng(0)"
    )


@pytest.mark.parametrize("mesh", [(2, 2), (3, 1)])
def test_a_bias_that_centring_takes_out_again(platform_name, mesh):
    """The rounding noise of a bias gradient that cancels is compared at the size of its terms: the plan passes."""
    report = user_report(platform_name, "centred", mesh)
    assert report.ok, report.text()


def test_a_fault_beside_the_bias_is_found(platform_name):
    """The same model is wrong when a bias is added twice."""
    report = user_report(platform_name, "centred", inject="double-bias@fc2")
    assert not report.ok


@pytest.mark.parametrize(
    "name, message",
    [
        ("frozen", FROZEN),
        ("detached_loss", NO_GRADIENT),
        (
            "loss_per_column",
            "SPEC: loss(output, batch) returned a tensor [5]; only one number can be trained on: add .mean() or .sum()",
        ),
        ("loss_as_number", "SPEC: loss(output, batch) returned float; it must return a tensor of one number"),
    ],
)
def test_what_cannot_be_trained_is_refused(platform_name, name, message):
    """Frozen models and losses without a gradient are refused as input errors that name the cure."""
    with pytest.raises(InputError) as caught:
        user_report(platform_name, name)
    assert str(caught.value) == message
