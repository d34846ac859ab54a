"""The example of a pipeline trains as one device, and its checkpoint is that of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.core.checkpoint import load
from hyper_parallel.verify import simulate, verify_program

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pipeline.py"

pytestmark = [
    pytest.mark.platforms("torch"),
    pytest.mark.skipif(not SCRIPT.exists(), reason="[no-tool] the examples are not installed"),
]


@pytest.fixture
def example(load_file):
    """The script as a module."""
    return load_file(SCRIPT)


def test_norms_and_weights_are_those_of_one_device(example, tmp_path):
    """Two stages over two and three ranks each, of sizes that the ranks do not divide."""
    import torch

    def weights(folder):
        model = example.Model(()).double()
        load(model, folder)
        return model.state_dict()

    (expected,) = simulate(example.train, 1, "torch", args=(tmp_path / "1",))
    assert min(expected) > 0.5
    for world in (4, 6):
        for norms in simulate(example.train, world, "torch", args=(tmp_path / str(world),)):
            torch.testing.assert_close(norms, expected, rtol=1e-12, atol=0)
        for name, x in weights(tmp_path / str(world)).items():
            torch.testing.assert_close(x, weights(tmp_path / "1")[name], rtol=1e-9, atol=1e-12)


def test_every_value_on_the_ranks_of_its_stage_is_that_of_one_device(example):
    """A comparison of programs holds what each rank has of the whole model: seven weights, or the other stage's ten."""
    report = verify_program(lambda: example.train(steps=1), 4, platform="torch")
    assert report.ok, report.text()
    weights = 2 * (7 + 10)
    assert report.verdict.counts["weight"] == 2 * weights  # before the step and after it
    assert report.verdict.counts["gradient"] == 2 * weights  # before clipping and after it
