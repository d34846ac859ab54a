"""Denies writes to the user's files that are not redirected, by the kernel or by Python's audit events.

Linux's Landlock, which needs no privileges, denies such writes to a thread and to everything that it starts, including
native code and subprocesses. On other systems, only writes by Python's own functions are detected.
"""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hyper_parallel.verify.program.private_files import PrivateFiles

__all__ = ["WriteRefusedError", "audited", "denied_by_kernel", "kernel_denies"]

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, the same on all architectures
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_NO_NEW_PRIVILEGES = 38  # option of prctl
_RENAMES_ACROSS_FOLDERS = 2  # first version in which a rule can allow renaming between folders
_WRITES = (1 << 1) | sum(1 << bit for bit in range(4, 14))  # writing, removing, creating files, renaming across folders
_TRUNCATE, _TRUNCATE_VERSION = 1 << 14, 3
_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = {
    "os.chmod": 0, "os.chown": 0, "os.link": 1, "os.mkdir": 0, "os.remove": 0, "os.rename": 1, "os.rmdir": 0,
    "os.setxattr": 0, "os.symlink": 1, "os.truncate": 0, "os.utime": 0, "sqlite3.connect": 0,
}  # fmt: skip
"""Audit events of functions that write, with the position of the path among the event's arguments."""


class WriteRefusedError(PermissionError):
    """A program tries to write a file of the user with a function that cannot be redirected."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled", ctypes.c_uint64),)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def kernel_denies() -> bool:
    """Return whether this system has Landlock, in a version that can allow renaming files between private folders."""
    return sys.platform == "linux" and _call(_CREATE_RULESET, None, 0, _VERSION_FLAG) >= _RENAMES_ACROSS_FOLDERS


def denied_by_kernel(files: PrivateFiles) -> None:
    """Deny writes outside private and shared files to this thread, until it ends, and to everything that it starts.

    Writes to temporary files are allowed, because those that are not redirected come from native code or this library.

    Raises:
        OSError: the kernel rejects the request.
    """
    version = _call(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    rights = _WRITES | (_TRUNCATE if version >= _TRUNCATE_VERSION else 0)
    rules = _checked(_CREATE_RULESET, ctypes.byref(_Ruleset(rights)), ctypes.sizeof(_Ruleset), 0)
    try:
        for folder in filter(os.path.isdir, _writable(files)):
            opened = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            try:
                _checked(_ADD_RULE, rules, _PATH_BENEATH, ctypes.byref(_Beneath(rights, opened)), 0)
            finally:
                os.close(opened)
        _libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _checked(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _writable(files: PrivateFiles) -> tuple[str, ...]:
    """Return the folders in which native code and subprocesses may write."""
    installed = {sysconfig.get_path(name) for name in ("purelib", "platlib")}  # packages may write compiled modules
    temporary = (files.temporary_root, str(files.folder))
    return ("/dev", "/proc", "/sys", *temporary, *installed, *files.shared, *_measurement())


def _measurement() -> tuple[str, ...]:
    """Return the folder of coverage data, which a measured process writes when it exits."""
    coverage: Any = sys.modules.get("coverage")
    current = None if coverage is None else coverage.Coverage.current()
    return () if current is None else (str(Path(current.config.data_file).absolute().parent),)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: Any) -> int:
    result: int = _libc().syscall(ctypes.c_long(number), *arguments)
    return result


def _checked(number: int, *arguments: Any) -> int:
    result = _call(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


_AUDITED: list[tuple[PrivateFiles, set[threading.Thread]]] = []  # at most one entry
_HOOKED: list[bool] = []  # set once: an audit hook cannot be removed


@contextmanager
def audited(files: PrivateFiles, *, this_thread: bool) -> Iterator[None]:
    """Inside this context, raise an error if a thread of this run writes a user's file by Python's functions.

    Args:
        files: files of the run.
        this_thread: whether the calling thread belongs to the run; threads that start inside always do.
    """
    others = set(threading.enumerate())
    if this_thread:
        others.discard(threading.current_thread())
    if not _HOOKED:
        _HOOKED.append(True)
        sys.addaudithook(_audit)
    _AUDITED.append((files, others))
    try:
        yield
    finally:
        _AUDITED.pop()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _AUDITED or (event != "open" and event not in _EVENTS):
        return
    files, others = _AUDITED[-1]
    if files.is_inside or threading.current_thread() in others:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _FLAGS):
        return
    path = arguments[_EVENTS.get(event, 0)]
    if not isinstance(path, (str, bytes, os.PathLike)) or os.fsdecode(path) == ":memory:":
        return
    with files.inside():
        place = files.find(path)
    if place is not None:
        msg = (
            f"{place.path} is written by a function that cannot be redirected to the run's private copy; "
            "open it with open() or pathlib"
        )
        raise WriteRefusedError(msg)
