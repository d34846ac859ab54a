"""The process group that simulated ranks get from ``torch.distributed``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.transport.base import Ranks
from hyper_parallel.transport.c10d.simulated_group import CollectiveGroup
from hyper_parallel.transport.simulated import SimulatedTransport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["SimulatedProcessGroup"]


class SimulatedProcessGroup(CollectiveGroup):
    """One rank's handle of one group: collectives, messages, and what PyTorch asks a group about itself.

    Args:
        transport: of the simulated rank.
        ranks: global ranks of the members, in the order of their group ranks.
        store: of the group.
    """

    supports_splitting = False
    supports_coalescing = False

    def __init__(self, transport: SimulatedTransport, ranks: Ranks, store: Store) -> None:
        super().__init__(transport, ranks)
        self._store = store
        self._name, self._description = "", "undefined"

    @property
    def group_name(self) -> Any:
        """PyTorch's name of the group, by which functional collectives find it."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The description that the program gave."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:  # noqa: N802 - PyTorch's C++ code calls it
        """The same as :attr:`group_name`."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - as above
        """The same as :attr:`group_desc`."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices whose tensors it carries: all, the host's first."""
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return [torch.device("cpu"), *([torch.device(accelerator.type)] if accelerator is not None else [])]

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's C++ code calls it
        """The name in messages of C++ code."""
        return "simulated"

    name = getBackendName

    def _get_backend(self, device: torch.device) -> SimulatedProcessGroup:
        """The engine for ``device``: the group itself."""
        del device
        return self

    def get_group_store(self) -> Store:
        """The store of the group."""
        return self._store

    def shutdown(self) -> None:
        """Nothing: the group ends with the simulation."""

    abort = shutdown

    def set_timeout(self, timeout: Any) -> None:
        """Nothing: what never ends is found without a time limit."""

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the coordinator counts."""

    def __repr__(self) -> str:
        return f"SimulatedProcessGroup({self.group_name!r}, rank {self.rank()} of ranks {list(self.ranks)})"
