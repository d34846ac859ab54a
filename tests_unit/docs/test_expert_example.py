"""The example of a mixture of experts trains as one device, and faults in its region are found."""

from pathlib import Path

import pytest

from hyper_parallel.cli import main
from hyper_parallel.core.expert_parallel import region
from hyper_parallel.core.expert_parallel.layouts import RegionLayouts

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mixture_of_experts.py"

pytestmark = [
    pytest.mark.platforms("torch"),
    pytest.mark.skipif(not EXAMPLE.exists(), reason="[no-tool] the examples are not installed"),
]


def status_of(mesh, *options):
    """Return the exit status of ``verify model`` on the example."""
    words = ["verify", "model", f"{EXAMPLE}:case", "--plan", f"{EXAMPLE}:plan", "--mesh", mesh]
    return main([*words, "--platform", "torch", *options])


@pytest.mark.untraced
@pytest.mark.parametrize("mesh", ["ep=2", "ep=3", "ep=4", "dp=2,ep=3"])
def test_every_gradient_and_weight_is_that_of_one_device(mesh, capsys):
    """Outputs, losses, gradients and weights of three steps, with dropped tokens and auxiliary losses."""
    status, out = status_of(mesh), capsys.readouterr().out
    assert status == 0, out
    assert "1 of 1 runs equal to one device" in out


@pytest.mark.sweep
def test_real_processes_train_alike(capsys):
    """The same over two processes and their engine."""
    status, out = status_of("ep=2", "--launch", "processes"), capsys.readouterr().out
    assert status == 0, out


def unreduced(layouts, stacked):
    """Leave out the sum of an expert's gradient over the data axis."""
    return stacked.to_local()


def own_ranks(layouts, everywhere):
    """Drop by the order of tokens of the expert axis alone."""
    return layouts.expert_ranks


@pytest.mark.parametrize("method, fault", [("_entered", unreduced), ("counted_ranks", own_ranks)])
def test_a_fault_of_the_layouts_is_found(method, fault, monkeypatch, capsys):
    """A gradient that is not summed, and tokens dropped by other counts than those of all ranks."""
    monkeypatch.setattr(RegionLayouts, method, fault)
    assert status_of("dp=2,ep=3") == 1
    assert "0 of 1 runs equal to one device" in capsys.readouterr().out


def test_a_row_returned_to_another_token_is_found(monkeypatch, capsys):
    """The rows of a rank come back in another order than they were sent in."""
    take = region._take
    monkeypatch.setattr(region, "_take", lambda platform, rows, positions: take(platform, rows, positions[::-1].copy()))
    assert status_of("ep=3") == 1
    assert "0 of 1 runs equal to one device" in capsys.readouterr().out
