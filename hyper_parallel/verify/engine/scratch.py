"""The folder on disk in which a verification keeps the arrays of its runs.

A verification owns one folder, and locks a file in it while it runs. The folder is removed at the end. If a run is
killed, its folder is no longer locked, and the next verification with the same parent folder removes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.transport.owned_folders import OwnedFolder

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Scratch", "ScratchError", "megabytes"]

_PREFIX = "hyper_parallel_scratch_"


class ScratchError(HyperParallelError, ValueError):
    """The scratch folder cannot be used, or has no room for the arrays of a run."""


class Scratch:
    """A folder for the arrays of one verification; use it as a context manager.

    Args:
        parent: folder in which the scratch folder is created; by default the system's folder for temporary files.
        limit: largest number of bytes that may be written; by default the free space of that disk.

    Attributes:
        path: path of the folder.
        removed: folders of killed runs that were removed from ``parent``.

    Raises:
        ScratchError: ``parent`` is not a writable folder.
    """

    def __init__(self, parent: str | Path | None = None, limit: int | None = None) -> None:
        self.parent = Path(tempfile.gettempdir() if parent is None else parent)
        try:
            self._folder: OwnedFolder | None = OwnedFolder(_PREFIX, self.parent)
        except OSError as error:
            msg = f"--scratch {self.parent}: no folder can be made there ({error.strerror})"
            raise ScratchError(msg) from error
        self.path, self.removed = self._folder.path, self._folder.removed
        self.limit = shutil.disk_usage(self.parent).free if limit is None else limit
        self._at_end = contextlib.ExitStack()

    def at_end(self, close: Callable[[], None]) -> None:
        """Register ``close`` to be called before the folder is removed.

        The processes of ranks, which have copies of this object, end before that.
        """
        self._at_end.callback(close)

    @property
    def written(self) -> int:
        """Number of bytes in the folder, written by this process and by the processes of ranks."""
        with os.scandir(self.path) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file())

    def file(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return str(self.path / name)

    def require(self, size: int, what: str) -> None:
        """Check that ``size`` more bytes fit.

        Raises:
            ScratchError: the disk is too full; the message names the size and possible fixes.
        """
        taken = self.written
        if taken + size > self.limit:
            msg = (
                f"no room in the scratch folder {self.parent} for {what}: {megabytes(size)} more are needed, and "
                f"{megabytes(taken)} of {megabytes(self.limit)} are taken; compare fewer steps (--steps), leave "
                "out outputs (--only 'layers.0.*'), or name a larger disk (--scratch FOLDER)"
            )
            raise ScratchError(msg)

    def drop(self, path: str) -> None:
        """Delete a file."""
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()

    def close(self) -> None:
        """Close all open files in the folder, and remove it."""
        self._at_end.close()
        if self._folder is not None:
            self._folder.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a rank's process, which writes to the folder but does not own it."""
        return {**self.__dict__, "_folder": None, "_at_end": contextlib.ExitStack()}

    def __enter__(self) -> Self:
        """Return the scratch folder itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the folder in any case."""
        self.close()


def megabytes(size: int) -> str:
    """Return a number of bytes in words: ``312 bytes``, ``12 MB``, ``5.4 GB``."""
    if size < 1e6:
        return f"{size} bytes"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
