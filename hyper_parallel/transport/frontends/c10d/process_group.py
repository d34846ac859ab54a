"""The process groups that simulated ranks get from ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from hyper_parallel.errors import MeshError, UnsupportedOnBackend
from hyper_parallel.transport.base import Ranks
from hyper_parallel.transport.frontends.c10d.simulated_messages import EngineLimitedGroup
from hyper_parallel.transport.simulated.transport import SimulatedTransport

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["Member", "SimulatedProcessGroup", "WorldGroup"]


class _DescribedGroup(EngineLimitedGroup):
    """Collectives, messages, and the properties that PyTorch reads of a group."""

    supports_splitting = False
    supports_coalescing = False
    _name = "0"
    _description = "default_pg"

    @property
    def group_name(self) -> Any:
        """PyTorch's name of the group, by which functional collectives find it."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The description that the program gave."""
        return self._description

    def getGroupName(self) -> str:
        """The same as :attr:`group_name`."""
        return self._name

    def getGroupDesc(self) -> str:
        """The same as :attr:`group_desc`."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        """Types of the devices whose tensors the group transfers, which are all devices; the CPU is first."""
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return [torch.device("cpu"), *([torch.device(accelerator.type)] if accelerator is not None else [])]

    def getBackendName(self) -> str:
        """The name in messages of C++ code."""
        return "simulated"

    name = getBackendName

    def _get_backend(self, device: torch.device) -> _DescribedGroup:
        """The engine for ``device``: the group itself."""
        del device
        return self

    def shutdown(self) -> None:
        """Does nothing: the group ends with the simulation."""

    abort = shutdown

    def set_timeout(self, timeout: Any) -> None:
        """Does nothing: the simulation detects hangs without a time limit."""

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the coordinator counts collectives."""

    def merge_remote_group(self, *arguments: Any) -> None:
        """Raise an error, because simulated groups cannot be merged.

        Raises:
            UnsupportedOnBackend: always.
        """
        del arguments
        msg = "merge_remote_group on simulated ranks: the world of a simulation cannot grow; use a larger world_size"
        raise UnsupportedOnBackend(msg)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, rank {self.rank()} of ranks {list(self.ranks)})"


class SimulatedProcessGroup(_DescribedGroup):
    """One rank's handle of one group.

    Args:
        transport: transport of the simulated rank.
        ranks: global ranks of the members, in the order of their group ranks.
        store: store of the group.
        name: PyTorch's name of the group.
        description: description that the program gave.
    """

    def __init__(
        self, transport: SimulatedTransport, ranks: Ranks, store: Store, name: str, description: str | None
    ) -> None:
        super().__init__(ranks.index(transport.rank), len(ranks))
        self.transport = transport
        self.ranks = ranks
        self._store = store
        self._coalesced = None
        self._name, self._description = name, description or "undefined"

    def get_group_store(self) -> Store:
        """The store of the group."""
        return self._store


class Member(NamedTuple):
    """What one rank needs to use the world's group: its transport and its store."""

    transport: SimulatedTransport
    store: Store


class WorldGroup(_DescribedGroup):
    """The group of all ranks of a simulation: one object for all ranks and simulations of this process.

    Modules are shared by ranks that are threads, and some keep the world's group from the time of their import, as the
    default of an argument. So this object looks up which rank uses it.

    Args:
        current: returns the group for the calling rank; None outside of ranks.
    """

    def __init__(self, current: Callable[[], Member | None]) -> None:
        super().__init__(0, 1)
        self._current = current
        self._gathered: WeakKeyDictionary[SimulatedTransport, list[Any]] = WeakKeyDictionary()

    def _member(self) -> Member:
        member = self._current()
        if member is None:
            msg = "the world's group of a simulation is used outside of its ranks, or by a thread that is not a rank"
            raise MeshError(msg)
        return member

    @property
    def transport(self) -> SimulatedTransport:  # type: ignore[override]  # read only
        """The transport of the calling rank."""
        return self._member().transport

    @property
    def ranks(self) -> Ranks:  # type: ignore[override]  # read only
        """All ranks of its world."""
        return tuple(range(self.transport.world_size))

    @property
    def _coalesced(self) -> list[Any] | None:
        return self._gathered.get(self.transport)

    @_coalesced.setter
    def _coalesced(self, works: list[Any] | None) -> None:
        if works is None:
            self._gathered.pop(self.transport, None)
        else:
            self._gathered[self.transport] = works

    def rank(self) -> int:
        """The calling rank."""
        return self.transport.rank

    def size(self) -> int:
        """Number of ranks."""
        return self.transport.world_size

    getRank, getSize = rank, size

    def get_group_store(self) -> Store:
        """The store of the world."""
        return self._member().store

    def __repr__(self) -> str:
        member = self._current()
        return "WorldGroup()" if member is None else super().__repr__()
