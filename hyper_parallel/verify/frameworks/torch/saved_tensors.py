"""Counts the bytes that autograd saves for backward, which is the activation memory of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hyper_parallel.platform.torch.versions import storage_number

__all__ = ["FULLY_SHARDED", "counted_for_backward"]

FULLY_SHARDED = "_hyper_parallel_fully_sharded"
"""Attribute of a module with its groups of ``fully_shard``."""


@contextmanager
def counted_for_backward(model: Any) -> Iterator[Callable[[], int]]:
    """Inside this context, count storages that autograd saves, each once, except those of parameters of ``model``.

    Autograd does not save tensors inside checkpointed regions, so these are not counted.

    Yields:
        a function that returns the largest number of bytes that were saved at one time.
    """
    kept = _Kept(model)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, _Saved.unpack):
        yield lambda: kept.most


class _Kept:
    """The storages that are saved now, each with the number of saved tensors that use it."""

    def __init__(self, model: Any) -> None:
        groups = [group for module in model.modules() for group in getattr(module, FULLY_SHARDED, ())]
        whole = [member.whole for group in groups for member in group.members]
        self._weights = {_storage(value)[0] for value in (*model.parameters(), *model.buffers(), *whole)}
        self._users: dict[int, int] = {}
        self._bytes = self.most = 0

    def pack(self, tensor: torch.Tensor) -> _Saved:
        """Count a tensor that is saved."""
        key, size = _storage(tensor)
        users = self._users.get(key, 0)
        if not users and key not in self._weights:
            self._bytes += size
            self.most = max(self.most, self._bytes)
        self._users[key] = users + 1
        return _Saved(self, tensor, key, size)

    def release(self, key: int, size: int) -> None:
        """Record that a saved tensor is not needed any more."""
        self._users[key] -= 1
        if not self._users[key] and key not in self._weights:
            self._bytes -= size


class _Saved:
    """A saved tensor, which autograd drops when backward has used it."""

    def __init__(self, kept: _Kept, tensor: torch.Tensor, key: int, size: int) -> None:
        self._kept, self._tensor, self._key, self._size = kept, tensor, key, size

    def unpack(self) -> torch.Tensor:
        """Return the tensor."""
        return self._tensor

    def __del__(self) -> None:
        """Stop counting the tensor."""
        self._kept.release(self._key, self._size)


def _storage(tensor: Any) -> tuple[int, int]:
    """Return a key of a tensor's storage and its size in bytes; for a DTensor, of the local tensor's storage."""
    local = getattr(tensor, "_local", tensor)
    return storage_number(local), local.untyped_storage().nbytes()
