"""Random models: correct plans raise no alarm, and an error of 1e-9 in one gradient component is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.platforms("torch"), pytest.mark.untraced]

COUNT = 10_000


@pytest.fixture(scope="module")
def models(load_file):
    """The script of the random models."""
    return load_file(Path(__file__).with_name("random_models.py"))


@pytest.mark.parametrize("first", [0, pytest.param(6, marks=pytest.mark.sweep)])  # six more of the same
def test_correct_models_raise_no_alarm(models, first):
    """Random models, plans, meshes and optimizers are verified as equal."""
    for seed in range(first, first + 6):
        report = models.Drawn(seed).report()
        assert report.ok, report.text()


def test_an_error_in_one_gradient_component_is_noticed(models):
    """A relative error of 1e-9 in one random component of one gradient is a divergence."""
    for seed in range(6):
        report = models.Drawn(seed, inject=True).report()
        assert not report.error
        assert report.first is not None


def test_the_same_seed_gives_the_same_numbers(models):
    """Two verifications with the same seed agree in every digit, bounds included."""
    first, second = models.Drawn(3).report(), models.Drawn(3).report()
    assert first.checks == second.checks
    assert (first.losses, first.parallel_losses) == (second.losses, second.parallel_losses)


def test_a_norm_of_float32_has_the_precision_of_float32(models):
    """The norm of float32 gradients is compared as float32; model 30150 differs in its last place only."""
    import torch

    report = models.Drawn(30150, dtype=torch.float32).report()
    assert report.ok, report.text()
    assert report.counts["norm"]


def test_operators_run_in_one_thread(models):
    """Operators of simulated ranks run in one thread, since sums in several depend on their number; it is restored."""
    import torch

    drawn, threads, before = models.Drawn(0), [], torch.get_num_threads()
    torch.set_num_threads(2)
    build = drawn.build
    drawn.build = lambda: (threads.append(torch.get_num_threads()), build())[1]
    try:
        assert drawn.report().ok
        assert set(threads) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [[], ["--inject"], ["--float32"]])
def test_many_models(models, options):
    """The long form of the first two tests, in float32 too: no wrong verdict."""
    assert models.main(["--count", str(COUNT), *options]) == 0
