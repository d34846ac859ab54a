"""Simulated process groups that refuse what an engine would refuse, where the environment names one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.transport.frontends.c10d.engine_rules import rules_of
from hyper_parallel.transport.frontends.c10d.simulated_messages import MessageGroup
from hyper_parallel.transport.processes import rehearsed_engine

__all__ = ["RuledGroup"]

_RULED = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "broadcast", "allgather", "all_gather_single", "allgather_coalesced",
    "all_gather_single_coalesced", "gather", "scatter", "alltoall", "all_to_all_single", "monitored_barrier", "send",
    "recv", "recv_anysource",
)  # fmt: skip


class RuledGroup(MessageGroup):
    """Collectives and messages of one rank in one group; each call is checked by the rules of the rehearsed engine."""


def _ruled(operation: str) -> Callable[..., Any]:
    plain: Callable[..., Any] = getattr(MessageGroup, operation)

    def call(self: RuledGroup, *arguments: Any, **named: Any) -> Any:
        rules = rules_of(rehearsed_engine())
        if rules is not None:
            rules.check(operation, [*arguments, *named.values()])
        return plain(self, *arguments, **named)

    call.__name__, call.__doc__ = operation, plain.__doc__
    return call


for _operation in _RULED:
    setattr(RuledGroup, _operation, _ruled(_operation))
