"""``torch.distributed`` of simulated ranks: each rank finds it initialised, on the simulation's coordinator.

PyTorch keeps one world per process, in an object that all its functions read. While a simulation runs, that object
looks up the rank that asks (a context variable) and answers with that rank's own groups; outside of ranks it answers
with the process's own world, which stays as it is. The registry of groups in C++ is switched to one per thread.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, _set_thread_isolation_mode  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.transport.base import active_transport
from hyper_parallel.transport.c10d.host import TorchOps
from hyper_parallel.transport.c10d.process_state import forget_environments
from hyper_parallel.transport.c10d.rank_groups import (
    FIELDS,
    REPLACED,
    RankGroups,
    current_rank,
    enter_rank,
    start_thread,
)
from hyper_parallel.transport.c10d.simulated_store import SimulatedStore
from hyper_parallel.transport.own_modules import OwnModules
from hyper_parallel.transport.simulated import SimulatedTransport
from hyper_parallel.transport.simulated_threads import run_threads

__all__ = ["run_ranks"]

_Module: Any = distributed_c10d
_World: type = type(_Module._world)  # noqa: SLF001 - PyTorch's extension point
_isolate: Callable[[bool], None] = _set_thread_isolation_mode
_KEEPING_GROUPS = ("torch.distributed.nn.functional", "torch.distributed.optim.zero_redundancy_optimizer")
_PORT = "29500"


def _field(name: str) -> property:
    plain: Any = getattr(_World, name)

    def read(world: Any) -> Any:
        rank = current_rank()
        return plain.fget(world) if rank is None else rank.get(name)

    def write(world: Any, value: Any) -> None:
        rank = current_rank()
        if rank is None:
            plain.fset(world, value)
        else:
            rank.set(name, value)

    return property(read, write)


_WorldOfRank = type("_WorldOfRank", (_World,), {name: _field(name) for name in FIELDS})


def _per_rank(replacement: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function of PyTorch that simulated ranks call as ``replacement``."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        rank = current_rank()
        return plain(*args, **kwargs) if rank is None else replacement(rank, *args, **kwargs)

    return call


class _Installation:
    """What simulations change in PyTorch while at least one runs, and what it was before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._before: dict[str, Any] = {}
        self._hook: Any = None
        self._start: Any = None

    def enter(self) -> None:
        """A simulation starts."""
        with self._lock:
            self._running += 1
            if self._running > 1:
                return
            _forget_default_groups()
            self._hook = sys.excepthook
            names = (*REPLACED, "_backend", "_default_pg_init_method")
            self._before = {name: getattr(_Module, name) for name in names if hasattr(_Module, name)}
            for name, replacement in REPLACED.items():
                self._put(name, _per_rank(replacement, self._before[name]))
            _Module._world.__class__ = _WorldOfRank  # noqa: SLF001 - as above
            self._start = threading.Thread.start
            threading.Thread.start = functools.partialmethod(_start_thread, self._start)  # type: ignore[assignment]
            _isolate(True)

    def _put(self, name: str, value: Any) -> None:
        """Set a name of PyTorch's module, and of the package, which has the public ones as well."""
        if getattr(dist, name, None) is getattr(_Module, name):
            setattr(dist, name, value)
        setattr(_Module, name, value)

    def leave(self) -> None:
        """A simulation has ended."""
        with self._lock:
            self._running -= 1
            if self._running:
                return
            _forget_default_groups()
            _forget_meshes()
            threading.Thread.start = self._start  # type: ignore[method-assign]
            forget_environments()
            _isolate(False)
            _Module._world.__class__ = _World  # noqa: SLF001 - as above
            for name, value in self._before.items():
                self._put(name, value)
            sys.excepthook = self._hook
            self._before = {}


def _start_thread(thread: threading.Thread, plain: Callable[[threading.Thread], None]) -> None:
    start_thread(plain, thread)


def _forget_meshes() -> None:
    """Clear the caches in which PyTorch's DTensor keeps every mesh that was ever redistributed over."""
    redistribution: Any = sys.modules.get("torch.distributed.tensor._redistribute")
    if redistribution is not None:
        redistribution.clear_redistribute_planner_cache()
        redistribution._gen_transform_infos.cache_clear()  # noqa: SLF001 - PyTorch's comment names it as the way
    costs: Any = sys.modules.get("torch.distributed.tensor._collective_utils")
    if costs is not None:
        costs.MeshTopoInfo.build_from_mesh.cache_clear()


def _forget_default_groups() -> None:
    """Replace groups that PyTorch's functions keep as defaults, from the time of their import, by None: the world's."""
    for module in filter(None, map(sys.modules.get, _KEEPING_GROUPS)):
        for function in vars(module).values():
            defaults = getattr(function, "__defaults__", None)
            if defaults:
                kept = (None if isinstance(value, dist.ProcessGroup) else value for value in defaults)
                function.__defaults__ = tuple(kept)


_INSTALLATION = _Installation()


def run_ranks(body: Callable[[], Any], world_size: int, timeout: float, *, own_modules: bool = False) -> list[Any]:
    """:func:`run_threads` with PyTorch: every rank finds ``torch.distributed`` initialised.

    Args:
        body: what every rank runs.
        world_size: number of ranks, at least one.
        timeout: seconds after which the run is given up.
        own_modules: whether each rank imports its own copies of the user's modules, ``__main__`` included.

    Raises:
        WorldFailedError: a rank raised, never finished, or left messages undelivered.
    """

    def calling() -> SimulatedTransport | None:
        rank = current_rank()
        return rank.transport if rank is not None and active_transport() is rank.transport else None

    store = SimulatedStore(calling)

    def rank_body() -> Any:
        transport = cast("SimulatedTransport", active_transport())
        with _rank_distributed(transport, store):
            return body()

    _INSTALLATION.enter()
    try:
        if not own_modules:
            return run_threads(rank_body, world_size, TorchOps(), timeout)
        with OwnModules(TorchOps()) as ops:
            return run_threads(rank_body, world_size, ops, timeout)
    finally:
        _INSTALLATION.leave()


@contextmanager
def _rank_distributed(transport: SimulatedTransport, store: Store) -> Iterator[None]:
    """Inside this context, this thread is a rank of the simulation; it starts with torchrun's environment.

    Args:
        transport: of the rank.
        store: of the world.
    """
    rank, size = str(transport.rank), str(transport.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=_PORT)
    groups = RankGroups(transport, store)
    enter_rank(groups)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        groups.clear()
        enter_rank(None)


def _identity(mesh: Any) -> Any:
    return mesh.__dict__.get("_thread_id")


def _identify(mesh: Any, value: Any) -> None:
    """A mesh belongs to the rank that makes it: PyTorch's caches must not take one rank's mesh for another's."""
    rank = current_rank()
    mesh.__dict__["_thread_id"] = value if rank is None else rank.identity


DeviceMesh._thread_id = property(_identity, _identify)  # type: ignore[assignment]  # noqa: SLF001 - PyTorch's own mark for worlds in threads
