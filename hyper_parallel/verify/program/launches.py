"""Refuses calls with which a program starts ranks itself, and RPC; the error names what to verify instead."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hyper_parallel.transport.installed import is_installed
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.launch_line import launch_in

__all__ = ["INSTEAD_OF_COMMAND", "PAGE", "command_words", "refused_launches", "replace"]

PAGE = "docs/stacks.md"
INSTEAD_OF_COMMAND = "starts ranks itself: give the command after --, as in -- {}"


@contextlib.contextmanager
def refused_launches() -> Iterator[None]:
    """Make calls that start ranks, or RPC, raise an :class:`InputError` inside this context."""
    with contextlib.ExitStack() as stack:
        replace(stack, subprocess.Popen, "__init__", functools.partial(_checked, "args"))
        replace(stack, os, "system", functools.partial(_checked, "command"))
        for name in ("execv", "execve"):
            replace(stack, os, name, functools.partial(_checked, "argv"))
        for module, name, refuse in _OF_TORCH if "torch" in sys.modules else ():
            replace(stack, importlib.import_module(module), name, functools.partial(_instead, refuse))
        yield


def replace(stack: contextlib.ExitStack, owner: Any, name: str, changed: Callable[[Any], Any]) -> None:
    """Replace an attribute until the stack closes.

    Args:
        stack: stack of contexts.
        owner: a module or class.
        name: name of the attribute.
        changed: function that returns the replacement of the current value.
    """
    plain = getattr(owner, name)
    stack.callback(setattr, owner, name, plain)
    setattr(owner, name, changed(plain))


def _instead(refuse: Callable[..., NoReturn], plain: Any) -> Callable[..., NoReturn]:
    del plain
    return refuse


def _checked(parameter: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``plain``, which runs a command, but refuse commands that start ranks."""
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        command = signature.bind(*args, **kwargs).arguments[parameter]
        words = launch_in(command_words(command), anywhere=isinstance(command, str))
        if words:
            _refuse_command(words)
        return plain(*args, **kwargs)

    return run


def command_words(command: Any) -> list[str]:
    """Return the words of a command, which is a list or a line of a shell; none if it cannot be split into words."""
    if isinstance(command, (list, tuple)):
        return [os.fsdecode(word) for word in command]
    if not isinstance(command, (str, bytes, os.PathLike)):
        return []
    try:
        return shlex.split(os.fsdecode(command))
    except ValueError:  # unbalanced quotes: the shell reports them
        return []


def _refuse_command(words: Sequence[str]) -> NoReturn:
    _refuse(INSTEAD_OF_COMMAND.format(shlex.join(words)))


def _refuse_agent(config: Any, entrypoint: Any, args: Sequence[Any], **_: Any) -> NoReturn:
    """Refuse ``launch_agent`` of PyTorch, which torchrun, its module and ``elastic_launch`` call."""
    if callable(entrypoint):
        _refuse_function(entrypoint)
    words = [str(word) for word in args if word != "-u"]  # an option of Python
    _refuse_command(["torchrun", "--nproc-per-node", str(config.nproc_per_node), *words])


def _refuse_function(fn: Any, *_: Any, **__: Any) -> NoReturn:
    """Refuse to run ``fn`` on ranks."""
    fn = getattr(fn, "launcher", fn)  # accelerate's notebook_launcher wraps the function
    file = getattr(getattr(fn, "__code__", None), "co_filename", "")
    if _is_users(file):
        _refuse(f"starts ranks itself: verify the function that they run, as in {Path(file).name}:{fn.__name__}")
    _refuse(
        "starts ranks itself: verify the function that they run, as in FILE:function; or let the stack take its ranks "
        'from torchrun, as strategy="ddp" does in Lightning'
    )


def _refuse_rpc(*_: Any, **__: Any) -> NoReturn:
    """Refuse ``init_rpc``."""
    _refuse(
        "starts RPC, which is not supported: what ranks compute for each other is not recorded; exchange tensors by "
        "torch.distributed, such as send and recv"
    )


_OF_TORCH: tuple[tuple[str, str, Callable[..., NoReturn]], ...] = (
    ("torch.multiprocessing", "spawn", _refuse_function),
    ("torch.multiprocessing", "start_processes", _refuse_function),
    ("torch.multiprocessing.spawn", "start_processes", _refuse_function),
    ("torch.distributed.launcher.api", "launch_agent", _refuse_agent),
    ("torch.distributed.rpc", "init_rpc", _refuse_rpc),
)
"""Functions of PyTorch, and their replacements."""


def _refuse(words: str) -> NoReturn:
    """Raise an error about the running call, with its line in the program."""
    frame: Any = inspect.currentframe()
    while frame.f_back is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    msg = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {words} ({PAGE})"
    raise InputError(msg)


def _is_users(file: str) -> bool:
    """Return whether a code's file is the program's: not installed, not this file, and not frozen into Python."""
    return bool(file) and file != __file__ and not file.startswith("<") and not is_installed(file)
