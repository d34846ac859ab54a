"""Detects wrong use of marks and fixtures at collection: a usage error with test, mistake and fix."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from _pytest.unittest import TestCaseFunction

from hyper_parallel.pytest_plugin import fixtures
from hyper_parallel.pytest_plugin.capability import DEVICES
from hyper_parallel.pytest_plugin.marks import MARKS, mesh_shape, seconds, spelled, world_sizes
from hyper_parallel.pytest_plugin.measuring import is_worker
from hyper_parallel.pytest_plugin.ranks import LAUNCHES
from hyper_parallel.pytest_plugin.selection import PLATFORMS

__all__ = ["PROBLEMS", "UNUSABLE", "check_use", "pytest_testnodedown"]

PROBLEMS = pytest.StashKey[list[str]]()
"""Problems of tests that could not be collected; in the controller of pytest-xdist, the problems of all workers."""
_OF_WORKER = "hyper_parallel_problems"

_OUTPUT = "leave it out: what a rank prints is in the report, and contextlib.redirect_stdout catches it inside the test"
UNUSABLE: dict[str, str] = {
    **dict.fromkeys(("capsys", "capfd", "capsysbinary", "capfdbinary", "capteesys"), _OUTPUT),
    "monkeypatch": "write `with pytest.MonkeyPatch.context() as monkeypatch:` inside the test",
    "caplog": "add a logging.Handler inside the test",
    "recwarn": "write `with warnings.catch_warnings(record=True) as recwarn:` or pytest.warns(...) inside the test",
    "request": "ask for what it would give: world_size, launch_name, platform_name, or a fixture of yours",
    "pytestconfig": "ask for the option's value with a fixture of yours",
    **dict.fromkeys(
        ("cache", "doctest_namespace", "pytester", "record_property", "record_testsuite_property", "testdir"),
        "use it in an ordinary test",
    ),
    **dict.fromkeys(("record_xml_attribute", "subtests", "tmp_path_factory"), "use it in an ordinary test"),
}
"""pytest's own fixtures that work only in pytest's process, each with the alternative on ranks."""

# By mark, a function whose parameters are the arguments that the mark accepts.
_PARAMETERS: dict[str, Callable[..., None]] = {
    "platforms": lambda *names, together=False: None,  # noqa: ARG005
    "world_size": lambda *sizes: None,  # noqa: ARG005
    "mesh": lambda *sizes, names=None: None,  # noqa: ARG005
    "launch": lambda *names: None,  # noqa: ARG005
    "rank_timeout": lambda seconds: None,  # noqa: ARG005
    "device": lambda name, devices=1: None,  # noqa: ARG005
}
_SPELLINGS = {mark.split("(")[0]: mark.split(":")[0] for mark in MARKS}


def check_use(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reject the run if a test uses a mark or a fixture of pytest incorrectly.

    A worker of pytest-xdist then runs no test, and its controller rejects the run.

    Args:
        config: configuration with the problems of tests that could not be collected.
        items: the collected tests.

    Raises:
        pytest.UsageError: there are problems; the message has one line per test and problem.
    """
    found = (f"{item.nodeid.split('[')[0]}: {problem}" for item in items for problem in _problems(item))
    problems = list(dict.fromkeys([*config.stash[PROBLEMS], *found]))
    if not problems:
        return
    if not is_worker(config):
        raise pytest.UsageError(*problems)
    config.workeroutput[_OF_WORKER] = problems  # type: ignore[attr-defined] # pytest-xdist's
    items.clear()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect the problems that a worker of pytest-xdist found."""
    known: list[str] = node.config.stash[PROBLEMS]
    known += [text for text in getattr(node, "workeroutput", {}).get(_OF_WORKER, ()) if text not in known]


def _problems(item: pytest.Item) -> Iterator[str]:
    try:
        for name in _PARAMETERS:
            for mark in item.iter_markers(name):
                _check_mark(mark)
        ranked = bool(world_sizes(item.get_closest_marker))
    except pytest.UsageError as error:
        yield str(error)
        return
    yield from _platform_problems(item)
    if ranked and isinstance(item, TestCaseFunction):
        yield "mark world_size has no effect on methods of unittest.TestCase; use a plain class"
    elif ranked and isinstance(item, pytest.Function):
        yield from _fixture_problems(item)


def _platform_problems(item: pytest.Item) -> Iterator[str]:
    """Yield a problem if a test's mark and its file's mark have no framework in common.

    If only the test's framework is selected, the file is not collected.
    """
    marks = list(item.iter_markers("platforms"))
    if len(marks) > 1 and not set(marks[0].args) & set(marks[-1].args):
        yield (
            f"mark {spelled(marks[0])}: the file has {spelled(marks[-1])}, and is left out where {marks[0].args[0]} is "
            "tested; move the test to another file"
        )


# -- marks -------------------------------------------------------------------------------------------------------------


def _check_mark(mark: pytest.Mark) -> None:
    """Reject arguments that the mark does not define, and values that it does not accept."""
    try:
        bound = inspect.signature(_PARAMETERS[mark.name]).bind(*mark.args, **mark.kwargs)
    except TypeError as error:
        msg = f"mark {spelled(mark)}: {error}; it is written {_SPELLINGS[mark.name]}"
        raise pytest.UsageError(msg) from None
    if mark.name in _NAMES:
        known = _NAMES[mark.name]
        names = bound.arguments.get("names", ()) if mark.name != "device" else (bound.arguments["name"],)
        if not names or any(name not in known for name in names):
            msg = f"mark {spelled(mark)}: known are {', '.join(known)}"
            raise pytest.UsageError(msg)
    if mark.name == "device":
        _check_count(mark, bound.arguments.get("devices", 1))
    elif mark.name == "rank_timeout":
        seconds(bound.arguments["seconds"], "mark rank_timeout")
    elif mark.name == "mesh":
        _check_names(mark)


_NAMES: dict[str, tuple[str, ...]] = {"platforms": PLATFORMS, "launch": LAUNCHES, "device": DEVICES}


def _check_count(mark: pytest.Mark, devices: object) -> None:
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        msg = f"mark {spelled(mark)}: devices is the number of devices that the test needs, at least 1"
        raise pytest.UsageError(msg)


def _check_names(mark: pytest.Mark) -> None:
    shape, names = mesh_shape(mark) or (), mark.kwargs.get("names")
    if names is None:
        return
    fits = isinstance(names, (tuple, list)) and len(set(names)) == len(names) == len(shape)
    if not fits or not all(isinstance(name, str) for name in names):
        msg = f"mark {spelled(mark)}: names are the {len(shape)} different names of its axes"
        raise pytest.UsageError(msg)


# -- fixtures ----------------------------------------------------------------------------------------------------------


def _fixture_problems(item: pytest.Function) -> Iterator[str]:
    """Yield problems with fixtures of pytest's process that the test, or a fixture on ranks, requests."""
    info: Any = item._fixtureinfo  # noqa: SLF001 - pytest has no public way to the fixtures of a test
    definitions: dict[str, Sequence[Any]] = info.name2fixturedefs
    for name in _unusable(info.argnames, definitions):
        yield f"fixture {name!r} works in pytest's process only, and this test runs on ranks; {UNUSABLE[name]}"
    for owner in definitions:
        if _runs_on_ranks(owner, definitions) and not _is_ours(definitions[owner][-1]):
            for name in _unusable(definitions[owner][-1].argnames, definitions):
                yield (
                    f"fixture {owner!r} runs on ranks, where there is no `{name}`, which works in pytest's process "
                    f"only; {UNUSABLE[name].replace('inside the test', 'inside the fixture')}"
                )


def _unusable(names: Sequence[str], definitions: dict[str, Sequence[Any]]) -> list[str]:
    """Return the ``names`` that are pytest's own fixtures, not a user's fixtures with the same name."""
    return [
        name
        for name in names
        if name in UNUSABLE
        and all(definition.func.__module__.startswith("_pytest.") for definition in definitions.get(name, ())[-1:])
    ]


def _runs_on_ranks(name: str, definitions: dict[str, Sequence[Any]]) -> bool:
    """Whether a fixture depends on ``rank``, ``mesh`` or ``device``."""
    return any(
        _is_ours(definition)
        or any(_runs_on_ranks(other, definitions) for other in definition.argnames if other != name)
        for definition in definitions.get(name, ())[-1:]
    )


def _is_ours(definition: Any) -> bool:
    return definition.argname in fixtures.ON_RANKS and definition.func.__module__ == fixtures.__name__
