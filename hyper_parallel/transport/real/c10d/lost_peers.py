"""Reports which ranks cannot be reached when gloo has lost a peer or timed out.

Gloo reports a timeout without the missing rank. Each failing rank therefore connects to the world's store again, writes
which call it is in, and reads the notes of the others. It uses a new connection, since a request on an old one may wait
forever. Ranks with a coordinator do not need this.
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
_ENDED_SECONDS = 1.0  # seconds to wait for answers after a closed connection, whose peer has ended
_HOST_SECONDS = 8.0  # seconds to look up the hosts of ranks that did not answer
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
        """Inside this context, replace gloo's errors of a lost or silent peer by one that names the ranks.

        Args:
            what: operation of gloo and its ranks, for the message.
            ranks: ranks that take part.

        Raises:
            RankFailedError: gloo timed out or lost its connection. The error lists the ranks that answer and those that
                do not; finding them takes up to fifteen seconds.
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
        """Return the result of ``ask``, a request to the world's store, which may wait forever on a lost connection.

        Args:
            what: name of the request, for the message.
            ranks: ranks that take part.
            ask: called in a separate thread.

        Raises:
            RankFailedError: there was no answer within the time limit of the world's store.
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
        """Return the world's time limit as an option of a group; none without a store over the network."""
        return {} if self._store is None else {"timeout": self._store.timeout}

    def built(self, ranks: Ranks, build: Callable[[], Any]) -> Any:
        """Return the group that ``build`` creates; its members find each other through the world's store.

        A request to the store waits forever on a broken connection. Therefore the group is built in a separate thread,
        which is abandoned after the world's time limit if the store cannot be reached. A reachable store applies its
        own limits.

        Args:
            ranks: the members.
            build: called in a separate thread.

        Raises:
            RankFailedError: members did not join, or the store cannot be reached; the error lists the ranks that
                answer.
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
        """Return the facts about the other ranks, one line each."""
        others = [rank for rank in ranks if rank != self._rank]
        if self._store is None:
            return [f"nothing is known of {ranked(others)}: this world has no store that ranks reach over the network"]
        where, here = f"{self._store.host}:{self._store.port}", socket.gethostname()
        problem = _problem(self._store.host, self._store.port)
        if problem:
            return [f"the store of the world at {where} cannot be reached from host {here}: {problem}",
                    f"nothing is known of {ranked(others)}"]  # fmt: skip
        # In a thread, because PyTorch waits forever if a process accepts the connection but never answers.
        lines: list[str] = []
        asking = threading.Thread(target=self._ask, args=(call, others, seconds, lines), daemon=True)
        asking.start()
        asking.join(seconds + _HOST_SECONDS)
        unfinished = [f"the store of the world at {where} did not answer in time"] if asking.is_alive() else []
        return [*lines, *unfinished]

    def _ask(self, call: str, others: list[int], seconds: float, lines: list[str]) -> None:
        """Append the facts about the other ranks to ``lines``."""
        try:
            lines.extend(self._answers(call, others, seconds))
        except (RuntimeError, OSError) as error:
            lines.append(
                "the store of the world does not answer, perhaps because the process that keeps it (rank 0, or the "
                f"launcher) has ended: {first_line(error)}"
            )

    def _answers(self, call: str, others: list[int], seconds: float) -> list[str]:
        """Write a note to the store, and wait briefly for the notes of the other ranks."""
        store: Any = PrefixStore(  # its values are bytes, contrary to its type hints
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
        """Return the host of a silent rank, without connecting to an address from the store."""
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
    """Return the world's store if it is used over the network, without the key prefixes of worlds."""
    store: Any = default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def _problem(address: str, port: int) -> str:
    """Return why a host does not answer at a port; empty if it does."""
    try:
        socket.create_connection((address, port), _CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return "no process listens there any more, so the process that kept the store has ended"
    except TimeoutError:
        return f"no answer within {_CONNECT_SECONDS:g} s: the link or the host is down, or a firewall is between"
    except OSError as error:
        return str(error.strerror or error)
    return ""
