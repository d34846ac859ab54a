"""The methods that modules have under ``fully_shard``, as PyTorch's have them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.data_parallel.accumulation import set_requires_gradient_sync
from hyper_parallel.core.data_parallel.sharding import groups_of
from hyper_parallel.errors import ArgumentTypeError, PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FSDPModule", "class_with"]


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns: parameters are there already."""

    def wait(self) -> None:
        """Return."""


class FSDPModule:
    """A base of the class of every PyTorch module that ``fully_shard`` was applied to."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own group, until ``reshard()`` or the end of a forward; all ranks call it.

        A gradient reaches the gathered parameters only through forward.
        """
        for group in groups_of(self)[0]:
            group.unshard()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Free what was gathered of this module's own group.

        Raises:
            PlanError: its forward or backward runs.
        """
        for group in groups_of(self)[0]:
            group.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in the passes to come, or keep those of each rank: calls the function of this name."""
        set_requires_gradient_sync(self, requires_gradient_sync, recurse=recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Reduce over the replicas in the passes to come, or keep the sums of the data axis until a pass does."""
        self._set("reduces_over_replicas", requires_all_reduce, recurse=recurse)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted: every backward waits for its reductions."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free the gathered parameters after forward, or keep them until backward."""
        self._set("reshards_after_forward", reshard_after_forward, recurse=recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free the gathered parameters after backward, or keep them until the shards are written."""
        self._set("keeps_after_backward", not reshard_after_backward, recurse=recurse)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sums of this module's own gradients by ``factor``, in the place of the number of ranks.

        Raises:
            PlanError: it is not positive.
        """
        if not factor > 0:
            msg = f"set_gradient_divide_factor: {factor!r} must be positive"
            raise PlanError(msg)
        self._set("divide_factor", factor, recurse=False)

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Accepted for modules under ``fully_shard``: what is gathered ahead is learned from the last forward."""
        _require_sharded("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Accepted for modules under ``fully_shard``: what is gathered ahead is learned from the last backward."""
        _require_sharded("set_modules_to_backward_prefetch", modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accepted: backward gathers whatever forward has freed."""

    def set_post_optim_event(self, event: Any) -> None:
        """Accepted: gathering follows the optimizer on its stream."""

    def _set(self, name: str, value: Any, *, recurse: bool) -> None:
        own, nested = groups_of(self)
        for group in [*own, *nested] if recurse else own:
            setattr(group, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For a copy or a file: the class is made anew from the module's own."""
        del protocol
        return _empty, (type(self).__mro__[2],), dict(vars(self))


def _require_sharded(caller: str, modules: Sequence[Any]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            msg = f"{caller}: fully_shard was not applied to this {type(module).__name__}"
            raise ArgumentTypeError(msg)


@lru_cache(maxsize=1024)
def class_with(methods: type, kind: type) -> type:
    """Return a class of the name of ``kind`` with the methods of ``methods`` before its own."""
    if issubclass(kind, methods):
        return kind
    return type(kind.__name__, (methods, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _empty(kind: type) -> Any:
    """An instance of the class for modules of ``kind``, without attributes."""
    made: Any = class_with(FSDPModule, kind)
    return made.__new__(made)
