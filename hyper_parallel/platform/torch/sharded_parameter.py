"""A parameter of a fully sharded group: its shard, the whole that its module computes with, and its place in rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.errors import PlanError
from hyper_parallel.platform.torch.dtensor import TorchDTensor, wrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.data_parallel.plan import Slot

__all__ = ["ShardedParameter"]


class ShardedParameter:
    """One parameter: its shard, which the optimizer sees, and the whole, which the module computes with.

    The whole is what the data axis shares: with tensor parallelism the tensor-parallel shard, which modules see as a
    DTensor.

    Args:
        original: the parameter before sharding; its storage is freed.
        sharded: the DTensor parameter.
        owners: modules and attribute names.
        slot: place in the rows.
        dtype: of the whole.
    """

    def __init__(
        self, original: Any, sharded: Any, owners: Sequence[tuple[Any, str]], slot: Slot, dtype: torch.dtype
    ) -> None:
        self.sharded, self.owners, self.slot = sharded, owners, slot
        # A parameter of its own, because gradients must reach it however its storage comes and goes.
        empty = torch.empty(slot.shape, dtype=dtype, device=original.device)
        self.whole = torch.nn.Parameter(empty, requires_grad=original.requires_grad)
        # Not a parameter: ``defer_grad_reduce`` would keep the gradient of one from the reduction over the data axis.
        self.exposed = wrap(self.whole, original.layout) if isinstance(original, TorchDTensor) else self.whole
        self.flat = self.whole.detach().view(-1)  # of the same storage
        self.accumulated: torch.Tensor | None = None
        """Gradient of passes without reduction."""
        self._dtype = self.local.dtype
        self._version = 0  # of the values: even; while freed, autograd sees the next odd number
        self.free()

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""
        local: torch.Tensor = self.sharded._local
        return local

    def free(self) -> None:
        """Free the storage of the whole, which backward cannot read until it is filled."""
        self.whole.untyped_storage().resize_(0)
        _set_version((self.whole,), (self._version + 1,))

    def fill(self, rows: Sequence[torch.Tensor], *, unchanged: bool) -> None:
        """Allocate the whole and copy it from all ranks' ``rows``.

        ``unchanged`` says that the values are those of the last time, so the version that autograd compares stays.
        """
        whole, offset = self.whole, self.slot.offset
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        torch.cat([row[offset : offset + size] for row, size in zip(rows, self.slot.sizes, strict=True)], out=self.flat)
        self._version += 0 if unchanged else 2
        _set_version((whole,), (self._version,))

    def check_unreplaced(self) -> None:
        """Check that the modules and the shard are those that were sharded.

        Raises:
            PlanError: a conversion of the module, or an assignment, has replaced the parameter or its dtype.
        """
        for owner, name in self.owners:
            present = owner._parameters.get(name)  # noqa: SLF001 - no public spelling
            if present is self.exposed or (present is self.sharded and self.local.dtype is self._dtype):
                continue
            msg = (
                f"fully_shard: parameter {name} of {type(owner).__name__} was replaced or converted after fully_shard, "
                "which gathers the one from before; convert the module first, and load values into its parameters"
            )
            raise PlanError(msg)

    def expose(self, *, whole: bool) -> None:
        """Let the modules see the whole parameter, or its shard."""
        for owner, name in self.owners:
            owner._parameters[name] = self.exposed if whole else self.sharded  # noqa: SLF001

    def take_gradient(self) -> torch.Tensor | None:
        """Return the gradient of the whole, that of passes without reduction included, and forget it.

        Raises:
            PlanError: the gradient is part of a graph.
        """
        gradient, self.whole.grad = self.whole.grad, None
        accumulated, self.accumulated = self.accumulated, None
        if gradient is not None and gradient.requires_grad:
            msg = "fully_shard: backward(create_graph=True) is not supported; gradients are reduced off the graph"
            raise PlanError(msg)
        if gradient is None or accumulated is None:
            return accumulated if gradient is None else gradient
        return accumulated.add_(gradient)

    def accumulate(self, dtype: torch.dtype) -> None:
        """Keep the gradient of this pass for a later reduction, in ``dtype``."""
        gradient = self.take_gradient()
        if gradient is not None:
            self.accumulated = gradient.to(dtype)


_set_version = torch._C._autograd._unsafe_set_version_counter  # noqa: SLF001 - no public spelling
