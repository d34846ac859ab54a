"""``hyper-parallel coverage``: combine the data of all processes, hold it against the floors, publish."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from hyper_parallel.cli.progress import Progress

__all__ = ["add_parser"]

_DESCRIPTION = """\
Floors are kept in pyproject.toml, [tool.hyper_parallel.coverage]; data and reports lie in coverage_reports/.
`erase ENV` goes before the tests of an environment, `gate ENV` after them; `combine` and `html` after all.

Exit status: 0 if everything that was checked held, 1 if not, 2 for invalid input."""


_CALLS = 4  # of the coverage tool: combine, html, xml and json take seconds each


def add_parser(commands: Any) -> None:
    """Declare the subcommands."""
    top = commands.add_parser(
        "coverage",
        help="combine, gate and publish coverage",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = top.add_subparsers(required=True, metavar="WHAT")
    _one(kinds, "erase", _erase, "drop data and reports of earlier runs of an environment").add_argument("env")
    gate = _one(kinds, "gate", _gate, "combine one environment, write its reports, hold it against every gate")
    gate.add_argument("env")
    combine = _one(kinds, "combine", _combine, "one report over environments, held against the floors of every file")
    combine.add_argument("env", nargs="*", help="default: those that pyproject.toml names, or all whose data is there")
    for one in (gate, combine):
        one.add_argument("--update-baseline", action="store_true", help="raise the ratchet to this run, if it held")
        one.add_argument("--lower-baseline", action="store_true", help="set it to this run, whatever that is")
    _one(kinds, "html", _html, "write coverage_reports/index.html and what it links").add_argument(
        "env", nargs="*", help="were to run"
    )


def _one(kinds: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    one: argparse.ArgumentParser = kinds.add_parser(name, help=text, description=text)
    one.add_argument("--root", default=".", metavar="FOLDER", help="of the project (default: here)")
    one.add_argument("--json", action="store_true", help="the outcome as JSON")
    one.set_defaults(run=run)
    return one


def _open(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Store and settings of the project."""
    if importlib.util.find_spec("coverage") is None:
        msg = "the coverage tool is not installed: pip install 'hyper-parallel[test]'"
        raise ImportError(msg)
    from hyper_parallel.verify.coverage.settings import read_settings
    from hyper_parallel.verify.coverage.store import Store

    root = Path(arguments.root).resolve()
    progress = Progress(_CALLS)
    arguments.progress = progress
    return Store(root, progress.next), read_settings(root / "pyproject.toml")


def _erase(arguments: argparse.Namespace) -> int:
    store, _ = _open(arguments)
    store.erase(arguments.env)
    if arguments.json:
        print(json.dumps({"ok": True, "env": arguments.env}))
    return 0


def _gate(arguments: argparse.Namespace) -> int:
    from hyper_parallel.verify.coverage.verdict import gate

    store, settings = _open(arguments)
    return _raise(arguments, store, settings, gate(store, settings, arguments.env))


def _combine(arguments: argparse.Namespace) -> int:
    from hyper_parallel.verify.coverage.verdict import gate_combined

    store, settings = _open(arguments)
    environments = arguments.env or settings.combined or store.environments()
    report = store.combine(environments)
    return _raise(arguments, store, settings, gate_combined(store, settings, environments, report))


def _raise(arguments: argparse.Namespace, store: Any, settings: Any, verdict: Any) -> int:
    """Tell the verdict, and raise the ratchet to it where that was asked for; the exit status."""
    from hyper_parallel.verify.coverage.baseline import write_baseline

    status = _report_error(arguments, verdict)
    if arguments.lower_baseline or (arguments.update_baseline and verdict.ok):
        for line in write_baseline(store, settings, verdict.name, lower=arguments.lower_baseline):
            print(line, file=sys.stderr)
        print(f"{settings.baseline}: {verdict.name} is as this run", file=sys.stderr)
    return status


def _html(arguments: argparse.Namespace) -> int:
    from hyper_parallel.verify.coverage.index import write_index, write_others

    store, settings = _open(arguments)
    write_others(store)
    path = write_index(store, settings, tuple(arguments.env))
    print(json.dumps({"ok": True, "path": str(path)}) if arguments.json else path)
    return 0


def _report_error(arguments: argparse.Namespace, verdict: Any) -> int:
    arguments.progress.clear()
    if arguments.json:
        print(json.dumps(verdict.json(), indent=2))
    else:
        print(verdict.text(), file=sys.stdout if verdict.ok else sys.stderr)
    return 0 if verdict.ok else 1
