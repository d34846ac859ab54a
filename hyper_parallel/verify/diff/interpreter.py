"""Runs a program with a different Python interpreter, whose process runs the ranks and stores their records.

This library need not be installed for that interpreter, only the library's dependencies. Requests and answers are files
of the scratch folder, to which no other process writes.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hyper_parallel.errors import RankFailedError
from hyper_parallel.transport.serialization import pack_back, unpack
from hyper_parallel.verify.engine.scratch import Scratch
from hyper_parallel.verify.frameworks.contract.case_changes import CaseChanges
from hyper_parallel.verify.frameworks.contract.record_log import Perturbation
from hyper_parallel.verify.frameworks.contract.records import Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.program import Program
from hyper_parallel.verify.program.worlds import World, run_world

__all__ = ["Interpreter", "main"]

_MODULE = "hyper_parallel.verify.diff.interpreter"
_STARTED = 60.0
"""Seconds that the process may take in addition to the timeout of the run."""

_LAST_LINES = 12


@dataclass
class Interpreter:
    """A Python interpreter other than the current one.

    Attributes:
        python: path of the interpreter, or its name on the search path.
        option: the option that named the interpreter, for messages.
        versions: versions of the interpreter and of its framework; empty before the first run.
    """

    python: str
    option: str
    versions: str = ""

    def __post_init__(self) -> None:
        """Find the interpreter.

        Raises:
            InputError: the interpreter does not exist.
        """
        if shutil.which(self.python) is None:
            msg = f"{self.option} {self.python}: there is no such program"
            raise InputError(msg)

    def run(
        self,
        program: Program,
        world: World,
        scratch: Scratch,
        perturbation: Perturbation | None = None,
        changes: Sequence[CaseChanges] | None = None,
    ) -> Run:
        """Run a program on its ranks; arrays are on disk.

        Args:
            program: a script.
            world: world of the ranks, with a sink in the scratch folder.
            scratch: folder of the requests and answers.
            perturbation: perturbation of a repeat; the measurements come back in the notes of the rank.
            changes: changes of the case, by rank.

        Raises:
            InputError: the interpreter cannot import the library, or the program cannot be run.
            RankFailedError: a rank fails.
        """
        python = shutil.which(self.python) or self.python
        folder = scratch.path / "interpreter"
        folder.mkdir(exist_ok=True)
        package = folder / "hyper_parallel"
        if not package.exists():
            package.symlink_to(Path(__file__).parents[2], target_is_directory=True)
        question, answer = folder / "question", folder / "answer"
        question.write_bytes(pack_back((program, world, perturbation, changes)))
        answer.unlink(missing_ok=True)
        found = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
        command = [python, "-m", _MODULE, str(question), str(answer)]
        try:
            done = subprocess.run(  # noqa: S603 - the interpreter that the user named, with a module of ours
                command, env={**os.environ, "PYTHONPATH": found}, capture_output=True, text=True,
                timeout=world.timeout + _STARTED, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            msg = f"{self.option} {self.python}: {error}"
            raise InputError(msg) from error
        if not answer.exists():
            said = "\n".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
            msg = f"{self.option} {self.python} ends with status {done.returncode} and without an answer\n{said}"
            raise InputError(msg)
        kind, self.versions, content = unpack(answer.read_bytes())
        if kind == "input":
            raise InputError(content)
        if kind == "failed":
            raise RankFailedError(content)
        run: Run = content
        return run


def main(question: str, answer: str) -> None:
    """Carry out a request, and write the answer.

    Args:
        question: path of the file with the program, the world, the perturbation and the changes.
        answer: path of the file to write: the kind of answer, versions, and the run or a message.
    """
    program, world, perturbation, changes = unpack(Path(question).read_bytes())
    result: tuple[str, Any]
    try:
        result = ("run", run_world(program, world, perturbation, changes))
    except RankFailedError as error:
        result = ("failed", str(error))
    except (ValueError, ImportError) as error:
        result = ("input", str(error))
    kind, content = result
    Path(answer).write_bytes(pack_back((kind, _versions(world.platform), content)))


def _versions(framework: str) -> str:
    """Return a description of the versions of this interpreter and of a framework."""
    words = f"Python {platform.python_version()}"
    try:
        return f"{words}, {framework} {metadata.version(framework)}"
    except metadata.PackageNotFoundError:
        return words


if __name__ == "__main__":
    main(*sys.argv[1:])
