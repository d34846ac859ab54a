"""Gradients of PyTorch's own data parallelism, reduced in the order of the ranks.

Gloo's all-reduce adds the parts of a tensor in an order that depends on where they lie in the bucket, and DDP rebuilds
its buckets after the first backward. With three processes or more a restarted training therefore rounds its first step
in another way than the training that was not interrupted, and simulated ranks round in a third.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.transport.host.torch.ops import reduce_in_order

__all__ = ["rank_order_hook"]


def rank_order_hook(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in the order of the ranks, bit-equal in every engine and every bucket.

    Give it to DDP: ``model.register_comm_hook(None, rank_order_hook)``. It gathers the gradients of all ranks, so it
    sends as many times more than an all-reduce as there are ranks, half of it.

    Args:
        group: the process group that DDP was given; None is the world's.
        bucket: DDP's flat gradients.

    Returns:
        a future of the averaged gradients, in memory of their own.
    """
    own = bucket.buffer()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    work: Any = dist.all_gather(parts, own, group=group, async_op=True)
    gathered: torch.futures.Future[Any] = work.get_future()
    return gathered.then(lambda _: reduce_in_order(parts, "avg"))


# DDP compares the annotations themselves, which are strings in this module.
rank_order_hook.__annotations__.update(bucket=vars(dist)["GradBucket"])
del rank_order_hook.__annotations__["return"]
