"""Gradient accumulation over several backward passes with one reduction."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.data_parallel.sharding import REPLICATED, groups_of
from hyper_parallel.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["no_sync", "set_requires_gradient_sync"]


def set_requires_gradient_sync(module: Any, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Set whether the next backward passes reduce gradients.

    Of fully sharded modules, gradients of passes that do not are kept whole on each rank, in ``reduce_dtype``, until
    one does, and ``zero_grad`` does not reach them; of replicated ones they are in ``grad``. On MindSpore, where
    gradients are returned, passes that do not reduce return zeros, and the next one that does returns the gradients of
    all. An optimizer step before a pass that reduces raises PlanError.

    Args:
        module: a module to which ``fully_shard`` or ``replicate`` was applied.
        requires_gradient_sync: False to accumulate.
        recurse: for sharded submodules as well.

    Raises:
        PlanError: (a ValueError) neither was applied to ``module``.
    """
    for group in _groups(module, "set_requires_gradient_sync", recurse=recurse):
        group.reduces = requires_gradient_sync


@contextmanager
def no_sync(module: Any) -> Iterator[None]:
    """Accumulate gradients without reduction inside the context; see :func:`set_requires_gradient_sync`.

    Args:
        module: a module to which ``fully_shard`` or ``replicate`` was applied.

    Raises:
        PlanError: (a ValueError) neither was applied to ``module``.
    """
    groups = _groups(module, "no_sync", recurse=True)
    before = [group.reduces for group in groups]
    for group in groups:
        group.reduces = False
    try:
        yield
    finally:
        for group, reduces in zip(groups, before, strict=True):
            group.reduces = reduces


def _groups(module: Any, caller: str, *, recurse: bool) -> list[Any]:
    if hasattr(module, REPLICATED):
        return [getattr(module, REPLICATED)]
    own, nested = groups_of(module)
    if not own:
        msg = (
            f"{caller}: neither fully_shard nor replicate was applied to this {type(module).__name__}; pass a module "
            "that one of them returned"
        )
        raise PlanError(msg)
    return [*own, *nested] if recurse else own
