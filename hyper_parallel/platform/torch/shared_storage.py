"""Tensors that share the storage of a DTensor: its ``.data``, and tensors assigned by ``.data =`` or ``set_()``."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakTensorKeyDictionary

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import LayoutError, MixedTensorError, UnsupportedOperatorError
from hyper_parallel.platform.torch.versions import storage_number, storage_use_count

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["UncountedWrites", "check_source", "check_unfollowed", "is_shared"]


class UncountedWrites:
    """Writes to a storage that are not in the version counter of a local tensor.

    They go through ``.data`` of the tensor and its aliases, or through a tensor that took the storage by ``set_()`` or
    ``.data =`` and has a version counter of its own.
    """

    __slots__ = ("_noted", "_storage", "_takers")

    def __init__(self) -> None:
        self._storage: Tensor | None = None
        # Version counters of local tensors, by id, with their values when the tensors began to share this storage.
        self._takers: dict[int, tuple[Tensor, int]] = {}
        self._noted = 0

    @classmethod
    def of(cls, local: Tensor) -> UncountedWrites:
        """Return the writes to the storage of ``local``; a view has those of its base."""
        owner = local if local._base is None else local._base
        with _LOCK:
            writes: UncountedWrites | None = _WRITES.get(owner)
            if writes is None:
                writes = _WRITES[owner] = cls()
        return writes

    def share_with(self, local: Tensor) -> None:
        """Count the writes to ``local``, which has this storage from now on, and those to its views."""
        with _LOCK:
            _WRITES[local] = self
            if local.is_inference():
                return  # it has no version counter
            counter: Tensor | None = _COUNTERS.get(local)
            if counter is None:
                counter = _COUNTERS[local] = local.detach()
                counter.data = local.new_empty(0)  # the version counter alone: the storage may be replaced
            self._takers.setdefault(id(counter), (counter, counter._version))

    def through(self, local: Tensor) -> Tensor:
        """Return the tensor for ``.data`` of the tensor over ``local``; writes to it are counted here."""
        if self._storage is None:
            self._storage = local.data
        return self._storage.detach()

    def note_write(self) -> None:
        """Count a write to a tensor without a version counter."""
        self._noted += 1

    @property
    def version(self) -> int:
        """Number of writes."""
        through_data = 0 if self._storage is None else self._storage._version
        return self._noted + through_data + sum(counter._version - before for counter, before in self._takers.values())


# By local tensor, while it lives; attributes of a tensor would be pickled with it.
_WRITES: Any = WeakTensorKeyDictionary()
_COUNTERS: Any = WeakTensorKeyDictionary()
_LOCK = threading.Lock()


def check_source(what: str, target: Any, source: Any) -> None:
    """Check that ``target`` can take the storage of ``source``.

    Raises:
        MixedTensorError: ``source`` is not a DTensor.
        LayoutError: (a ValueError) the two are laid out in different ways.
        UnsupportedOperatorError: ``source`` is a copy of a part of another tensor.
    """
    wanted = target._layout.notation(target.dtype)
    if not isinstance(source, DTensor):
        msg = f"{what} must be a DTensor laid out as {wanted}, got {type(source).__name__}"
        raise MixedTensorError(msg)
    if source._layout is not target._layout:
        same = source._layout.mesh is target._layout.mesh and source.shape == target.shape
        fix = (
            f"; call value.redistribute(placements={list(target.placements)}) for a copy, or write into the tensor "
            "with copy_(value)"
        )
        msg = (
            f"{what} must be a DTensor laid out as {wanted}, whose storage is then shared, got "
            f"{source._layout.notation(source.dtype)}{fix if same else ''}"
        )
        raise LayoutError(msg)
    check_unfollowed(what, source)


def check_unfollowed(what: str, source: Any) -> None:
    """Check that ``source`` is not read-only, like a copy of a part of another tensor.

    Raises:
        UnsupportedOperatorError: ``source`` is read-only; writes would reach only one of the two tensors.
    """
    if source._readonly is not None:
        msg = f"{what} would not share the storage of the value: {source._readonly}; use value.clone()"
        raise UnsupportedOperatorError(msg)


def is_shared(tensor: Any) -> bool:
    """Whether others share the storage of ``tensor``: a view, its base, autograd, or users of its local tensor."""
    local = tensor._local
    views = storage_use_count(storage_number(local)) > _USES_BY_ONE_TENSOR
    own = 1 + sum(value is local for value in vars(tensor).values())  # the slot of the local tensor, and attributes
    return views or sys.getrefcount(local) > own + 2  # the variable here, and the argument of getrefcount


_USES_BY_ONE_TENSOR = 2  # by the local tensor itself, and by the Python object that asks
