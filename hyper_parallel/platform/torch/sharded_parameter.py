"""A parameter of a fully sharded group: its shard, the gathered parameter, and its slot in the all-gathered rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.errors import PlanError
from hyper_parallel.platform.contract.fully_sharded import replaced_parameter
from hyper_parallel.platform.torch.deferred_hooks import DeferredHooks
from hyper_parallel.platform.torch.dtensor import wrap
from hyper_parallel.platform.torch.optimizer_steps import set_replaced
from hyper_parallel.platform.torch.versions import set_version_counter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hyper_parallel.core.data_parallel.plan import Slot

__all__ = ["ShardedParameter"]


class ShardedParameter:
    """One parameter: its shard, for the optimizer, and the gathered parameter ("whole"), for the module.

    The data axis shards the gathered parameter. With tensor parallelism the gathered parameter is a tensor-parallel
    shard, which modules have as a DTensor.

    Args:
        original: the parameter before sharding; its storage is freed.
        sharded: the DTensor parameter.
        owners: the modules that have it, with the attribute name in each.
        slot: position in every rank's row, the flat buffer that is gathered.
        dtype: dtype of the gathered parameter.
    """

    def __init__(
        self, original: Any, sharded: Any, owners: Sequence[tuple[Any, str]], slot: Slot, dtype: torch.dtype
    ) -> None:
        self._begin(owners, slot, dtype, getattr(original, "_layout", None), sharded)

    def _begin(self, owners: Any, slot: Slot, dtype: torch.dtype, original_layout: Any, sharded: Any) -> None:
        self.owners, self.slot, self._whole_dtype, self._original_layout = owners, slot, dtype, original_layout
        self.accumulated: torch.Tensor | None = None
        """Sum of the gradients of passes that did not reduce."""
        self._for_hooks: torch.Tensor | None = None
        """Reduced gradient of the running backward, kept for hooks, which are called at its end."""
        self._watched: torch.Tensor | None = None
        self._hold(sharded)

    def __getstate__(self) -> tuple[Any, ...]:
        """Return the state for copying and pickling, without gradients and hooks, as for other parameters."""
        return self.owners, self.slot, self._whole_dtype, self._original_layout, self.sharded

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Initialise, with the gathered parameter freed."""
        self._begin(*state)

    def _hold(self, sharded: Any) -> None:
        """Set ``sharded`` as the shard, and create the gathered parameter on its device, with freed storage."""
        self.sharded = sharded
        # A separate parameter, because gradients must reach it although its storage is freed and filled.
        empty = torch.empty(self.slot.shape, dtype=self._whole_dtype, device=sharded.device)
        self.whole = torch.nn.Parameter(empty, requires_grad=sharded.requires_grad)
        layout = self._original_layout
        # The wrapper is not a parameter: ``defer_grad_reduce`` would defer its gradient, past the reduction over the
        # data axis.
        self.exposed = self.whole if layout is None else wrap(self.whole, layout)
        self.flat = self.whole.detach().view(-1)  # shares the storage
        self._dtype = self.local.dtype
        self.hooks = DeferredHooks(self.local, self._refuse_direct_gradient, self.whole)
        self._version = 0  # the version of the values is even; while freed, it is the next odd number
        self.free()

    def materialize(self) -> None:
        """Replace the shard, which was on the meta device, by the parameter that the module has now.

        Raises:
            PlanError: the module's parameter is missing, is still on the meta device or is sharded in another way, or
                parameters that were tied are no longer.
        """
        places = [f"{name} of {type(owner).__name__}" for owner, name in self.owners]
        present = [owner._parameters.get(name) for owner, name in self.owners]
        first = present[0]
        if any(other is not first for other in present):
            msg = (
                f"fully_shard: parameters {', '.join(places)} were tied on the meta device and are no longer; assign "
                "the first to the other places, before the optimizer is built"
            )
            raise PlanError(msg)
        before = self.sharded
        layout, dtype = getattr(first, "_layout", None), getattr(first, "dtype", None)
        if first is None or first.is_meta or layout is not before._layout or dtype is not before.dtype:
            msg = (
                f"fully_shard: parameter {places[0]} was sharded on the meta device, and has not been replaced by "
                f"{before._layout.notation(before.dtype)} on a device; call module.to_empty(device=...), and "
                "initialise or load all values, before the first forward"
            )
            raise PlanError(msg)
        set_replaced(before, ".".join(reversed(places[0].split(" of "))))
        self._hold(first)

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""
        local: torch.Tensor = self.sharded._local
        return local

    def free(self) -> None:
        """Free the gathered storage, which backward cannot read until it is filled."""
        self.whole.untyped_storage().resize_(0)
        set_version_counter((self.whole,), (self._version + 1,))

    def fill(self, rows: Sequence[torch.Tensor], *, unchanged: bool) -> None:
        """Allocate the gathered parameter and copy it from all ranks' ``rows``.

        If ``unchanged``, the values equal those of the last call, so the version that autograd compares is kept.
        """
        whole, offset = self.whole, self.slot.offset
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        if not whole.is_meta:  # otherwise there are no values
            parts = [row[offset : offset + size] for row, size in zip(rows, self.slot.sizes, strict=True)]
            if self.slot.dim == 0:
                torch.cat(parts, out=self.flat)
            else:
                shaped = [part.view(self.slot.local_shape(rank)) for rank, part in enumerate(parts)]
                torch.cat(shaped, self.slot.dim, out=self.flat.view(self.slot.shape))
        self._version += 0 if unchanged else 2
        set_version_counter((whole,), (self._version,))

    def check_unreplaced(self) -> bool:
        """Check that modules still have this parameter; return whether its ``requires_grad`` is unchanged.

        Raises:
            PlanError: a conversion of the module, or an assignment, has replaced the parameter or its dtype.
        """
        for owner, name in self.owners:
            present = owner._parameters.get(name)
            if present is self.exposed or (present is self.sharded and self.local.dtype is self._dtype):
                continue
            raise replaced_parameter(name, owner)
        return bool(self.sharded.requires_grad == self.whole.requires_grad)

    def follow_requires_grad(self) -> None:
        """Freeze or unfreeze the gathered parameter to match its shard.

        Raises:
            PlanError: gradients are accumulated, and would never be reduced.
        """
        if self.sharded.requires_grad == self.whole.requires_grad:
            return
        if self.accumulated is not None:
            msg = (
                f"fully_shard: {self._name()} was frozen while its gradient is accumulated under no_sync(); run a "
                "backward outside of it first"
            )
            raise PlanError(msg)
        self.whole.requires_grad_(self.sharded.requires_grad)

    @property
    def is_exposed(self) -> bool:
        """Whether a module has the gathered parameter, not the shard."""
        return any(owner._parameters.get(name) is self.exposed for owner, name in self.owners)

    def expose(self, *, whole: bool) -> None:
        """Set the gathered parameter, or its shard, in the modules."""
        for owner, name in self.owners:
            owner._parameters[name] = self.exposed if whole else self.sharded

    def _name(self) -> str:
        owner, name = self.owners[0]
        return f"parameter {name} of {type(owner).__name__}"

    def _refuse_direct_gradient(self, gradient: torch.Tensor) -> None:
        del gradient
        self.hooks.refuse(f"fully_shard: {self._name()} got a gradient outside of the forward of its module")

    def watch_whole(self, call: Callable[[torch.Tensor], None]) -> None:
        """Call ``call`` with each gradient of the gathered parameter; hooks of users on it are refused."""
        if self._watched is self.whole:
            return
        self._watched = self.whole

        def refuse(gradient: torch.Tensor) -> None:
            del gradient
            hooks.refuse(f"fully_shard: {self._name()} got hooks in the forward of its module")

        hooks = DeferredHooks(self.whole, refuse)
        hooks.after_accumulation(call)

    def add_reduced(self, local: torch.Tensor) -> None:
        """Add a reduced gradient to that of the shard; if there are hooks, at the end of backward."""
        if self.hooks:
            self._for_hooks = local if self._for_hooks is None else self._for_hooks + local
        else:
            self._accumulate_reduced(local)

    def _accumulate_reduced(self, local: torch.Tensor) -> None:
        sharded = self.sharded
        if sharded.grad is not None:
            local = local + sharded.grad.to_local()
        sharded.grad = wrap(local, sharded.layout)

    def forget_reduced(self) -> None:
        """Drop the reduced gradient of a backward that has raised."""
        self._for_hooks = None

    def call_hooks(self) -> None:
        """At the end of backward: call the hooks that users have registered on the shard."""
        reduced, self._for_hooks = self._for_hooks, None
        if reduced is not None:
            self._accumulate_reduced(self.hooks.changed(reduced))
            self.hooks.announce()

    def take_gradient(self) -> torch.Tensor | None:
        """Return and drop the gradient of the gathered parameter, with that of passes without reduction.

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
            self.hooks.refuse(f"fully_shard: the gradient of {self._name()} is accumulated under no_sync()")
            self.accumulated = gradient.to(dtype)
