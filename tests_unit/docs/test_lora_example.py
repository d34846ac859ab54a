"""The example of low-rank adapters trains as one device, with fewer key/value heads than ranks."""

from pathlib import Path

import pytest

from hyper_parallel import DTensor
from hyper_parallel.cli import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lora.py"

pytestmark = [
    pytest.mark.platforms("torch"),
    pytest.mark.skipif(not EXAMPLE.exists(), reason="[no-tool] the examples are not installed"),
]


def status_of(mesh):
    """Return the exit status of ``verify model`` on the example."""
    words = ["verify", "model", f"{EXAMPLE}:case", "--plan", f"{EXAMPLE}:plan", "--mesh", mesh]
    return main([*words, "--platform", "torch"])


@pytest.mark.untraced
@pytest.mark.parametrize("mesh", [pytest.param("tp=2", marks=pytest.mark.sweep), "tp=3"])
def test_every_gradient_and_weight_is_that_of_one_device(mesh, capsys):
    """Frozen weights stay, adapters train: one key/value head on two and three ranks."""
    status, out = status_of(mesh), capsys.readouterr().out
    assert status == 0, out
    assert "1 of 1 runs equal to one device" in out


@pytest.mark.sweep
def test_a_missing_sum_over_the_ranks_of_a_head_is_found(monkeypatch, capsys):
    """Each rank's gradient of a repeated head, used as the complete one, changes what the adapters learn."""
    local_for = DTensor.local_for

    def unsummed(tensor, layout, axes, cause=None):
        return local_for(tensor, layout, axes if cause else (), cause)

    monkeypatch.setattr(DTensor, "local_for", unsummed)
    assert status_of("tp=2") == 1
    out = capsys.readouterr().out
    assert "0 of 1 runs equal to one device" in out
    assert "gradient" in out
