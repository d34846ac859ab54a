"""Exchanges data among the processes of torchrun over its store, without a process group."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.platform.torch.versions import creating_groups

__all__ = ["TorchrunProcesses", "torchrun_world"]

_CHUNK = 4 << 20  # the store rejects values of 8 MiB and more


def torchrun_world() -> tuple[int, int] | None:
    """Return rank and world size of a process that torchrun has started; None in any other process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class TorchrunProcesses:
    """The processes of one torchrun call, including this one.

    Args:
        seconds: time limit of each wait.

    Attributes:
        rank: rank of this process.
        world_size: number of processes.
    """

    def __init__(self, seconds: float) -> None:
        """Connect to the store of torchrun's agent.

        Raises:
            HyperParallelError: torchrun has no store that outlives the program's process group.
        """
        self.rank, self.world_size = torchrun_world() or (0, 1)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            msg = "torchrun keeps no store of its own here; start it with --standalone, or with --rdzv-backend c10d"
            raise HyperParallelError(msg)
        store = TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
        )  # fmt: skip
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store: Any = PrefixStore(  # its values are bytes, contrary to its type hints
            f"hyper_parallel/{os.environ['TORCHELASTIC_RUN_ID']}/{restart}", store
        )
        self._groups: list[Any] = []

    def keep_groups(self) -> AbstractContextManager[None]:
        """Return a context that keeps process groups created in it alive as long as this object.

        The thread in which gloo frees a completed collective may drop the last reference to a DistributedDataParallel.
        If this destroys the group too, the thread deadlocks with itself while it has the interpreter lock (PyTorch
        2.13).
        """
        return creating_groups(self._groups.append)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of every process in rank order on rank 0, which waits for all; an empty list on others."""
        self._send(f"rank {self.rank}", data)
        return [] if self.rank else [self._receive(f"rank {rank}") for rank in range(self.world_size)]

    def broadcast(self, data: bytes = b"", name: str = "result") -> bytes:
        """Return rank 0's data of that name on every process; rank 0 waits until all have read it."""
        if self.rank:
            data = self._receive(name)
            self._store.set(f"{name} read by {self.rank}", b"1")
            return data
        self._send(name, data)
        self._store.wait([f"{name} read by {rank}" for rank in range(1, self.world_size)])
        return data

    def _send(self, name: str, data: bytes) -> None:
        count = -(-len(data) // _CHUNK)
        for number in range(count):
            self._store.set(f"{name} {number}", data[number * _CHUNK : (number + 1) * _CHUNK])
        self._store.set(f"{name} count", str(count).encode())

    def _receive(self, name: str) -> bytes:
        count = int(self._store.get(f"{name} count"))
        return b"".join(self._store.get(f"{name} {number}") for number in range(count))
