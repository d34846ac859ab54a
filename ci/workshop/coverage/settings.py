"""The coverage floors, read from ``pyproject.toml``."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

__all__ = ["EnvironmentSettings", "Settings", "SharedSettings", "read_settings"]

_TABLE = "[tool.hyper_parallel.coverage]"
_KEYS: dict[str, Any] = {
    "combined": None,
    "ratchet": dict.fromkeys(("baseline", "slack")),
    "shared": dict.fromkeys(("environments", "files", "floor")),
    "env": {"*": {**dict.fromkeys(("total", "omit", "exceptions", "ranks")), "files": {"*": None}}},
}


@dataclass(frozen=True)
class EnvironmentSettings:
    """Floors of one tox environment.

    Attributes:
        total: percentage over all files that are not omitted.
        omit: patterns of files that cannot run there, or whose tests do not.
        files: pattern to the percentage that each matching file must have; the longest matching pattern counts.
        exceptions: most files that the baseline may except from their floor.
        ranks: least number of ranks that must be started; 0 if an environment may start none.
    """

    total: float = 0.0
    omit: tuple[str, ...] = ()
    files: dict[str, float] = field(default_factory=dict)
    exceptions: int = 0
    ranks: int = 1

    def floor(self, name: str) -> float | None:
        """Return the floor of file ``name``, or None."""
        matching = [pattern for pattern in self.files if fnmatch(name, pattern)]
        return self.files[max(matching, key=len)] if matching else None


@dataclass(frozen=True)
class SharedSettings:
    """Code that belongs to no framework, which every framework's environment must run.

    Attributes:
        environments: the environments that must reach it.
        files: patterns of the files.
        floor: percentage of each file that each environment must reach.
    """

    environments: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    floor: float = 0.0

    def covers(self, name: str) -> bool:
        """Whether file ``name`` is shared code."""
        return any(fnmatch(name, pattern) for pattern in self.files)


@dataclass(frozen=True)
class Settings:
    """All floors.

    Attributes:
        environments: by name; ``combined`` has the floors of the combined report.
        combined: the environments whose data must be in the combined report for its floors to count.
        shared: code that each framework must run.
        baseline: file with the percentages below which no file may fall, relative to the root.
        slack: percentage points that a file may fall short of its baseline.
    """

    environments: dict[str, EnvironmentSettings]
    combined: tuple[str, ...]
    shared: SharedSettings
    baseline: str
    slack: float

    def environment(self, name: str) -> EnvironmentSettings:
        """Return the settings of environment ``name``; without floors if it has no entry."""
        return self.environments.get(name, EnvironmentSettings())


def read_settings(pyproject: Path) -> Settings:
    """Read the table of floors.

    Raises:
        ValueError: there is no file or table, a key is unknown, or a floor is not a percentage.
    """
    try:
        table = _parse(pyproject.read_text(encoding="utf-8"))["tool"]["hyper_parallel"]["coverage"]
    except OSError as error:
        msg = f"{pyproject} cannot be read: {error.strerror}; run the command in the project's folder, or give --root"
        raise ValueError(msg) from error
    except ValueError as error:  # of the parser, or bytes that no text has
        msg = f"{pyproject} cannot be read: {error}"
        raise ValueError(msg) from error
    except KeyError as error:
        msg = f"{pyproject} has no table {_TABLE}: no floors are configured"
        raise ValueError(msg) from error
    _check_keys("", table, _KEYS)
    shared = table.get("shared", {})
    ratchet = table.get("ratchet", {})
    return Settings(
        {name: _environment(name, entry) for name, entry in table.get("env", {}).items()},
        tuple(table.get("combined", ())),
        SharedSettings(
            tuple(shared.get("environments", ())),
            tuple(shared.get("files", ())),
            _percentage("shared.floor", shared.get("floor", 0)),
        ),
        ratchet.get("baseline", "ci/coverage_baseline.json"),
        _percentage("ratchet.slack", ratchet.get("slack", 0)),
    )


def _parse(text: str) -> dict[str, Any]:
    # Python 3.10 has no tomllib; coverage[toml] brings the same parser under its old name.
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    parsed: dict[str, Any] = parser.loads(text)
    return parsed


def _check_keys(where: str, table: Any, known: dict[str, Any]) -> None:
    """Refuse unknown keys: a mistyped one would be a floor that is never checked."""
    if not isinstance(table, dict):
        msg = f"{_TABLE}{where and ' '}{where} is {table!r}; it must be a table"
        raise ValueError(msg)  # noqa: TRY004 - what a file says, not what a caller passes
    for key, value in table.items():
        name = f"{where}.{key}".lstrip(".")
        if key not in known and "*" not in known:
            msg = f"{_TABLE} {name} is unknown; known: {', '.join(known)}"
            raise ValueError(msg)
        inner = known.get(key, known.get("*"))
        if inner is not None:
            _check_keys(name, value, inner)


def _environment(name: str, entry: dict[str, Any]) -> EnvironmentSettings:
    files = {
        pattern: _percentage(f"env.{name}.files.{pattern}", floor) for pattern, floor in entry.get("files", {}).items()
    }
    exceptions = _count(f"env.{name}.exceptions", entry.get("exceptions", 0), "files")
    ranks = _count(f"env.{name}.ranks", entry.get("ranks", 1), "ranks")
    total = _percentage(f"env.{name}.total", entry.get("total", 0))
    return EnvironmentSettings(total, tuple(entry.get("omit", ())), files, exceptions, ranks)


def _count(where: str, value: Any, of: str) -> int:
    if type(value) is not int or value < 0:
        msg = f"{_TABLE} {where} = {value!r} must be a number of {of}"
        raise ValueError(msg)
    return value


def _percentage(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 100:
        msg = f"{_TABLE} {where} = {value!r} is not a percentage from 0 to 100"
        raise ValueError(msg)
    return float(value)
