"""The plugin's pytest hooks."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.errors import RankFailedError
from hyper_parallel.pytest_plugin.capability import (
    DEVICES,
    Requirement,
    SkipReason,
    count_devices,
    reason_of,
    requirement,
    skip_without,
)
from hyper_parallel.pytest_plugin.fixtures import RankCall, deferred
from hyper_parallel.pytest_plugin.marks import ARG_MARKS, MARKS, seconds, world_sizes
from hyper_parallel.pytest_plugin.measuring import RankContexts, end_worker, is_worker, start_worker
from hyper_parallel.pytest_plugin.ranks import LAUNCHES, TIMEOUT, RankedOutcome, ranked_test, run_ranked
from hyper_parallel.pytest_plugin.report import RanksRepr, describe_run, other_framework, rank_of_failure, titled
from hyper_parallel.pytest_plugin.selection import REMOVED, allowed, allows, module_mark, selected, split
from hyper_parallel.pytest_plugin.usage import PROBLEMS, check_use
from hyper_parallel.transport.processes import end_ranks
from hyper_parallel.transport.timeouts import rank_seconds

TALLY = pytest.StashKey["Tally"]()
_SHOWN_CALLS = 5
_HIDDEN: Any = getattr(pytest, "HIDDEN_PARAM", None)  # before pytest 8.4, ids name even a single framework
_OUTCOMES = {"passed", "failed", "skipped"}  # pytest reports an expected failure as skipped


class Tally:
    """Counts of executed and skipped tests, for the checks at the end of the run.

    With pytest-xdist, the controller receives the reports of all workers.
    """

    def __init__(self) -> None:
        self.executed = 0
        self.on_device: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.other_skips: list[str] = []
        self.ranked = 0
        self.problems: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: fixtures, subtests and repeated calls are not counted."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self._count_skip(report)
        elif report.when == "call" and report.outcome in _OUTCOMES and not hasattr(report, "context"):
            self.executed += 1
            properties = dict(report.user_properties)
            self.ranked += "world_size" in properties
            self.on_device[str(properties.get("device", "cpu"))] += 1

    def _count_skip(self, report: pytest.TestReport) -> None:
        text = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason_of(text)
        self.skipped[reason or "(not on the list)"] += 1
        if reason is None:
            self.other_skips.append(f"{report.nodeid}: {text.removeprefix('Skipped: ')}")


# -- start ---------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("hyper_parallel", "tests on ranks (hyper-parallel)")
    group.addoption(
        "--hp-platforms", metavar="torch,mindspore", help="frameworks (or HP_TEST_PLATFORMS); all installed"
    )
    group.addoption("--hp-launch", default="simulated", choices=LAUNCHES, help="how ranks are started, without a mark")
    group.addoption(
        "--hp-rank-timeout", type=float, metavar="SECONDS", help="for each ranked test (or HP_RANK_TIMEOUT); 60"
    )
    group.addoption("--device", dest="hp_device", default="cpu", choices=DEVICES, help="what ranks compute on (cpu)")
    group.addoption("--require-npu", action="store_true", help="fail if no test ran on an NPU")
    group.addoption("--hp-require", metavar="npu:8", help="fail unless N devices are available (or HP_REQUIRE)")
    group.addoption("--hp-min-executed", type=int, metavar="N", help="fail if fewer tests ran (or HP_MIN_EXECUTED)")
    group.addoption(
        "--hp-one-cpu",
        action="store_true",
        help="pin each xdist worker and its ranks to one CPU, if there are as many workers as CPUs",
    )
    parser.addini("hp_closed_skips", "every skip must give a reason of the closed list", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks, and fail before collection if required devices are missing."""
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    for name, text in ARG_MARKS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    config.stash[REMOVED] = Counter()
    config.stash[TALLY] = Tally()
    config.stash[PROBLEMS] = []
    config.pluginmanager.register(config.stash[TALLY], "hyper_parallel.tally")
    if config.getoption("cov_context", None) is not None:
        config.pluginmanager.register(RankContexts(), "hyper_parallel.contexts")
    selected(config)
    wanted = _requirement(config)
    if wanted is not None and count_devices(wanted.device) < wanted.devices:
        msg = f"{wanted.devices} {wanted.device} devices are required, but {count_devices(wanted.device)} are available"
        raise pytest.UsageError(msg)
    _floor(config)
    config.stash[TIMEOUT] = _limit(config)
    if is_worker(config):
        start_worker(config)


def _limit(config: pytest.Config) -> float:
    option: float | None = config.getoption("hp_rank_timeout")
    if option is not None:
        return seconds(option, "--hp-rank-timeout")
    try:
        return rank_seconds()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def _requirement(config: pytest.Config) -> Requirement | None:
    option = config.getoption("hp_require")
    return requirement(option, "--hp-require") or requirement(os.environ.get("HP_REQUIRE", ""), "HP_REQUIRE")


def _floor(config: pytest.Config) -> int:
    option: int | None = config.getoption("hp_min_executed")
    text = os.environ.get("HP_MIN_EXECUTED", "0")
    if option is None and not text.isdigit():
        msg = f"HP_MIN_EXECUTED={text}: expected a number of tests"
        raise pytest.UsageError(msg)
    if option is not None and option < 0:
        msg = f"--hp-min-executed {option}: expected a number of tests"
        raise pytest.UsageError(msg)
    return int(text) if option is None else option


def pytest_sessionstart(session: pytest.Session) -> None:
    """Describe the run in its JUnit file."""
    describe_run(session.config)


# -- collection ----------------------------------------------------------------------------------------------------


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip and count modules of frameworks that are not selected, before they are imported."""
    name = collection_path.name
    if not (name.endswith("_test.py") or (name.startswith("test_") and name.endswith(".py"))):
        return None
    mark = module_mark(collection_path)
    if mark is None or allows(mark, selected(config)):
        return None
    config.stash[REMOVED][f"{', '.join(mark.args)} (whole modules)"] += 1
    return True


@pytest.hookimpl(trylast=True)  # ids then begin with the user's own parameters: test[1-torch]
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise a test by the frameworks, world sizes and launches of its marks.

    The id of a test for one framework does not contain its name: ``test[1]``, or ``test`` without other parameters.
    """
    try:
        _parametrize_by_marks(metafunc)
    except pytest.UsageError as error:  # reported after the collection, with all other problems
        metafunc.config.stash[PROBLEMS].append(f"{metafunc.definition.nodeid}: {error}")


def _parametrize_by_marks(metafunc: pytest.Metafunc) -> None:
    sizes = world_sizes(metafunc.definition.get_closest_marker)
    if sizes and "platform_name" not in metafunc.fixturenames:
        metafunc.fixturenames.append("platform_name")
    if "platform_name" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("platforms")
        names = selected(metafunc.config)
        allows(mark, names)
        ids = [_HIDDEN] if mark is not None and len(mark.args) == 1 and allowed(mark, names) else None
        metafunc.parametrize("platform_name", allowed(mark, names), scope="session", ids=ids)
    if len(sizes) > 1:
        _parametrize(metafunc, "world_size", sizes, [f"{size}ranks" for size in sizes])
    launch = metafunc.definition.get_closest_marker("launch")
    if launch is not None and len(launch.args) > 1:
        _parametrize(metafunc, "launch_name", list(launch.args), list(launch.args))


def _parametrize(metafunc: pytest.Metafunc, name: str, values: list[Any], ids: list[str]) -> None:
    if name not in metafunc.fixturenames:
        metafunc.fixturenames.append(name)
    metafunc.parametrize(name, values, ids=ids)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reject wrong use of marks and fixtures; deselect and count tests of frameworks that are not selected."""
    check_use(config, items)
    kept, removed = split(config, items)
    if removed:
        config.hook.pytest_deselected(items=removed)
        items[:] = kept


# -- one test ------------------------------------------------------------------------------------------------------


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose devices are missing; ``--hp-require`` makes missing devices an error."""
    mark = item.get_closest_marker("device")
    if mark is None:
        return
    arguments = {**dict(zip(("name", "devices"), mark.args, strict=False)), **mark.kwargs}
    name, devices = arguments["name"], arguments.get("devices", 1)
    here = count_devices(name)
    if here < devices:
        skip_without(
            SkipReason.TOO_FEW_DEVICES if here else SkipReason.NO_DEVICE, f"needs {devices} {name}, has {here}"
        )
    item.user_properties.append(("device", name))


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> object:
    """Defer a fixture that depends on ``rank``, ``mesh`` or ``device`` to the ranks."""
    values = {name: request.getfixturevalue(name) for name in fixturedef.argnames}
    if not any(map(deferred, values.values())):
        return None
    if "request" in values:
        msg = f"fixture {fixturedef.argname!r} runs on ranks, where there is no `request`; ask for world_size instead"
        raise pytest.UsageError(msg)
    call = RankCall(fixturedef.argname, fixturedef.func, values)
    fixturedef.cached_result = (call, fixturedef.cache_key(request), None)  # type: ignore[arg-type]
    return call


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a ranked test on its ranks."""
    test = ranked_test(pyfuncitem)
    if test is None:
        return None
    pyfuncitem.user_properties.extend(test.properties())
    names = pyfuncitem._fixtureinfo.argnames  # noqa: SLF001 - what pytest itself passes to the function
    outcome = run_ranked(test, pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in names})
    _add_sections(pyfuncitem, outcome)
    if outcome.failure is not None:
        first = rank_of_failure(outcome.failure)
        pyfuncitem.user_properties.append(("rank_of_failure", "none" if first is None else first))
        raise outcome.failure
    _apply_verdicts(outcome.verdicts)
    return True


def _add_sections(item: pytest.Function, outcome: RankedOutcome) -> None:
    """Add the output of each rank to the report and, if the test failed, the last collectives of each rank."""
    for rank, text in enumerate(outcome.outputs):
        if text:
            item.add_report_section("call", f"stdout of rank {rank}", text)
    if outcome.failure is not None:
        for rank, calls in enumerate(outcome.history):
            if calls:
                item.add_report_section("call", f"collectives of rank {rank}", "\n".join(calls[-_SHOWN_CALLS:]))


def _apply_verdicts(verdicts: list[tuple[str, str]]) -> None:
    """Skip or xfail the test if all ranks did; fail it if they disagree."""
    kinds = {kind for kind, _ in verdicts}
    if len(kinds) > 1:
        per_rank = "; ".join(f"rank {rank} {kind} {text}".rstrip() for rank, (kind, text) in enumerate(verdicts))
        pytest.fail(f"ranks disagree about the test: {per_rank}", pytrace=False)
    if kinds == {"skipped"}:
        pytest.skip(verdicts[0][1])
    if kinds == {"xfailed"}:
        pytest.xfail(verdicts[0][1])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the failures of the ranks instead of the plugin's traceback."""
    report = yield
    failure = call.excinfo.value if call.excinfo is not None else None
    # A world that could not be started has no failures of ranks; the report is its message.
    is_world_failure = hasattr(failure, "failures") or (
        isinstance(failure, RankFailedError) and bool(world_sizes(item.get_closest_marker))
    )
    if call.when == "call" and report.failed and failure is not None and is_world_failure:
        path, line, _ = item.location
        report.longrepr = RanksRepr(_explained(item, str(failure)), path, (line or 0) + 1, failure)
    return report


def _explained(item: pytest.Item, text: str) -> str:
    """Return the report with the test's world, and a note if the test is written for a different framework."""
    test = ranked_test(item) if isinstance(item, pytest.Function) else None
    if test is None:
        return text
    note = ""
    if item.get_closest_marker("platforms") is None and len(selected(item.config)) > 1:
        note = other_framework(test.framework, item.path, text)
    return "\n".join(filter(None, [f"on {test.title()}:", text, note]))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> Generator[None, None, None]:
    """Add the rank to its printed output in JUnit files; on the terminal the section titles have it."""
    sections = report.sections
    report.sections = titled(sections)
    try:
        yield
    finally:
        report.sections = sections


# -- end -------------------------------------------------------------------------------------------------------


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that executed too few tests or skipped one for a reason outside the closed list."""
    config = session.config
    if is_worker(config):
        end_worker()
        return
    tally = config.stash[TALLY]
    floor, device = _floor(config), config.getoption("hp_device")
    # In a run on a device, only tests that ran on the device are counted.
    executed = tally.executed if device == "cpu" else tally.on_device[device]
    if executed < floor:
        where = "" if device == "cpu" else f" on {device}"
        tally.problems.append(f"{executed} tests ran{where}, fewer than the required {floor}")
    if config.getoption("require_npu") and not tally.on_device["npu"]:
        tally.problems.append("--require-npu: no test ran on an NPU")
    if config.getini("hp_closed_skips"):
        tally.problems += [f"skipped for a reason that is not on the list: {text}" for text in tally.other_skips]
    if tally.problems and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    found_by_workers: list[str] = config.stash[PROBLEMS]
    if found_by_workers and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
        tally.problems += found_by_workers
    if not config.pluginmanager.has_plugin("terminalreporter"):  # without a terminal reporter there is no summary
        for problem in tally.problems:
            sys.stderr.write(f"FAILED RUN: {problem}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the numbers of selected, deselected and skipped tests, so that a partial run is recognizable."""
    tally, removed = config.stash[TALLY], config.stash[REMOVED]
    if removed or tally.ranked or os.environ.get("HP_TEST_PLATFORMS") or config.getoption("hp_platforms"):
        terminalreporter.write_line(f"platforms: {', '.join(selected(config)) or 'none is installed'}")
    for names, count in sorted(removed.items()):
        terminalreporter.write_line(f"deselected: {count} {'of' if 'modules' in names else 'tests of'} {names}")
    if config.getini("hp_closed_skips"):
        for reason, count in sorted(tally.skipped.items()):
            terminalreporter.write_line(f"skipped: {count} tests, {reason}")
    for problem in tally.problems:
        terminalreporter.write_line(f"FAILED RUN: {problem}", red=True)


def pytest_unconfigure() -> None:
    """End the warm rank processes."""
    end_ranks()
