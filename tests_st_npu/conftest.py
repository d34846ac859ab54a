"""Options of the system tests: `--scenario NAME` (repeatable) and `--devices N`, next to the plugin's `--device`."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

import pytest

from hyper_parallel.pytest_plugin import SkipReason, capability, hooks, ranks, report, skip_without
from hyper_parallel.transport.processes import ENGINE_VARIABLE
from hyper_parallel.transport.real.launched_processes import run_launched, warm_up
from hyper_parallel.transport.serialization import pack
from hyper_parallel.transport.timeouts import rank_seconds
from hyper_parallel.verify.faults import FAULTS
from hyper_parallel.verify.scenarios import SCENARIOS, scenario_named
from hyper_parallel.verify.simulate import on_platform

EVERYDAY = ("2x2-rms-tied", "3-tutorial", "drop-allreduce")
"""Scenarios and faults of every rehearsal: two axes with tied weights, a tutorial's own training, a lost sum."""

_SIZES = (1, 2, 4, 8)
_REHEARSED = (1, 2, 4)  # On two cores, eight processes test no more than four.
_WITHOUT_RULES = "test_rehearsal.py"  # whose tests choose
# MindSpore's operators pad and add there, which takes minutes on CPU; the transport's unit tests hold what it computes.
_SLOW_ON_MINDSPORE = ("test_every_collective_equals_numpy", "test_every_source_reaches_every_target")
_REHEARSED_DEVICES = int(os.environ.get("HP_REHEARSAL_ASCEND_DEVICES", "0"))  # rehearsal/README.md, as the next
_ON_REHEARSAL = bool(_REHEARSED_DEVICES) or "HP_REHEARSAL_DEVICES" in os.environ
if "HP_REHEARSAL_DEVICES" in os.environ:
    import torch  # noqa: F401 - registers the rehearsal devices, which have no device nodes
if _REHEARSED_DEVICES:  # which have no device nodes either
    import sitecustomize

    sitecustomize.come_first()  # pytest's own finder has come before it
    for _counting in (capability, hooks, ranks, report):
        _counting.count_devices = lambda device: _REHEARSED_DEVICES if device == "npu" else 1 << 16


def pytest_addoption(parser):
    """Declare the options."""
    parser.addoption("--scenario", action="append", metavar="NAME", help="only this bundled scenario; repeatable")
    parser.addoption(
        "--devices", type=int, choices=_SIZES, help="only worlds of this size (default: 1, 2, 4; 8 on NPUs)"
    )


def rehearsed(config):
    """Whether nothing of the run is on a real device: it is on CPU, or on the rehearsal device."""
    return config.getoption("hp_device") == "cpu" or _ON_REHEARSAL


@pytest.fixture(scope="session")
def effort(request):
    """How much a test does: ``rehearsal`` for the everyday check, ``night`` on devices."""
    return "rehearsal" if rehearsed(request.config) else "night"


@pytest.fixture(scope="session")
def counts_memory(request):
    """Whether the device of this run counts the bytes in use: neither the host nor the stand-in for Ascend does."""
    return request.config.getoption("hp_device") != "cpu" and not _REHEARSED_DEVICES


@pytest.fixture(autouse=True)
def engine_rules(request, monkeypatch):
    """Rehearsals refuse what HCCL refuses; a device has its own engine."""
    framework = _framework(request.node)
    free = os.environ.get(ENGINE_VARIABLE) or request.path.name == _WITHOUT_RULES
    slow = framework == "mindspore" and request.node.originalname in _SLOW_ON_MINDSPORE
    if rehearsed(request.config) and framework is not None and not free and not slow:
        monkeypatch.setenv(ENGINE_VARIABLE, "hccl")


def _framework(item):
    """Return the framework that a test is for; None if it is for none."""
    return item.callspec.params.get("platform_name") if hasattr(item, "callspec") else None


def pytest_configure(config):
    """On devices, and on the rehearsal device, compare what is skipped with the ledger."""
    if config.getoption("hp_device") != "cpu":
        config.pluginmanager.register(_ledger().Ledger(), "hp_device_ledger")


@functools.cache
def _ledger():
    """Return the module beside this file."""
    specification = importlib.util.spec_from_file_location("hp_device_ledger", Path(__file__).with_name("ledger.py"))
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="session", autouse=True)
def warm_server():
    """Let ranks of PyTorch find imported what its optimizers import, which takes seconds."""
    warm_up("torch", "torch._dynamo")


def _parametrize(metafunc, name, values, text):
    """Give a test each value; on CPU one every day and the others in the sweep: simulated ranks show all of them."""
    swept = rehearsed(metafunc.config) and not metafunc.config.getoption("scenario")
    marked = [
        pytest.param(value, marks=[] if not swept or text(value) in EVERYDAY else pytest.mark.sweep) for value in values
    ]
    metafunc.parametrize(name, marked, ids=[text(value) for value in values])


def pytest_generate_tests(metafunc):
    """Parametrize tests by the scenarios and world sizes of this run."""
    config = metafunc.config
    if "scenario" in metafunc.fixturenames:
        try:
            chosen = [scenario_named(name) for name in config.getoption("scenario") or ()] or list(SCENARIOS)
        except ValueError as error:
            raise pytest.UsageError(f"--scenario: {error}") from error
        _parametrize(metafunc, "scenario", chosen, lambda scenario: scenario.name)
    if "fault" in metafunc.fixturenames and metafunc.module.__name__.endswith("test_scenarios"):
        _parametrize(metafunc, "fault", list(FAULTS), str)
    if "world_size" in metafunc.fixturenames:
        devices = config.getoption("devices")
        sizes = (devices,) if devices else _REHEARSED if rehearsed(config) else _SIZES
        metafunc.parametrize("world_size", sizes, ids=lambda size: f"{size}devices")


@pytest.fixture
def lacking(platform_name, effort):
    """Return the operators that fail on this device, by the ledger, each with why; a rehearsal has none."""
    return _ledger().OPERATORS[platform_name] if effort == "night" else {}


@pytest.fixture
def reports(request, tmp_path):
    """Return the folder of the JUnit report, beside which results are published, or ``tmp_path``."""
    junit = request.config.getoption("xmlpath")
    return Path(junit).resolve().parent if junit else tmp_path


@pytest.fixture
def on_ranks(suite_device, platform_name):
    """A function that calls another on the warm ranks of a real world, and returns their results or raises."""

    def run(function, size, *arguments, device=suite_device, seconds=None):
        called = pack((on_platform, (platform_name, device, function, *arguments)), function)
        done = run_launched(called, size, platform_name, seconds or rank_seconds(), device)
        if done.failure is not None:
            raise done.failure
        return done.results

    return run


@pytest.fixture
def suite_device(request, platform_name):
    """The device of this run; skips a test that cannot have its ranks there. Ranks of PyTorch share devices."""
    device = request.config.getoption("hp_device")
    devices = capability.count_devices(device)
    if not devices:
        skip_without(SkipReason.NO_DEVICE, f"there is no {device} device")
    needed = _ledger().devices_needed(request.node.nodeid)
    if devices < needed:
        skip_without(
            SkipReason.TOO_FEW_DEVICES, f"{needed} ranks of MindSpore need a device each, but {devices} are available"
        )
    request.node.user_properties.append(("device", device))
    return device
