"""Fixtures of tests that run on ranks.

``rank``, ``mesh`` and ``device`` have values only on ranks. A user's fixture that depends on one of them, directly or
through another fixture, also runs on every rank. All other fixtures run once, and every rank gets a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from hyper_parallel.pytest_plugin.marks import world_sizes

__all__ = [
    "ON_RANKS",
    "RankCall",
    "RankValue",
    "deferred",
    "device",
    "launch_name",
    "mesh",
    "rank",
    "resolve",
    "world_size",
]

ON_RANKS = ("rank", "mesh", "device")
"""Fixtures that have values only on ranks."""


@dataclass(frozen=True)
class RankValue:
    """Placeholder for a value that exists only on ranks: ``rank``, ``mesh`` or ``device``."""

    name: str

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # pickle and pytest look for optional methods
            raise AttributeError(attribute)
        msg = f"fixture {self.name!r} has its value on ranks only; use it in a test, or in a fixture that asks for it"
        raise RuntimeError(msg)


@dataclass(frozen=True)
class RankCall:
    """A user's fixture to run on each rank: its function and arguments."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]


def deferred(value: Any) -> bool:
    """Whether ``value`` exists only on ranks."""
    return isinstance(value, (RankValue, RankCall))


def resolve(value: Any, known: dict[str, Any], stack: ExitStack) -> Any:
    """Return the value of a fixture on this rank; ``stack`` tears down a fixture with ``yield``."""
    if isinstance(value, RankValue):
        return known[value.name]()
    if not isinstance(value, RankCall):
        return value
    if value.name not in known:
        arguments = {name: resolve(argument, known, stack) for name, argument in value.arguments.items()}
        result = value.function(**arguments)
        if hasattr(result, "__next__"):
            generator, result = result, next(result)
            stack.callback(next, generator, None)
        known[value.name] = lambda: result
    return known[value.name]()


def _on_ranks(request: pytest.FixtureRequest, name: str) -> RankValue:
    if not world_sizes(request.node.get_closest_marker):
        msg = f"fixture {name!r} belongs to tests on ranks: mark the test with world_size(n) or mesh(n, m)"
        raise pytest.UsageError(msg)
    return RankValue(name)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> RankValue:
    """This rank's number in the world."""
    return _on_ranks(request, "rank")


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> RankValue:
    """A device mesh over all ranks: that of the mark ``mesh``, or one axis named tp."""
    return _on_ranks(request, "mesh")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> RankValue:
    """Name of the device of this run: cpu, npu, cuda."""
    return _on_ranks(request, "device")


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """Number of ranks of the test."""
    sizes = world_sizes(request.node.get_closest_marker)
    if not sizes:
        _on_ranks(request, "world_size")
    return sizes[0]  # several sizes are passed as parameters


@pytest.fixture
def launch_name(request: pytest.FixtureRequest) -> str:
    """Launch mode of the ranks: simulated or processes."""
    mark = request.node.get_closest_marker("launch")
    launch: str = mark.args[0] if mark is not None else request.config.getoption("hp_launch")
    return launch
