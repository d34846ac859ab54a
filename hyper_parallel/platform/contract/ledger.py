"""The gap ledger: what a framework or device cannot serve, with the reason and the nearest substitute.

A member that is not served raises the error that its ledger entry makes, so nothing is refused that is not listed.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

from hyper_parallel.errors import UnsupportedOnBackend

__all__ = ["Gap", "LedgerFacet"]


@dataclass(frozen=True)
class Gap:
    """One member that is not served.

    Attributes:
        member: its name in the contract.
        reason: what the framework or device lacks.
        substitute: what to use instead.
        devices: device types on which it is not served; empty means all.
    """

    member: str
    reason: str
    substitute: str
    devices: tuple[str, ...] = ()


class LedgerFacet(abc.ABC):
    """What every facet refuses by.

    Attributes:
        platform_type: name of the framework.
        gaps: the framework's ledger.
    """

    platform_type: str
    gaps: ClassVar[tuple[Gap, ...]] = ()

    @abc.abstractmethod
    def device_type(self) -> str:
        """Where tensors are made: ``npu`` or ``cuda`` where this process has one, else ``cpu``."""

    def gap(self, member: str) -> Gap | None:
        """The ledger's entry of ``member`` on this device, or None where it is served."""
        device = self.device_type()
        for one in self.gaps:
            if one.member == member and (not one.devices or device in one.devices):
                return one
        return None

    def unsupported(self, member: str) -> UnsupportedOnBackend:
        """The error of a member that stands in the ledger.

        Raises:
            KeyError: it does not.
        """
        found = self.gap(member)
        if found is None:
            msg = f"{member} is not in the gap ledger of {self.platform_type} on {self.device_type()}"
            raise KeyError(msg)
        where = f"{self.platform_type} on {self.device_type()}"
        return UnsupportedOnBackend(f"{member} is not served by {where}: {found.reason}; {found.substitute}")
