"""Options of the framework's part of ``replicate``: ranks to average over, and buckets.

Both frameworks use the bucketing and the check below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hyper_parallel.transport.base import Ranks

__all__ = ["ReplicatedOptions", "bucketed", "check_unchanged"]


@dataclass(frozen=True)
class ReplicatedOptions:
    """How the gradients of a module are averaged.

    Attributes:
        ranks: global ranks that hold the same parameters, this one included.
        bucket_bytes: size of a bucket; a larger parameter has a bucket of its own.
        source: global rank whose parameters and buffers are copied to all; None: each keeps its own.
    """

    ranks: Ranks
    bucket_bytes: int
    source: int | None


def bucketed(sizes: Sequence[tuple[Any, int]], bucket_bytes: int) -> list[list[int]]:
    """Return the indices of the gradients in each bucket, in order.

    Args:
        sizes: per gradient, its kind (such as its dtype) and its bytes; a bucket holds one kind.
        bucket_bytes: size of a bucket; a larger gradient has a bucket of its own.
    """
    buckets: list[list[int]] = []
    room = 0
    for index, (kind, size) in enumerate(sizes):
        if not buckets or kind != sizes[index - 1][0] or size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(index)
        room -= size
    return buckets


def check_unchanged(trained: Mapping[str, int], averaged: Collection[int]) -> None:
    """Check that the gradients of all trained parameters are averaged.

    Args:
        trained: identity of each parameter that is trained now, by name.
        averaged: identities of the parameters that ``replicate`` has found.

    Raises:
        PlanError: a parameter was replaced, added or unfrozen after ``replicate``.
    """
    names = [name for name, identity in trained.items() if identity not in averaged]
    if names:
        msg = (
            f"replicate: parameters {', '.join(names)} were replaced, added or unfrozen after replicate; their "
            "gradients would not be averaged; call replicate once the model is complete"
        )
        raise PlanError(msg)
