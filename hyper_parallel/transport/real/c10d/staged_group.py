"""A process group over gloo that stages a device's tensors in host memory, and can apply an engine's limits.

It has two uses: to run more ranks than there are devices, which NCCL and HCCL reject, and to check on CPU that a
program stays within the limits of HCCL (a rehearsal of HCCL).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.torch.versions import backend_plugins
from hyper_parallel.transport.frontends.c10d.engine_rules import ENGINES, OLDER_NAMES, EngineRules
from hyper_parallel.transport.frontends.c10d.simulated_work import SimulatedWork
from hyper_parallel.transport.processes import ENGINE_VARIABLE

__all__ = ["REHEARSED", "STAGED", "StagedGroup", "register_engine"]

STAGED = "staged"
"""Name of the engine that only stages tensors and has no limits."""

REHEARSED = "hccl"
"""Name of the engine that stages tensors and applies the limits of HCCL."""

_HOST = "cpu"
_ProcessGroup: Any = dist.ProcessGroup
_DEVICES = ["cpu", "cuda", "npu"]
_FLAT = frozenset({"_allgather_base", "_reduce_scatter_base"})  # gloo checks shapes of their buffers
_FORWARDED = (
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "allgather_coalesced", "gather", "scatter",
    "reduce_scatter", "_allgather_base", "_reduce_scatter_base", "alltoall_base", "send", "recv",
    "recv_anysource", "all_gather_single", "reduce_scatter_single", "all_to_all_single",
)  # fmt: skip


class StagedGroup(_ProcessGroup):  # type: ignore[misc]  # its stubs have signatures per overload
    """One rank's handle of one group.

    Args:
        store: store for the rendezvous of the members.
        rank: this rank in the group.
        size: number of members.
        timeout: time limit of a collective.
        rules: limits of an engine that calls are checked against; None for no limits.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, rules: EngineRules | None) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._rules = rules
        self._name, self._description = "", ""

    def getBackendName(self) -> str:
        """Name of the backend in messages of C++ code."""
        return STAGED if self._rules is None else self._rules.engine

    name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        """PyTorch's name of the group."""
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

    def _get_backend(self, device: torch.device) -> StagedGroup:
        del device
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: gloo counts by itself."""

    def barrier(self, opts: Any = None) -> Any:
        """Wait for every member."""
        return self._gloo.barrier(*(() if opts is None else (opts,)))

    def call(self, operation: str, *arguments: Any) -> Any:
        """Execute one of gloo's calls with tensors of any device.

        Raises:
            UnsupportedOnBackend: the engine whose limits are checked would reject the call.
        """
        if self._rules is not None:
            self._rules.check(operation, arguments)
        gloo_name = OLDER_NAMES.get(operation, operation)
        plain = getattr(self._gloo, gloo_name)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        hosted = [_hosted(argument, pairs) for argument in arguments]
        if gloo_name in _FLAT:
            hosted = [x.view(-1) if isinstance(x, torch.Tensor) else x for x in hosted]
        work = plain(*hosted)
        if not pairs:
            return work

        def finish() -> list[torch.Tensor]:
            work.wait()
            if operation != "send":
                for place, value in pairs:
                    place.data.copy_(value)
            return [place for place, _ in pairs]

        return SimulatedWork(finish, work.is_completed)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> SimulatedWork:
        """Send each member its tensor of a list, in one buffer, because gloo takes no lists in PyTorch 2.10.

        Raises:
            UnsupportedOnBackend: as for :meth:`call`.
        """
        if self._rules is not None:
            self._rules.check("alltoall", (outputs, inputs, opts))
        incoming, outgoing = ([x.numel() for x in several] for several in (outputs, inputs))
        sent = torch.cat([x.detach().reshape(-1) for x in inputs])
        received = sent.new_empty(sum(incoming))
        work = self.call("alltoall_base", received, sent, incoming, outgoing)

        def finish() -> list[torch.Tensor]:
            work.wait()
            for place, value in zip(outputs, received.split(incoming), strict=True):
                place.detach().copy_(value.view(place.shape))
            return outputs

        return SimulatedWork(finish, work.is_completed)


def _hosted(argument: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Return an argument with device tensors replaced by copies in host memory, which ``pairs`` collects."""
    if isinstance(argument, list | tuple):
        return [_hosted(several, pairs) for several in argument]
    if not isinstance(argument, torch.Tensor) or argument.device.type == _HOST:
        return argument
    copied = argument.detach().to("cpu", copy=True)
    pairs.append((argument, copied))
    return copied


def _forward(operation: str) -> Callable[..., Any]:
    def call(self: StagedGroup, *arguments: Any) -> Any:
        return self.call(operation, *arguments)

    call.__name__, call.__doc__ = operation, f"Gloo's ``{operation}``."
    return call


for _operation in _FORWARDED:
    setattr(StagedGroup, _operation, _forward(_operation))


def register_engine(rules: EngineRules | None) -> str:
    """Register the engine with ``torch.distributed`` and return its name.

    Args:
        rules: limits of HCCL for its rehearsal; None for an engine without limits.

    Raises:
        ValueError: the engine cannot be rehearsed here: this installation has the real one, or it is NCCL.
    """
    name = STAGED if rules is None else rules.engine
    plugin = backend_plugins.get(name.upper())
    if plugin is not None and plugin.creator_fn in (_create_staged, _create_rehearsed):
        return name
    if plugin is not None or name not in (STAGED, REHEARSED):
        msg = f"{name} cannot be rehearsed over gloo: PyTorch has an engine of this name; unset {ENGINE_VARIABLE}"
        raise ValueError(msg)
    dist.Backend.register_backend(name, _create_staged if rules is None else _create_rehearsed, devices=_DEVICES)
    return name


def _create_staged(store: Any, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    return StagedGroup(store, rank, size, timeout, None)


def _create_rehearsed(store: Any, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    return StagedGroup(store, rank, size, timeout, ENGINES[REHEARSED])
