"""MindSpore's own communication (``communication``, ``mint.distributed``, ``ops.AllReduce``) on ranks without devices.

``begin`` makes a process a rank. Its collectives are matched by the coordinator, which also carries their payloads:
nothing is written to or read from a device, and HCCL is not involved.
"""

from __future__ import annotations

from hyper_parallel.transport.frontends.mindspore_comm.install import begin, begin_again

__all__ = ["begin", "begin_again"]
