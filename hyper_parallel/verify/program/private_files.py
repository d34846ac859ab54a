"""Private copies of the files that one run of a program writes: an overlay over the user's files.

A file that the run opens for writing is first copied into a scratch folder. From then on, the run reads the copy. All
other files are read where they are. Files that the run removes are only marked as removed. The overlay is a folder, so
ranks that are processes can share it.
"""

from __future__ import annotations

import errno
import getpass
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.transport.checks.flight_recorder import FOLDER_VARIABLE

__all__ = ["Place", "PrivateFiles"]

_SYSTEM = ("/dev", "/proc", "/sys")
_OWN = "hyper_parallel_"
"""Prefix of this library's own temporary files."""

_COMPILED = "torchinductor_"
"""Prefix of the folder, among temporary files, in which PyTorch's compiler caches its results."""

_GONE = ".removed"
_MOST_LINKS = 40
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", FOLDER_VARIABLE)
_CREATES = os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Place:
    """The file that a path of the program refers to.

    Attributes:
        path: absolute path without symbolic links.
        upper: path of the private copy in the overlay.
        written: whether the private copy exists.
        hidden: whether the run has removed the user's file.
        direct: whether no symbolic link on the way to the file is in the overlay.
    """

    path: str
    upper: str
    written: bool
    hidden: bool
    direct: bool

    @property
    def seen(self) -> str:
        """The path of the file that the program sees, even if the file does not exist."""
        return self.upper if self.written or self.hidden else self.path

    @property
    def exists(self) -> bool:
        """Whether the program sees a file, a folder or a link."""
        return self.written or (not self.hidden and os.path.lexists(self.path))


class PrivateFiles:
    """The files of one run.

    Every method must be called inside :meth:`inside`, where file functions are Python's own.

    Args:
        folder: an empty folder, the same for each process of the run.
        written: a folder to which this library writes during the run; empty if there is none.
        temporary_root: the user's folder of temporary files, if this process may have a different one; otherwise empty.

    Attributes:
        folder: the argument.
        temporary: the run's folder for temporary files, which is used without redirection.
        temporary_root: the argument.
        compiler_cache: default cache folder of PyTorch's compiler.
        shared: folders that all runs write without redirection: caches of packages, compilers and downloads.
    """

    def __init__(self, folder: Path, written: str = "", temporary_root: str = "") -> None:
        self.folder = folder
        root = os.path.realpath(folder)
        self._upper, self._removed = f"{root}/files", f"{root}/removed"
        self.temporary = f"{root}/t"
        for name in (self._upper, self.temporary):
            Path(name).mkdir(parents=True, exist_ok=True)
        self.temporary_root = os.path.realpath(temporary_root or tempfile.gettempdir())
        temporary = f"{self.temporary_root}/"
        self._own = (f"{temporary}{_OWN}", f"{temporary}{_COMPILED}", *_measurements())
        self.compiler_cache = f"{self.temporary_root}/{_COMPILED}{getpass.getuser()}"
        self.shared = (*_shared_folders(), *([os.path.realpath(written)] if written else []))
        self._busy = threading.local()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside this context, this thread uses files without redirection."""
        before = self.is_inside
        self._busy.active = True
        try:
            yield
        finally:
            self._busy.active = before

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in :meth:`inside`."""
        return getattr(self._busy, "active", False)

    def virtual(self, path: str) -> str:
        """Return the path that the program knows for a path in the overlay; other paths are returned unchanged."""
        if path == self._upper or path.startswith(self._upper + "/"):
            return path[len(self._upper) :] or "/"
        return path

    def working_folder(self) -> str:
        """Return the working folder, as the program sees it."""
        return self.virtual(os.getcwd())

    def find(self, path: Any, *, follow: bool = True) -> Place | None:
        """Return the place of ``path``; None for a path that is used without redirection.

        Args:
            path: a path, relative to the working folder or absolute.
            follow: whether to follow a symbolic link that ``path`` ends in.

        Raises:
            OSError: there are too many links.
        """
        text = self.virtual(os.fsdecode(path))
        if not text:
            return None
        full = text if text.startswith("/") else f"{self.working_folder()}/{text}"
        if self._is_real(full):
            return None
        place = self._walk(full, follow=follow)
        return None if self._is_real(place.path) else place

    def _is_real(self, path: str) -> bool:
        """Return whether a path is used without redirection: of the system, of this library, or in a cache."""
        return path.startswith(self._own) or any(
            _within(path, folder) for folder in (*_SYSTEM, self.temporary, *self.shared)
        )

    def _walk(self, full: str, *, follow: bool) -> Place:
        at, links, direct = "", 0, True
        pending = _parts(full)
        written, hidden = True, False
        removals = os.path.lexists(self._removed)
        while pending:
            name = pending.pop()
            if name == "..":
                at = at.rpartition("/")[0]
                written, hidden = self._state(at, removals=removals)
                continue
            step = f"{at}/{name}"
            step_written = written and os.path.lexists(self._upper + step)
            step_hidden = hidden or (removals and self._is_removed(step))
            if pending or follow:
                seen = self._upper + step if step_written or step_hidden else step
                with suppress(OSError):
                    target = self.virtual(os.readlink(seen))
                    links += 1
                    if links > _MOST_LINKS:
                        break
                    direct = direct and not step_written
                    if target.startswith("/"):
                        at = ""
                        written, hidden = True, False
                    pending += _parts(target)
                    continue
            at, written, hidden = step, step_written, step_hidden
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), full)
        return Place(at or "/", self._upper + at, written, hidden, direct)

    def _state(self, path: str, *, removals: bool) -> tuple[bool, bool]:
        hidden = removals and any(self._is_removed(parent) for parent in _parents(path))
        return os.path.lexists(self._upper + path), hidden

    def _is_removed(self, path: str) -> bool:
        return os.path.lexists(f"{self._removed}{path}/{_GONE}")

    # -- changes ---------------------------------------------------------------------------------------------------

    def writable(self, place: Place, flags: int = 0) -> str:
        """Return the path at which the run may write, for the ``flags`` of ``os.open``.

        An existing file is copied first, unless the flags truncate it; for a new file, the parent folders are created.
        Devices, pipes and sockets of the user are returned as they are.

        Raises:
            FileExistsError: the flags require a new file, but it exists.
        """
        exists = place.exists
        if exists and flags & os.O_EXCL and flags & os.O_CREAT:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place.path)
        if place.written:
            return place.upper
        if not exists:
            if self._has_parent(place):
                Path(place.upper).parent.mkdir(parents=True, exist_ok=True)
            return place.upper
        return self._copy(place, empty=flags & _CREATES == _CREATES)

    def _has_parent(self, place: Place) -> bool:
        parent = self._walk(place.path.rpartition("/")[0] or "/", follow=True)
        return os.path.isdir(parent.seen)

    def _copy(self, place: Place, *, empty: bool) -> str:
        """Copy the user's file into the overlay; two ranks may do so at the same time."""
        upper = Path(place.upper)
        mode = os.lstat(place.path).st_mode
        if stat.S_ISDIR(mode):
            upper.mkdir(parents=True, exist_ok=True)
        elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            upper.parent.mkdir(parents=True, exist_ok=True)
            if empty and stat.S_ISREG(mode):
                return place.upper
            with tempfile.TemporaryDirectory(dir=self.temporary) as folder:
                copied = shutil.copy2(place.path, Path(folder) / "copy", follow_symlinks=False)
                with suppress(FileExistsError):
                    os.link(copied, place.upper, follow_symlinks=False)
        else:
            return place.path
        return place.upper

    def copy_folder(self, place: Place) -> None:
        """Copy a folder into the overlay, with all files in it that the program sees."""
        self._copy(place, empty=False) if not place.written else None
        for name in self.names(place):
            child = self._walk(f"{place.path}/{name}", follow=False)
            if os.path.isdir(child.seen) and not os.path.islink(child.seen):
                self.copy_folder(child)
            elif not child.written:
                self._copy(child, empty=False)

    def remove(self, place: Place) -> None:
        """Hide the user's file or folder from this run."""
        if not place.hidden and os.path.lexists(place.path):
            marker = Path(f"{self._removed}{place.path}/{_GONE}")
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()

    def names(self, place: Place) -> list[str]:
        """Return the names in a folder.

        Raises:
            OSError: ``place`` is not a folder.
        """
        if place.written and not os.path.isdir(place.upper):
            return os.listdir(place.upper)  # raises
        own = os.listdir(place.upper) if place.written else []
        if place.hidden or (place.written and not os.path.isdir(place.path)):
            return own if place.written else os.listdir(place.upper)  # raises
        theirs = os.listdir(place.path)
        if os.path.lexists(self._removed):
            theirs = [name for name in theirs if not self._is_removed(f"{place.path}/{name}")]
        return list(dict.fromkeys([*theirs, *own]))

    def written_in(self, folder: Path) -> Path:
        """Return the folder with the files that the run has written in ``folder``."""
        return Path(self._upper + str(folder.resolve()))


def _measurements() -> list[str]:
    """Return the prefixes of the paths of coverage data, of this process and its ranks."""
    coverage: Any = sys.modules.get("coverage")
    current = None if coverage is None else coverage.Coverage.current()
    return [] if current is None else [os.path.abspath(current.config.data_file)]


def _shared_folders() -> tuple[str, ...]:
    """Return the folders that all runs share: caches and flight records, unless the working folder is inside."""
    home = os.path.expanduser("~")
    named = [os.environ[name] for name in _CACHES if os.environ.get(name)]
    folders = [os.path.realpath(name) for name in (f"{home}/.cache", f"{home}/.triton", f"{home}/.nv", *named)]
    here = os.path.realpath(os.getcwd())
    return tuple(dict.fromkeys(folder for folder in folders if not _within(here, folder)))


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _parts(path: str) -> list[str]:
    """Return the names in a path, in reverse order."""
    return [part for part in reversed(path.split("/")) if part and part != "."]


def _parents(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition("/")[0]
