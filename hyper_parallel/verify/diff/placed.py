"""One of the two runs, with its program and its world."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable
from dataclasses import replace

from hyper_parallel.platform.select import require_framework
from hyper_parallel.verify.diff.interpreter import Interpreter
from hyper_parallel.verify.diff.revision import at_revision
from hyper_parallel.verify.diff.side import DiffSide
from hyper_parallel.verify.engine.scratch import Scratch
from hyper_parallel.verify.engine.wording import count_words
from hyper_parallel.verify.frameworks.contract.record_log import RecordLimits
from hyper_parallel.verify.frameworks.contract.records import Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.framework import program_framework
from hyper_parallel.verify.program.program import Program, find_program
from hyper_parallel.verify.program.worlds import World, run_world
from hyper_parallel.verify.run_arguments import LAUNCHES

__all__ = ["PlacedSide", "check_side"]

_LAUNCHES = (*LAUNCHES, "threads")


class PlacedSide:
    """A side of the comparison with its program and its world."""

    def __init__(
        self, label: str, side: DiffSide, steps: int | None, timeout: float, stack: contextlib.ExitStack
    ) -> None:
        self.label, self.side = label, side
        program, option = find_program(side.target, side.args, label), f"--{label.lower()}-rev"
        self.program = stack.enter_context(at_revision(program, side.revision, option))
        self.interpreter = Interpreter(side.python, f"--{label.lower()}-python") if side.python else None
        if self.interpreter is not None and not self.program.is_script:
            msg = f"{self.interpreter.option} runs a script; {self.program.name} is a function"
            raise InputError(msg)
        platform = side.platform or program_framework(self.program)
        if self.interpreter is None:
            require_framework(platform)
        mesh = (("world", side.world_size),)
        self.world = World(side.world_size, platform, side.launch, mesh, RecordLimits(steps), timeout)

    @property
    def words(self) -> str:
        """Description of the program, its arguments, its framework and its ranks."""
        revision = f" of {self.side.revision}" if self.side.revision else ""
        line = shlex.join([self.program.name, *self.program.arguments])
        python = ""
        if self.interpreter is not None:
            python = f" by {self.side.python}"
            python += f" ({self.interpreter.versions})" if self.interpreter.versions else ""
        return f"{line}{revision} on {self.world.platform}{python}, {count_words('rank', self.side.world_size)}"

    def alone(self) -> Program:
        """Return the program with the arguments for one rank."""
        arguments = self.side.args if self.side.single_args is None else self.side.single_args
        return replace(self.program, arguments=tuple(arguments))

    def run(self, world: World, scratch: Scratch) -> Run:
        """Run the program on its ranks."""
        return self.runner(scratch)(self.program, world)

    def runner(self, scratch: Scratch) -> Callable[..., Run]:
        """Return a function that makes runs in the side's interpreter, with the parameters of :func:`run_world`."""
        if self.interpreter is None:
            return run_world
        interpreter = self.interpreter
        return lambda program, world, perturbation=None, changes=None: interpreter.run(
            program, world, scratch, perturbation, changes
        )


def check_side(label: str, side: DiffSide) -> None:
    """Check the arguments of a side."""
    if side.world_size < 1:
        msg = f"--{label}-world-size is {side.world_size}; a world has at least one rank"
        raise InputError(msg)
    if side.launch not in _LAUNCHES:
        msg = f"--{label}-launch {side.launch!r} must be {', '.join(_LAUNCHES[:-1])} or {_LAUNCHES[-1]}"
        raise InputError(msg)
