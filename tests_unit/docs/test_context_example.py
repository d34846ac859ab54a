"""The example of context parallelism trains as one device, and faults in the ring are found."""

from pathlib import Path

import pytest

from hyper_parallel.cli import main
from hyper_parallel.core.context_parallel import plan
from hyper_parallel.core.context_parallel.ring import Ring

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "context_parallel.py"

pytestmark = [
    pytest.mark.platforms("torch"),
    pytest.mark.skipif(not EXAMPLE.exists(), reason="[no-tool] the examples are not installed"),
]


def status_of(mesh, *options):
    """Return the exit status of ``verify model`` on the example."""
    words = ["verify", "model", f"{EXAMPLE}:case", "--plan", f"{EXAMPLE}:plan", "--mesh", mesh]
    return main([*words, "--platform", "torch", *options])


@pytest.mark.untraced
@pytest.mark.parametrize("mesh", ["cp=2", "cp=3", "cp=4", "dp=2,cp=3"])
def test_every_gradient_and_weight_is_that_of_one_device(mesh, capsys):
    """Outputs, losses, gradients and weights of three steps, with a sequence that does not divide."""
    status, out = status_of(mesh), capsys.readouterr().out
    assert status == 0, out
    assert "1 of 1 runs equal to one device" in out


@pytest.mark.sweep
def test_real_processes_train_alike(capsys):
    """The same over two processes and their engine."""
    status, out = status_of("cp=2", "--launch", "processes"), capsys.readouterr().out
    assert status == 0, out


@pytest.mark.parametrize("name", ["sees_all", pytest.param("sees", marks=pytest.mark.sweep)])
def test_a_wrong_mask_is_found(name, monkeypatch, capsys):
    """Queries that see keys behind their position, and queries that do not see a part that they should see."""
    monkeypatch.setattr(plan.Run, name, lambda run, keys: (name == "sees_all") or keys.position == run.position)
    assert status_of("cp=3") == 1
    assert "0 of 1 runs equal to one device" in capsys.readouterr().out


def test_wrong_gradients_of_keys_are_found(monkeypatch, capsys):
    """The gradients of keys and values are twice what they are when they reach their owner."""
    shifted = Ring._shifted

    def doubled(ring, tensors, member):
        return shifted(ring, [2 * tensor for tensor in tensors] if member == ring.plan.index else tensors, member)

    monkeypatch.setattr(Ring, "_shifted", doubled)
    assert status_of("cp=2") == 1
    assert "0 of 1 runs equal to one device" in capsys.readouterr().out
