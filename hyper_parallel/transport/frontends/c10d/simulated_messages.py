"""Send and receive in a simulated process group. A send is complete when its receive is posted, as over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import WORLD, Channel
from hyper_parallel.transport.checks.fingerprint import ANY_SOURCE, MessageFingerprint, call_site
from hyper_parallel.transport.checks.torch_distributed import LIBRARY_FILES, name_of
from hyper_parallel.transport.frontends.c10d.engine_rules import OLDER_NAMES, rules_of
from hyper_parallel.transport.frontends.c10d.pending_receives import watch_receive
from hyper_parallel.transport.frontends.c10d.simulated_group import CollectiveGroup
from hyper_parallel.transport.frontends.c10d.simulated_work import SimulatedWork, require_unwritten
from hyper_parallel.transport.processes import rehearsed_engine
from hyper_parallel.transport.simulated.message_board import Posted
from hyper_parallel.transport.simulated.threads import ThreadEndpoint

if TYPE_CHECKING:
    import torch

__all__ = ["EngineLimitedGroup", "MessageGroup"]


class MessageGroup(CollectiveGroup):
    """Collectives and messages of one rank in one group."""

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int = 0) -> SimulatedWork:
        """Send a tensor to the member of group rank ``destination``."""
        (x,) = tensors
        message = self._message("send", x, self.rank(), destination, tag)
        sent = x.detach().clone()
        posted = self._board.post(message, sent, sending=True)

        def finish() -> list[torch.Tensor]:
            require_unwritten(x, sent, message.site)
            self._board.matched(posted)
            return [x]

        return self._given(SimulatedWork(finish, lambda: self._is_matched(posted)))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> SimulatedWork:
        """Receive a tensor from the member of group rank ``source``."""
        (x,) = tensors
        return self._receive(x, self._message("recv", x, source, self.rank(), tag))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> SimulatedWork:
        """Receive the first tensor that any member has sent with this tag."""
        (x,) = tensors
        return self._receive(x, self._message("recv", x, ANY_SOURCE, self.rank(), tag))

    def _receive(self, x: torch.Tensor, message: MessageFingerprint) -> SimulatedWork:
        posted = self._board.post(message, sending=False)
        end = watch_receive(x, message.site)

        def finish() -> list[torch.Tensor]:
            end()
            x.data.copy_(self._board.matched(posted).reshape(x.shape))
            return [x]

        def source() -> int:
            return self.ranks.index(posted.message.source)

        return self._given(SimulatedWork(finish, lambda: self._is_matched(posted), source))

    def _is_matched(self, posted: Posted) -> bool:
        if not posted.matched:
            self._board.give_way()
        return posted.matched

    @property
    def _board(self) -> ThreadEndpoint:
        return cast("ThreadEndpoint", self.transport.endpoint)

    def _message(self, operation: str, x: torch.Tensor, source: int, destination: int, tag: int) -> MessageFingerprint:
        self.check_owner()
        peer = destination if operation == "send" else source
        if peer == self.rank() or not (peer == ANY_SOURCE or 0 <= peer < len(self.ranks)):
            msg = (
                f"{operation} on group rank {self.rank()} names group rank {peer}; it must be another rank of the "
                f"group's {len(self.ranks)}"
            )
            raise CollectiveMismatchError(msg)
        name = name_of(self)
        return MessageFingerprint(
            ANY_SOURCE if source == ANY_SOURCE else self.ranks[source],
            self.ranks[destination],
            int(tag),
            (("shape", tuple(x.shape)), ("dtype", str(x.dtype))),
            call_site(*LIBRARY_FILES),
            Channel(ranks=self.ranks, build=f"named {name!r}") if name else WORLD,
            counted=True,
        )


_RULED = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "broadcast", "allgather", "all_gather_single", "allgather_coalesced",
    "all_gather_single_coalesced", "gather", "scatter", "alltoall", "all_to_all_single", "monitored_barrier", "send",
    "recv", "recv_anysource",
)  # fmt: skip


class EngineLimitedGroup(MessageGroup):
    """Collectives and messages of one rank in one group, with the rules that ``HYPER_PARALLEL_ENGINE_RULES`` names."""


def _ruled(operation: str) -> Callable[..., Any]:
    plain: Callable[..., Any] = getattr(MessageGroup, operation)

    def call(self: EngineLimitedGroup, *arguments: Any, **named: Any) -> Any:
        rules = rules_of(rehearsed_engine())
        if rules is not None:
            rules.check(operation, [*arguments, *named.values()])
        return plain(self, *arguments, **named)

    call.__name__, call.__doc__ = operation, plain.__doc__
    return call


for _operation in _RULED:
    setattr(EngineLimitedGroup, _operation, _ruled(_operation))

for _newer, _older in OLDER_NAMES.items():
    setattr(EngineLimitedGroup, _older, getattr(EngineLimitedGroup, _newer))
