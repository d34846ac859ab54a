"""The base of every command's report, and its header: date, revision, versions, platform and command line."""

from __future__ import annotations

import abc
import contextlib
import html
import json
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from hyper_parallel._release import __version__
from hyper_parallel.platform.tested import TESTED, newer_than_tested
from hyper_parallel.verify.report_files import write_text

__all__ = [
    "PROPERTY",
    "Report",
    "RunHeader",
    "command_line",
    "report_json",
    "report_text",
    "revision_of",
    "run_header",
    "write_report",
]

PROPERTY = "hyper_parallel."
"""Prefix of the names of properties with which the pytest plugin describes a run in its JUnit file."""

_PACKAGES = ("torch", "mindspore", "numpy")
_GIT_SECONDS = 10.0
_ROUNDING = "TF32 and HF32 switched off"


@dataclass(frozen=True)
class RunHeader:
    """The description of a run in its report; it is determined without importing a framework.

    Attributes:
        words: words of the command line.
        seed: seed of all random draws of the run, or None if there were none.
        date: start of the run, in UTC.
        device: device of the run; the header names it if it is an accelerator.
    """

    words: tuple[str, ...]
    seed: int | None = None
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    device: str = "cpu"

    @cached_property
    def revision(self) -> str:
        """The commit of the running checkout, with a plus if files differ from it; otherwise the version."""
        return revision_of(Path(__file__).parents[2])

    @cached_property
    def versions(self) -> dict[str, str]:
        """Versions of Python, of this library, and of the installed numerical packages."""
        installed = {name: version for name in _PACKAGES if (version := _version(name))}
        return {"python": platform.python_version(), "hyper-parallel": __version__, **installed}

    @property
    def platform(self) -> str:
        """The operating system and the machine's architecture."""
        return f"{platform.system()} {platform.release()} {platform.machine()}"

    @property
    def untested(self) -> str:
        """A sentence for each installed framework that is newer than all tested versions."""
        newer = [newer_than_tested(name, self.versions[name]) for name in TESTED if name in self.versions]
        return "; ".join(filter(None, newer))

    def json(self) -> dict[str, Any]:
        """Return the header as a JSON object; ``seed`` is included if known, ``device`` if it is an accelerator.

        ``untested`` is included if a framework is newer than all tested versions.
        """
        untested = {"untested": self.untested} if self.untested else {}
        seed = {} if self.seed is None else {"seed": self.seed}
        device = {} if self.device == "cpu" else {"device": f"{self.device}; {_ROUNDING}"}
        return {
            "date": self.date,
            "revision": self.revision,
            "versions": self.versions,
            "platform": self.platform,
            "command": shlex.join(self.words),
            **untested,
            **seed,
            **device,
        }

    def facts(self) -> dict[str, str]:
        """Return the header as pairs of a name and a text."""
        facts = {name: str(value) for name, value in self.json().items()}
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return facts

    def text(self) -> str:
        """Return the header as lines of text, each of which starts with ``#``."""
        return "\n".join(f"# {name}: {text}" for name, text in self.facts().items())


_CURRENT: ContextVar[RunHeader | None] = ContextVar("run_header", default=None)


@contextlib.contextmanager
def command_line(words: Sequence[str], seed: int | None = None, device: str = "cpu") -> Iterator[RunHeader]:
    """Add this command line to every report inside the block.

    Args:
        words: the program and its arguments.
        seed: seed of the run.
        device: device of the run.
    """
    header = RunHeader(tuple(words), seed, device=device)
    before = _CURRENT.set(header)
    try:
        yield header
    finally:
        _CURRENT.reset(before)


def run_header() -> RunHeader:
    """Return the header of the running command, or a new one with the arguments of the process."""
    return _CURRENT.get() or RunHeader((Path(sys.argv[0]).name, *sys.argv[1:]))


def report_json(document: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return a report as JSON with its header under ``header``; a list is put under ``rows``."""
    content = document if isinstance(document, Mapping) else {"rows": list(document)}
    return json.dumps({"header": run_header().json(), **content}, indent=2)


def report_text(text: str) -> str:
    """Return a report as text, with its header."""
    return f"{run_header().text()}\n{text}"


def write_report(path: Path | str, document: Callable[[], Mapping[str, Any]], text: Callable[[], str]) -> None:
    """Write the file of ``--report`` with its header: as JSON if its name ends in .json, else as text.

    Args:
        path: path of the file.
        document: function that returns the content for JSON.
        text: function that returns the content for text.

    Raises:
        ValueError: the file cannot be written.
    """
    content = report_json(document()) if Path(path).suffix == ".json" else report_text(text())
    write_text(path, content + "\n", "--report")


def revision_of(root: Path) -> str:
    """Return the commit of the checkout at ``root``, with a plus if files differ; elsewhere this library's version."""
    return _commit(root) or f"version {__version__}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit(root: Path) -> str:
    """Return the commit of the checkout at ``root``, or ``""`` if it is not a checkout or git is not installed."""
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return ""
    command = [git, "-C", str(root), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(  # noqa: S603 - no argument comes from a user
            command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


class Report(abc.ABC):
    """The result of a command; ``hyper_parallel.verify.pages.report_pages.page_of`` makes its page.

    Attributes:
        has_page: whether reports of this class have one.
    """

    has_page: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def ok(self) -> bool:
        """Whether something was checked, and all checks passed."""

    @property
    def status(self) -> int:
        """The exit status of the command."""
        return 0 if self.ok else 1

    @abc.abstractmethod
    def text(self) -> str:
        """Return the report for a terminal."""

    @abc.abstractmethod
    def json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""

    def _repr_html_(self) -> str | None:
        """Return the report's page in a frame, for notebooks; None if the report has no page."""
        if not self.has_page:
            return None
        from hyper_parallel import verify

        frame = '<iframe srcdoc="{}" style="width: 100%; height: 40em; border: 0"></iframe>'
        return frame.format(html.escape(str(verify.page_of(self))))

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """Print the report's text if IPython displays no page."""
        printer.text(self.text())

    def full_text(self) -> str:
        """Return the report for a file, including the lines that a terminal shows before the summary."""
        return self.text()

    def write(self, path: str | None) -> None:
        """Write the file of ``--report``, if there is one.

        Raises:
            ValueError: the file cannot be written.
        """
        if path is not None:
            write_report(path, self.json, self.full_text)
