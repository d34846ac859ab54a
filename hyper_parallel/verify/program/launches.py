"""Rejects calls with which a program starts ranks itself, or RPC; errors say what to verify instead."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import inspect
import multiprocessing.process
import os
import shlex
import subprocess
import sys
import types
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
    """Inside this context, calls that start ranks or RPC raise an :class:`InputError`."""
    with contextlib.ExitStack() as stack:
        replace(stack, subprocess.Popen, "__init__", functools.partial(_checked, "args"))
        replace(stack, os, "system", functools.partial(_checked, "command"))
        for name in ("execv", "execve"):
            replace(stack, os, name, functools.partial(_checked, "argv"))
        replace(stack, multiprocessing.process.BaseProcess, "start", _started)
        for module, name, changed in _OF_TORCH if "torch" in sys.modules else ():
            replace(stack, importlib.import_module(module), name, changed)
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
    """Return ``plain``, which runs a command, changed to reject commands that start ranks."""
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
    """Return the words of a command, which is a list or a shell line; none if the line cannot be split into words."""
    if isinstance(command, (list, tuple)):
        return [os.fsdecode(word) for word in command]
    if not isinstance(command, (str, bytes, os.PathLike)):
        return []
    try:
        return shlex.split(os.fsdecode(command))
    except ValueError:  # unbalanced quotes: the shell reports them
        return []


def _started(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Process.start``, changed to reject a target function, or method ``run``, that joins a process group."""

    @functools.wraps(plain)
    def start(process: Any) -> Any:
        fn = getattr(process, "_target", None) or type(process).run
        fn = getattr(fn, "func", fn)  # of functools.partial
        if _joins(fn, set()):
            _refuse_function(fn)
        return plain(process)

    return start


def _joins(value: Any, seen: set[Any]) -> bool:
    """Return whether a function or method of the program calls ``init_process_group``, directly or indirectly.

    The calls are read from the bytecode. They are global functions, functions of the program's modules, ``__init__`` of
    classes, and methods of these classes with the name of a loaded attribute.
    """
    fn = inspect.unwrap(getattr(value, "__func__", value))
    fn = fn if isinstance(fn, types.FunctionType) else getattr(type(fn), "__call__", None)  # noqa: B004 - of an object
    if not isinstance(fn, types.FunctionType) or fn in seen or not _is_users(fn.__code__.co_filename):
        return False
    seen.add(fn)
    loaded, attributes = _names(fn.__code__)
    closed = {
        name: cell.cell_contents
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        if cell != types.CellType()  # a variable that is assigned later
    }
    found = [closed.get(name, fn.__globals__.get(name)) for name in loaded]
    owners = [each for each in found if isinstance(each, (type, types.ModuleType))]
    members = [vars(owner).get(name) for owner in owners for name in attributes | {"__init__"}]
    called = [each for each in (*found, *members) if isinstance(each, types.FunctionType)]
    return _JOINS in loaded | attributes or any(_joins(each, seen) for each in called)


def _names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the names of variables and of attributes that a function and its inner functions load."""
    loaded, attributes = set[str](), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLOSURE", "IMPORT_FROM"}:
            loaded.add(step.argval)
        elif step.opname in {"LOAD_ATTR", "LOAD_METHOD"}:
            attributes.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            loaded, attributes = loaded | inner[0], attributes | inner[1]
    return loaded, attributes


def _in_rank(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``init_process_group``, changed to raise an error in processes that this rank's process forks."""
    owner = os.getpid()

    @functools.wraps(plain)
    def join(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() != owner:
            _refuse_function(_forked_function())
        return plain(*args, **kwargs)

    return join


def _forked_function() -> Any:
    """Return the code of the program's function that this process of ``multiprocessing`` runs; None elsewhere."""
    frame: Any = inspect.currentframe()
    own = None
    while frame is not None and frame.f_code.co_name != "_bootstrap":
        own = frame.f_code if _is_users(frame.f_code.co_filename) else own
        frame = frame.f_back
    return own if frame is not None else None


def _refuse_command(words: Sequence[str]) -> NoReturn:
    _refuse(INSTEAD_OF_COMMAND.format(shlex.join(words)))


def _refuse_agent(config: Any, entrypoint: Any, args: Sequence[Any], **_: Any) -> NoReturn:
    """Reject ``launch_agent`` of PyTorch, which torchrun, ``torch.distributed.run`` and ``elastic_launch`` call."""
    if callable(entrypoint):
        _refuse_function(entrypoint)
    words = [str(word) for word in args if word != "-u"]  # an option of Python
    _refuse_command(["torchrun", "--nproc-per-node", str(config.nproc_per_node), *words])


def _refuse_function(fn: Any, *_: Any, **__: Any) -> NoReturn:
    """Raise an error instead of running ``fn`` on ranks."""
    fn = getattr(fn, "launcher", fn)  # accelerate's notebook_launcher wraps the function
    code = getattr(fn, "__code__", fn)
    file = getattr(code, "co_filename", "")
    if _is_users(file):
        inside = "." in getattr(fn, "__qualname__", "")  # a method, or an inner function
        name = "function, which must be at the top level of the file" if inside else code.co_name
        _refuse(f"starts ranks itself: verify the function that they run, as in {Path(file).name}:{name}")
    _refuse(
        "starts ranks itself: verify the function that they run, as in FILE:function; or let the stack take its ranks "
        'from torchrun, as strategy="ddp" does in Lightning'
    )


def _refuse_rpc(*_: Any, **__: Any) -> NoReturn:
    """Raise an error instead of starting RPC."""
    _refuse(
        "starts RPC, which is not supported: what ranks compute for each other is not recorded; exchange tensors by "
        "torch.distributed, such as send and recv"
    )


_JOINS = "init_process_group"
"""The function of PyTorch that a rank calls."""

_OF_TORCH: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("torch.multiprocessing", "spawn", functools.partial(_instead, _refuse_function)),
    ("torch.multiprocessing", "start_processes", functools.partial(_instead, _refuse_function)),
    ("torch.multiprocessing.spawn", "start_processes", functools.partial(_instead, _refuse_function)),
    ("torch.distributed.launcher.api", "launch_agent", functools.partial(_instead, _refuse_agent)),
    ("torch.distributed.rpc", "init_rpc", functools.partial(_instead, _refuse_rpc)),
    ("torch.distributed", _JOINS, _in_rank),
    ("torch.distributed.distributed_c10d", _JOINS, _in_rank),
)
"""Functions of PyTorch (module and name), each with a function that returns its replacement."""


def _refuse(words: str) -> NoReturn:
    """Raise an error about the call that is running, with its line in the program."""
    frame: Any = inspect.currentframe()
    while frame.f_back is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    msg = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {words} ({PAGE})"
    raise InputError(msg)


def _is_users(file: str) -> bool:
    """Return whether a source file is the program's: not installed, not this file, and not frozen into Python."""
    return bool(file) and file != __file__ and not file.startswith("<") and not is_installed(file)
