"""Says which ranks cannot be reached when gloo has lost a peer or waited for one in vain.

Gloo says that it timed out, and not for whom. Each rank that fails therefore connects to the world's store once more,
leaves there where it was, and looks who else does. It uses a connection of its own: on the old ones a request may wait
for ever. Ranks that a coordinator watches need none of this.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from hyper_parallel._text import first_line, ranked
from hyper_parallel.errors import RankFailedError
from hyper_parallel.platform.torch.versions import default_store
from hyper_parallel.transport.base import Ranks
from hyper_parallel.transport.checks.fingerprint import call_site
from hyper_parallel.transport.failures import gave_up, lost_peer

__all__ = ["LostPeers"]

_CONNECT_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
_ENDED_SECONDS = 1.0  # where a connection was closed: the peer has ended, and will not answer
_HOST_SECONDS = 8.0  # to ask where those are that did not answer
_ROUND_SECONDS = 0.1
_PREFIX = "hyper_parallel/lost"


class LostPeers:
    """Finds the ranks that one rank has lost.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._count = itertools.count()
        self._store = _tcp_store()
        if self._store is not None:
            self._store.set(f"{_PREFIX}/host/{rank}", socket.gethostname())

    @contextlib.contextmanager
    def named(self, what: str, ranks: Ranks) -> Iterator[None]:
        """Turn gloo's errors of a lost or silent peer inside into one that names the ranks.

        Args:
            what: what gloo carries out and for whom, for the message.
            ranks: that take part.

        Raises:
            RankFailedError: gloo gave up or lost its connection; it says which ranks answer and which do not. It takes
                up to fifteen seconds to find out.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankFailedError) or not (lost_peer(error) or gave_up(error)):
                raise
            reason = f"gloo: {first_line(error)}"
            if gave_up(error):
                raise self._error(what, ranks, reason) from error
            raise self._error(what, ranks, reason, _ENDED_SECONDS, "lost the connection to another rank") from error

    def answered(self, what: str, ranks: Ranks, ask: Callable[[], list[str]]) -> list[str]:
        """Return what ``ask`` returns, which asks the world's store: on a cut link that would wait for ever.

        Args:
            what: what it is asked for, for the message.
            ranks: that take part.
            ask: called in a thread of its own.

        Raises:
            RankFailedError: there was no answer within the limit that the world has for its store.
        """
        if self._store is None:
            return ask()
        answers: list[list[str] | BaseException] = []
        asking = threading.Thread(target=_put_outcome, args=(ask, answers), daemon=True)
        asking.start()
        limit = self._store.timeout.total_seconds()
        asking.join(limit)
        if not answers:
            raise self._error(what, ranks, f"the world's store gave no answer within {limit:g} s")
        if isinstance(answers[0], BaseException):
            raise answers[0]
        return answers[0]

    def limits(self) -> dict[str, timedelta]:
        """The time limit of the world, as an option of a group; none if no store over the network has it."""
        return {} if self._store is None else {"timeout": self._store.timeout}

    def built(self, ranks: Ranks, build: Callable[[], Any]) -> Any:
        """Return the group that ``build`` makes: its members find each other through the world's store.

        On a cut link a request to the store waits for ever. So the group is built in a thread of its own, which is
        given up after the world's limit once the store cannot be reached: a store that can be keeps its own limits.

        Args:
            ranks: the members.
            build: called in a thread of its own.

        Raises:
            RankFailedError: members did not come, or the store cannot be reached; it says which ranks answer.
        """
        what, outcomes = f"building the group of ranks {ranks}", list[Any]()
        if self._store is None:
            return build()
        building = threading.Thread(target=_put_outcome, args=(build, outcomes), daemon=True)
        building.start()
        building.join(limit := self._store.timeout.total_seconds())
        while building.is_alive():
            if _problem(self._store.host, self._store.port):
                raise self._error(what, ranks, f"the group was not built within {limit:g} s")
            building.join(_ANSWER_SECONDS)
        if isinstance(outcomes[0], (DistStoreError, DistNetworkError)):
            reason = f"the world's store: {first_line(outcomes[0])}"
            raise self._error(what, ranks, reason) from outcomes[0]
        with self.named(what, ranks):
            if isinstance(outcomes[0], BaseException):
                raise outcomes[0]
        return outcomes[0]

    def _error(
        self,
        what: str,
        ranks: Ranks,
        reason: str,
        seconds: float | None = None,
        happened: str = "waited in vain for another rank",
    ) -> RankFailedError:
        call = f"{what} at {call_site(contextlib.__file__)}"
        facts = self._facts(call, ranks, _ANSWER_SECONDS if seconds is None else seconds)
        lines = [f"{call}: rank {self._rank} {happened}", *facts, reason]
        return RankFailedError("\n  ".join(lines))

    def _facts(self, call: str, ranks: Ranks, seconds: float) -> list[str]:
        """What is known of the other ranks, a line each."""
        others = [rank for rank in ranks if rank != self._rank]
        if self._store is None:
            return [f"nothing is known of {ranked(others)}: this world has no store that ranks reach over the network"]
        where, here = f"{self._store.host}:{self._store.port}", socket.gethostname()
        problem = _problem(self._store.host, self._store.port)
        if problem:
            return [f"the store of the world at {where} cannot be reached from host {here}: {problem}",
                    f"nothing is known of {ranked(others)}"]  # fmt: skip
        # In a thread: PyTorch waits for ever where something accepts the connection and says nothing.
        lines: list[str] = []
        asking = threading.Thread(target=self._ask, args=(call, others, seconds, lines), daemon=True)
        asking.start()
        asking.join(seconds + _HOST_SECONDS)
        unfinished = [f"the store of the world at {where} did not answer in time"] if asking.is_alive() else []
        return [*lines, *unfinished]

    def _ask(self, call: str, others: list[int], seconds: float, lines: list[str]) -> None:
        """Put what is known of the other ranks into ``lines``."""
        try:
            lines.extend(self._answers(call, others, seconds))
        except (RuntimeError, OSError) as error:
            lines.append(
                "the store of the world does not answer, perhaps because the process that keeps it (rank 0, or the "
                f"launcher) has ended: {first_line(error)}"
            )

    def _answers(self, call: str, others: list[int], seconds: float) -> list[str]:
        """Leave a note in the store, and wait a moment for those of the others."""
        store: Any = PrefixStore(  # which takes and returns bytes, whatever its types say
            f"{_PREFIX}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(self._count)}", self._connect()
        )
        store.set(str(self._rank), call)
        deadline = time.monotonic() + seconds
        silent = others
        while silent and time.monotonic() < deadline:
            time.sleep(_ROUND_SECONDS)
            silent = [rank for rank in silent if not store.check([str(rank)])]
        ended = [
            f"rank {rank} has failed, too, in {store.get(str(rank)).decode()}" for rank in others if rank not in silent
        ]
        return [*ended, *(f"rank {rank} does not answer; {self._host_of(rank)}" for rank in silent)]

    def _connect(self) -> Any:
        return TCPStore(
            self._store.host, self._store.port, is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=_ANSWER_SECONDS),
        )  # fmt: skip

    def _host_of(self, rank: int) -> str:
        """Where a silent rank is; no address from the store is connected to."""
        key = f"{_PREFIX}/host/{rank}"
        plain: Any = self._connect()
        if not plain.check([key]):
            return "its host is not known"
        name = plain.get(key).decode()
        return f"its host {name} cannot be reached, or the rank has ended, is stopped, or does something else"


def _put_outcome(ask: Callable[[], Any], outcomes: list[Any]) -> None:
    """Put the result or the error of ``ask`` into a list."""
    try:
        outcomes.append(ask())
    except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
        outcomes.append(error)


def _tcp_store() -> Any:
    """The world's store if it is reached over the network, without the prefixes that worlds put before their keys."""
    store: Any = default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def _problem(address: str, port: int) -> str:
    """Why a host does not answer at a port; empty if it does."""
    try:
        socket.create_connection((address, port), _CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return "nobody listens there any more, so the process that kept it has ended"
    except TimeoutError:
        return f"no answer within {_CONNECT_SECONDS:g} s: the link or the host is down, or a firewall is between"
    except OSError as error:
        return str(error.strerror or error)
    return ""
