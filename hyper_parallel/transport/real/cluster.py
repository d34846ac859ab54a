"""MindSpore's dynamic cluster on this machine, like msrun's: environment of its processes, and its scheduler.

Ranks on devices find each other in this cluster, one rank per device. The scheduler is a separate process that
distributes the data that HCCL needs to connect the ranks. It does not number the ranks, and computes nothing.
"""

from __future__ import annotations

import importlib
import os
import signal
from typing import Any

from hyper_parallel.transport.failures import exit_text
from hyper_parallel.transport.processes import free_port
from hyper_parallel.transport.simulated.rank_pool import FRESH, SERVERS, start_process

__all__ = ["RankStart", "meets_in_cluster", "rank_environment", "scheduler_environment", "serve_scheduler"]

_DEVICES = "hyper_parallel.transport.real.mindspore.devices"
_HOST = "127.0.0.1"
_TOPOLOGY_SECONDS = 300


def meets_in_cluster(framework: str, device: str) -> bool:
    """Return whether ranks join a world through MindSpore's cluster: on devices they do, on CPU they use gloo."""
    return framework == "mindspore" and device != "cpu"


def rank_environment(rank: int, world_size: int, port: str) -> dict[str, str]:
    """Return the variables that msrun sets for a worker of one machine; rank i takes the i-th visible device.

    Args:
        rank: rank of the worker.
        world_size: number of workers.
        port: port of the scheduler.
    """
    own = dict.fromkeys(("MS_NODE_ID", "RANK_ID", "DEVICE_ID"), str(rank))
    return {**_cluster(world_size, port), "MS_ROLE": "MS_WORKER", **own}


def scheduler_environment(world_size: int, port: str) -> dict[str, str]:
    """Return the variables that msrun sets for the scheduler of ``world_size`` workers, which listens at ``port``."""
    return {**_cluster(world_size, port), "MS_ROLE": "MS_SCHED", "RANK_ID": "0"}


def _cluster(world_size: int, port: str) -> dict[str, str]:
    sizes = dict.fromkeys(("MS_WORKER_NUM", "RANK_SIZE"), str(world_size))
    return {**sizes, "MS_SCHED_HOST": _HOST, "MS_SCHED_PORT": port, "MS_TOPO_TIMEOUT": str(_TOPOLOGY_SECONDS)}


class RankStart:
    """The fork server for the processes of a world's ranks, and the scheduler if the ranks use MindSpore's cluster.

    A scheduler whose workers have died ends by itself, after 30 s measured with MindSpore 2.10.

    Args:
        framework: framework of the ranks.
        device: type of the device on which the ranks compute.
        world_size: number of ranks.

    Attributes:
        server: fork server that starts their processes; see :func:`start_process`.
        port: port of the scheduler; empty without a scheduler.
    """

    def __init__(self, framework: str, device: str, world_size: int) -> None:
        self.server, self.port = SERVERS[framework], ""
        self._scheduler: Any = None
        if meets_in_cluster(framework, device):
            self.server, self.port = FRESH, free_port()
            arguments = (world_size, self.port)
            self._scheduler = start_process(serve_scheduler, arguments, "mindspore-scheduler", self.server)

    def how_it_ended(self) -> str:
        """Return a text with the exit code of an ended scheduler; empty while it runs, or without a scheduler."""
        if self._scheduler is None or self._scheduler.exitcode is None:
            return ""
        return f"MindSpore's scheduler ended {exit_text(self._scheduler.exitcode)}; stderr has its error"

    def close(self) -> None:
        """End the scheduler; its workers have ended, so it has no work left."""
        if self._scheduler is not None:
            self._scheduler.kill()
            self._scheduler.join()


def serve_scheduler(world_size: int, port: str) -> None:
    """Run the scheduler: MindSpore's ``init`` listens in C++, where signal handlers of Python never run.

    Args:
        world_size: number of workers.
        port: port that it listens on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after a Ctrl-C in the terminal, the parent process ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a Python handler would never run
    devices: Any = importlib.import_module(_DEVICES)
    os.environ.update(scheduler_environment(world_size, port))
    devices.communication.init()
