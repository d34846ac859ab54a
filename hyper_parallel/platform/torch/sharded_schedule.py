"""Orders the gathers and reductions of the groups of one model, and gathers ahead of use."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.platform.torch.dtensor import TorchDTensor
from hyper_parallel.platform.torch.row_carrier import RowCarrier
from hyper_parallel.platform.torch.versions import current_graph_task_id
from hyper_parallel.transport.base import active_transport_of
from hyper_parallel.transport.checks.sequence import AgreedSequence, Finish, Step

if TYPE_CHECKING:
    from hyper_parallel.transport.base import Ranks

__all__ = ["ShardedSchedule", "abandon_failed_backward"]

_RUNNING: set[ShardedSchedule] = set()
"""Schedules with groups in backward, of all simulated ranks."""
_LOCK = Lock()


def abandon_failed_backward() -> None:
    """Drop the backward passes of this rank that an exception has ended; no collective is called."""
    rank = active_transport_of("torch")
    with _LOCK:
        failed = [schedule for schedule in _RUNNING if schedule.rank is rank]
    for schedule in failed:
        schedule.abandon()


class ShardedSchedule:
    """The windows of collectives of the groups of one model over the same ranks.

    Args:
        platform: PyTorch's platform.
        device: device of the parameters; None if the first group has none.
        ranks: ranks of the data axis.
    """

    def __init__(self, platform: Any, device: torch.device | None, ranks: Ranks) -> None:
        self._ranks = ranks
        self._carrier = RowCarrier(platform, device)
        self.sequence = AgreedSequence(self._carrier, ranks)
        self.rank = active_transport_of("torch")  # the simulated rank
        self.groups: dict[str, Any] = {}
        self._depth = 0
        self._in_backward: list[Any] = []

    def adopt(self, group: Any) -> None:
        """Add a group; its name is equal on all ranks."""
        name = f"{len(self.groups)} ({group.kind})"
        self.groups[name] = group
        self._carrier.device = self._carrier.device or group.device
        group.schedule, group.name = self, name

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle without groups; each group adds itself when it is copied or loaded."""
        return _without_groups, (self._carrier.device, self._ranks)

    def readopt(self, group: Any) -> None:
        """Add a copied group, which keeps its name."""
        self.groups[group.name] = group

    def set_device(self, device: torch.device | None) -> None:
        """Set the device of rows, which was not known before."""
        self._carrier.device = device

    def enter_forward(self, group: Any) -> None:
        """Begin the forward of ``group``; the outermost one opens a window."""
        if self._is_stale():
            self.abandon()
            self._close()
            for each in self.groups.values():
                each.announce_reduced()
        if self.sequence.window is None:
            self._depth = 0
            self.sequence.open(("forward", group.name, torch.is_grad_enabled()))
        self._depth += 1

    def leave_forward(self) -> None:
        """End a forward; that of the outermost group closes the window."""
        self._depth = max(self._depth - 1, 0)
        if not self._depth and self.sequence.window is not None and self.sequence.window[0] == "forward":
            self._close()

    def enter_backward(self, group: Any) -> None:
        """Begin the backward of ``group``; the first one opens a window."""
        if self.sequence.window is None:
            self.sequence.open(("backward", group.name, group.reduces))
        self._in_backward.append(group)
        with _LOCK:
            _RUNNING.add(self)

    def leave_backward(self, group: Any) -> None:
        """End the backward of ``group``; the last one waits for all reductions, and calls the hooks of parameters."""
        self._in_backward.remove(group)
        if not self._in_backward:
            self._mark_ended()
            if self.sequence.window is not None and self.sequence.window[0] == "backward":
                self._close()
            else:
                self.sequence.complete_all()
            for each in self.groups.values():
                each.call_hooks()

    def abandon(self) -> None:
        """Drop a backward that has raised, with its gradients that are not reduced yet.

        Its window stays open until the next forward, for collectives that other ranks still expect.
        """
        if self._is_stale():
            for group in self._in_backward:
                group.abandon_backward()
            self._in_backward.clear()
            self._mark_ended()
            self.sequence.forget_reductions()

    def _mark_ended(self) -> None:
        with _LOCK:
            _RUNNING.discard(self)

    def run(self, step: Step, rows: torch.Tensor, finish: Finish) -> int:
        """See :meth:`AgreedSequence.run`."""
        if self.sequence.next_owed != step:
            self.prefetch()
        return self.sequence.run(step, rows, finish)

    def prefetch(self) -> None:
        """Begin the next all-gather, if one is due."""
        owed = self.sequence.next_owed
        if owed is not None and owed.operation == "all_gather" and self.groups[owed.owner].pending is None:
            self.groups[owed.owner].start_gather()

    def _is_stale(self) -> bool:
        """Whether the open window is of a backward that has raised."""
        running = current_graph_task_id() != -1
        window = self.sequence.window
        return window is not None and window[0] == "backward" and not running

    def _close(self) -> None:
        try:
            self.sequence.close()
        finally:
            for group in self.groups.values():
                group.pending = None


def _without_groups(device: torch.device | None, ranks: Ranks) -> ShardedSchedule:
    return ShardedSchedule(TorchDTensor._platform, device, ranks)
