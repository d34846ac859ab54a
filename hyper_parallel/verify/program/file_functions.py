"""Makes the file functions of a program work on private copies of the files that its run changes.

Functions that take a path are replaced in all modules that have them as attributes: Python's own, and those of native
libraries that open files themselves. Other writes, such as those of other native libraries or of subprocesses, cannot
be redirected; :mod:`~hyper_parallel.verify.program.write_guard` stops them.
"""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import pathlib
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

from hyper_parallel.transport.frames import hide_file
from hyper_parallel.verify.program.private_files import Place, PrivateFiles

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["redirected"]

hide_file(__file__)

_READS = ("stat", "lstat", "access", "readlink", "statvfs", "getxattr", "listxattr", "pathconf")
_CHANGES = ("chmod", "chown", "lchown", "utime", "truncate", "setxattr", "removexattr", "chflags")
_LINK_ITSELF = ("lstat", "readlink", "lchown")
_NATIVE = {
    ("torch._C", "PyTorchFileWriter"): (0, True),
    ("torch._C", "PyTorchFileReader"): (0, False),
    ("safetensors._safetensors_rust", "serialize_file"): (1, True),
    ("safetensors._safetensors_rust", "safe_open"): (0, False),
    ("_sqlite3", "connect"): (0, True),
}
"""Functions of native code, with the position of their path argument, and whether they write to the path."""

_HOLDERS = (("mindspore.train.serialization", "_ckpt_fs"),)
"""Objects in modules whose attributes are file functions."""

_TRUNCATES = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MODES = {"w": _TRUNCATES, "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND, "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL}
_SETS = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks", "supports_effective_ids")
_IMPORTING = ("posix", "importlib._bootstrap", "importlib._bootstrap_external", __name__)


@contextmanager
def redirected(files: PrivateFiles, *, this_thread: bool) -> Iterator[None]:
    """Inside this context, make this process's threads use the private files of ``files`` instead of the user's.

    Args:
        files: files of the run.
        this_thread: whether the calling thread belongs to the run as well; threads that start inside always do.
    """
    others = set(threading.enumerate())
    if this_thread:
        others.discard(threading.current_thread())
    functions = _Functions(files, others)
    with ExitStack() as stack:
        stack.callback(setattr, functions, "active", False)  # replacements that were kept call the plain function
        _bind(stack, functions.replacements())
        _bind_mapped(stack, functions)
        _set(stack, shutil, "_use_fd_functions", value=False)  # these use descriptors of open folders
        _set(stack, tempfile, "tempdir", value=files.temporary)
        _forget_folder_of_processes(stack)
        for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
            stack.callback(_restore_variable, name, os.environ.get(name))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", files.compiler_cache)
        os.environ["TMPDIR"] = files.temporary
        yield


def _forget_folder_of_processes(stack: ExitStack) -> None:
    """Make multiprocessing create a new folder for sockets; the current one is the user's or an earlier run's."""
    known: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    before = known.pop("tempdir", None)
    stack.callback(known.pop, "tempdir", None)
    if before is not None:
        stack.callback(known.setdefault, "tempdir", before)


def _set(stack: ExitStack, owner: Any, name: str, *, value: Any) -> None:
    stack.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


def _restore_variable(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def _bind(stack: ExitStack, replacements: list[tuple[Any, Any]]) -> None:
    """Replace the plain functions in all modules that have them as attributes, except in the import system."""
    by_identity = {id(plain): replacement for plain, replacement in replacements}
    stack.callback(_unbind, {id(replacement): plain for plain, replacement in replacements})
    for names in (getattr(os, supported) for supported in _SETS):
        for plain, replacement in replacements:
            if plain in names:
                names.add(replacement)
                stack.callback(names.discard, replacement)
    modules = [module for module in list(sys.modules.values()) if getattr(module, "__name__", "") not in _IMPORTING]
    objects = [getattr(sys.modules.get(module), name, None) for module, name in _HOLDERS]
    for owner in [*modules, *objects]:
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if id(value) in by_identity:
                _set(stack, owner, name, value=by_identity[id(value)])
    accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 has them as attributes of a class
    for name, value in list(vars(accessor).items()) if accessor is not None else ():
        if id(value) in by_identity:
            _set(stack, accessor, name, value=staticmethod(by_identity[id(value)]))


def _unbind(plain: dict[int, Any]) -> None:
    """Restore the plain functions in modules that were imported inside the context and got replacements."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in plain:
                setattr(module, name, plain[id(value)])


def _bind_mapped(stack: ExitStack, functions: _Functions) -> None:
    """Redirect ``UntypedStorage.from_file``, with which PyTorch maps files into memory; C++ defines it."""
    storage: Any = getattr(sys.modules.get("torch"), "UntypedStorage", None)
    if storage is not None:
        stack.callback(delattr, storage, "from_file")
        storage.from_file = staticmethod(functions.mapped(storage.from_file))


class _Functions:
    """The replacements of file functions, for one run.

    Attributes:
        active: whether the replacements redirect; if not, they call the plain functions.
    """

    def __init__(self, files: PrivateFiles, others: set[threading.Thread]) -> None:
        self.active = True
        self._files = files
        self._others = others

    def replacements(self) -> list[tuple[Any, Any]]:
        """Return each plain function with its replacement."""
        kinds: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(_READS, self._read),
            **dict.fromkeys(_CHANGES, self._change),
            **dict.fromkeys(("rename", "replace"), self._rename),
            **dict.fromkeys(("remove", "unlink"), self._remove),
            "open": self._os_open, "mkdir": self._mkdir, "rmdir": self._rmdir, "link": self._link,
            "symlink": self._symlink, "listdir": self._listdir, "scandir": self._scandir, "chdir": self._chdir,
            "getcwd": self._getcwd, "getcwdb": self._getcwdb, "mkfifo": self._make, "mknod": self._make,
        }  # fmt: skip
        pairs = [(getattr(os, name), kind) for name, kind in kinds.items() if hasattr(os, name)]
        pairs.append((io.open, self._open))
        for (module, name), (position, writes) in _NATIVE.items():
            native = _native(module, name)
            if native is not None:
                pairs.append((native, self._native(position, writes=writes)))
        return [(plain, self._replacement(plain, kind)) for plain, kind in pairs]

    def mapped(self, plain: Any) -> Any:
        """Return the redirected ``UntypedStorage.from_file``, which may write to the file if the storage is shared."""

        def redirect(plain: Any, filename: Any, shared: bool = False, *args: Any, **kwargs: Any) -> Any:
            place = self._find(filename)
            flags = os.O_RDWR | os.O_CREAT if shared else 0
            return plain(filename if place is None else self._opened(place, flags), shared, *args, **kwargs)

        return self._replacement(plain, redirect)

    def _replacement(self, plain: Any, redirect: Callable[..., Any]) -> Any:
        files, others = self._files, self._others

        @wraps(plain, updated=())
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if not self.active or files.is_inside or threading.current_thread() in others:
                return plain(*args, **kwargs)
            try:
                with files.inside():
                    return redirect(plain, *args, **kwargs)
            except OSError as error:
                for name, given in zip(("filename", "filename2"), args, strict=False):
                    if getattr(error, name) is not None and isinstance(given, (str, bytes, os.PathLike)):
                        setattr(error, name, os.fspath(given))
                raise

        return replacement

    def _find(self, path: Any, dir_fd: int | None = None, *, follow: bool = True) -> Place | None:
        """Return the place of a path; None for a file descriptor, and for a path that is not redirected."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return None
        if dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fsdecode(path))
        return self._files.find(path, follow=follow)

    def _read(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        itself = plain.__name__ in _LINK_ITSELF
        follow = not itself and kwargs.get("follow_symlinks", True)
        place = self._find(path, kwargs.get("dir_fd"), follow=follow)
        if place is None:
            return plain(path, *args, **kwargs)
        kwargs.pop("dir_fd", None)
        return plain(place.seen, *args, **kwargs)

    def _change(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        follow = plain.__name__ not in _LINK_ITSELF and kwargs.get("follow_symlinks", True)
        place = self._find(path, kwargs.get("dir_fd"), follow=follow)
        if place is None:
            return plain(path, *args, **kwargs)
        kwargs.pop("dir_fd", None)
        return plain(self._files.writable(place) if place.exists else place.upper, *args, **kwargs)

    def _os_open(self, plain: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        place = self._find(path, dir_fd, follow=not flags & (os.O_NOFOLLOW | os.O_EXCL))
        if place is None:
            return int(plain(path, flags, mode, dir_fd=dir_fd))
        return int(plain(self._opened(place, flags), flags, mode))

    def _opened(self, place: Place, flags: int) -> str:
        return self._files.writable(place, flags) if flags & _WRITES else place.seen

    def _open(self, plain: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opener = kwargs.get("opener", args[5] if len(args) > 5 else None)
        place = None if opener is not None else self._find(file)
        if place is None:
            return plain(file, mode, *args, **kwargs)
        wanted = _MODES.get(next((letter for letter in mode if letter in _MODES), ""), 0)
        actual = self._opened(place, wanted | (os.O_RDWR if "+" in mode else 0))
        if len(args) > 5:
            args = args[:5]
        # With an opener, the file object keeps the program's name of the file.
        return plain(file, mode, *args, **{**kwargs, "opener": lambda _, flags: os.open(actual, flags, 0o666)})

    def _native(self, position: int, *, writes: bool) -> Callable[..., Any]:
        def redirect(plain: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) <= position or not isinstance(args[position], (str, os.PathLike)):
                return plain(*args, **kwargs)
            text = os.fspath(args[position])
            place = None if text.startswith((":", "file:")) else self._find(text)
            if place is None:
                return plain(*args, **kwargs)
            actual = self._opened(place, os.O_RDWR | os.O_CREAT if writes else 0)
            return plain(*args[:position], actual, *args[position + 1 :], **kwargs)

        return redirect

    def _mkdir(self, plain: Any, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._make(plain, path, mode, dir_fd=dir_fd)

    def _make(self, plain: Any, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        place = self._find(path, dir_fd, follow=False)
        if place is None:
            plain(path, *args, dir_fd=dir_fd, **kwargs)
        else:
            plain(self._files.writable(place, os.O_CREAT | os.O_EXCL), *args, **kwargs)

    def _symlink(self, plain: Any, src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        place = self._find(dst, kwargs.pop("dir_fd", None), follow=False)
        plain(src, dst if place is None else self._files.writable(place, os.O_CREAT | os.O_EXCL), *args, **kwargs)

    def _link(self, plain: Any, src: Any, dst: Any, **kwargs: Any) -> None:
        source = self._find(src, kwargs.pop("src_dir_fd", None), follow=kwargs.get("follow_symlinks", False))
        place = self._find(dst, kwargs.pop("dst_dir_fd", None), follow=False)
        actual = src if source is None else self._files.writable(source) if source.exists else source.upper
        plain(actual, dst if place is None else self._files.writable(place, os.O_CREAT | os.O_EXCL), **kwargs)

    def _remove(self, plain: Any, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._find(path, dir_fd, follow=False)
        if place is None:
            plain(path, dir_fd=dir_fd)
        elif place.written or not place.exists:
            plain(place.upper)
            self._files.remove(place)
        elif _is_folder(place.path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), place.path)
        else:
            self._files.remove(place)

    def _rmdir(self, plain: Any, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._find(path, dir_fd, follow=False)
        if place is None:
            plain(path, dir_fd=dir_fd)
            return
        if place.exists and not _is_folder(place.seen):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), place.path)
        if place.exists and self._files.names(place):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), place.path)
        if place.written or not place.exists:
            plain(place.upper)
        self._files.remove(place)

    def _rename(self, plain: Any, src: Any, dst: Any, **kwargs: Any) -> None:
        files = self._files
        source = self._find(src, kwargs.pop("src_dir_fd", None), follow=False)
        target = self._find(dst, kwargs.pop("dst_dir_fd", None), follow=False)
        if source is None and target is None:
            plain(src, dst)
            return
        actual = src
        if source is not None and source.exists:
            actual = files.writable(source)
            if _is_folder(source.seen):
                files.copy_folder(source)
        elif source is not None:
            actual = source.upper
        if target is None:
            plain(actual, dst)
        else:
            if target.exists and _is_folder(target.seen):
                if files.names(target) and _is_folder(actual):
                    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), src, None, dst)
                files.writable(target)  # an empty folder: a folder can replace it, but a file cannot
            plain(actual, files.writable(target, _TRUNCATES))
            files.remove(target)
        if source is not None:
            files.remove(source)

    def _listdir(self, plain: Any, path: Any = ".") -> list[Any]:
        place = self._find(path)
        if place is None:
            listed: list[Any] = plain(path)
            return listed
        names = self._files.names(place)
        return [os.fsencode(name) for name in names] if isinstance(os.fspath(path), bytes) else names

    def _scandir(self, plain: Any, path: Any = ".") -> Any:
        place = self._find(path)
        if place is None:
            return plain(path)
        parent = os.fspath(path)
        names: list[Any] = self._files.names(place)
        if isinstance(parent, bytes):
            names = [os.fsencode(name) for name in names]
        return _Scan(iter([_Entry(name, os.path.join(parent, name)) for name in names]))

    def _chdir(self, plain: Any, path: Any) -> None:
        place = self._find(path)
        user = place is not None and not place.hidden and os.path.isdir(place.path)
        plain(path if place is None else place.path if user else place.upper)

    def _getcwd(self, plain: Any) -> str:
        return self._files.virtual(plain())

    def _getcwdb(self, plain: Any) -> bytes:
        return os.fsencode(self._files.virtual(os.fsdecode(plain())))


class _Scan:
    """The result of ``os.scandir`` for a folder with files of the run."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing, because no folder is open."""


class _Entry:
    """An entry of ``os.scandir``; replaces ``os.DirEntry``, which has no constructor."""

    def __init__(self, name: Any, path: Any) -> None:
        self.name, self.path = name, path

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """See ``os.DirEntry``."""
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        """See ``os.DirEntry``."""
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """See ``os.DirEntry``."""
        return self._is(stat.S_ISDIR, follow_symlinks=follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """See ``os.DirEntry``."""
        return self._is(stat.S_ISREG, follow_symlinks=follow_symlinks)

    def is_symlink(self) -> bool:
        """See ``os.DirEntry``."""
        return self._is(stat.S_ISLNK, follow_symlinks=False)

    def is_junction(self) -> bool:
        """Return False: junctions are folders of Windows. ``os.walk`` calls this from Python 3.12 on."""
        return False

    def _is(self, kind: Callable[[int], bool], *, follow_symlinks: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow_symlinks).st_mode)
        except FileNotFoundError:
            return False


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _native(module: str, name: str) -> Any:
    """Return a native function; None if its package is not installed, or is PyTorch and not imported."""
    with suppress(ImportError):
        import safetensors  # noqa: F401 - functions of modules imported later are not replaced
    with suppress(ImportError):
        import sqlite3  # noqa: F401 - as above
    return getattr(sys.modules.get(module), name, None)
