"""Values on disk until somebody wants them back: an unnamed temporary file, gone with its last record."""

from __future__ import annotations

import os
import tempfile
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Record", "SpillFile"]


class SpillFile:
    """Appends arrays; room is given back when the file is, that is, with its last record."""

    def __init__(self) -> None:
        # Closed when nothing refers to it any more; it has no name, so nothing is left behind however a process ends.
        self._file = tempfile.TemporaryFile(prefix="hyper_parallel_swap_", buffering=0)  # noqa: SIM115
        self._end = 0
        self._lock = threading.Lock()

    def write(self, array: np.ndarray[Any, Any]) -> Record:
        """Append the values of a contiguous array.

        Raises:
            OSError: the disk is full.
        """
        import numpy as np

        view = memoryview(array.reshape(-1).view(np.uint8).data)
        with self._lock:
            start, self._end = self._end, self._end + len(view)
        done = 0
        while done < len(view):
            done += os.pwrite(self._file.fileno(), view[done:], start + done)
        return Record(self, start, len(view), tuple(array.shape), array.dtype)

    def read(self, start: int, target: np.ndarray[Any, Any]) -> None:
        """Fill an array of bytes."""
        view, done = memoryview(target.data), 0
        while done < len(view):
            done += os.preadv(self._file.fileno(), [view[done:]], start + done)


class Record:
    """Where an array is."""

    def __init__(self, file: SpillFile, start: int, size: int, shape: tuple[int, ...], dtype: Any) -> None:
        self._file, self._start, self._size, self._shape, self._dtype = file, start, size, shape, dtype

    def array(self) -> np.ndarray[Any, Any]:
        """The values, in memory of their own."""
        import numpy as np

        target = np.empty(self._size, np.uint8)
        self._file.read(self._start, target)
        values: np.ndarray[Any, Any] = target.view(self._dtype).reshape(self._shape)
        return values
