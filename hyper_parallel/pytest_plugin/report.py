"""The report of a failed ranked test: the failing rank's traceback first, then the state of the other ranks.

A test without the mark ``platforms`` runs on every installed framework. If it is written for only one of them and fails
on the other, the report says so. A JUnit file gets the origin of the run, and titles for the output of each rank.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest.junitxml import xml_key

from hyper_parallel._text import first_line
from hyper_parallel.errors import RankFailedError
from hyper_parallel.pytest_plugin.capability import count_devices
from hyper_parallel.pytest_plugin.selection import selected
from hyper_parallel.transport.installed import installed_package

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest
    from _pytest._io import TerminalWriter

__all__ = ["TITLES", "RanksRepr", "describe_run", "other_framework", "rank_of_failure", "titled"]

TITLES = {"torch": "PyTorch", "mindspore": "MindSpore"}
"""Display names of the frameworks."""

_FILE = re.compile(r"[^\s\"]+\.py\b")
_OF_RANK = re.compile(r"Captured ((?:stdout|collectives) of rank \d+) ")


class RanksRepr(TerminalRepr):
    """The text of a failed world, and the line for pytest's summary.

    Args:
        text: the complete report.
        path, line: location of the test.
        failure: the error.
    """

    def __init__(self, text: str, path: str, line: int, failure: BaseException) -> None:
        self.text = text
        self.reprcrash = ReprFileLocation(path, line, _headline(failure))

    def __str__(self) -> str:
        return self.text

    def toterminal(self, tw: TerminalWriter) -> None:
        """Write the text, error lines in red."""
        for line in self.text.splitlines():
            tw.line(line, red=line.startswith("E ") or "Error:" in line)
        self.reprcrash.toterminal(tw)


def _headline(failure: BaseException) -> str:
    first = rank_of_failure(failure)
    cause = failure.__cause__
    if first is None or cause is None:
        return first_line(failure)
    text = [line.strip() for line in str(cause).splitlines()] or [""]
    facts = " ".join(text[:2]) if text[0].endswith(":") else text[0]
    if isinstance(cause, RankFailedError):
        return facts if facts.startswith(f"rank {first} ") else f"rank {first}: {facts}"
    return f"rank {first}: {type(cause).__name__}: {facts}"


def rank_of_failure(failure: BaseException) -> int | None:
    """Return the rank that failed first, or None if unknown."""
    failures = getattr(failure, "failures", {})
    return next(iter(failures), None)


def other_framework(ran_on: str, path: Path, text: str) -> str:
    """Return reason and fix if a test failed on a framework for which it is not written; otherwise an empty text.

    Args:
        ran_on: framework of the ranks.
        path: module of the test.
        text: report of the failure; a traceback through the other framework shows that the test uses it too.
    """
    imported = _imports(path)
    passed = {installed_package(file) for file in _FILE.findall(text)}
    for name, title in TITLES.items():
        in_traceback = name in passed and ran_on not in passed
        if name != ran_on and ran_on not in imported and (name in imported or in_traceback):
            how = f"{path.name} imports {name}" if name in imported else f"the traceback leads through {name}"
            return (
                f"This test ran on {TITLES[ran_on]} because both frameworks are installed, but {how}: for a test of "
                f'{title} write @pytest.mark.platforms("{name}"), or run pytest with --hp-platforms {name}'
            )
    return ""


def _imports(path: Path) -> set[str]:
    """Return the top-level packages that a module imports anywhere, without importing the module."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    except (OSError, SyntaxError, ValueError):
        return set()
    plain = (alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names)
    sources = (node.module or "" for node in nodes if isinstance(node, ast.ImportFrom))
    return {name.partition(".")[0] for name in (*plain, *sources)}


def describe_run(config: pytest.Config) -> None:
    """Write date, revision, versions, command, frameworks and devices of this run into its JUnit file, if any."""
    from hyper_parallel.verify.report import PROPERTY, RunHeader, revision_of

    file = config.stash.get(xml_key, None)
    if file is None:
        return
    device = config.getoption("hp_device")
    facts = {
        **RunHeader(("pytest", *map(str, config.invocation_params.args))).facts(),
        "revision": revision_of(config.rootpath),
        "frameworks": ", ".join(selected(config)) or "none",
        "device": device,
        **({} if device == "cpu" else {"devices": str(count_devices(device))}),
    }
    for name, text in facts.items():
        file.add_global_property(PROPERTY + name, text)


def titled(sections: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the sections of a test for a JUnit file, which supports neither titles nor sections of collectives.

    Args:
        sections: pairs of title and text; sections of ranks become printed output that begins with the title.
    """
    found = [(_OF_RANK.match(title), title, text) for title, text in sections]
    return [
        (title, text) if rank is None else ("Captured stdout call", f"--- {rank[1]} ---\n{text.rstrip()}\n")
        for rank, title, text in found
    ]
