"""Temporary folders that a process owns while it runs, and that the next process removes if their owner was killed.

The owner holds a lock on a file in its folder. The kernel releases the lock when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["OwnedFolder", "owned_folder"]

_LOCK = "lock"


class OwnedFolder:
    """A new temporary folder, locked by this process until :meth:`close` removes it.

    Args:
        prefix: prefix of the folder's name; other folders with this prefix whose owner has ended are removed first.
        parent: parent folder; by default the system's folder for temporary files.

    Attributes:
        path: path of the folder.
        removed: paths of folders of killed processes.

    Raises:
        OSError: the folder cannot be created.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        self.removed = _remove_abandoned(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._owner = os.getpid()
        new = self.path / f"{_LOCK}.new"  # a process that opens the file before it is locked could claim the folder
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the folder with its files; in a process that was forked from the owner, do nothing."""
        if os.getpid() == self._owner:
            shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


@contextlib.contextmanager
def owned_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield the path of an :class:`OwnedFolder`, which is removed at the end."""
    folder = OwnedFolder(prefix, parent)
    try:
        yield folder.path
    finally:
        folder.close()


def _remove_abandoned(parent: Path, prefix: str) -> list[str]:
    """Remove the folders in ``parent`` whose owner has ended, and return their paths."""
    removed = []
    for folder in parent.glob(f"{prefix}*"):
        try:
            descriptor = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:  # its owner has not locked it yet, or is a different user
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its owner runs
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(str(folder))
        finally:
            os.close(descriptor)
    return removed
