"""The program that is verified (a script, as torchrun starts it, or a function), and its run on one rank."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from hyper_parallel.platform.select import get_platform
from hyper_parallel.transport.frames import hide_file
from hyper_parallel.transport.simulated.own_modules import PROGRAM_MODULE
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.case_changes import CaseChanges
from hyper_parallel.verify.frameworks.contract.record_log import (
    Perturbation,
    ProgramStopped,
    RecordLimits,
    RecordLog,
)
from hyper_parallel.verify.frameworks.contract.records import RankRecords
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.launch_line import OTHER_FILES, module_file
from hyper_parallel.verify.program.printed import noting_output
from hyper_parallel.verify.spec import user_file

__all__ = ["Program", "ProgramExitError", "find_program", "run_program", "start_program", "started_by_python"]

hide_file(__file__)


_NUMBERS = {"rank": "rank", "local_rank": "rank", "world": "world_size", "world_size": "world_size"}
"""Names of function parameters that get the rank or the world size, each with that attribute of the transport."""


class ProgramExitError(Exception):
    """The program exited with a status other than 0."""


@dataclass(frozen=True)
class Program:
    """A program to run.

    Attributes:
        name: name for messages.
        path: path of the file that is run as a script, or whose function is called; empty for a function object.
        function: the function, or its name in the file; empty for a script.
        arguments: arguments of a script, as ``sys.argv[1:]``.
        module: name with which ``python -m`` runs the file; empty if the file is given by its path.
        moved: a folder, and the folder that replaces it in Python's search path; empty strings for none.
    """

    name: str
    path: str = ""
    function: Callable[..., Any] | str = ""
    arguments: tuple[str, ...] = ()
    module: str = ""
    moved: tuple[str, str] = ("", "")

    @property
    def folder(self) -> Path:
        """The first folder in which Python looks for the modules that the file imports."""
        return Path(self.in_place(str(Path.cwd()))) if self.module else Path(self.path).parent

    def in_place(self, path: str) -> str:
        """Return the replacement of a path in the folder that was moved; other paths are returned unchanged."""
        old, new = self.moved
        if not old:
            return path
        links = (os.path.abspath(path), os.path.realpath(path))  # noqa: PTH100 - a link in the folder counts too
        full = next((each for each in links if _is_in(each, old)), "")
        installed = [prefix for prefix in (sys.prefix, sys.base_prefix) if _is_in(prefix, old)]
        if not full or any(_is_in(full, prefix) for prefix in installed):
            return path
        return new + full[len(old) :]

    @property
    def is_script(self) -> bool:
        """Whether the file runs as ``__main__``."""
        return not self.function


def find_program(target: str | Callable[..., Any], arguments: Sequence[str], source: str) -> Program:
    """Return the program of a target.

    Args:
        target: ``path/train.py``, ``path/train.py:function``, ``-m package.train``, or a function.
        arguments: arguments of the script.
        source: ``FILE`` or ``--single``, for messages.

    Raises:
        InputError: (a ValueError) the file does not exist or is not Python, or arguments are given to a function.
    """
    if callable(target):
        program = Program(getattr(target, "__qualname__", type(target).__name__), "", target)
    elif target.startswith("-m "):
        module = target.removeprefix("-m ").strip()
        path = module_file(module, source)
        _check_file(path, source, is_file=True)
        program = Program(target, str(path), "", tuple(arguments), module)
    else:
        file, _, function = target.rpartition(":") if target.rpartition(":")[2].isidentifier() else (target, "", "")
        file, function = (file, function) if file else (function, "")
        path, is_file = user_file(file)
        _check_file(path, source, is_file=is_file)
        program = Program(target, str(path), function, tuple(arguments))
    if arguments and program.function:
        msg = f"{source} {program.name!r} is a function, which takes no arguments {list(arguments)}; only scripts do"
        raise InputError(msg)
    return program


def _check_file(path: Path, source: str, *, is_file: bool) -> None:
    if not is_file:
        msg = f"{source}: {path} is a folder; name a script" if path.is_dir() else f"{source}: there is no file {path}"
        with contextlib.suppress(InputError):
            module_file(path.name, source)
            msg += f"; -m {path.name} runs the module of this name"
        raise InputError(msg)
    if path.suffix in OTHER_FILES:
        msg = f"{source}: {path} is {OTHER_FILES[path.suffix]}"
        raise InputError(msg)
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        number = getattr(error, "lineno", None)  # missing if the file has null bytes
        line = f":{number}" if number else ""
        msg = f"{source}: {path}{line} is not Python: {error.args[0]}"
        if "'utf-8' codec" in msg:
            msg = f"{source}: {path} is not UTF-8; save it as UTF-8, or name its encoding: # -*- coding: latin-1 -*-"
        raise InputError(msg) from None


def run_program(
    program: Program,
    mesh: tuple[tuple[str, int], ...],
    limits: RecordLimits,
    perturbation: Perturbation | None,
    rank: int | None = None,
    changes: Sequence[CaseChanges] | None = None,
) -> RankRecords:
    """Run the program on this rank and return its records.

    Args:
        program: the program to run.
        mesh: names and sizes of the axes, for a function that takes a mesh.
        limits: limits of the records; the program is stopped after ``limits.steps``.
        perturbation: perturbation of a reference, or None.
        rank: rank of this process; by default that of the current transport.
        changes: changes of the case, by rank.

    Raises:
        ProgramExitError: the program exits with a status other than 0.
    """
    platform = get_platform()
    rank = platform.transport().rank if rank is None else rank
    log = RecordLog(rank, limits, perturbation, CaseChanges() if changes is None else changes[rank])
    with harness_of(platform).inherited_world(), harness_of(platform).recording(log), noting_output(log):
        try:
            start_program(program, mesh)
        except ProgramStopped:
            pass
        except SystemExit as ended:
            if ended.code not in (None, 0):
                msg = f"the program ended with sys.exit({ended.code!r})"
                raise ProgramExitError(msg) from ended
    _check_imports(program)
    return log.result()


def _is_in(path: str, folder: str) -> bool:
    return (path + os.sep).startswith(folder + os.sep)


def _check_imports(program: Program) -> None:
    """Check that no module was loaded from the folder that is replaced (``program.moved``).

    Raises:
        InputError: a module was loaded from that folder, because it was not found through Python's search path.
    """
    own = str(Path(__file__).parents[3])
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if Path(file).is_absolute() and program.in_place(file) != file and not file.startswith(own):
            msg = (
                f"it imports {name} from {file}, which is not part of the revision; use an environment in which the "
                "checkout is not installed"
            )
            raise InputError(msg)


def start_program(program: Program, mesh: tuple[tuple[str, int], ...]) -> None:
    """Run the program in this process, with the process's current arguments and search path.

    Args:
        program: the program to run.
        mesh: names and sizes of the axes, for a function that takes a mesh.

    Raises:
        InputError: the file has no such function, or the function has other parameters.
    """
    if callable(program.function):
        _call(program.function, mesh)
        return
    name = "__main__" if program.is_script else PROGRAM_MODULE
    code = compile(Path(program.path).read_bytes(), program.path, "exec", dont_inherit=True)
    module = types.ModuleType(name)
    module.__file__ = program.path
    module.__dict__["__builtins__"] = __builtins__
    if program.module:  # as in python -m: relative imports work, and the package is imported first
        module.__package__ = program.module if Path(program.path).name == "__main__.py" else _parent(program.module)
        if module.__package__:
            importlib.import_module(module.__package__)
    sys.modules[name] = module
    exec(code, module.__dict__)  # noqa: S102 - the user's program, which is what this runs
    if not program.is_script:
        function = getattr(module, program.function, None)
        if not callable(function):
            names = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
            others = f"; it has {', '.join(names)}" if names else ", nor any other"
            msg = f"the file has no function {program.function!r}{others}"
            raise InputError(msg)
        _call(function, mesh)


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _call(function: Callable[..., Any], mesh: tuple[tuple[str, int], ...]) -> None:
    required = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if not required:
        function()
    elif set(required) <= set(_NUMBERS):  # mp.spawn runs such functions
        transport = get_platform().transport()
        function(**{name: getattr(transport, _NUMBERS[name]) for name in required})
    elif len(required) == 1:
        function(
            harness_of(get_platform()).program_mesh(tuple(size for _, size in mesh), tuple(name for name, _ in mesh))
        )
    else:
        name, known = getattr(function, "__qualname__", function), [name for name in required if name in _NUMBERS]
        msg = f"{name} takes {', '.join(required)}; it must take nothing, a mesh, or rank and world_size"
        if known:  # mp.spawn runs such functions, with more arguments
            msg += f": verify a function that calls it, such as `def ranks({', '.join(known)}): {name}(...)`"
        raise InputError(msg)


@contextlib.contextmanager
def started_by_python(program: Program, output: str, ranks: str) -> Iterator[None]:
    """Give this process the program's arguments, search path and standard output inside this context.

    Args:
        program: the program; a script gets ``sys.argv`` and ``sys.path`` as ``python FILE ARGS`` sets them.
        output: destination of the program's standard output: ``stderr``, because stdout is for the report, ``nothing``,
            or ``stdout``.
        ranks: description of the ranks that print, such as ``2 ranks``, for the title above the output.
    """
    argv, path = sys.argv, list(sys.path)
    with contextlib.ExitStack() as stack:
        if output == "stderr":
            titled = _TitledOutput(sys.stderr, f"{program.name} on {ranks} prints:\n")
            stack.enter_context(contextlib.redirect_stdout(cast("TextIO", titled)))
        elif output == "nothing":
            nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        if program.path:
            sys.argv = [program.path, *program.arguments]
            sys.path[:] = [program.in_place(entry) for entry in sys.path]
            sys.path.insert(0, str(program.folder))
        try:
            yield
        finally:
            sys.argv, sys.path[:] = argv, path


class _TitledOutput:
    """A text stream that writes a title before the first text."""

    def __init__(self, stream: TextIO, title: str) -> None:
        """Write to ``stream``, and ``title`` once before the first text."""
        self._stream, self._title, self._lock = stream, title, threading.Lock()

    def write(self, text: str) -> int:
        """Write ``text``."""
        with self._lock:
            title, self._title = self._title, ""
            return self._stream.write(title + text) - len(title)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stream, such as ``flush``."""
        return getattr(self._stream, name)
