"""Parses a launch command, such as ``torchrun --nproc-per-node 2 train.py``, into a program."""

from __future__ import annotations

import importlib.machinery
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.verify.input_error import InputError

__all__ = ["OTHER_FILES", "LaunchLine", "launch_in", "module_file", "read_launch_line", "with_program"]

_RANKS = ("--nproc-per-node", "--num-processes", "--num-gpus", "--worker-num", "--local-worker-num", "-n")
_HOSTS = ("--nnodes", "--num-machines", "--num-nodes")
_HARMLESS = (
    "--standalone", "--master-addr", "--master-port", "--main-process-ip", "--main-process-port", "--rdzv-backend",
    "--rdzv-endpoint", "--rdzv-id", "--cpu", "--multi-gpu", "--node-rank", "--machine-rank", "--max-restarts",
    "--join",
)  # fmt: skip
_LAUNCHERS = {
    "torchrun": "torchrun", "torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun",
    "accelerate": "accelerate launch", "accelerate.commands.launch": "accelerate launch", "deepspeed": "deepspeed",
    "msrun": "msrun", "mindspore.parallel.cluster.run": "msrun",
}  # fmt: skip
_ELSEWHERE = {
    "accelerate launch": "it reaches the script as a variable ACCELERATE_*: set that, or pass Accelerator a plugin",
    "torchrun": "the ranks are started here: leave it out",
    "msrun": "the ranks are started here: leave it out",
    "deepspeed": "the ranks are started here: leave it out",
}
"""For each launcher, the reason why other options are rejected, and the fix."""

OTHER_FILES = {
    ".ipynb": "a notebook: save its cells as a script (jupyter nbconvert --to script), or call verify_program there",
    ".sh": "a shell script: write its command after --, as in `-- torchrun --nproc-per-node 2 train.py`",
}
"""Suffixes of files that are not Python programs, and how to give the program instead."""


@dataclass(frozen=True)
class LaunchLine:
    """The program that a launch command starts.

    Attributes:
        target: a file, or ``-m`` and a module.
        arguments: arguments of the target.
        ranks: number of ranks; None if the command does not determine it.
    """

    target: str
    arguments: tuple[str, ...]
    ranks: int | None = None


def read_launch_line(words: Sequence[str]) -> LaunchLine:
    """Return the program that a command of Python, torchrun, msrun, ``accelerate launch`` or deepspeed starts.

    Raises:
        InputError: (a ValueError) the command does not start a Python script, or has an unsupported option.
    """
    if "-c" in words[1:2] and words[2:] and Path(words[0]).name in {"bash", "sh", "zsh"}:
        raise InputError(f"'{words[0]} -c' is not supported here: `hyper-parallel verify program -- {words[2]}`")
    launcher, rest = _launcher(words)
    options, target, arguments = _parts(rest, shlex.join(words))
    ranks: int | None = None
    if not launcher and options and options[0] == words[0]:
        raise InputError(_without(words, [*shlex.split(target), *arguments]))
    while options:
        name, sign, value = options.pop(0).partition("=")
        name = name if name == "-n" else name.replace("_", "-")
        if not sign and options and not options[0].startswith("-"):
            value = options.pop(0)
        if name in _RANKS and value.isdigit():
            ranks = int(value)
        elif name in _RANKS:
            msg = f"{name} {value!r} is not a number; leave out {name}, and give --world-size"
            raise InputError(msg)
        elif name in _HOSTS and value not in ("1", "1:1"):
            msg = f"{name} {value}: all ranks are started on this machine; leave out {name}, and give --world-size"
            raise InputError(msg)
        elif name not in (*_HARMLESS, *_HOSTS):
            msg = f"{name} of {launcher or 'python'} is not supported here: {_ELSEWHERE.get(launcher, 'leave it out')}"
            raise InputError(msg)
    return LaunchLine(target, arguments, ranks)


def _without(words: Sequence[str], program: Sequence[str]) -> str:
    """Return the error for a command whose first word is unknown, with the same command without that word.

    Args:
        words: the words of the command.
        program: a script or module, and its arguments.
    """
    starts = (place for place, word in enumerate(words) if _launcher([word])[0] or _PYTHON.fullmatch(Path(word).name))
    place = next(starts, len(words) - len(program))
    inner = list(words[place:])
    inner = ["python", *program] if inner == list(program) else inner
    variables = "".join(f"{word} " for word in words[:place] if _VARIABLE.match(word))
    ranks = "" if _launcher(inner)[0] else "--world-size N "
    command = f"{variables}hyper-parallel verify program {ranks}-- {shlex.join(inner)}"
    return f"{words[0]!r} is not supported here; run `{command}`"


def with_program(words: Sequence[str], module: str) -> list[str]:
    """Return a command that starts ``module`` and passes the program of ``words``, with its arguments, to it.

    Args:
        words: command of Python, torchrun, msrun or ``accelerate launch`` for a script or module; options are kept.
        module: the module and its own first arguments, as for ``python -m``.

    Raises:
        InputError: (a ValueError) the command does not start a script or module.
    """
    launcher, rest = _launcher(words)
    options, target, arguments = _parts(rest, shlex.join(words))
    start = list(words[: len(words) - len(rest)])
    if not start and not options:
        start = [sys.executable]
    if launcher == "deepspeed" or not start:
        msg = (
            f"{words[0]!r} is not supported here; python, torchrun, msrun and accelerate launch are supported; "
            "otherwise put `with hyper_parallel.verify.record_run(FOLDER):` around the training in the script"
        )
        raise InputError(msg)
    if "--no-python" in options:
        raise InputError("--no-python starts a program that is not a Python script; leave out --no-python")
    options += ["python"] if launcher == "msrun" and options[-1:] != ["python"] else []  # msrun needs a command
    return [*start, *options, "-m", *shlex.split(module), *shlex.split(target), *arguments]


_PYTHON = re.compile(r"python[\d.]*")
_VARIABLE = re.compile(r"\w+=")
_SHELL = re.compile(r"[;&|(]$|^\w+=|^(?:nohup|exec|time|env|then|do)$")
"""Words of a shell line after which a new command may start."""


def launch_in(words: Sequence[str], *, anywhere: bool) -> list[str]:
    """Return the words that start a script or module with a launcher; empty if there are none.

    Args:
        words: the words of a command.
        anywhere: whether ``words`` are a line of a shell script, in which several commands may start.
    """
    for place in range(len(words) if anywhere else min(1, len(words))):
        if place and not _SHELL.search(words[place - 1]):
            continue
        launcher, rest = _launcher(words[place:])
        if launcher and any(word.rstrip(";&|)").endswith(".py") or word in ("-m", "--module") for word in rest):
            return list(_command(words[place:])) if anywhere else list(words)
    return []


def _command(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of the first command of a line of a shell script."""
    for word in words:
        if word.rstrip(";&|)"):
            yield word.rstrip(";&|)")
        if word[-1:] in (*";&|)",):
            return


def _launcher(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the launcher of a command (empty for Python itself), and the words after it."""
    rest = list(words)
    if rest and _PYTHON.fullmatch(Path(rest[0]).name):
        rest = rest[1:]
        if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _LAUNCHERS:
            rest = rest[1:]
    launcher = _LAUNCHERS.get(Path(rest[0]).name if rest else "", "")
    rest = rest[len(launcher.split()) if Path(rest[0]).name == "accelerate" else 1 :] if launcher else rest
    return launcher, rest


def _parts(words: list[str], line: str) -> tuple[list[str], str, tuple[str, ...]]:
    """Return the options before a script or module, the script or module, and the arguments after it."""
    for number, word in enumerate(words):
        if word in ("-m", "--module") and words[number + 1 :]:
            return words[:number], f"-m {words[number + 1]}", tuple(words[number + 2 :])
        if word.endswith(".py"):
            return words[:number], word, tuple(words[number + 1 :])
        if Path(word).suffix in OTHER_FILES:
            msg = f"{word} is {OTHER_FILES[Path(word).suffix]}"
            raise InputError(msg)
    msg = f"{line!r} starts no Python script and no module (-m): give FILE, or a command such as torchrun train.py"
    raise InputError(msg)


def module_file(name: str, source: str) -> Path:
    """Return the file of a module that ``python -m`` would run in this folder; nothing is imported.

    Raises:
        InputError: there is no such module.
    """
    path: list[str] | None = [str(Path.cwd()), *filter(None, sys.path)]
    spec: importlib.machinery.ModuleSpec | None = None
    for part in (*name.split("."), "__main__"):
        if path is None and part == "__main__":
            break
        if path is None:  # a name below a module that is not a package
            spec = None
            break
        spec = importlib.machinery.PathFinder.find_spec(part, path)
        path = (
            None if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)
        )
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        module = name or repr(name)
        msg = f"{source}: python -m finds no module {module}, neither in this folder nor among those installed"
        if name.endswith(".py"):
            msg = f"{msg}; -m takes the name of a module, without .py"
        raise InputError(msg)
    return Path(spec.origin)
