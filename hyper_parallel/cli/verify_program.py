"""``hyper-parallel verify program``: run a distributed program on one rank and on several, and compare them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.cli.arguments import (
    MOST_STEPS,
    add_declare,
    add_device,
    add_reports,
    add_run_limits,
    add_seed,
    declared_placements,
    int_range,
)
from hyper_parallel.cli.devices import require_settings
from hyper_parallel.cli.output import can_be_written, print_report, write_outputs
from hyper_parallel.cli.progress import Progress
from hyper_parallel.platform.select import FRAMEWORKS
from hyper_parallel.verify.input_error import InputError

__all__ = ["add_parser", "run"]

_RUNS = 5  # the reference, two perturbed repeats, the ranks, the comparison; more if a value exceeds its tolerance

_DESCRIPTION = """\
Run a training program unchanged on one rank and on several, as torchrun would start it, and compare everything that
it computes: outputs of modules, losses, masks, gradients when the optimizer sees them, gradient norms, optimizer
state, weights and buffers after each step. The report names the first difference with its rank, step and cause.

FILE is a script, or file.py:function, where the function takes no argument or a mesh. Arguments of the script follow
--. Without FILE, the command that starts training follows --: `-- torchrun --nproc-per-node 4 train.py --lr 0.1`,
`-- accelerate launch --num_processes 4 train.py`, or with --world-size `-- python -m package.train`. The program must
also run on one rank: it reads rank and world size from torch.distributed or the environment, and takes its part of one
global batch. The tolerance of each value is measured by repeating the run on one rank with inputs perturbed by one unit
in the last place.

Your files are not overwritten: each run has a private copy of the files that it writes, which is deleted at its end
(--keep-files keeps it). Writes by subprocesses and native code cannot be redirected, and are denied
where Linux has Landlock.

If torchrun starts this command (`torchrun --nproc-per-node N -m hyper_parallel verify program FILE`), its processes
are the ranks.

The report lists blind spots of the case: ranks with equal data hide a missing average, constant weights hide wrong
gradients of earlier layers, one step hides state that is stale in the second. The result is inconclusive if all ranks
do the same work or all gradients are zero. --harden runs a passing program again with fewer blind spots, without
changing it: constant initial weights become random, losses of ranks with equal data are weighted, outputs that the loss
adds up are multiplied by random numbers, symmetric inputs get noise, masks get unequal counts, inputs get other
strides, --steps 1 becomes 3, and more ranks make axes unequal and shards uneven. Blind spots that remain are listed.

Exit status: 0 if everything was compared and equal, 1 if not, 2 for invalid input, 3 if all values match but the
result is inconclusive, 130 after Ctrl-C."""

_EXAMPLES = (
    "hyper-parallel verify program train.py --world-size 4 -- --lr 0.1",
    "hyper-parallel verify program -- torchrun --nproc-per-node 4 train.py",
)


def add_parser(kinds: Any) -> None:
    """Declare the subcommand."""
    subparser = kinds.add_parser(
        "program",
        help="run a training program on one rank and on several, and compare them",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/verify-a-training-script.md",
    )
    subparser.leftover = "; give arguments of the script after --"
    subparser.add_argument(
        "file", nargs="?", metavar="FILE", help="script, or function in a script as in train.py:function"
    )
    subparser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, not FILE, as python -m does")
    subparser.add_argument("--world-size", type=int_range(1), metavar="N", help="number of ranks")
    subparser.add_argument(
        "--mesh", metavar="dp=2,tp=2",
        help="names and sizes of the axes, the last varies fastest; gives the number of ranks, and names axes for "
        "--declare and messages",
    )  # fmt: skip
    subparser.add_argument(
        "--single", metavar="FILE", help="script or function for the run on one rank (default: FILE)"
    )
    subparser.add_argument(
        "--single-args",
        metavar="ARGS",
        help="arguments of the script on one rank, as one string (default: those after --)",
    )
    subparser.add_argument(
        "--steps",
        type=int_range(1, MOST_STEPS),
        metavar="N",
        help="stop after N optimizer steps (default: run to the end)",
    )
    subparser.add_argument("--only", action="append", metavar="PATTERN", help="record only these outputs; repeatable")
    add_declare(subparser)
    subparser.add_argument(
        "--harden", action="store_true", help="if all values match, run again in a case that hides fewer errors"
    )
    subparser.add_argument(
        "--accumulate", metavar="ARGS",
        help="compare micro-batches with one large batch, which these arguments of the script select; auto finds them",
    )  # fmt: skip
    subparser.add_argument(
        "--logged", action=argparse.BooleanOptionalAction, default=None,
        help="fail on every logged number that differs, or compare none (default: fail only where the cause is known)",
    )  # fmt: skip
    subparser.add_argument(
        "--resume", metavar="ARGS",
        help="stop after some steps, restart with these arguments of the script, and compare with an uninterrupted run",
    )  # fmt: skip
    subparser.add_argument(
        "--resume-after",
        type=int_range(1, MOST_STEPS),
        metavar="N",
        help="steps before the stop of --resume (default: half of them)",
    )
    subparser.add_argument(
        "--resume-world",
        type=int_range(1),
        metavar="N",
        help="number of ranks after the stop of --resume (default: the same)",
    )
    subparser.add_argument(
        "--dtypes", action="append", metavar="KIND=DTYPE",
        help="fail where parameters, gradients, reductions, states or masters have another dtype, as in "
        "states=float32 or parameters:*.norm.*=float32; repeatable",
    )  # fmt: skip
    subparser.add_argument(
        "--data", action="store_true",
        help="fail where an epoch draws a sample twice or leaves one out, over all ranks (data loaders of PyTorch)",
    )  # fmt: skip
    subparser.add_argument(
        "--all", action="store_true", dest="all_relations",
        help="run all checks that need no arguments: --data, and --accumulate auto if the script accumulates",
    )  # fmt: skip
    subparser.add_argument(
        "--allow",
        action="append",
        metavar="KIND",
        help="accept a blind spot that makes the result inconclusive, such as equal-data; repeatable",
    )
    subparser.add_argument(
        "--launch", default="simulated", metavar="simulated|threads|processes",
        help="ranks in a simulated cluster, as threads of one process, or as processes over gloo (default: simulated)",
    )  # fmt: skip
    add_device(subparser, "device of the program: simulated ranks share one, processes have one each")
    subparser.add_argument(
        "--pretend", default="", metavar="cuda|npu", help="run a script that names this device on the CPU"
    )
    subparser.add_argument(
        "--platform", choices=FRAMEWORKS, help="framework of the program (default: the one that FILE imports)"
    )
    add_seed(subparser, "the perturbations that measure rounding")
    add_run_limits(subparser)
    subparser.add_argument(
        "--keep-files", default="", metavar="FOLDER", help="copy what the ranks write in the working folder to FOLDER"
    )
    subparser.add_argument(
        "--upcast", action=argparse.BooleanOptionalAction, default=None,
        help="verify again in a wider dtype (default: only for half precision, where an error could pass)",
    )  # fmt: skip
    add_reports(subparser, "differences, causes and everything that was compared")
    subparser.usage = "hyper-parallel verify program FILE (--world-size N | --mesh AXES) [options] [-- ARGS or COMMAND]"
    subparser.set_defaults(run=run, arguments=())


def run(arguments: argparse.Namespace) -> int:
    """Verify the program; return 0 if the values of all ranks equal the single-device run's."""
    from hyper_parallel.verify.program.run import verify_program
    from hyper_parallel.verify.program.torchrun import is_first_rank

    program, script, world_size = _program(arguments)
    can_be_written("--report", arguments.report)
    can_be_written("--html", arguments.html)
    if arguments.keep_files and Path(arguments.keep_files).is_file():
        msg = f"--keep-files {arguments.keep_files} is a file; name a folder"
        raise InputError(msg)
    require_settings(arguments.device)
    progress = Progress(2 * _RUNS if arguments.harden else _RUNS)
    try:
        with progress.ticking():
            report = verify_program(
                program,
                world_size,
                single=arguments.single,
                mesh=arguments.mesh,
                steps=arguments.steps,
                platform=arguments.platform,
                seed=arguments.seed,
                launch=arguments.launch,
                declared=declared_placements(arguments.declare or ()),
                args=script,
                single_args=_words("--single-args", arguments.single_args),
                accumulate=_words("--accumulate", arguments.accumulate),
                logged=arguments.logged,
                resume=_words("--resume", arguments.resume),
                resume_after=arguments.resume_after,
                resume_world=arguments.resume_world,
                dtypes=arguments.dtypes or (),
                data=arguments.data,
                all_relations=arguments.all_relations,
                only=arguments.only or (),
                timeout=arguments.timeout,
                harden=arguments.harden,
                allow=arguments.allow or (),
                upcast=arguments.upcast,
                scratch=arguments.scratch,
                budget=None if arguments.budget is None else int(arguments.budget * (1 << 30)),
                progress=progress.next,
                device=arguments.device,
                keep_files=arguments.keep_files,
                pretend=arguments.pretend,
            )
    except ValueError:
        if not is_first_rank():  # the first rank reports the error
            return 2
        raise
    finally:
        progress.clear()
    if not is_first_rank():
        return report.status
    write_outputs(report, arguments)
    print_report(report, as_json=arguments.json)
    return report.status


def _program(arguments: argparse.Namespace) -> tuple[str, Sequence[str], int | None]:
    """Return the program, its arguments and the world size, from FILE, a module, or a launcher's command after --.

    Raises:
        ValueError: none or two of the three are given, or the command does not state the number of ranks.
    """
    if arguments.file is not None and arguments.module is not None:
        msg = f"FILE {arguments.file!r} and -m {arguments.module!r}: both name a program; leave out one of them"
        raise ValueError(msg)
    if arguments.file is not None or arguments.module is not None:
        target = f"-m {arguments.module}" if arguments.file is None else arguments.file
        return target, arguments.arguments, arguments.world_size
    if not arguments.arguments:
        command = "-- torchrun --nproc-per-node 2 train.py"
        msg = f"no program is named; give FILE, -m MODULE, or the command that starts training, as in `{command}`"
        raise ValueError(msg)
    from hyper_parallel.verify.program.launch_line import read_launch_line
    from hyper_parallel.verify.program.torchrun import started_by_torchrun

    line = read_launch_line(arguments.arguments)
    size = arguments.world_size or (None if arguments.mesh else line.ranks)
    if size is None and not arguments.mesh and not started_by_torchrun():
        command = shlex.join(arguments.arguments)
        example = f"hyper-parallel verify program --world-size 2 -- {command}"
        msg = f"`{command}` does not give the number of ranks; give it with --world-size, as in `{example}`"
        raise ValueError(msg)
    return line.target, line.arguments, size


def _words(option: str, text: str | None) -> list[str] | None:
    """Split one string into arguments, like a shell."""
    try:
        return None if text is None else shlex.split(text)
    except ValueError as error:
        msg = f"{option} {text!r} cannot be split into arguments: {error}"
        raise ValueError(msg) from None
