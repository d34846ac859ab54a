"""Which row goes to which expert on which rank: plans of integers, without tensors and without communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DispatchPlan", "LocalRouting", "expert_capacity", "local_routing", "plan_dispatch"]

Integers = Any  # NDArray[np.int64], which Sphinx cannot resolve in a dataclass


@dataclass(frozen=True)
class LocalRouting:
    """One rank's assignments of tokens to experts.

    Attributes:
        experts: the expert of each assignment, [A]; assignment ``t * k + j`` is the ``j``-th choice of token ``t``.
        order: assignments sorted by expert, those of one expert in the order of tokens, [A].
        counts: assignments per expert, [E].
    """

    experts: Integers
    order: Integers
    counts: Integers


@dataclass(frozen=True)
class DispatchPlan:
    """The rows that one rank sends, receives and returns.

    Attributes:
        sent: assignments in the order in which their rows are sent: by expert, then by token, [S].
        input_splits: rows sent to each rank of the expert axis.
        output_splits: rows received from each.
        by_expert: position, among the received rows, of each row sorted by expert, then by global token, [R].
        by_source: the inverse permutation, [R].
        counts: rows of each expert of this rank.
        slots: position in ``sent`` of each assignment, [A]; the number of sent rows if it was dropped.
    """

    sent: Integers
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    by_expert: Integers
    by_source: Integers
    counts: tuple[int, ...]
    slots: Integers

    @property
    def drops(self) -> bool:
        """Return True if an assignment of this rank was dropped."""
        return len(self.sent) < len(self.slots)


def local_routing(experts: NDArray[Any], num_experts: int) -> LocalRouting:
    """Sort the choices of this rank's tokens by expert.

    Args:
        experts: chosen experts, integers [T, k] in ``range(num_experts)``.
        num_experts: number E of all experts.
    """
    flat = np.asarray(experts, np.int64).reshape(-1)
    return LocalRouting(flat, np.argsort(flat, kind="stable"), np.bincount(flat, minlength=num_experts))


def expert_capacity(assignments: int, num_experts: int, factor: float) -> int:
    """Return the largest number of assignments of one expert, of the global batch.

    It is ``ceil(assignments * factor / num_experts)``, as in Switch Transformer (Fedus et al., 2022, equation 3). Since
    the assignments of all ranks are counted, it does not depend on the number of ranks.
    """
    return int(np.ceil(assignments * factor / num_experts))


def plan_dispatch(
    own: LocalRouting,
    counts: Sequence[NDArray[Any]],
    rank: int,
    members: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    capacity: int | None = None,
) -> DispatchPlan:
    """Plan one rank's dispatch.

    With a capacity, an expert takes its first assignments in the order of global tokens and, within a token, of its
    choices; which ones these are does not depend on the number of ranks.

    Args:
        own: this rank's assignments.
        counts: assignments per expert of each rank, in the order of the tokens that they hold.
        rank: this rank's position in ``counts``.
        members: positions in ``counts`` of the ranks of this rank's expert axis, this one among them.
        bounds: range of experts of each member.
        capacity: maximum number of assignments of one expert, over all ranks; None for no limit.
    """
    matrix = np.asarray(counts, np.int64)
    before = np.cumsum(matrix, axis=0) - matrix
    limit = int(matrix.sum()) if capacity is None else capacity
    kept = np.minimum(matrix, np.maximum(limit - before, 0))
    sent = own.order[_within(own.counts) < np.repeat(kept[rank], own.counts)]
    slots = np.full(len(own.experts), len(sent), np.int64)
    slots[sent] = np.arange(len(sent))
    start, stop = bounds[list(members).index(rank)]
    received = kept[list(members), start:stop]
    by_expert = _sorted_by_expert(received)
    return DispatchPlan(
        sent,
        tuple(int(kept[rank, low:high].sum()) for low, high in bounds),
        tuple(int(rows) for rows in received.sum(axis=1)),
        by_expert,
        np.argsort(by_expert, kind="stable"),
        tuple(int(rows) for rows in received.sum(axis=0)),
        slots,
    )


def _within(counts: Integers) -> Integers:
    """Return the position of each row within its expert, for rows sorted by expert."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _sorted_by_expert(received: Integers) -> Integers:
    """Return the order that sorts received rows by expert; they arrive by source, and by expert within a source."""
    experts = np.tile(np.arange(received.shape[1]), received.shape[0])
    return np.argsort(np.repeat(experts, received.reshape(-1)), kind="stable")
