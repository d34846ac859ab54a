"""The base of every command's report: text for people, JSON for programs, and the files of both."""

from __future__ import annotations

import abc
from typing import Any

from hyper_parallel.verify.run_header import write_report

__all__ = ["Report"]


class Report(abc.ABC):
    """What a command found; ``hyper_parallel.verify.pages.report_pages.page_of`` makes its page."""

    @property
    @abc.abstractmethod
    def ok(self) -> bool:
        """Whether something was checked, and nothing is wrong."""

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

    def full_text(self) -> str:
        """Return the report for a file, with what a terminal has shown before its summary."""
        return self.text()

    def write(self, path: str | None) -> None:
        """Write the file of ``--report``, if there is one.

        Raises:
            ValueError: the file cannot be written.
        """
        if path is not None:
            write_report(path, self.json, self.full_text)
