"""PyTorch's transports: the host operations of simulated ranks, and real collectives over ``torch.distributed``."""

from hyper_parallel.transport.c10d.host import TorchOps, from_host, reduce_in_order, seed_rank, to_host
from hyper_parallel.transport.c10d.transport import C10dTransport, join_world, start_gloo, start_world
from hyper_parallel.transport.gloo import materialized

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
