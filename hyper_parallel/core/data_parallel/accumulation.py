"""Gradient accumulation over several backward passes with one reduction, and losses per token over all of them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.data_parallel.sharding import REPLICATED, groups_of
from hyper_parallel.core.dtensor.dtensor import DTensor, resolve_mesh
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.select import platform_of_argument

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = ["global_mean", "no_sync", "set_requires_gradient_sync"]


def set_requires_gradient_sync(module: Any, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Set whether the next backward passes reduce gradients.

    A pass that does not reduce keeps the gradients. Each rank keeps those of fully sharded modules unsharded, in
    ``reduce_dtype``, and ``zero_grad`` does not clear them; those of replicated modules are in ``grad``. The next pass
    that reduces adds them. On MindSpore, which returns gradients, passes that do not reduce return zeros, and the next
    reducing pass returns the gradients of all. An optimizer step before a pass that reduces raises PlanError.

    Args:
        module: a module to which ``fully_shard`` or ``replicate`` was applied.
        requires_gradient_sync: False to accumulate.
        recurse: whether to apply it to sharded submodules as well.

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


def global_mean(loss_sum: Any, count: Any, mesh: DeviceMesh | None = None) -> Any:
    """Return the mean over the tokens of all ranks, scaled so that averaged gradients are those of that mean.

    A mean of the ranks' means would give tokens of short batches more weight. This divides by the count of all ranks;
    the gradient of this rank's sum is multiplied by the number of ranks, since ``replicate``, ``fully_shard`` and DDP
    then divide by it.

    To accumulate over several passes, give every pass the ``count`` of all of them: the losses then add up to the mean
    over all, and so do the gradients.

    Args:
        loss_sum: the sum of this rank's losses in this pass, a plain 0-d tensor.
        count: this rank's tokens, in all passes before the next step: a number, or a 0-d tensor.
        mesh: the ranks over which gradients are averaged, by default those of the current mesh; all of them call this.
            Ranks that hold parts of a sequence are counted as ranks, too.

    Returns:
        a tensor like ``loss_sum``, whose value is equal on all ranks.

    Raises:
        PlanError: (a ValueError) ``loss_sum`` is a DTensor or has dims, a rank's count is negative or not a number, or
            all are zero. All ranks raise it.
    """
    mesh = resolve_mesh(mesh)
    platform = platform_of_argument(loss_sum, "global_mean: loss_sum")
    if isinstance(loss_sum, DTensor):
        layout = loss_sum.layout.notation(loss_sum.dtype)
        msg = f"global_mean: loss_sum is a DTensor {layout}; pass loss_sum.full_tensor()"
        raise PlanError(msg)
    if tuple(loss_sum.shape):
        msg = f"global_mean: loss_sum has the shape {list(loss_sum.shape)}; pass a 0-d sum"
        raise PlanError(msg)
    ranks = tuple(mesh.ranks)
    counts = platform.transport().all_gather_object(_number(count), ranks)
    wrong = [rank for rank, each in zip(ranks, counts, strict=True) if not each >= 0]  # NaN is wrong too
    if wrong or not sum(counts):
        facts = f"negative or not a number on ranks {wrong}" if wrong else "zero on all ranks"
        msg = f"global_mean: count is {facts}; pass the number of tokens of each rank"
        raise PlanError(msg)
    total = sum(counts)
    mean = platform.all_reduce(platform.detach(loss_sum), ranks) / total
    share = loss_sum * (len(ranks) / total)
    return mean + (share - platform.detach(share))  # the second term is exactly zero: it only adds a gradient


def _number(count: Any) -> float:
    """Return a count as a number; NaN if it is not one, so that the error is raised on all ranks."""
    try:
        return float(count.item() if hasattr(count, "item") else count)
    except (TypeError, ValueError, RuntimeError):
        return float("nan")
