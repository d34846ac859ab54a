"""MindSpore's idle threads sleep at once in the harness's processes, where many ranks share few cores.

A thread of MindSpore's pool that has nothing to do asks for work some 300,000 times before it sleeps, which takes tens
of milliseconds after every operator that used it. On a device's host that saves a wake-up; in six ranks on two cores
it is most of what they compute (measured: a quick sweep of all operators takes 90 s of processor time with it and 54 s
without). The runtime sets the number itself between the steps of a graph (``ThreadPool::SetMaxSpinCount``,
``SetSpinCountMaxValue``), but no setting of Python's reaches it, so its own functions are called by their names. A
name says its argument types, and the pool is known by its class's table of virtual functions: where either is not what
it is here, nothing is touched and ranks are as slow as they were.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from mindspore import Tensor

__all__ = ["quiet_process"]

_LIBRARY = "libmindspore_core.so"
_MANAGER = "_ZN9mindspore8ActorMgr8actorMgrE"  # the object that owns the pool
_POOL_CLASS = "_ZTVN9mindspore15ActorThreadPoolE"
_SET_MOST = "_ZN9mindspore10ThreadPool15SetMaxSpinCountEi"
_USE_MOST = "_ZN9mindspore10ThreadPool20SetSpinCountMaxValueEv"
_WORD = ctypes.sizeof(ctypes.c_void_p)
_WORDS = 4  # of the owner, among which the pool is looked for
_HEADER = 2  # words of a class's table before its functions, to which objects point
_MAPS = Path("/proc/self/maps")


def quiet_process() -> bool:
    """Let the idle threads of this process sleep; for processes of the harness only.

    Returns:
        False where MindSpore's runtime is not the one this knows: nothing was changed then.
    """
    return _quiet(os.getpid())


@cache
def _quiet(_: int) -> bool:
    """Once per process: the pool of a forked one is its own."""
    (Tensor(np.ones(2)) + 1).asnumpy()  # the pool is there from the first operator on
    return any(map(_quieted, _loaded()))


def _loaded() -> list[str]:
    """Where the runtime's library was loaded from; nothing where the system does not tell."""
    try:
        lines = _MAPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[5] for line in lines if line.endswith("/" + _LIBRARY)})


def _quieted(path: str) -> bool:
    library = ctypes.CDLL(path)  # is loaded: this finds it
    try:
        set_most, use_most = getattr(library, _SET_MOST), getattr(library, _USE_MOST)
        pools = list(_pools(_address(library, _MANAGER), _address(library, _POOL_CLASS) + _HEADER * _WORD))
    except (AttributeError, ValueError, OSError):  # a name that it does not have
        return False
    for pool in pools:
        set_most.restype = use_most.restype = None
        set_most(ctypes.c_void_p(pool), ctypes.c_int(1))
        use_most(ctypes.c_void_p(pool))
    return bool(pools)


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library, name))


def _pools(owner: int, table: int) -> Iterator[int]:
    """Objects of the class with that table to which the owner points."""
    readable = _readable()
    for place in range(_WORDS):
        found = _word(owner + place * _WORD)
        inside = found % _WORD == 0 and any(start <= found <= stop - _WORD for start, stop in readable)
        if inside and _word(found) == table:
            yield found


def _word(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value


def _readable() -> list[tuple[int, int]]:
    """Where this process keeps what it has made."""
    found = []
    for line in _MAPS.read_text(encoding="utf-8").splitlines():
        area, rights = line.split(maxsplit=2)[:2]
        if rights.startswith("rw"):
            start, stop = area.split("-")
            found.append((int(start, 16), int(stop, 16)))
    return found
