"""The store of a simulated world: a rank that waits lets the others run; a wait that cannot end is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

from torch.distributed import Store  # type: ignore[attr-defined]

from hyper_parallel.errors import RankFailedError
from hyper_parallel.transport.checks.fingerprint import call_site
from hyper_parallel.transport.checks.torch_distributed import LIBRARY_FILES
from hyper_parallel.transport.simulated.threads import ThreadEndpoint
from hyper_parallel.transport.simulated.transport import SimulatedTransport

__all__ = ["SimulatedStore"]

_Store: Any = Store
_TIMEOUT = timedelta(seconds=300)


class _Keys:
    """The keys that a rank waits for."""

    def __init__(self, keys: Sequence[str], site: object) -> None:
        self.keys = tuple(keys)
        self._site = site

    def text(self) -> str:
        """See :class:`Wait`."""
        return f"store.wait({list(self.keys)}) at {self._site}"

    def hopeless(self, ended: Mapping[int, str]) -> str | None:
        """Return None: any remaining rank may still set the keys."""
        del ended
        return None

    def answering(self, world_size: int) -> Sequence[int]:
        """See :class:`Wait`."""
        return range(world_size)

    def causes(self) -> list[str]:
        """See :class:`Wait`."""
        return []

    def unanswered(self) -> list[str]:
        """See :class:`Wait`."""
        return []

    def dismiss(self) -> None:
        """See :class:`Wait`; a key that is set later does no harm."""


class SimulatedStore(_Store):  # type: ignore[misc]  # its stubs lack its constructor
    """The key-value store of one simulated world, shared by its ranks.

    Args:
        current: returns the transport of the calling rank, or None outside of ranks.
        site: returns the place of the call in the program.
    """

    def __init__(
        self,
        current: Callable[[], SimulatedTransport | None],
        site: Callable[[], object] = lambda: call_site(*LIBRARY_FILES),
    ) -> None:
        super().__init__()
        self._site = site
        self._current = current
        self._values: dict[str, bytes] = {}
        self._waiting: dict[int, _Keys] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key; ranks that wait for it continue."""
        self._values[key] = _bytes(value)
        endpoint = cast("ThreadEndpoint", self._rank().endpoint)
        for rank, waiting in list(self._waiting.items()):
            if all(name in self._values for name in waiting.keys):
                del self._waiting[rank]
                endpoint.unblock(rank)

    def get(self, key: str) -> bytes:
        """The value of a key, once some rank has set it."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until every key is set; if no rank can set a key any more, raise an error at once, without a timeout."""
        del timeout
        if all(key in self._values for key in keys):
            return
        transport = self._rank()
        waiting = self._waiting[transport.rank] = _Keys(keys, self._site())
        try:
            cast("ThreadEndpoint", transport.endpoint).wait_until(waiting)
        finally:
            self._waiting.pop(transport.rank, None)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether every key is set; if not, other ranks run first, because programs poll."""
        if not all(key in self._values for key in keys):
            cast("ThreadEndpoint", self._rank().endpoint).give_way()
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, 0 at first; return the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def append(self, key: str, value: str | bytes) -> None:
        """Append a value to the value of a key."""
        self.set(key, self._values.get(key, b"") + _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if its value is ``expected``, or if it is unset and ``expected`` is empty; return its value."""
        known = self._values.get(key)
        if known is None and _bytes(expected):
            return _bytes(expected)
        if known is None or known == _bytes(expected):
            self.set(key, desired)
        return self._values[key]

    def delete_key(self, key: str) -> bool:
        """Forget a key; return whether it was set."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Number of keys."""
        return len(self._values)

    def list_keys(self) -> list[str]:
        """The keys."""
        return list(self._values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, once all are set."""
        self.wait(keys)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Whether the store has append, multi_get and multi_set."""
        return True

    # PyTorch's C++ code calls these under its own names.
    deleteKey, getNumKeys, compareSet, listKeys = delete_key, num_keys, compare_set, list_keys
    multiGet, multiSet, hasExtendedApi = multi_get, multi_set, has_extended_api

    def set_timeout(self, timeout: timedelta) -> None:
        """Does nothing: the simulation detects hangs without a time limit."""

    @property
    def timeout(self) -> timedelta:
        """PyTorch's default; not used here."""
        return _TIMEOUT

    def _rank(self) -> SimulatedTransport:
        transport = self._current()
        if transport is None:
            msg = "the store of a simulated world is used by a thread that is not one of its ranks, or after its end"
            raise RankFailedError(msg)
        return transport


def _bytes(value: str | bytes | Sequence[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
