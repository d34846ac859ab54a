"""PyTorch's real collectives over ``torch.distributed``, with the host operations on its tensors."""

from hyper_parallel.transport.host.torch.ops import (
    TorchOps,
    from_host,
    materialized,
    reduce_in_order,
    seed_rank,
    to_host,
)
from hyper_parallel.transport.real.c10d.transport import C10dTransport, join_world, start_gloo, start_world

__all__ = [
    "C10dTransport",
    "TorchOps",
    "from_host",
    "join_world",
    "materialized",
    "reduce_in_order",
    "seed_rank",
    "start_gloo",
    "start_world",
    "to_host",
]
