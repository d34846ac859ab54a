"""A gradient that cancels to nothing, and losses that nothing can be trained by."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.verify.compare import NOISE_SHARE, difference, noise_floor
from hyper_parallel.verify.model import verify_model
from hyper_parallel.verify.model_case import InputError

USER = Path(__file__).parent / "user"
NO_GRADIENT = (
    "SPEC: the first step gives no parameter a gradient other than zero, so nothing would be verified; the loss must "
    "depend on the model's output, without detach() or no_grad() on the way"
)
FROZEN = (
    "SPEC: none of the model's 4 parameters is floating and requires grad, so there is nothing to train; "
    "leave at least one unfrozen"
)


def checked(platform_name, name, mesh=(2, 2), **options):
    """The report of one of the user's cases, with the batch split too."""
    spec, plan = (f"{USER / platform_name}_case.py:{one}" for one in (name, "plan"))
    return verify_model(spec, plan, mesh, ("dp", "tp"), platform=platform_name, **options)


@pytest.mark.parametrize("mesh", [(2, 2), (3, 1)])
def test_a_bias_that_centring_takes_out_again(platform_name, mesh):
    """Noise where a bias's gradient cancels is measured by the size of what was summed: the plan is right."""
    report = checked(platform_name, "centred", mesh)
    assert report.ok, report.text()


def test_a_fault_beside_the_bias_is_found(platform_name):
    """The same model with a bias added twice is wrong."""
    report = checked(platform_name, "centred", inject="double-bias@fc2")
    assert not report.ok


def test_the_floor_is_what_was_summed():
    """A sum of large numbers that cancels is exact to their rounding, a sum of small ones to theirs."""
    assert noise_floor(2.0) == 2.0 * NOISE_SHARE
    assert noise_floor(2.0, 0.5) == 0.5
    assert difference([1e-14], [0.0], 1e-13, noise_floor(0.0, 0.5)) == (2e-14, "")
    assert difference([1e-14], [0.0], 1e-13, noise_floor(0.0, 1e-3))[1] != ""


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
    """Frozen models and losses without a gradient are the caller's mistakes, told as such with the cure."""
    with pytest.raises(InputError) as caught:
        checked(platform_name, name)
    assert str(caught.value) == message
