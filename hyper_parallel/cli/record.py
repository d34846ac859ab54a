"""``hyper-parallel record``: record the values of every rank during training."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from hyper_parallel.cli.arguments import MOST_GIB, MOST_STEPS, float_range, int_range
from hyper_parallel.cli.output import print_result
from hyper_parallel.platform.select import FRAMEWORKS
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.report import report_json

__all__ = ["add_parser", "run"]


_DESCRIPTION = """\
Run a training program unchanged, and write fingerprints of what each rank computes to a file per rank in FOLDER:
norm, sum, extremes, eight projections and four elements of inputs, outputs of modules, losses, gradients and
parameters. If a run is killed, what was written until then remains. `hyper-parallel verify diff FOLDER FOLDER` and
`hyper-parallel verify diff FOLDER train.py` compare recordings.

COMMAND starts python, torchrun, msrun or accelerate launch with a script or a module of PyTorch or MindSpore. If
another launcher starts the ranks, let it start this command on each: srun hyper-parallel record -o FOLDER -- python
train.py.

Exit status: that of the command; 2 for invalid input, 130 after Ctrl-C."""

_EXAMPLES = (
    "hyper-parallel record -o run1 -- torchrun --nproc-per-node 8 train.py --lr 0.1",
    "hyper-parallel record -o run1 --steps 20 --whole 'lm_head*' -- python train.py",
)


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    subparser = commands.add_parser(
        "record",
        help="record what every rank of a training run computes",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/compare-two-runs.md",
    )
    subparser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="folder of the recording")
    subparser.add_argument(
        "--steps",
        type=int_range(1, MOST_STEPS),
        metavar="N",
        help="record nothing after the first N optimizer steps; the run goes on",
    )
    subparser.add_argument(
        "--every", type=int_range(1, MOST_STEPS), default=1, metavar="N",
        help="record the first step and each Nth after it (default: 1)",
    )  # fmt: skip
    subparser.add_argument(
        "--whole", action="append", default=[], metavar="PATTERN",
        help="also record all elements of tensors whose names match; repeatable",
    )  # fmt: skip
    subparser.add_argument(
        "--limit", type=float_range(MOST_GIB), default=1.0, metavar="GIB",
        help="maximum size of the file of a rank (default: 1)",
    )  # fmt: skip
    subparser.add_argument(
        "--platform", choices=FRAMEWORKS, help="framework of the program (default: the one that its file imports)"
    )
    subparser.add_argument(
        "--json", action="store_true", help="print the result as JSON on stdout, and the program's output on stderr"
    )
    subparser.usage = "hyper-parallel record -o FOLDER [options] -- COMMAND"
    subparser.leftover = "; give the command after --"
    subparser.set_defaults(run=run, arguments=())


def run(arguments: argparse.Namespace) -> int:
    """Run the user's command with recording on; return the exit status of that command."""
    from hyper_parallel.verify.engine.wording import count_words
    from hyper_parallel.verify.program.launch_line import with_program
    from hyper_parallel.verify.recording.file import is_blank

    if not arguments.arguments:
        msg = "there is no command to record; give it after --: `hyper-parallel record -o FOLDER -- python train.py`"
        raise InputError(msg)
    folder = Path(arguments.output).absolute()
    if not arguments.output or (folder.exists() and not folder.is_dir()):
        msg = f"-o {arguments.output or repr('')} is not a folder"
        raise InputError(msg)
    settings = {
        "folder": str(folder),
        "steps": arguments.steps,
        "every": arguments.every,
        "whole": arguments.whole,
        "platform": arguments.platform,
        "limit": max(1 << 16, int(arguments.limit * (1 << 30))),
    }
    module = shlex.join(["hyper_parallel.verify.recording", json.dumps(settings)])
    command = with_program(arguments.arguments, module)
    earlier = {name for name in _files(folder) if not is_blank(folder / name)}
    try:
        done = subprocess.run(command, check=False)  # noqa: S603 - the user's own command, named to be run
    except OSError as error:
        msg = f"{command[0]} cannot be started: {error.strerror}"
        raise InputError(msg) from None
    status = done.returncode if done.returncode >= 0 else 128 - done.returncode
    new = sorted(_files(folder) - earlier)
    blank = [name for name in new if is_blank(folder / name)]
    files = [name for name in new if name not in blank]
    text = f"{arguments.output}: {count_words('rank', len(files))} recorded" if files else "nothing was recorded"
    if blank:
        text += f"; {', '.join(blank)}: the program trained nothing inside the recording, or failed before it did"
    ok = not status and bool(files) and not blank
    if arguments.json:
        print_result(report_json({"ok": ok, "status": status, "files": files}))
    else:
        print(text, file=sys.stderr)
    return status or int(not ok)


def _files(folder: Path) -> set[str]:
    """Return the names of the ranks' files in a folder, which need not exist."""
    return {path.name for path in folder.glob("rank-*.jsonl")}
