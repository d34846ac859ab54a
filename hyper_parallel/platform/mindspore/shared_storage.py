"""Counts of the writes to a storage, which the local tensors of it share.

MindSpore's own counter misses writes; those that arrive at a DTensor are counted here.
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
        """A pickled local tensor has storage of its own when it is loaded, perhaps without this library."""
        return int, ()


# An attribute of local tensors.
_WRITES = "_hyper_parallel_writes"


def _known(local: Any) -> _Writes | None:
    writes = getattr(local, _WRITES, None)
    return writes if type(writes) is _Writes else None


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
    """Count a write to ``local``, if somebody asked for the count."""
    writes = _known(local)
    if writes is not None:
        writes.noted += 1


def share_count(view: Any, base: Any) -> None:
    """Count writes to ``view`` and ``base`` together if they have the same storage.

    A tensor without elements has none; it counts with its base, as on the ranks that have elements.
    """
    if is_delayed(base) or str(base.device).startswith("meta"):
        return
    if 0 in view.shape or view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr():
        setattr(view, _WRITES, _writes(base))
