"""The stores that a program makes itself on simulated ranks: each is a part of the world's store.

PyTorch's own stores wait in C++, where a simulated rank cannot let other ranks run.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.transport.checks.fingerprint import call_site
from hyper_parallel.transport.checks.torch_distributed import LIBRARY_FILES
from hyper_parallel.transport.frontends.c10d.rank_groups import current_rank

__all__ = ["STORES", "refuse_gloo"]

_Prefix: Any = PrefixStore
_PORTS = 40000  # ports chosen by the system are above this
_MADE, _COMPLETE = "number of ranks", "all ranks"


class _Part(_Prefix):  # type: ignore[misc]  # its stubs lack its constructor
    """A store of a rank; outside of ranks, calling the class creates a store of PyTorch."""

    plain: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a new part, or PyTorch's store."""
        return super().__new__(cls) if current_rank() else cls.plain(*args, **kwargs)

    def _begin(self, name: str) -> None:
        rank: Any = current_rank()
        super().__init__(name, rank.store)


class _TCPStore(_Part):
    """The store that ``TCPStore`` creates on a rank; there is one store per port.

    Args:
        host_name: name of the server; not used.
        port: port of the store; 0 takes a new one.
        world_size: number of ranks that make the store; the server waits for all of them.
        is_master: whether the rank is the server.
        timeout: not used, because the simulation detects hangs without a time limit.
        wait_for_workers: whether the server waits.
    """

    plain = TCPStore

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Any = None,
        wait_for_workers: bool = True,
        **_: Any,
    ) -> None:
        del timeout
        rank: Any = current_rank()
        self.host, self.port = host_name, port or _PORTS + rank.store.add("hyper_parallel/ports", 1)
        self._begin(f"tcp {self.port}")
        if world_size is not None and world_size > 0 and wait_for_workers:
            if self.add(_MADE, 1) == world_size:
                self.set(_COMPLETE, "")
            if is_master:
                self.wait([_COMPLETE])


class _FileStore(_Part):
    """The store that ``FileStore`` creates on a rank; there is one store per file, which is not written.

    Args:
        file_name: name of the file.
        world_size: not used, because nothing waits for the ranks.
    """

    plain = FileStore

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        del world_size
        self.path = file_name
        self._begin(f"file {os.path.realpath(file_name)}")


STORES: dict[str, type[_Part]] = {"TCPStore": _TCPStore, "FileStore": _FileStore}
"""Classes by their names in ``torch.distributed``."""


def refuse_gloo(plain: Any) -> Any:
    """Return the constructor of ``ProcessGroupGloo``, which raises on simulated ranks.

    Args:
        plain: the constructor.
    """

    def construct(group: Any, *args: Any, **kwargs: Any) -> None:
        if current_rank():
            msg = (
                f"ProcessGroupGloo(...) at {call_site(*LIBRARY_FILES)}: a simulated rank opens no connections to "
                "others; call torch.distributed.new_group"
            )
            raise UnsupportedOnBackend(msg)
        plain(group, *args, **kwargs)

    return construct
