"""Implements MindSpore's own communication (``communication``, ``mint.distributed``, ``ops.AllReduce``) on CPU ranks.

``begin`` turns a process into a rank. The coordinator matches its collectives and transfers their payloads; devices and
HCCL are not used.
"""

from __future__ import annotations

from hyper_parallel.transport.frontends.mindspore_comm.install import begin, begin_again

__all__ = ["begin", "begin_again"]
