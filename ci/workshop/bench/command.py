"""``python ci/workshop bench``: what calls, training steps and the harness cost the host."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hyper_parallel.cli.arguments import add_device, int_range
from hyper_parallel.cli.output import can_be_written, print_result
from hyper_parallel.cli.progress import Progress
from hyper_parallel.cli.verify_model import platforms
from hyper_parallel.platform.select import FRAMEWORKS, use_platform
from hyper_parallel.verify.report import report_json
from hyper_parallel.verify.report_files import write_text
from workshop.bench.baseline import BAND, earlier_ratios, held_to
from workshop.bench.harness_timings import Timing, figures, recorded, warm_start
from workshop.bench.planning_timings import planning_figures
from workshop.bench.training_speed import WORLDS, training_rows
from workshop.bench.turns import BenchmarkRow, in_tenths

__all__ = ["add_parser", "run"]

_MOST_ROUNDS = 7
_MOST_REPEATS = 1_000_000
_MOST_FUNCTIONS = 30


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    text = "time operations next to PyTorch's DTensor or plain MindSpore, or the commands of the harness"
    subparser = commands.add_parser("bench", help=text, description=text)
    subparser.add_argument(
        "--repeats",
        type=int_range(1, _MOST_REPEATS),
        default=1000,
        help="calls per measurement (default: 1000, which takes about 40 s)",
    )
    subparser.add_argument(
        "--platform",
        choices=FRAMEWORKS,
        help="framework of the operations (default: torch; with --harness, those installed)",
    )
    subparser.add_argument(
        "--harness", action="store_true", help="time the harness instead, which takes about 5 minutes on two cores"
    )
    subparser.add_argument(
        "--training",
        action="store_true",
        help="time training steps and the save of 1 GiB over processes of PyTorch instead, which takes about 3 minutes",
    )
    subparser.add_argument(
        "--profile",
        metavar="NAME",
        help="list the functions that take the time of one row's call instead; rows are, for example, "
        "'linear' and 'partial to shard(1), 8 ranks'",
    )
    add_device(subparser, "device of the tensors; the time of the host is measured on every device")
    subparser.add_argument("--report", metavar="FILE", help="also write the measurements as JSON, for `coverage html`")
    subparser.add_argument(
        "--baseline",
        metavar="FILE",
        type=Path,
        help=f"report of an earlier run: allow each ratio {BAND} times its earlier value, instead of its budget",
    )
    subparser.add_argument("--json", action="store_true", help="print the rows as JSON")
    subparser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the measurements; return 0 if each is within its budget.

    Raises:
        ValueError: the report cannot be written, no row has the name of ``--profile``, or options contradict each
            other.
        RuntimeError: ranks of ``--training`` failed.
        UnsupportedOnBackend: the framework sees no such device.
    """
    can_be_written("--report", arguments.report)
    _check(arguments)
    if arguments.profile is not None:
        return _profile(arguments)
    earlier = {} if arguments.baseline is None else earlier_ratios(arguments.baseline)
    if arguments.training:
        rows = [_rated(row) for row in _training_rows()]
    elif arguments.harness:
        rows = [_timing(timing) for timing in _harness_timings(arguments.platform)]
    else:
        rows = [_rated(row) for row in _measured_rows(arguments)]
        if arguments.platform == "mindspore" and arguments.device == "cpu":  # whose ranks are warm there
            rows.append(_timing(warm_start().timed()))
    if earlier:
        rows = held_to(rows, earlier, arguments.baseline)
    if arguments.report is not None:
        write_text(arguments.report, report_json(rows), "--report")
    if arguments.json:
        print_result(report_json(rows))
    else:
        lines = _timing_lines if arguments.harness else _training_lines if arguments.training else _lines
        print("\n".join(lines(rows)))
    return 0 if all(row["ok"] for row in rows) else 1


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that contradict each other."""
    msg = ""
    if arguments.harness and arguments.training:
        msg = "--harness times commands, and --training training steps; leave out one of them"
    elif arguments.baseline is not None and (arguments.harness or arguments.profile is not None):
        option = "--harness" if arguments.harness else "--profile"
        msg = f"--baseline compares ratios, and {option} measures none; leave out one of them"
    elif arguments.profile is not None and (arguments.harness or arguments.training):
        what = "--harness times commands" if arguments.harness else "--training times steps"
        msg = f"--profile measures the call of one row, and {what}; leave out one of them"
    elif arguments.device != "cpu" and (arguments.harness or arguments.training):
        what = "--harness times the commands" if arguments.harness else "--training times the steps"
        msg = f"{what} on cpu; leave out --device, or {what.split()[0]}"
    elif arguments.training and arguments.platform == "mindspore":
        msg = "--training compares with PyTorch's own parallelism, and MindSpore has none; leave out --platform"
    if msg:
        raise ValueError(msg)


def _profile(arguments: argparse.Namespace) -> int:
    """Print who takes the time of one row's call."""
    (profile,) = _measured_rows(arguments, arguments.profile)
    document = {"profile": asdict(profile)}
    if arguments.report is not None:
        write_text(arguments.report, report_json(document), "--report")
    print_result(report_json(document) if arguments.json else "\n".join(_profile_lines(document["profile"])))
    return 0


def _profile_lines(profile: dict[str, Any]) -> Iterator[str]:
    yield "{name}: {microseconds:.1f} µs per call, {profiled:.1f} µs while it is profiled".format(**profile)
    yield f"{'own µs':>9}{'total µs':>10}{'calls':>8}  function"
    for function in profile["functions"][:_MOST_FUNCTIONS]:
        yield "{own:9.2f}{total:10.2f}{calls:8.2f}  {function}".format(**function)
    left = profile["functions"][_MOST_FUNCTIONS:]
    if left:
        yield f"{sum(function['own'] for function in left):9.2f}{'':18}  {len(left)} others"


def _lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The table of a framework's operations; one without a DTensor of its own has no column of it, and more rows."""
    if rows[0]["peer"] is not None:
        yield from _peer_lines(rows)
        return
    yield f"{'':34}{'plain µs':>10}{'ours µs':>10}{'ratio':>8}{'budget':>8}"
    for row in rows:
        if "ratio" in row:
            yield "{name:34}{plain:10.1f}{ours:10.1f}{ratio:8.2f}{budget:8.2f}".format(**row)
        else:
            yield "{name:34}{seconds:18.2f} s{budget:14.2f} s  {problem}".format(**row).rstrip()
    yield "ratio: ours / plain; for the training step plain is the same written by hand"


def _peer_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'':48}{'plain µs':>10}{'peer µs':>10}{'ours µs':>10}{'ratio':>8}{'budget':>8}"
    for row in rows:
        peer = in_tenths(row["peer"])
        yield "{name:48}{plain:10.1f}{peer:>10}{ours:10.1f}{ratio:8.2f}{budget:8.2f}".format(**{**row, "peer": peer})
    yield "ratio: our overhead over the plain operation / PyTorch DTensor's"
    yield "for the block, optimizers and redistributions: plain is the same written by hand, ratio is ours / plain"


def _timing_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'':48}{'seconds':>10}{'budget':>10}"
    for row in rows:
        yield "{name:48}{seconds:10.2f}{budget:10.1f}  {problem}".format(**row).rstrip()


def _training_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'':40}{'PyTorch ms':>11}{'ours ms':>9}{'ratio':>7}{'budget':>8}"
    for row in rows:
        theirs, ours = row["plain"] / 1000, row["ours"] / 1000
        yield f"{row['name']:40}{theirs:11.1f}{ours:9.1f}{row['ratio']:7.2f}{row['budget']:8.2f}"
    yield "ratio: ours / PyTorch's own parallelism; for the save, to one file that one process writes with safetensors"


def _rated(row: BenchmarkRow) -> dict[str, Any]:
    return {**asdict(row), "ratio": row.ratio, "ok": row.ratio <= row.budget}


def _timing(timing: Timing) -> dict[str, Any]:
    return {**asdict(timing), "ok": timing.ok}


def _measured_rows(arguments: argparse.Namespace, profiled: str | None = None) -> list[Any]:
    name = arguments.platform or "torch"
    platforms(name, arguments.device)
    with use_platform(name):  # also where the other framework was used before in this process
        operators = importlib.import_module(f"workshop.bench.{name}.operators")
        if profiled is not None:
            return [operators.profile(profiled, arguments.repeats, arguments.device)]
        rows = operators.run(arguments.repeats, min(arguments.repeats, _MOST_ROUNDS), arguments.device)
        return _with_progress(operators.ROWS, rows)


def _training_rows() -> list[BenchmarkRow]:
    """Measure training steps, world by world."""
    platforms("torch")
    progress, rows = Progress(len(WORLDS)), list[BenchmarkRow]()
    for ranks in WORLDS:
        with progress.running(f"steps on {ranks} ranks"):
            rows += training_rows(ranks)
    return rows


def _harness_timings(platform: str | None) -> list[Timing]:
    """Time every part of the harness on the installed frameworks, or one of them."""
    names = platforms(platform)
    jobs = [*figures(names), *(planning_figures() if "torch" in names else ())]
    progress, timed = Progress(len(jobs)), list[Timing]()
    for figure in jobs:
        with progress.running(figure.name):
            timed.append(figure.timed())
    return [*timed, *recorded(Path("reports"))]


def _with_progress(count: int, rows: Iterable[Any]) -> list[Any]:
    progress, finished = Progress(count), []
    progress.start("measuring")
    for row in rows:
        finished.append(row)
        progress.finish()
        progress.start(f"after {row.name}")
    progress.clear()
    return finished
