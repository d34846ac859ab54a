"""The folder of coverage data and reports, and the calls of coverage.py that read and write it."""

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CoverageToolError", "Store", "process_of"]

_PID = re.compile(r"\.pid(\d+)\.")
_OWNER = "owner"
_DATA = "data"
_NAME = re.compile(r"\w[\w.-]*")


class CoverageToolError(ValueError):
    """The coverage tool failed; the message has its output."""


@dataclass(frozen=True)
class Store:
    """The folder ``coverage_reports`` of the project at ``root``.

    Attributes:
        root: of the project.
        starts: called with the name of each coverage command before it runs, which may take seconds.
    """

    root: Path
    starts: Callable[[str], None] = lambda _: None

    @property
    def reports(self) -> Path:
        """The folder of everything that is generated."""
        return self.root / "coverage_reports"

    def data(self, environment: str) -> Path:
        """Return the folder of an environment's data files."""
        return self.reports / _DATA / _named(environment)

    def ledger(self, environment: str) -> Path:
        """Return the folder with a file per rank that was started."""
        return self.data(environment) / "ranks"

    def folder(self, environment: str) -> Path:
        """Return the folder of an environment's reports."""
        return self.reports / _named(environment)

    def erase(self, environment: str) -> None:
        """Delete data and reports of earlier runs, which would raise the result.

        Raises:
            ValueError: ``environment`` is not a valid name, another run is writing there, or the folder is not
                writable.
        """
        owner = self.data(environment) / _OWNER
        parent = os.getppid()  # tox or the shell, which runs erase, the tests and the gate
        if (
            owner.exists()
            and (other := _number(owner.read_text(errors="replace"))) not in (parent, 0)
            and Path(f"/proc/{other}").exists()
        ):
            msg = f"process {other} is writing coverage of {environment} in {self.reports}: two runs cannot share it"
            raise ValueError(msg)
        try:
            for folder in (self.folder(environment), self.data(environment)):
                shutil.rmtree(folder, ignore_errors=True)
            self.ledger(environment).mkdir(parents=True)
            owner.write_text(str(parent))
        except OSError as error:
            msg = f"{self.reports} cannot be written: {error.strerror}"
            raise ValueError(msg) from error

    def launched(self, environment: str) -> dict[int, str] | None:
        """Return process number and name of every rank that was started; None without a ledger."""
        ledger = self.ledger(environment)
        if not ledger.is_dir():
            return None
        return {int(path.name): path.read_text().partition("\n")[0] for path in ledger.glob("[0-9]*")}

    def measured(self, environment: str) -> tuple[list[int], list[str]]:
        """Return process numbers of the data files that are not combined yet, and names of broken files.

        A process that is killed while it writes leaves half a file, which the coverage tool ignores.
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
        """Combine environments into one report that shows per line which environments ran it.

        Raises:
            ValueError: one of them has no combined data, or there are none.
        """
        missing = self.without_data(environments)
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

    def without_data(self, environments: Sequence[str]) -> list[str]:
        """Return those of ``environments`` whose data was not combined, because their tests or their gate never ran."""
        return [name for name in environments if not (self.data(name) / ".coverage").exists()]

    def environments(self) -> list[str]:
        """Return the environments that have reports."""
        names = sorted(path.parent.name for path in self.reports.glob("*/coverage.json"))
        return [name for name in names if name != "combined"]

    def versions(self) -> list[str]:
        """Return the environments of versions of Python and the frameworks that have combined data."""
        return sorted(path.parent.name for path in (self.reports / _DATA).glob("py*/.coverage"))

    def report(self, environment: str) -> dict[str, Any]:
        """Return the JSON report of an environment.

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
            CoverageToolError: the tool failed, for example on a data file that another version wrote.
        """
        self.starts(arguments[0])
        self._run(*arguments)

    def _run(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "coverage", *arguments]
        done = subprocess.run(command, cwd=self.root, text=True, capture_output=True, check=False)
        if done.returncode:
            output = (done.stdout + done.stderr).strip()
            msg = f"`coverage {arguments[0]}` failed: {output}"
            raise CoverageToolError(msg)

    def _refuse_other_versions(self, environment: str) -> None:
        """Refuse data of another version: the coverage tool leaves it out, which would lower the number silently."""
        from coverage.sqldata import SCHEMA_VERSION

        for path in sorted(self.data(environment).glob(".coverage*")):
            version = _schema(path)
            if version not in {None, SCHEMA_VERSION}:
                msg = (
                    f"{path} was written by another version of the coverage tool (format {version}, here "
                    f"{SCHEMA_VERSION}); run `python ci/workshop coverage erase {environment}` and the tests again"
                )
                raise ValueError(msg)

    def _write(self, name: str, data: Path, omit: Sequence[str]) -> dict[str, Any]:
        out = self.folder(name)
        out.mkdir(parents=True, exist_ok=True)
        options = [f"--data-file={data}", *([f"--omit={','.join(omit)}"] if omit else [])]
        targets = {
            "html": f"--directory={out / 'html'}",
            "xml": f"-o{out / 'coverage.xml'}",
            "json": f"-o{out / 'coverage.json'}",
        }
        self.starts(", ".join(targets))
        with ThreadPoolExecutor() as pool:  # each reads the data and parses every file on its own
            list(pool.map(lambda kind: self._run(kind, "--quiet", *options, targets[kind]), targets))
        return self.report(name)


def _named(environment: str) -> str:
    """Return the name if it can be a folder among the reports; any other could erase or read something else."""
    if not _NAME.fullmatch(environment) or environment == _DATA:
        msg = f"{environment!r} is not the name of an environment, such as torch"
        raise ValueError(msg)
    return environment


def _number(text: str) -> int:
    """Return the process number in ``text``; 0 if there is none, as after a crash of the machine."""
    return int(text) if text.strip().isdecimal() else 0


def _readable(path: Path) -> bool:
    return _schema(path) is not None


def _schema(path: Path) -> int | None:
    """Return the version of a data file's format, None for other files."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as data:
            row = data.execute("select version from coverage_schema").fetchone()
    except sqlite3.Error:
        return None
    return None if row is None else int(row[0])


def process_of(name: str) -> int | None:
    """Return the process number in the name of a data file, or None."""
    match = _PID.search(name)
    return int(match[1]) if match else None
