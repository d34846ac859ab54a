"""Coverage of rank processes: coverage.py measures a rank as it measures the process that started the world.

By itself, coverage.py measures a process that is forked from a warm server, or started by torchrun, only with the
setting ``patch = subprocess``, and the data is lost if the process is ended before it writes. So each task contains the
parent's coverage settings. A rank writes its data after every task, next to the parent's data, where
``coverage combine`` and pytest-cov look for it. coverage.py is used only if the parent has imported it.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

__all__ = [
    "Measurement",
    "current_measurement",
    "in_test_context",
    "measured",
    "wrote_data_at",
]

# Warnings that ranks suppress: a rank runs only some of the code, and its server may have imported some of it before.
_NO_DATA = "no-data-collected"
_EXPECTED = [_NO_DATA, "module-not-imported", "module-not-measured", "module-not-python", "already-imported"]

_TEST_CONTEXT: ContextVar[str | None] = ContextVar("test_context", default=None)
_LOCK = threading.RLock()
_STARTED: list[tuple[Measurement, Any]] = []  # the Coverage object that was started here, at most one
_LOST: set[str] = set()  # data files, without this process's suffix, that could not be written


@dataclass(frozen=True)
class Measurement:
    """How coverage measures a process.

    Attributes:
        settings: coverage's configuration by name.
        folder: folder to which its relative paths refer.
        context: name of the running test if contexts are recorded, else None.
    """

    settings: dict[str, Any]
    folder: str
    context: str | None = None


@contextmanager
def in_test_context(name: str) -> Iterator[None]:
    """Record the lines that ranks run inside this block under the coverage context ``name``."""
    token = _TEST_CONTEXT.set(name)
    try:
        yield
    finally:
        _TEST_CONTEXT.reset(token)


def current_measurement() -> Measurement | None:
    """Return how coverage measures this process now, for use in its ranks; None if it is not running, or paused."""
    coverage: Any = sys.modules.get("coverage")
    current = None if coverage is None else coverage.Coverage.current()
    if current is None or not _traced():
        return None
    quiet = current.get_option("run:disable_warnings")
    if _NO_DATA not in quiet:  # data may come from ranks alone
        current.set_option("run:disable_warnings", [*quiet, _NO_DATA])
    folder = coverage.files.relative_directory()
    settings = {name: value for name, value in vars(current.config).items() if not name.startswith("_")}
    settings["data_file"] = str(Path(folder, settings["data_file"]))
    return Measurement(settings, folder, _TEST_CONTEXT.get())


def wrote_data_at(pid: int) -> float:
    """Return when a rank last wrote to its coverage data, in seconds since the epoch; 0.0 if it has none.

    Args:
        pid: process id of the rank, which is measured with the settings of this process.
    """
    coverage: Any = sys.modules.get("coverage")
    current = None if coverage is None else coverage.Coverage.current()
    if current is None:
        return 0.0
    own = Path(coverage.files.relative_directory(), current.config.data_file)
    times = []
    for path in own.parent.glob(f"{own.name}.*.pid{pid}.*"):
        with suppress(FileNotFoundError):  # a journal that was removed meanwhile
            times.append(path.stat().st_mtime)
    return max(times, default=0.0)


def _traced() -> bool:
    """Whether this thread's lines are counted: by a trace function, or from Python 3.12 on by ``sys.monitoring``."""
    monitoring: Any = getattr(sys, "monitoring", None)
    return sys.gettrace() is not None or (
        monitoring is not None and monitoring.get_tool(monitoring.COVERAGE_ID) is not None
    )


def _measuring(measurement: Measurement) -> Any:
    """The Coverage object that measures this process: a new one if none does."""
    import coverage

    key = dataclasses.replace(measurement, context=None)
    with _LOCK:
        if _STARTED and _STARTED[0][0] != key:
            earlier, other = _STARTED.pop()
            other.stop()
            _write(other, earlier, other.save)
        current = coverage.Coverage.current()
        if current is None:
            current = _start(key)
            _STARTED.append((key, current))
    return current


def _start(measurement: Measurement) -> Any:
    import coverage

    here = Path.cwd()
    os.chdir(measurement.folder)
    try:
        started: Any = coverage.Coverage(config_file=False, data_suffix=True)
        vars(started.config).update(measurement.settings)
        started.config.disable_warnings = [*started.config.disable_warnings, *_EXPECTED]
        started.config.sigterm = True
        started.start()
        _search_no_files(started)
    finally:
        os.chdir(here)
    return started


@contextmanager
def measured(measurement: Measurement | None) -> Iterator[None]:
    """Measure the code that runs in this context, and write the coverage data at its end.

    If the data cannot be written, for example on a full disk, the code runs on. The process id and the error are
    printed to standard error, and the incomplete file is deleted. The process is no longer measured, so the check of
    the tests' coverage reports it as a process without data.
    """
    if measurement is None or measurement.settings.get("data_file") in _LOST:
        yield
        return
    current = _measuring(measurement)
    if measurement.context is not None:
        _write(current, measurement, partial(current.switch_context, measurement.context))
    try:
        yield
    finally:
        with _sigterm_deferred():
            # Not `save`, which hashes the complete file each time; coverage saves once when the process exits.
            _write(current, measurement, current.get_data)


def _search_no_files(started: Any) -> None:
    """Skip coverage's search for files that never ran: the parent lists them, and it takes most of a save."""
    inside = getattr(started, "_inorout", None)
    if inside is not None:
        inside.find_possibly_unexecuted_files = tuple


def _forget_parents_data() -> None:
    """Drop, in a forked process, the data measured before the fork, which the parent writes.

    A fork server has measured the import of the complete package; writing that again would take most of the time of a
    short rank.
    """
    coverage: Any = sys.modules.get("coverage")
    for started in getattr(getattr(coverage, "Coverage", None), "_instances", ()):
        _search_no_files(started)
        for measured_lines in list(started._collector.data.values()):  # noqa: SLF001 - its lock may be held for ever
            measured_lines.clear()


os.register_at_fork(after_in_child=_forget_parents_data)


def _write(current: Any, measurement: Measurement, write: Callable[[], object]) -> None:
    """Call a function of coverage that writes data: to save it, or to begin another context."""
    try:
        write()
    except Exception as error:  # noqa: BLE001 - coverage's, sqlite's or the system's
        _lose_data(current, Path(measurement.settings["data_file"]), error)


def _lose_data(current: Any, data_file: Path, error: Exception) -> None:
    """Delete the data of this process, stop measuring, and report it: partial data would be counted as complete."""
    current.stop()
    current.save = lambda: None  # coverage saves again when the process leaves
    with _LOCK:
        _LOST.add(str(data_file))
    for path in data_file.parent.glob(f"{data_file.name}.*.pid{os.getpid()}.*"):
        path.unlink(missing_ok=True)
    sys.stderr.write(
        f"coverage data of process {os.getpid()} is lost: {error}; the file is deleted and the process no longer "
        "measured, and the coverage gate reports it as one without data\n"
    )


@contextmanager
def _sigterm_deferred() -> Iterator[None]:
    """Let a SIGTERM that arrives in this context take effect at its end.

    coverage's handler would save in the middle of a save and then end the process, which leaves half a data file.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        if arrived:
            os.kill(os.getpid(), signal.SIGTERM)
