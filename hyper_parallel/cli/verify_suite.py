"""``hyper-parallel verify`` without a command: run the checks that pyproject.toml names."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel._text import near_hint
from hyper_parallel.cli import verify_diff, verify_model, verify_program
from hyper_parallel.cli.arguments import Parser, UsageError
from hyper_parallel.cli.output import can_be_written, coloured, print_report
from hyper_parallel.cli.progress import Progress
from hyper_parallel.verify.report import report_json
from hyper_parallel.verify.report_files import write_text

if TYPE_CHECKING:
    from hyper_parallel.verify.suite.report import SuiteReport
    from hyper_parallel.verify.suite.settings import SuiteCheck

__all__ = ["add_options", "run"]

_COMMANDS: dict[str, Callable[[Any], None]] = {
    "program": verify_program.add_parser, "diff": verify_diff.add_parser, "model": verify_model.add_parser,
}  # fmt: skip
_NAMED = {"program": ("run",), "diff": ("a", "b"), "model": ("spec",)}
"""Keys of a check that replace positional arguments."""

_OWN = ("help", "json", "report", "html")
"""Options that this command sets itself."""


def add_options(parser: Any, parse: Callable[[list[str]], Any]) -> None:
    """Declare the options of ``verify`` without a command.

    Args:
        parser: parser of ``verify``.
        parse: parses a command line of the program; raises UsageError.
    """
    parser.add_argument("--config", metavar="FILE", help="settings (default: the nearest pyproject.toml that has them)")
    parser.add_argument("--only", action="append", metavar="NAME", help="run only this check; repeatable")
    parser.add_argument(
        "--reports", metavar="FOLDER", help="also write verify.json, junit.xml, verify.sarif and pages to FOLDER"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON on stdout")
    parser.set_defaults(run=lambda arguments: run(arguments, parse))


def run(arguments: argparse.Namespace, parse: Callable[[list[str]], Any]) -> int:
    """Run the checks; return 0 if all pass.

    Raises:
        InputError: (a ValueError) there are no settings, or an option in the settings is wrong. No check has run then.
    """
    from hyper_parallel.verify.suite.report import SuiteReport
    from hyper_parallel.verify.suite.run import run_check
    from hyper_parallel.verify.suite.settings import find_settings, read_settings

    path = find_settings(Path.cwd()) if arguments.config is None else Path(arguments.config).absolute()
    checks = _chosen(read_settings(path), arguments.only)
    lines = [_checked_words(path, check, parse) for check in checks]
    can_be_written("--reports", arguments.reports, folder=True)
    report, progress = SuiteReport(path), Progress(len(checks))
    try:
        for check, words in zip(checks, lines, strict=True):
            with progress.running(check.name):
                report.results.append(run_check(check, words, path.parent, _page(arguments.reports, check)))
            last = report.results[-1]
            if not arguments.json:
                shown = "" if last.ok or not last.text else f"\n{last.text.strip()}"
                print(coloured(f"{last.line()}{shown}"), flush=True)
    except KeyboardInterrupt:
        progress.clear()
        report.left = [check.name for check in checks[len(report.results) :]]
        _write(report, arguments.reports)
        raise KeyboardInterrupt(report.text()) from None
    _write(report, arguments.reports)
    if arguments.json:
        print_report(report, as_json=True)
    else:
        print(coloured(report.text().rpartition("\n")[2]))
    return report.status


def _chosen(checks: list[SuiteCheck], only: list[str] | None) -> list[SuiteCheck]:
    """Return the checks that ``--only`` names, with or without the world size in parentheses."""
    if not only:
        return checks
    from hyper_parallel.verify.input_error import InputError

    names = {name for check in checks for name in (check.name, check.name.partition(" (")[0])}
    unknown = [name for name in only if name not in names]
    if unknown:
        listed = "; checks: " + ", ".join(check.name for check in checks)
        msg = f"--only {unknown[0]!r} names no check of the settings{near_hint(unknown[0], sorted(names)) or listed}"
        raise InputError(msg)
    return [check for check in checks if check.name in only or check.name.partition(" (")[0] in only]


def _checked_words(path: Path, check: SuiteCheck, parse: Callable[[list[str]], Any]) -> list[str]:
    """Return the command line of a check, after parsing it to validate its options.

    Raises:
        InputError: an option is wrong.
    """
    from hyper_parallel.verify.input_error import InputError

    try:
        words = _words(check)
        parse(words)
    except (UsageError, InputError) as error:
        msg = f"{path}: {check.label}: {error}"
        raise InputError(msg) from error
    return words


def _words(check: SuiteCheck) -> list[str]:
    """Return the command line of a check: its options, then its script."""
    from hyper_parallel.verify.input_error import InputError

    actions, named = _actions(check.kind), _NAMED[check.kind]
    known = [text.removeprefix("--") for text in actions if text.startswith("--")]
    foreign = [name for name in check.shared if not any(f"--{name}" in _actions(kind) for kind in _COMMANDS)]
    shared = {name: value for name, value in check.shared.items() if name in known}
    words = ["verify", check.kind]
    for name, value in {**dict.fromkeys(foreign), **shared, **check.options}.items():
        if name in named:
            continue
        if name in _OWN:
            msg = f"{name} is not an option of a check: `hyper-parallel verify` has --json and --reports"
            raise InputError(msg)
        if name not in known:
            msg = f"unknown option {name}{near_hint(name, [*known, *named])}"
            raise InputError(msg)
        words += _option(actions[f"--{name}"], name, value)
    return [*words, *_positional(check)]


def _positional(check: SuiteCheck) -> list[str]:
    """Return the positional arguments: the script of a check."""
    from hyper_parallel.verify.input_error import InputError

    texts = []
    for name in _NAMED[check.kind]:
        text = check.options.get(name)
        if text is None and name != "b":
            msg = f"{name} is missing: it names what is verified"
            raise InputError(msg)
        if text is not None and not isinstance(text, str):
            msg = f"{name} is {text!r}; it must be a text"
            raise InputError(msg)
        texts += [] if text is None else [text]
    if check.kind != "program":
        return texts
    try:
        first, *rest = shlex.split(texts[0])
    except ValueError as error:
        msg = f"run {texts[0]!r} cannot be split into arguments: {error}"
        raise InputError(msg) from None
    return [first, "--", *rest] if ".py:" in first else ["--", first, *rest]


def _option(action: argparse.Action, name: str, value: Any) -> list[str]:
    """Return a value of the settings as words of a command line."""
    from hyper_parallel.verify.input_error import InputError

    if action.nargs == 0:
        if not isinstance(value, bool):
            msg = f"{name} is {value!r}; it must be true or false"
            raise InputError(msg)
        off = f"--no-{name}"
        return [f"--{name}"] if value else [off] if off in action.option_strings else []
    values = value if isinstance(value, list) else [value]
    several = isinstance(action, argparse._AppendAction) or action.nargs in {"*", "+"}  # noqa: SLF001 - its class has no public name
    if not all(isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in values) or (
        isinstance(value, list) and not several
    ):
        msg = f"{name} is {value!r}; it must be a text or a number{', or a list of them' if several else ''}"
        raise InputError(msg)
    return [f"--{name}={each}" for each in values]


@functools.cache
def _actions(kind: str) -> Mapping[str, argparse.Action]:
    """Return the option actions of a command of ``verify``, by option as written."""
    kinds = Parser(prog="hyper-parallel verify").add_subparsers()
    _COMMANDS[kind](kinds)
    parser: argparse.ArgumentParser = kinds.choices[kind]
    return parser._option_string_actions  # noqa: SLF001 - argparse lists its options nowhere else


def _page(folder: str | None, check: SuiteCheck) -> Path | None:
    """Return the path of a check's page; None if its command writes no page."""
    if folder is None or "--html" not in _actions(check.kind):
        return None
    return Path(folder).absolute() / (re.sub(r"\W+", "-", check.name).strip("-") + ".html")


def _write(report: SuiteReport, folder: str | None) -> None:
    """Write the files of ``--reports``."""
    from hyper_parallel.verify.suite.formats import junit, sarif

    if folder is None:
        return
    place = Path(folder)
    write_text(place / "verify.json", report_json(report.json()) + "\n", "--reports")
    write_text(place / "junit.xml", junit(report), "--reports")
    write_text(place / "verify.sarif", sarif(report), "--reports")
