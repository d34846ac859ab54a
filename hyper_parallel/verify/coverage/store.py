"""Where coverage data and reports lie, and the coverage tool that reads and writes them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CoverageToolError", "Store", "process_of"]

_PID = re.compile(r"\.pid(\d+)\.")
_OWNER = "owner"
_DATA = "data"
_NAME = re.compile(r"\w[\w.-]*")


class CoverageToolError(ValueError):
    """The coverage tool refused; the message has its own words."""


@dataclass(frozen=True)
class Store:
    """The folder ``coverage_reports`` of the project at ``root``.

    Attributes:
        root: of the project.
        starts: told the name of each call of the coverage tool before it runs, which may take seconds.
    """

    root: Path
    starts: Callable[[str], None] = lambda _: None

    @property
    def reports(self) -> Path:
        """Everything that is generated."""
        return self.root / "coverage_reports"

    def data(self, environment: str) -> Path:
        """Data files of an environment."""
        return self.reports / _DATA / _named(environment)

    def ledger(self, environment: str) -> Path:
        """One file per rank that was started."""
        return self.data(environment) / "ranks"

    def folder(self, environment: str) -> Path:
        """Reports of an environment."""
        return self.reports / _named(environment)

    def erase(self, environment: str) -> None:
        """Drop data and reports of earlier runs: an old data file must not lift today's number.

        Raises:
            ValueError: this is no name of an environment, another run writes there now, or the folder cannot be
                written.
        """
        owner = self.data(environment) / _OWNER
        mine = os.getppid()  # tox, or the shell: whoever runs erase, the tests and the gate
        if (
            owner.exists()
            and (other := _number(owner.read_text(errors="replace"))) not in (mine, 0)
            and Path(f"/proc/{other}").exists()
        ):
            msg = f"process {other} is writing coverage of {environment} in {self.reports}: two runs cannot share it"
            raise ValueError(msg)
        try:
            for folder in (self.folder(environment), self.data(environment)):
                shutil.rmtree(folder, ignore_errors=True)
            self.ledger(environment).mkdir(parents=True)
            owner.write_text(str(mine))
        except OSError as error:
            msg = f"{self.reports} cannot be written: {error.strerror}"
            raise ValueError(msg) from error

    def launched(self, environment: str) -> dict[int, str] | None:
        """Process numbers of the ranks that were started, with their names; None where there is no ledger."""
        ledger = self.ledger(environment)
        if not ledger.is_dir():
            return None
        return {int(path.name): path.read_text().partition("\n")[0] for path in ledger.glob("[0-9]*")}

    def measured(self, environment: str) -> tuple[list[int], list[str]]:
        """Process numbers of the data files that are not combined yet, and names of files that are broken.

        A process that is ended while it writes leaves half a file, which the coverage tool passes over.
        """
        files = sorted(self.data(environment).glob(".coverage.*"))
        broken = [path.name for path in files if not _readable(path)]
        names = [path.name for path in files if path.name not in broken]
        return [pid for name in names if (pid := process_of(name)) is not None], broken

    def publish(self, environment: str, omit: Sequence[str]) -> dict[str, Any]:
        """Combine the data of all processes, write text, HTML, XML and JSON, and return the JSON report."""
        data = self.data(environment)
        self._refuse_other_versions(environment)
        self.coverage("combine", "--quiet", f"--data-file={data / '.coverage'}", str(data))
        (data / _OWNER).unlink(missing_ok=True)
        return self._write(environment, data / ".coverage", omit)

    def combine(self, environments: Sequence[str]) -> dict[str, Any]:
        """Combine environments into one report, whose lines tell which environment ran them."""
        missing = [name for name in environments if not (self.data(name) / ".coverage").exists()]
        if missing or not environments:
            msg = f"there is no combined data of {', '.join(missing) or 'any environment'}; run `tox -e <env>` first"
            raise ValueError(msg)
        for name in environments:
            self._refuse_other_versions(name)
        shutil.rmtree(self.folder("combined"), ignore_errors=True)
        target = self.data("combined") / ".coverage"
        target.parent.mkdir(parents=True, exist_ok=True)
        sources = [str(self.data(name) / ".coverage") for name in environments]
        self.coverage("combine", "--keep", "--quiet", f"--data-file={target}", *sources)
        return self._write("combined", target, ())

    def environments(self) -> list[str]:
        """Environments whose reports are there."""
        found = sorted(path.parent.name for path in self.reports.glob("*/coverage.json"))
        return [name for name in found if name != "combined"]

    def report(self, environment: str) -> dict[str, Any]:
        """The JSON report of an environment.

        Raises:
            ValueError: there is none.
        """
        path = self.folder(environment) / "coverage.json"
        try:
            report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            msg = f"{path} cannot be read; run `tox -e {environment}` first"
            raise ValueError(msg) from error
        return report

    def coverage(self, *arguments: str) -> None:
        """Run the coverage tool in the root.

        Raises:
            CoverageToolError: it failed, for example on a data file that another version wrote.
        """
        self.starts(arguments[0])
        command = [sys.executable, "-m", "coverage", *arguments]
        done = subprocess.run(  # noqa: S603 - our own interpreter, arguments made here
            command, cwd=self.root, text=True, capture_output=True, check=False
        )
        if done.returncode:
            told = (done.stdout + done.stderr).strip()
            msg = f"`coverage {arguments[0]}` failed: {told}"
            raise CoverageToolError(msg)

    def _refuse_other_versions(self, environment: str) -> None:
        """The coverage tool warns of data of another version and leaves it out: the number would silently be lower."""
        from coverage.sqldata import SCHEMA_VERSION

        for path in sorted(self.data(environment).glob(".coverage*")):
            version = _schema(path)
            if version not in {None, SCHEMA_VERSION}:
                msg = (
                    f"{path} was written by another version of the coverage tool (format {version}, here "
                    f"{SCHEMA_VERSION}); run `hyper-parallel coverage erase {environment}` and the tests again"
                )
                raise ValueError(msg)

    def _write(self, name: str, data: Path, omit: Sequence[str]) -> dict[str, Any]:
        out = self.folder(name)
        out.mkdir(parents=True, exist_ok=True)
        options = [f"--data-file={data}", *([f"--omit={','.join(omit)}"] if omit else [])]
        self.coverage("html", "--quiet", *options, f"--directory={out / 'html'}")
        self.coverage("xml", "--quiet", *options, "-o", str(out / "coverage.xml"))
        self.coverage("json", "--quiet", *options, "-o", str(out / "coverage.json"))
        return self.report(name)


def _named(environment: str) -> str:
    """The name, if it can be a folder among the reports: any other would have something else erased or read."""
    if not _NAME.fullmatch(environment) or environment == _DATA:
        msg = f"{environment!r} is no name of an environment, such as torch"
        raise ValueError(msg)
    return environment


def _number(text: str) -> int:
    """The process number in ``text``; 0 if it is none, as a machine that stopped while it was written leaves behind."""
    return int(text) if text.strip().isdecimal() else 0


def _readable(path: Path) -> bool:
    return _schema(path) is not None


def _schema(path: Path) -> int | None:
    """Version of a data file's format, or None where it is no data file."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as data:
            row = data.execute("select version from coverage_schema").fetchone()
    except sqlite3.Error:
        return None
    return None if row is None else int(row[0])


def process_of(name: str) -> int | None:
    """Process number in the name of a data file, or None."""
    found = _PID.search(name)
    return int(found[1]) if found else None
