"""Output of a command: its result on stdout, in colour on a terminal, and checks of output paths before it starts."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hyper_parallel._text import printable
from hyper_parallel.verify.report import report_json
from hyper_parallel.verify.report_files import write_text

if TYPE_CHECKING:
    from hyper_parallel.verify.report import Report

__all__ = [
    "can_be_written",
    "check_distinct_outputs",
    "coloured",
    "logs_to_stderr",
    "print_report",
    "print_result",
    "wants_colour",
    "write_outputs",
]


_RED, _GREEN, _END = "\x1b[1;31m", "\x1b[32m", "\x1b[0m"
_BAD = re.compile(r"\b(FAILED|DIVERGED|ENDED|NOT VERIFIED|WRONG|MISSED|worse|error)\b")
_GOOD = re.compile(r"\b(equal|held|as expected|better)\b")


def wants_colour(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal with colours and ``NO_COLOR`` is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str, stream: TextIO | None = None) -> str:
    """Return text in which the first verdict of each line is coloured, if the stream supports colours.

    Control characters are escaped, since names of a user's modules may contain them.

    Args:
        text: text of a report or an error.
        stream: stream of the output; stdout by default.
    """
    text = printable(text, keep="\n\t")
    if not wants_colour(sys.stdout if stream is None else stream):
        return text
    return "\n".join(map(_coloured_line, text.split("\n")))


def _coloured_line(line: str) -> str:
    if _BAD.search(line):
        return _BAD.sub(lambda word: f"{_RED}{word[0]}{_END}", line, count=1)
    return _GOOD.sub(lambda word: f"{_GREEN}{word[0]}{_END}", line, count=1)


_STDOUT, _STDERR = 1, 2  # the process's file descriptors, which subprocesses inherit
_ANSWERS: ContextVar[list[str] | None] = ContextVar("answers", default=None)
_OUTPUTS = ("report", "html", "perfetto", "night")
_INPUTS = ("spec", "plan", "file", "single", "before", "after", "history", "add")


def print_result(text: str) -> None:
    """Print a command's result; inside :func:`logs_to_stderr` it is printed at the end of the block."""
    answers = _ANSWERS.get()
    if answers is None:
        print(text)
    else:
        answers.append(text)


def print_report(report: Report, *, as_json: bool, seed: int | None = None) -> None:
    """Print a report as JSON, or as text with its verdicts in colour, followed by ``seed``."""
    if as_json:
        print_result(report_json(report.json()))
    else:
        print_result(coloured(report.text() if seed is None else f"{report.text()}\nseed {seed}"))


def write_outputs(report: Report, arguments: argparse.Namespace) -> None:
    """Write the files of ``--report`` and ``--html``.

    Raises:
        ValueError: a file cannot be written.
    """
    report.write(arguments.report)
    if arguments.html is not None:
        from hyper_parallel.verify.pages.report_pages import page_of

        write_text(arguments.html, page_of(report), "--html")


@contextlib.contextmanager
def logs_to_stderr() -> Iterator[None]:
    """Redirect stdout of the user's code, its subprocesses and libraries to stderr until the block ends."""
    answers: list[str] = []
    token = _ANSWERS.set(answers)
    try:
        with _descriptor_replaced(), contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _ANSWERS.reset(token)
        for text in answers:
            print(text)


@contextlib.contextmanager
def _descriptor_replaced() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # one of the two is closed
            stack.callback(os.close, kept := os.dup(_STDOUT))
            os.dup2(_STDERR, _STDOUT)
            stack.callback(os.dup2, kept, _STDOUT)
        yield


def check_distinct_outputs(arguments: argparse.Namespace) -> None:
    """Check that each output file of a command differs from its inputs and from its other outputs.

    Args:
        arguments: parsed arguments of the command.

    Raises:
        ValueError: a file would be overwritten.
    """
    read = {path for name in _INPUTS for path in _files(getattr(arguments, name, None))}
    written: dict[Path, str] = {}
    for name in _OUTPUTS:
        text = getattr(arguments, name, None)
        if text is None:
            continue
        path = Path(os.path.realpath(text))
        if path in read:
            msg = f"--{name} {text} would overwrite a file that this command reads; name another file"
            raise ValueError(msg)
        if path in written:
            msg = f"--{written[path]} and --{name} both name {text}; give each a file of its own"
            raise ValueError(msg)
        written[path] = name


def _files(value: str | list[str] | None) -> Iterator[Path]:
    """Yield the files that an argument names; in ``file.py:function`` that is the file."""
    for text in [value] if isinstance(value, str) else value or ():
        yield Path(os.path.realpath(text))
        yield Path(os.path.realpath(text.rpartition(":")[0] or text))


def can_be_written(option: str, path_text: str | None, *, folder: bool = False) -> None:
    """Check before a long run that a report can be written; missing folders are created, with a note on stderr.

    Args:
        option: option that names the file, for the message.
        path_text: path of the file, or None if none is written.
        folder: whether the path is a folder for several files.

    Raises:
        ValueError: the file or its folder cannot be written.
    """
    if path_text is None:
        return
    path = Path(path_text)
    problem = "it is a folder" if path.is_dir() and not folder else ""
    parent = path if folder else path.parent
    try:
        if not parent.exists():
            parent.mkdir(parents=True)
            print(f"{option}: created the folder {printable(str(parent))}", file=sys.stderr)
        elif not parent.is_dir():
            problem = "it is a file, not a folder" if folder else "its folder is a file"
        if not problem and not os.access(path if path.exists() else parent, os.W_OK):
            problem = "Permission denied"
    except OSError as error:
        problem = error.strerror or type(error).__name__
    if problem:
        msg = f"{option} {path_text or repr('')} cannot be written: {problem}"
        raise ValueError(msg)
