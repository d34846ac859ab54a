"""Reports collectives of a simulated rank, which do not pass PyTorch's dispatcher, to ``CommDebugMode``."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform.torch.versions import (
    allgather_base,
    dispatch_mode_stack,
    len_dispatch_stack,
    reduce_scatter_base,
)

__all__ = ["count_collective", "count_of_transport"]

_OPS: Any = torch.ops.c10d
# Operators by function of torch.distributed; those of barriers are not counted on real ranks either.
_PACKETS = {
    "all_reduce": _OPS.allreduce_,
    "all_reduce_coalesced": _OPS.allreduce_coalesced_,
    "reduce": _OPS.reduce_,
    "broadcast": _OPS.broadcast_,
    "all_gather": _OPS.allgather_,
    "all_gather_into_tensor": allgather_base,
    "all_gather_coalesced": _OPS.allgather_coalesced_,
    "gather": _OPS.gather_,
    "scatter": _OPS.scatter_,
    "reduce_scatter": _OPS.reduce_scatter_,
    "reduce_scatter_tensor": reduce_scatter_base,
    "all_to_all": _OPS.alltoall_,
    "all_to_all_single": _OPS.alltoall_base_,
}
# The functions on single tensors that a real rank calls for each method of the transport.
_OF_TRANSPORT = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor",
                 "all_to_all": "all_to_all_single"}  # fmt: skip


class _Counted:
    """A placeholder for a collective's operator: ``CommDebugMode`` calls it, and counts the operator's packet."""

    def __init__(self, packet: Any) -> None:
        self._overloadpacket = packet

    def __call__(self) -> None:
        """Do nothing: the collective runs on the simulated transport."""

    def __str__(self) -> str:
        return str(self._overloadpacket)


def count_of_transport(method: str) -> None:
    """Count the collective that a real rank runs for a method of the transport."""
    count_collective(_OF_TRANSPORT.get(method, method))


def count_collective(name: str) -> None:
    """Count a call in each ``CommDebugMode`` of this thread; ``name`` is its name in ``torch.distributed``."""
    if not len_dispatch_stack():
        return
    from torch.distributed.tensor.debug import CommDebugMode

    modes = [mode for mode in dispatch_mode_stack() if isinstance(mode, CommDebugMode)]
    for mode in modes if name in _PACKETS else ():
        mode.__torch_dispatch__(_Counted(_PACKETS[name]), ())
