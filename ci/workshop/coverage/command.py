"""``python ci/workshop coverage``: combine the data of all processes, check the floors, publish."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from hyper_parallel.cli.output import coloured, print_result
from hyper_parallel.cli.progress import Progress
from hyper_parallel.verify.report import report_json

__all__ = ["add_parser"]

_DESCRIPTION = """\
Check that coverage does not fall. The floors are in pyproject.toml, table [tool.hyper_parallel.coverage]; data and
reports are in coverage_reports/. Run `erase ENV` before the tests of an environment and `gate ENV` after them; run
`combine` and `html` after the tests of all environments.

Exit status: 0 if every check passed, 1 if not, 2 for invalid input."""


_PARTS = 2  # of the coverage tool's work: combine, and the reports; they take seconds each


def add_parser(commands: Any) -> None:
    """Declare the subcommands."""
    top = commands.add_parser(
        "coverage",
        help="combine, gate and publish coverage",
        description=_DESCRIPTION,
    )
    subcommands = top.add_subparsers(required=True, metavar="WHAT")
    _add_subcommand(
        subcommands, "erase", _erase, "delete data and reports of earlier runs of an environment"
    ).add_argument("env", help="tox environment, such as torch")
    gate = _add_subcommand(
        subcommands, "gate", _gate, "combine the data of an environment, write its reports, check all gates"
    )
    gate.add_argument("env", help="tox environment, such as torch")
    gate.set_defaults(arguments=())
    gate.epilog = "If pytest had arguments, so that not all tests ran, give them after `--`; then no floor is checked."
    combine = _add_subcommand(
        subcommands, "combine", _combine, "write one report of several environments, and check the floor of every file"
    )
    combine.add_argument(
        "env", nargs="*", help="environments (default: those that pyproject.toml names, or all that have data)"
    )
    combine.add_argument(
        "--versions",
        action="store_true",
        help="also combine environments of other versions that have data, such as py312-torch214",
    )
    for parser in (gate, combine):
        parser.add_argument(
            "--update-baseline", action="store_true", help="raise the baseline to this run if all gates pass"
        )
        parser.add_argument(
            "--lower-baseline", action="store_true", help="set the baseline to this run, also where coverage fell"
        )
    _add_subcommand(
        subcommands, "html", _html, "write coverage_reports/index.html and the pages that it links"
    ).add_argument(
        "env", nargs="*", help="further environments that should have run; those without a report are listed as not run"
    )


def _add_subcommand(subcommands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subcommands.add_parser(name, help=text, description=text)
    parser.add_argument(
        "--root", default=".", metavar="FOLDER", help="folder of the project (default: the current one)"
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(run=run)
    return parser


def _open(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Store and settings of the project."""
    if importlib.util.find_spec("coverage") is None:
        msg = "the coverage tool is not installed: pip install 'coverage[toml]>=7.15.3' 'diff-cover>=10'"
        raise ImportError(msg)
    from workshop.coverage.settings import read_settings
    from workshop.coverage.store import Store

    root = Path(arguments.root).resolve()
    progress = Progress(_PARTS)
    arguments.progress = progress
    return Store(root, progress.next), read_settings(root / "pyproject.toml")


def _erase(arguments: argparse.Namespace) -> int:
    store, _ = _open(arguments)
    store.erase(arguments.env)
    if arguments.json:
        print_result(report_json({"ok": True, "env": arguments.env}))
    return 0


def _gate(arguments: argparse.Namespace) -> int:
    from workshop.coverage.gate_result import gate

    store, settings = _open(arguments)
    return _finish(arguments, store, settings, gate(store, settings, arguments.env, arguments.arguments))


def _combine(arguments: argparse.Namespace) -> int:
    from workshop.coverage.gate_result import gate_combined

    store, settings = _open(arguments)
    environments = arguments.env or settings.combined or store.environments()
    if arguments.versions:
        environments = list(dict.fromkeys([*environments, *store.versions()]))
    failed = store.without_data(environments)
    measured = [name for name in environments if name not in failed] or environments
    report = store.combine(measured)
    return _finish(arguments, store, settings, gate_combined(store, settings, measured, report, failed))


def _finish(arguments: argparse.Namespace, store: Any, settings: Any, result: Any) -> int:
    """Print the result, renew the baseline if asked to, and return the exit status."""
    from workshop.coverage.baseline import write_baseline

    status = _report_error(arguments, result)
    if arguments.lower_baseline or (arguments.update_baseline and result.ok):
        for line in write_baseline(store, settings, result.name, lower=arguments.lower_baseline):
            print(line, file=sys.stderr)
        print(f"{settings.baseline}: {result.name} is as this run", file=sys.stderr)
    return status


def _html(arguments: argparse.Namespace) -> int:
    from workshop.coverage.index import write_index, write_others

    store, settings = _open(arguments)
    write_others(store)
    path = write_index(store, settings, tuple(arguments.env))
    print_result(report_json({"ok": True, "path": str(path)}) if arguments.json else str(path))
    return 0


def _report_error(arguments: argparse.Namespace, result: Any) -> int:
    arguments.progress.clear()
    if arguments.json:
        print_result(report_json(result.json()))
    else:
        stream = sys.stdout if result.ok else sys.stderr
        print(coloured(result.text(), stream), file=stream)
    return 0 if result.ok else 1
