"""Options of the system tests: `--scenario NAME` (repeatable) and `--cards N` beside the plugin's `--device`."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.pytest_plugin import SkipReason, skip_without
from hyper_parallel.pytest_plugin.capability import count_cards
from hyper_parallel.verify.scenarios import SCENARIOS, scenario_named

_SIZES = (1, 2, 4, 8)
_REHEARSED = (1, 2, 4)  # On two cores, eight processes test no more than four.


def pytest_addoption(parser):
    """Declare the options."""
    parser.addoption("--scenario", action="append", metavar="NAME", help="only this embedded scenario; repeatable")
    parser.addoption("--cards", type=int, choices=_SIZES, help="only worlds of this size (default: 1, 2, 4; 8 on NPUs)")


def pytest_generate_tests(metafunc):
    """Parametrize tests by the scenarios and world sizes of this run."""
    config = metafunc.config
    if "scenario" in metafunc.fixturenames:
        try:
            chosen = [scenario_named(name) for name in config.getoption("scenario") or ()] or list(SCENARIOS)
        except ValueError as error:
            raise pytest.UsageError(f"--scenario: {error}") from error
        metafunc.parametrize("scenario", chosen, ids=lambda scenario: scenario.name)
    if "world_size" in metafunc.fixturenames:
        cards = config.getoption("cards")
        sizes = (cards,) if cards else _REHEARSED if config.getoption("hp_device") == "cpu" else _SIZES
        metafunc.parametrize("world_size", sizes, ids=lambda size: f"{size}cards")


@pytest.fixture
def reports(request, tmp_path):
    """Return the folder of the JUnit report, beside which results are published, or ``tmp_path``."""
    junit = request.config.getoption("xmlpath")
    return Path(junit).resolve().parent if junit else tmp_path


@pytest.fixture
def on_processor(request):
    """Skip a test whose ranks cannot run on a card yet; it runs on CPU."""
    device = request.config.getoption("hp_device")
    if device != "cpu":
        skip_without(SkipReason.NO_TRANSPORT, f"the suite of collectives takes tensors of the host, none of {device}")


@pytest.fixture
def suite_device(request, platform_name):
    """The device of this run; skips a test that cannot have ranks there. Ranks share cards where there are fewer."""
    device = request.config.getoption("hp_device")
    if device != "cpu" and platform_name == "mindspore":
        skip_without(SkipReason.NO_TRANSPORT, f"`verify model` starts ranks of MindSpore on CPU only, not on {device}")
    if not count_cards(device):
        skip_without(SkipReason.NO_CARD, f"there is no {device} card")
    return device
