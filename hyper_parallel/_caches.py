"""Registry of the library's caches: each cache registers where it is defined, and ``cache_info`` reports its size.

A cache either has a limit, and is emptied when it is full, or its entries are weak references. Entries that hold
layouts keep meshes alive; :func:`empty_layout_caches` drops all of these entries at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

__all__ = ["CacheInfo", "CacheTable", "Owners", "cache_info", "empty_layout_caches", "register", "register_owners"]

_Owner = TypeVar("_Owner")


class CacheInfo(NamedTuple):
    """The size of one cache.

    Attributes:
        name: kind of its entries.
        entries: number of entries.
        limit: maximum number of entries; None for a cache of weak references, or of one entry for each signature of an
            operator.
    """

    name: str
    entries: int
    limit: int | None


class CacheTable(tuple[CacheInfo, ...]):
    """The sizes of all caches; ``print`` shows a table."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return a line per cache; ``-`` stands for no limit."""
        width = max((len(info.name) for info in self), default=0)
        rows = [("cache", "entries", "limit"), *((name, entries, limit or "-") for name, entries, limit in self)]
        return "\n".join(f"{name:{width}}{entries:>9}{limit:>9}" for name, entries, limit in rows)


class Owners(Generic[_Owner]):
    """The objects of one kind that have a cache each, referenced weakly."""

    def __init__(self) -> None:
        self._alive: WeakValueDictionary[int, _Owner] = WeakValueDictionary()

    def add(self, owner: _Owner) -> None:
        """Add an object, which need not be hashable."""
        with _LOCK:
            self._alive[id(owner)] = owner

    def __iter__(self) -> Iterator[_Owner]:
        """Iterate over the objects that are alive now."""
        with _LOCK:
            return iter(list(self._alive.values()))


class _Registered(NamedTuple):
    """Caches that were registered together."""

    sizes: Callable[[], Iterable[CacheInfo]]
    empty: Callable[[], None] | None


_REGISTERED: list[_Registered] = []
# Re-entrant: a garbage collection inside may finalize an object that registers.
_LOCK = threading.RLock()


def register(name: str, cache: Any, limit: Callable[[], int] | None = None, *, has_layouts: bool = False) -> None:
    """Register one cache.

    Args:
        name: kind of the entries.
        cache: a mapping, or a function under ``functools.lru_cache``.
        limit: returns the maximum number of entries of a mapping.
        has_layouts: whether entries hold layouts; they may then be dropped at any time, on a single rank too.
    """
    info = getattr(cache, "cache_info", None)

    def sizes() -> Iterable[CacheInfo]:
        if info is not None:
            return [CacheInfo(name, info().currsize, info().maxsize)]
        return [CacheInfo(name, len(cache), None if limit is None else limit())]

    empty = None if not has_layouts else cache.clear if info is None else cache.cache_clear
    with _LOCK:
        _REGISTERED.append(_Registered(sizes, empty))


def register_owners(
    owners: Owners[_Owner], describe: Callable[[_Owner], CacheInfo], empty: Callable[[_Owner], None] | None = None
) -> None:
    """Register objects that have a cache each; an empty cache is left out.

    Args:
        owners: the objects.
        describe: returns the size of an object's cache.
        empty: drops an object's entries that hold layouts; None if they must not be dropped on a single rank.
    """

    def sizes() -> Iterable[CacheInfo]:
        return [info for info in map(describe, owners) if info.entries]

    def empty_all() -> None:
        for owner in owners:
            if empty is not None:
                empty(owner)

    with _LOCK:
        _REGISTERED.append(_Registered(sizes, empty_all))


def cache_info() -> CacheTable:
    """Return the name, the number of entries and the limit of each cache of the library, sorted by name.

    Caches of modules that are not imported yet are left out, and so are the plans of operators that were not called.
    """
    with _LOCK:
        registered = list(_REGISTERED)
    return CacheTable(sorted(info for caches in registered for info in caches.sizes()))


def empty_layout_caches() -> None:
    """Drop every cache entry that keeps a layout, and with it a mesh, alive; layouts that are in use stay valid."""
    with _LOCK:
        registered = list(_REGISTERED)
    for caches in registered:
        if caches.empty is not None:
            caches.empty()
