"""The gap ledger: functions that a framework or device does not support, with the reason and the nearest substitute.

The error of such a function is made from its entry in the ledger, so a function raises only if it is listed.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

from hyper_parallel.errors import UnsupportedOnBackend

__all__ = ["Gap", "LedgerFacet"]


@dataclass(frozen=True)
class Gap:
    """A function that is not supported.

    Attributes:
        member: its name in the contract.
        reason: the feature that the framework or device lacks.
        substitute: the alternative.
        devices: device types on which it is not supported; an empty tuple means all.
    """

    member: str
    reason: str
    substitute: str
    devices: tuple[str, ...] = ()


class LedgerFacet(abc.ABC):
    """Makes the errors of functions that are not supported.

    Attributes:
        platform_type: name of the framework.
        gaps: the framework's ledger.
    """

    platform_type: str
    gaps: ClassVar[tuple[Gap, ...]] = ()

    @abc.abstractmethod
    def device_type(self) -> str:
        """Return the device type of new tensors: ``npu`` or ``cuda`` if this process has one, else ``cpu``."""

    def gap(self, member: str) -> Gap | None:
        """Return the entry of ``member`` on this device, or None if the member is supported."""
        device = self.device_type()
        for gap in self.gaps:
            if gap.member == member and (not gap.devices or device in gap.devices):
                return gap
        return None

    def unsupported(self, member: str) -> UnsupportedOnBackend:
        """Return the error of a member that is in the ledger.

        Raises:
            KeyError: ``member`` is not in the ledger.
        """
        gap = self.gap(member)
        if gap is None:
            msg = f"{member} is not in the gap ledger of {self.platform_type} on {self.device_type()}"
            raise KeyError(msg)
        where = f"{self.platform_type} on {self.device_type()}"
        return UnsupportedOnBackend(f"{member} is not supported by {where}: {gap.reason}; {gap.substitute}")
