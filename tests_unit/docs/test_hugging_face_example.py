"""The example of a model of Transformers with adapters of PEFT trains as on one device."""

import importlib.util
from pathlib import Path

import pytest

from hyper_parallel.verify import verify_program

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hugging_face.py"

pytestmark = [
    pytest.mark.platforms("torch"),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="[no-tool] extra examples is not installed"),
    pytest.mark.skipif(not EXAMPLE.exists(), reason="[no-tool] the examples are not installed"),
]


@pytest.mark.untraced
def test_every_value_is_that_of_one_device(load_file):
    """One step on two ranks: adapters train, frozen weights stay, and clipping has one norm over both kinds."""
    report = verify_program(lambda: load_file(EXAMPLE).train(steps=1), 2, platform="torch")
    assert report.ok, report.text()
    assert report.verdict.counts["gradient"] == 2 * 2 * 8  # before and after clipping; four adapters of two matrices
    assert report.verdict.counts["weight"] == 2 * 2 * 29
