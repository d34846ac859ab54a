"""Reads the checks of `[tool.hyper_parallel.verify]` in pyproject.toml."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel._text import near_hint
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.report_files import parse_toml

__all__ = ["FILE", "KINDS", "TABLE", "SuiteCheck", "find_settings", "read_settings"]

FILE = "pyproject.toml"
TABLE = "tool.hyper_parallel.verify"
KINDS = {"programs": "program", "diffs": "diff", "models": "model"}
"""Tables of checks, with the command of each."""

_SECONDS = "seconds"
_WORLDS = ("world-size", "mesh")
"""Options whose lists give one check for each value."""


@dataclass(frozen=True)
class SuiteCheck:
    """One command to run.

    Attributes:
        name: name of the table, with the world size or mesh if the table lists several: ``ddp (world-size 3)``.
        kind: ``program``, ``diff`` or ``model``.
        options: options of the command, by their long names without the dashes.
        shared: options for every check whose command has them.
        seconds: time after which the check is stopped; None for no limit.
        place: the file of the settings, and the line of the check's table.
    """

    name: str
    kind: str
    options: Mapping[str, Any]
    shared: Mapping[str, Any]
    seconds: float | None = None
    place: tuple[str, int] = (FILE, 1)

    @property
    def label(self) -> str:
        """The table of the check, for messages."""
        return f"[{TABLE}.{_group(self.kind)}] {self.name}"

    @property
    def script(self) -> str:
        """The file that the check runs, as written in the settings; empty if there is none."""
        text = str(self.options.get({"program": "run", "diff": "a", "model": "spec"}[self.kind], ""))
        try:
            words = shlex.split(text)
        except ValueError:
            return ""
        return next((word.rpartition(":")[0] or word for word in words if ".py" in word), "")


def find_settings(folder: Path) -> Path:
    """Return the nearest pyproject.toml with a table :data:`TABLE`, in the folder or in one above it.

    Raises:
        InputError: there is no such file.
    """
    folder = folder.resolve()
    for each in (folder, *folder.parents):
        path = each / FILE
        if path.is_file() and _table(path) is not None:
            return path
    msg = (
        f"no {FILE} in {folder} or above it has a table [{TABLE}], whose checks `hyper-parallel verify` runs; add one, "
        "or name what to verify, as in `hyper-parallel verify program train.py`"
    )
    raise InputError(msg)


def read_settings(path: Path) -> list[SuiteCheck]:
    """Return the checks of a file, in its order.

    Raises:
        InputError: the file or its table cannot be read, or there are no checks.
    """
    table = _table(path)
    if table is None:
        msg = f"{path} has no table [{TABLE}]"
        raise InputError(msg)
    if not isinstance(table, dict):
        msg = f"{path}: {TABLE} must be a table"
        raise InputError(msg)
    shared = {_option(name): value for name, value in table.items() if name not in KINDS}
    checks = [
        check
        for group, kind in KINDS.items()
        for name, options in _tables(path, f"{TABLE}.{group}", table.get(group, {})).items()
        for check in _checks(path, name, kind, options, shared)
    ]
    if not checks:
        known = ", ".join(f"[{TABLE}.{group}.NAME]" for group in KINDS)
        near = next((hint for name in shared if (hint := near_hint(name, KINDS))), "")
        msg = f"{path}: [{TABLE}] has no check; checks are tables {known}{near}"
        raise InputError(msg)
    return checks


def _checks(
    path: Path, name: str, kind: str, options: Mapping[str, Any], shared: Mapping[str, Any]
) -> list[SuiteCheck]:
    """Return the checks of one table: one for each of its world sizes."""
    own = {_option(key): value for key, value in options.items()}
    rest = {key: value for key, value in shared.items() if key != _SECONDS}
    seconds = own.pop(_SECONDS, shared.get(_SECONDS))
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or seconds <= 0):
        msg = f"{path}: [{TABLE}] {name}: {_SECONDS} is {seconds!r}; it must be a number above 0"
        raise InputError(msg)
    place = _place(path, f"{_group(kind)}.{name}")
    several = [option for option in _WORLDS if isinstance(own.get(option), list)]
    if not several:
        return [SuiteCheck(name, kind, own, rest, seconds, place)]
    if len(several) > 1 or not own[several[0]]:
        msg = f"{path}: [{TABLE}] {name}: give the worlds as one non-empty list: {' or '.join(_WORLDS)}"
        raise InputError(msg)
    return [
        SuiteCheck(f"{name} ({several[0]} {value})", kind, {**own, several[0]: value}, rest, seconds, place)
        for value in own[several[0]]
    ]


def _group(kind: str) -> str:
    return next(table for table, command in KINDS.items() if command == kind)


def _place(path: Path, name: str) -> tuple[str, int]:
    """Return the name of the file and the line where a table starts; line 1 if the table is not found."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = (number for number, line in enumerate(lines, 1) if line.strip().startswith(f"[{TABLE}.{name}]"))
    return path.name, next(found, 1)


def _option(name: str) -> str:
    return name.replace("_", "-")


def _tables(path: Path, name: str, value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        msg = f"{path}: [{name}] must have a table for each check: [{name}.NAME]"
        raise InputError(msg)
    return value


def _table(path: Path) -> Any:
    """Return the table of a file; None if it has none."""
    try:
        content: Any = parse_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
        msg = f"{path} cannot be read: {reason}"
        raise InputError(msg) from error
    for key in TABLE.split("."):
        if not isinstance(content, dict) or key not in content:
            return None
        content = content[key]
    return content
