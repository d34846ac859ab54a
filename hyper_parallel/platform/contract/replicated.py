"""What the framework's part of ``replicate`` is given: over which ranks gradients are averaged, and in what buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyper_parallel.transport.base import Ranks

__all__ = ["ReplicatedOptions"]


@dataclass(frozen=True)
class ReplicatedOptions:
    """How the gradients of a module are averaged.

    Attributes:
        ranks: global ranks that hold the same parameters, this one included.
        bucket_bytes: size of a bucket; a larger parameter has a bucket of its own.
        source: global rank whose parameters and buffers all take; None: each keeps its own.
    """

    ranks: Ranks
    bucket_bytes: int
    source: int | None
