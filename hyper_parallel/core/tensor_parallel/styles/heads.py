"""Numbers of attention heads: where modules keep them, and how often ranks repeat key and value heads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "HEAD_COUNT_ATTRIBUTES", "KV_HEAD_ATTRIBUTES", "HeadCounts", "attention_among", "groups_of", "named_counts",
]  # fmt: skip

QUERY_HEAD_ATTRIBUTES = ("n_heads", "num_heads", "n_head", "num_attention_heads")
KV_HEAD_ATTRIBUTES = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
HEAD_COUNT_ATTRIBUTES = (*QUERY_HEAD_ATTRIBUTES, *KV_HEAD_ATTRIBUTES)
GROUP_ATTRIBUTES = ("num_key_value_groups", "n_rep")
"""Names under which modules keep the number of query heads per key/value head."""


@dataclass(frozen=True)
class HeadCounts:
    """Heads of an attention module, over all ranks.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
    """

    heads: int
    kv_heads: int

    @property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    def repeated(self, size: int) -> int:
        """Number of key/value heads after each is repeated until their number is divisible by ``size`` ranks."""
        return math.lcm(self.kv_heads, size)

    def repeated_groups(self, size: int) -> int:
        """Query heads per repeated key/value head."""
        return self.heads // self.repeated(size)

    def problem(self, size: int) -> str | None:
        """The reason why query heads, each with its key/value head, cannot be split over ``size`` ranks; or None."""
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            return f"{self.heads} query heads are not a multiple of {self.kv_heads} key/value heads"
        if self.heads % size:
            return (
                f"{self.heads} query heads are not divisible by the {size} ranks of the parallel axis; with "
                "ColwiseParallel(use_local_output=False) for queries, keys and values all three stay DTensors, whose "
                "heads need not be"
            )
        return None

    @staticmethod
    def of(owner: Any) -> HeadCounts | None:
        """Return the numbers of heads of an attention module, or of its configuration; None if it has none."""
        counts = dict(named_counts(owner))
        heads = next((counts[name] for name in QUERY_HEAD_ATTRIBUTES if name in counts), None)
        kv_heads = next((counts[name] for name in KV_HEAD_ATTRIBUTES if name in counts), None)
        return None if heads is None or kv_heads is None else HeadCounts(heads, kv_heads)


def named_counts(owner: Any) -> Iterator[tuple[str, int]]:
    """Yield names and values of an attention module's numbers of heads.

    A number that the module lacks may be in its ``config``, as in models of Transformers. Other modules keep the same
    configuration; those of attention are recognised by their ``head_dim``.
    """
    config = getattr(owner, "config", None) if hasattr(owner, "head_dim") else None
    for name in HEAD_COUNT_ATTRIBUTES:
        count = getattr(owner, name, getattr(config, name, None))
        if isinstance(count, int):
            yield name, count


def attention_among(ancestors: Sequence[Any], default: Any) -> Any:
    """Return the nearest of a module's ancestors that keeps numbers of heads, the attention module; or ``default``."""
    return next((module for module in ancestors if HeadCounts.of(module)), default)


def groups_of(owner: Any) -> dict[str, Any]:
    """Return the attributes, by name, in which a module keeps the number of query heads per key/value head."""
    return {name: getattr(owner, name) for name in GROUP_ATTRIBUTES if hasattr(owner, name)}
