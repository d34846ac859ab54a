"""``hyper-parallel verify ops``: check operators in all placements against one device."""

from __future__ import annotations

import argparse
import ast
import math
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel._text import near_hint
from hyper_parallel.cli.arguments import add_device, add_reports, add_seed
from hyper_parallel.cli.output import can_be_written, coloured, print_report, print_result, write_outputs
from hyper_parallel.cli.progress import Progress
from hyper_parallel.cli.verify_model import platforms
from hyper_parallel.platform.select import FRAMEWORKS, platform_named, require_framework
from hyper_parallel.verify.report import report_json, write_report

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.ops.report import OperatorReport, SweepReport
    from hyper_parallel.verify.ops.selection import Effort

__all__ = ["MOST_RANKS", "add_parser", "mesh_sizes", "meshes_of", "operators", "run"]

_SECONDS = 540.0
"""Wall time in seconds that is divided among operators.

A full sweep takes about ten minutes, because every operator is checked with its first sizes even after that time."""

MOST_RANKS = 16
"""Maximum number of ranks of a mesh for rules and redistributions: more ranks mean more placements to check."""

_DIGITS = 4

_NOT_AUDITED = ("FILE", "--platform", "--mesh", "--quick", "--html", "--seed", "--device")
"""Options that ``--target`` does not use."""

_DESCRIPTION = """\
Run every operator on shards, as its sharding rule says, and compare the result with the operator on one device:
forward, and backward with random cotangents, in all placements that the rule claims, with uneven and empty shards and
partial values.

FILE is a Python file that registers your operators and declares samples of them with
hyper_parallel.verify.operator_sample(function, real("ab"), ...). Without FILE, the library's own rules are checked.

One check is one operator with one sample, one choice of sizes, one placement of each operand and one mesh: outputs
and the gradient of every differentiable input, on every rank. Most checks run on plain per-rank tensors in one
process; every rule also runs on DTensors in the simulated cluster. Placements that are rejected with a clear error
are counted separately.

Exit status: 0 if everything was checked and passed, 1 if not, 2 for invalid input, 130 after Ctrl-C."""

_EXAMPLES = (
    "hyper-parallel verify ops --quick --html operators.html",
    "hyper-parallel verify ops my_operators.py --mesh 3,2x3",
)


def add_parser(subcommands: Any) -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "ops",
        help="check sharding rules, forward and backward, in every placement",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/adding-an-operator.md",
    )
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="Python file with your operators (default: the library's operators)"
    )
    parser.add_argument(
        "--list", action="store_true", help="only list the operators of each framework, and those that it lacks"
    )
    parser.add_argument("--op", nargs="+", metavar="NAME", help="check only these operators")
    parser.add_argument(
        "--platform",
        metavar="torch,mindspore",
        help="frameworks to check (default: the one that FILE imports, or those installed)",
    )
    add_device(parser, "device of the reference and of all ranks")
    parser.add_argument("--mesh", metavar="3,2x3", help="check only on these meshes (default: 1,2,3,4,2x2,2x3,3x2)")
    parser.add_argument("--quick", action="store_true", help="check fewer sizes and meshes, in a minute or two")
    parser.add_argument(
        "--target", metavar="torch-dtensor", help="check PyTorch's own DTensor instead, on simulated ranks"
    )
    add_seed(parser, "all values")
    add_reports(parser, "the matrix of operators")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the sweep; return 0 if all operators passed."""
    if arguments.list:
        return _list(arguments)
    if arguments.target is not None:
        return _audit(arguments)
    from hyper_parallel.verify.ops.report import SweepReport

    can_be_written("--report", arguments.report)
    can_be_written("--html", arguments.html)
    tasks, planned = _tasks(arguments)
    report = SweepReport(planned=planned, mode="quick" if arguments.quick else "full", device=arguments.device)
    progress, started = Progress(sum(len(task["ops"]) for task in tasks)), time.monotonic()
    try:
        for operator_report in _results(tasks, progress):
            _add(report, operator_report)
            progress.finish()
            if not operator_report.holds and not arguments.json:
                print(coloured(operator_report.text()), end="\n\n", flush=True)
    except KeyboardInterrupt:
        progress.clear()
        report.interrupted = "interrupted; the rest was not verified"
        report.seconds = time.monotonic() - started
        write_outputs(report, arguments)
        raise KeyboardInterrupt(report.text()) from None
    report.seconds = time.monotonic() - started
    if arguments.file is not None:
        report.planned = max(len(report.operators), 1)  # unknown before the file has run
        if not report.operators:
            report.interrupted = f"{arguments.file} declares nothing to check: operator_sample(function, real('ab'))"
    write_outputs(report, arguments)
    print_report(report, as_json=arguments.json, seed=arguments.seed)
    return report.status


def _list(arguments: argparse.Namespace) -> int:
    """Print the operators that each framework has and lacks; return 0."""
    from hyper_parallel.core.shard.rule import Rule, find_rule
    from hyper_parallel.platform.select import use_platform

    names = [name for name in operators(arguments.op) if isinstance(find_rule(name), Rule)]
    lists = []
    for framework in platforms(arguments.platform):
        with use_platform(framework) as platform:
            lacking = [name for name in names if not _has_kernel(platform, name)]
        has = [name for name in names if name not in lacking]
        lists.append({"platform": framework, "operators": has, "lacking": lacking})
    if arguments.json:
        print_result(report_json({"ok": True, "frameworks": lists}))
        return 0
    for row in lists:
        print(f"{row['platform']}: {len(row['operators'])} operators")
        print(textwrap.fill(", ".join(row["operators"]), initial_indent="  ", subsequent_indent="  "))
        if row["lacking"]:
            print(f"{row['platform']} lacks {len(row['lacking'])} operators that have a rule")
            print(textwrap.fill(", ".join(row["lacking"]), initial_indent="  ", subsequent_indent="  "))
    return 0


def _has_kernel(platform: Platform, name: str) -> bool:
    try:
        platform.local_op(name)
    except (KeyError, NotImplementedError):
        return False
    return True


def _audit(arguments: argparse.Namespace) -> int:
    """Audit another library's distributed tensors; return 0 if every operator was exercised and nothing was wrong."""
    from hyper_parallel.verify.ops.audit import TARGETS, OperatorAudit, confirm, summary
    from hyper_parallel.verify.ops.tasks import audit_tasks
    from hyper_parallel.verify.ops.worker_pool import run_tasks

    if arguments.target not in TARGETS:
        msg = f"--target {arguments.target!r} is not one of {', '.join(TARGETS)}"
        raise ValueError(msg)
    options = {name: getattr(arguments, name.strip("-").lower()) for name in _NOT_AUDITED}
    if ignored := [name for name, value in options.items() if value and (name, value) != ("--device", "cpu")]:
        msg = f"--target cannot be combined with {', '.join(ignored)}, only with --op, --json and --report"
        raise ValueError(msg)
    can_be_written("--report", arguments.report)
    framework = TARGETS[arguments.target].framework
    require_framework(framework)
    ops = operators(arguments.op)
    audits: list[OperatorAudit] = []
    progress = Progress(len(ops))
    for audit in run_tasks(
        OperatorAudit, audit_tasks(arguments.target, framework, ops), lambda _, op: progress.start(op)
    ):
        audits.append(audit)
        progress.finish()
    progress.clear()
    audits.sort(key=lambda audit: ops.index(audit.op))
    confirm(arguments.target, audits)
    holds = all(audit.holds for audit in audits)
    document = {"target": arguments.target, "ok": holds, "operators": [audit.json() for audit in audits]}
    if arguments.report is not None:
        text = "\n".join([*(audit.text() for audit in audits), summary(arguments.target, audits)])
        write_report(arguments.report, lambda: document, lambda: text)
    if arguments.json:
        print_result(report_json(document))
    else:
        shown = [audit.text() for audit in audits if not audit.holds or arguments.op]
        print("\n".join([*shown, summary(arguments.target, audits)]))
    return 0 if holds else 1


def _results(tasks: Sequence[dict[str, Any]], progress: Progress) -> Iterator[OperatorReport]:
    from hyper_parallel.verify.ops.report import OperatorReport
    from hyper_parallel.verify.ops.worker_pool import run_tasks

    def started(platform: str, op: str) -> None:
        progress.start(f"{op} on {platform}")

    for report in run_tasks(OperatorReport, tasks, started, seconds=_SECONDS):
        if not report.holds:
            platform_named(report.platform)  # raises if the framework cannot be imported
        yield report


def _add(report: SweepReport, addition: OperatorReport) -> None:
    """Add a report; the reports of an operator's two levels are merged."""
    for known in report.operators:
        if (known.op, known.platform) == (addition.op, addition.platform):
            known.merge(addition)
            return
    report.operators.append(addition)


# -- what to run -----------------------------------------------------------------------------------------------------


def _tasks(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Return the tasks, and the number of operators in them."""
    from hyper_parallel.verify.ops import tasks

    if arguments.file is not None:
        return _user_tasks(arguments)
    planned_tasks, planned = [], 0
    ops, frameworks = operators(arguments.op), platforms(arguments.platform, arguments.device)
    effort = _effort(arguments)
    for platform in frameworks:
        planned += len(ops)
        planned_tasks.extend(tasks.library_tasks(platform, ops, effort))
    return planned_tasks, planned


def operators(asked: Sequence[str] | None) -> list[str]:
    """Return the named rules, or all rules without names.

    Raises:
        ValueError: a name is unknown.
    """
    known = _known_operators()
    unknown = [name for name in asked or () if name not in known]
    if unknown:
        hint = near_hint(unknown[0].rpartition(".")[2].lower(), known)
        msg = f"--op: there is no operator {', '.join(map(repr, unknown))}{hint}"
        raise ValueError(msg)
    return list(dict.fromkeys(asked)) if asked else list(known)


def _known_operators() -> Sequence[str]:
    from hyper_parallel.core.shard import rules
    from hyper_parallel.core.shard.rule import rule_names

    rules.load()
    return rule_names()


def _effort(arguments: argparse.Namespace) -> Effort:
    from hyper_parallel.verify.ops.selection import QUICK, Effort

    effort = replace(QUICK if arguments.quick else Effort(), seed=arguments.seed, device=arguments.device)
    if arguments.mesh is None:
        return effort
    return replace(effort, meshes=meshes_of(arguments.mesh), public_meshes=None)


def meshes_of(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse the meshes of ``--mesh``, as in ``3,2x3``, without duplicates.

    Raises:
        ValueError: a text is not a mesh, or a mesh has too many ranks.
    """
    return tuple(dict.fromkeys(mesh_sizes(each) for each in text.split(",")))


def mesh_sizes(text: str) -> tuple[int, ...]:
    """Parse the sizes of a mesh, as in ``2x3``."""
    sizes = text.strip().split("x")
    if not all(size.isascii() and size.isdecimal() and int(size[:_DIGITS]) > 0 for size in sizes) or len(sizes) > 3:
        msg = f"--mesh {text!r} must look like 3 or 2x3, or like 3,2x3 for two meshes"
        raise ValueError(msg)
    if max(map(len, sizes)) > _DIGITS or math.prod(map(int, sizes)) > MOST_RANKS:
        msg = f"--mesh {text!r} has too many ranks; there can be at most {MOST_RANKS}"
        raise ValueError(msg)
    return tuple(map(int, sizes))


def _user_tasks(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    from hyper_parallel.verify.ops import tasks
    from hyper_parallel.verify.ops.selection import USER

    tree = _parsed(arguments.file)
    effort = replace(USER, seed=arguments.seed, device=arguments.device)
    if arguments.mesh is not None:
        effort = replace(effort, meshes=meshes_of(arguments.mesh))
    frameworks = platforms(arguments.platform or ",".join(_imported(tree)), arguments.device)
    file, ops = str(Path(arguments.file).resolve()), list(dict.fromkeys(arguments.op or ["*"]))
    return [tasks.task_of(framework, ops, effort, file=file) for framework in frameworks], 0


def _parsed(file: str) -> ast.Module:
    """Parse the file, which only child processes will run.

    Raises:
        ValueError: the file cannot be read, or is not Python source.
    """
    path = Path(file)
    if path.is_dir():
        problem = "is a folder; name a Python file"
    elif not path.exists():
        hint = f"; for the operator of this name, give --op {file}" if file in _known_operators() else ""
        problem = f"does not exist{hint}"
    elif path.suffix != ".py":
        problem = "is not a Python file: its name does not end in .py"
    else:
        try:
            return ast.parse(path.read_bytes(), path.name)
        except OSError as error:
            problem = f"cannot be read: {error.strerror or type(error).__name__}"
        except (SyntaxError, ValueError) as error:  # ValueError: bytes that are not text
            problem = f"is not Python: {error}"
    msg = f"FILE {file!r} {problem}"
    raise ValueError(msg)


def _imported(tree: ast.Module) -> list[str]:
    """Return the frameworks that the file imports, or all installed ones if it imports none."""
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            roots.add(node.module.split(".")[0])
    imported = [name for name in FRAMEWORKS if name in roots]
    for name in imported:
        require_framework(name)
    return imported or platforms(None)
