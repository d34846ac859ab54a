"""A parameter of a fully sharded group: its shard, the whole that its module computes with, and its place in rows."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.data_parallel.plan import Slot

__all__ = ["ShardedParameter"]


class ShardedParameter:
    """One parameter: its shard, which the optimizer sees, and the whole, which the module computes with.

    Args:
        original: the whole parameter before sharding; its storage is freed.
        sharded: the DTensor parameter.
        owners: modules and attribute names.
        slot: place in the rows.
    """

    def __init__(self, original: Any, sharded: Any, owners: Sequence[tuple[Any, str]], slot: Slot) -> None:
        self.sharded, self.owners, self.slot = sharded, owners, slot
        # A parameter of its own, because gradients must reach it however its storage comes and goes.
        self.whole = torch.nn.Parameter(torch.empty_like(original.detach()), requires_grad=original.requires_grad)
        self.flat = self.whole.detach().view(-1)  # of the same storage
        self.free()

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""
        local: torch.Tensor = self.sharded._local
        return local

    def free(self) -> None:
        """Free the storage of the whole."""
        self.whole.untyped_storage().resize_(0)

    def fill(self, rows: Sequence[torch.Tensor], *, unchanged: bool) -> None:
        """Allocate the whole and copy it from all ranks' ``rows``.

        ``unchanged`` says that the values are those of the last time, so the version that autograd compares stays.
        """
        whole, offset = self.whole, self.slot.offset
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        with _unsafe_preserve_version_counter(whole) if unchanged else nullcontext():
            parts = [row[offset : offset + rank_size] for row, rank_size in zip(rows, self.slot.sizes, strict=True)]
            torch.cat(parts, out=self.flat)

    def expose(self, *, whole: bool) -> None:
        """Let the modules see the whole parameter, or its shard."""
        for owner, name in self.owners:
            owner._parameters[name] = self.whole if whole else self.sharded  # noqa: SLF001
