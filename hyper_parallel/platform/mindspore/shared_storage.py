"""Counts writes to a storage; all local tensors that share the storage share the count.

MindSpore's own counter misses writes, so writes to DTensors are counted here. Whether a tensor shares the storage of
the tensor that it was made of is determined when its count is first needed, because most tensors are never written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.mindspore.delayed import is_delayed

__all__ = ["counting", "note_write", "share_count"]


class _Writes:
    """The number of writes to a storage."""

    __slots__ = ("noted",)

    def __init__(self) -> None:
        self.noted = 0

    def __reduce__(self) -> tuple[type[int], tuple[()]]:
        """Pickle as 0: a loaded local tensor has its own storage, and may be loaded without this library."""
        return int, ()


class _Undecided:
    """The storage of a tensor's base, which the tensor may share.

    Attributes:
        writes: count of the writes to the storage.
        pointer: address of the storage; it is not reused while the tensor that may share it lives.
    """

    __slots__ = ("pointer", "writes")

    def __init__(self, writes: _Writes, pointer: int) -> None:
        self.writes, self.pointer = writes, pointer

    def __reduce__(self) -> tuple[type[int], tuple[()]]:
        """Pickle as 0, as :class:`_Writes` does."""
        return int, ()


# Attribute of local tensors: the count, or a storage that they may share.
_WRITES = "_hyper_parallel_writes"


def _known(local: Any) -> _Writes | None:
    found = getattr(local, _WRITES, None)
    if type(found) is _Undecided:
        # A tensor without elements has no storage; it counts with its base, as on the ranks that have elements.
        shares = _pointer(local) == found.pointer or 0 in local.shape
        found = found.writes if shares else None
        setattr(local, _WRITES, found)
    return found if type(found) is _Writes else None


def _pointer(local: Any) -> int:
    pointer: int = local.untyped_storage().data_ptr()
    return pointer


def _writes(local: Any) -> _Writes:
    writes = _known(local)
    if writes is None:
        writes = _Writes()
        setattr(local, _WRITES, writes)
    return writes


def counting(local: Any) -> Callable[[], int]:
    """Return the function that counts the writes to the storage of ``local``."""
    writes = _writes(local)
    return lambda: writes.noted


def note_write(local: Any) -> None:
    """Count a write to ``local``, if its writes are counted."""
    writes = _known(local)
    if writes is not None:
        writes.noted += 1


def share_count(view: Any, base: Any) -> None:
    """Count writes to ``view`` and ``base`` together if they have the same storage."""
    writes = _known(base)
    if writes is None:
        if is_delayed(base) or str(base.device).startswith("meta"):
            return
        writes = _writes(base)
    setattr(view, _WRITES, _Undecided(writes, _pointer(base)))
