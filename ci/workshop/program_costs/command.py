"""``python ci/workshop cost``: what `verify program` takes for a GPT, compared with the same script under torchrun."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from hyper_parallel.cli.output import print_result
from hyper_parallel.cli.progress import Progress
from hyper_parallel.verify.report import report_json
from workshop.program_costs.measurement import Cost, cost_of
from workshop.program_costs.stacks import STACKS

__all__ = ["add_parser", "run"]

SCRIPT = Path(__file__).parents[1] / "bench" / "torch" / "gpt.py"
SIZES = ("0.1M", "1M", "11M", "124M")
_MODES = ("ddp", "fsdp")
_GIGABYTE = 1e9
_LINE = "{:>6} {:>5} {:>6} {:>6}  {:>9} {:>9} {:>6}  {:>8} {:>8}  {:>7} {:>7}  {}"


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    text = "measure verify program on a GPT of several sizes, compared with the same script under torchrun"
    subparser = commands.add_parser("cost", help=text, description=text)
    subparser.add_argument(
        "--size", default="0.1M,11M", help=f"numbers of parameters: {', '.join(SIZES)} (default: 0.1M,11M)"
    )
    subparser.add_argument("--mode", default="ddp,fsdp", help="ddp or fsdp (default: both)")
    subparser.add_argument("--ranks", default="4", help="numbers of ranks, such as 4,64 (default: 4)")
    subparser.add_argument("--steps", default="3", help="numbers of optimizer steps, such as 1,10 (default: 3)")
    stacks = "run programs of training stacks instead, such as accelerate_ddp,megatron_gpt, or all that are installed"
    subparser.add_argument("--stacks", default="", metavar="all|NAMES", help=stacks)
    subparser.add_argument("--json", action="store_true", help="print the rows as JSON")
    subparser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure every combination; return 0 if all commands succeeded."""
    cases = _of_stacks(arguments.stacks) if arguments.stacks else _of_sizes(arguments)
    progress, rows = Progress(2 * len(cases)), []
    if not arguments.json:
        print(_LINE.format(
            "stack" if arguments.stacks else "size", "mode", "ranks", "steps", "CPU s", "torchrun", "ratio", "GB",
            "torchrun", "wall s", "torchrun", "",
        ).rstrip())  # fmt: skip
    for case in cases:
        title = f"{case.size} {case.mode} on {case.ranks} ranks".replace("  ", " ")
        with progress.running(f"{title}: torchrun"):
            peer = _measured([*_torchrun(case.ranks), *case.plain])
        with progress.running(f"{title}: verify program"):
            ours = _measured([*_verify(case.ranks), *case.verified])
        rows.append({
            "size": case.size, "mode": case.mode, "ranks": case.ranks, "steps": case.steps,
            "ours": _facts(ours), "torchrun": _facts(peer), "ok": ours.status == peer.status == 0,
        })  # fmt: skip
        if not arguments.json:
            print(_line(rows[-1]), flush=True)
    ok = all(row["ok"] for row in rows)
    if arguments.json:
        print_result(report_json({"ok": ok, "rows": rows}))
    return 0 if ok else 1


class _Case(NamedTuple):
    """A row: what torchrun and ``verify program`` get after their own options."""

    size: str
    mode: str
    ranks: int
    steps: int
    plain: list[str]
    verified: list[str]


def _of_sizes(arguments: argparse.Namespace) -> list[_Case]:
    """Return the GPT in every combination of the options."""
    cases = []
    for size in _chosen(arguments.size, SIZES, "--size"):
        for mode in _chosen(arguments.mode, _MODES, "--mode"):
            for ranks in _numbers(arguments.ranks, "--ranks", 2):
                for steps in _numbers(arguments.steps, "--steps", 1):
                    options = ["--size", size, "--mode", mode, "--steps", str(steps)]
                    plain = [str(SCRIPT), *options]
                    cases.append(_Case(size, mode, ranks, steps, plain, [str(SCRIPT), "--", *options]))
    return cases


def _of_stacks(names: str) -> list[_Case]:
    """Return programs of stacks; where one needs a device, the CPU stands in for it under torchrun, too."""
    every = [name for name, stack in STACKS.items() if not stack.missing()] if names == "all" else list(STACKS)
    cases = []
    for name in every if names == "all" else _chosen(names, tuple(every), "--stacks"):
        stack = STACKS[name]
        script = plain = [str(stack.path(name)), *stack.arguments]
        pretend: list[str] = []
        if stack.pretend:
            pretend = ["--pretend", stack.pretend]
            plain = [str(Path(__file__).parent / "pretended_script.py"), stack.pretend, *script]
        cases.append(_Case(name, "", stack.ranks, 3, plain, [script[0], *pretend, "--", *script[1:]]))
    return cases


def _torchrun(ranks: int) -> list[str]:
    """Return the start of torchrun's command; ranks share the processors, as simulated ones do."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def _verify(ranks: int) -> list[str]:
    return [sys.executable, "-m", "hyper_parallel", "verify", "program", "--world-size", str(ranks)]


def _measured(command: list[str]) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        return cost_of(command, Path(folder))


def _facts(cost: Cost) -> dict[str, Any]:
    facts = asdict(cost)
    return facts if cost.status else {**facts, "output": ""}


def _line(row: dict[str, Any]) -> str:
    ours, peer = row["ours"], row["torchrun"]
    failed = next((cost for cost in (ours, peer) if cost["status"]), None)
    last = [] if failed is None else failed["output"].strip().splitlines()[-1:]
    times = [ours["processor"], peer["processor"], ours["processor"] / max(peer["processor"], 1e-3)]
    memory = [cost["memory"] / _GIGABYTE for cost in (ours, peer)]
    numbers = [f"{value:.{digits}f}" for value, digits in zip(
        [*times, *memory, ours["seconds"], peer["seconds"]], (1, 1, 1, 2, 2, 1, 1), strict=True
    )]  # fmt: skip
    failure = "" if failed is None else f"status {failed['status']}: {''.join(last)}"
    return _LINE.format(row["size"], row["mode"], row["ranks"], row["steps"], *numbers, failure).rstrip()


def _chosen(text: str, known: tuple[str, ...], option: str) -> list[str]:
    chosen = text.split(",")
    unknown = [word for word in chosen if word not in known]
    if unknown:
        msg = f"{option} {unknown[0]!r} is not one of {', '.join(known)}"
        raise ValueError(msg)
    return chosen


def _numbers(text: str, option: str, least: int) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < least:
        msg = f"{option} {text!r} is not a list of numbers of at least {least}, such as 4,64"
        raise ValueError(msg)
    return numbers
