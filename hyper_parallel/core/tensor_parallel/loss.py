"""Cross entropy of logits that stay sharded over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hyper_parallel.core.shard.dispatch import implicit_replication
from hyper_parallel.core.shard.rules.loss import vocab_parallel_loss

__all__ = ["loss_parallel"]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Compute cross entropies inside this context without gathering logits that are sharded over classes.

    ::

        logits_BLV  [B, L, V@tp]   @tp Shard(-1)    (a ColwiseParallel head with use_local_output=False)
        labels_BL   [B, L]         @tp Replicate    (plain labels and class weights are treated as replicated)
        loss        []             @tp Replicate    (per row, ranks exchange a maximum and sums, never logits)

    Backward needs no context. Outside of it, such logits are gathered first, which is correct but expensive. The
    complete signature of cross entropy works: reductions, ignored labels, smoothing, class weights, class
    probabilities, uneven vocabularies, meshes of several axes. Applies to the current thread and task; may be nested.

    Example:
        >>> with loss_parallel():
        ...     loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        >>> loss.backward()
    """
    with vocab_parallel_loss(), implicit_replication():
        yield
