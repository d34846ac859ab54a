"""Changes in PyTorch while a simulation runs, so that each rank has its own ``torch.distributed``.

PyTorch keeps one world per process, in an object that all its functions read. While a simulation runs, that object
looks up the calling rank (a context variable) and returns that rank's own groups; outside of ranks it returns those of
the process's own world, which is not changed. The registry of groups in C++ is switched to one per thread.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.platform.torch.versions import c10d_world, set_thread_isolation
from hyper_parallel.transport.frontends.c10d.program_stores import STORES, refuse_gloo
from hyper_parallel.transport.frontends.c10d.rank_groups import FIELDS, REPLACED, current_rank, start_thread
from hyper_parallel.transport.host.torch.process_state import forget_environments

__all__ = ["INSTALLATION", "Installation"]

_Module: Any = distributed_c10d
_World: type = type(c10d_world)  # PyTorch's extension point
_gloo: Any = distributed_c10d.ProcessGroupGloo
_isolate: Callable[[bool], None] = set_thread_isolation
_STATE = ("_backend", "_default_pg_init_method")  # names in PyTorch's module that init_process_group sets
_KEEPING_GROUPS = ("torch.distributed.nn.functional", "torch.distributed.optim.zero_redundancy_optimizer")


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
    """Return a function that calls ``replacement`` on simulated ranks, and ``plain`` outside of them."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        rank = current_rank()
        return plain(*args, **kwargs) if rank is None else replacement(rank, *args, **kwargs)

    return call


class Installation:
    """The changes that simulations make in PyTorch while they run, and the values before.

    After a time limit, a thread may outlive its run. So PyTorch's functions remain replaced until the last rank has
    ended, while the process gets its own registry and state back at the end of the run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._users = 0
        self._functions: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._start: Any = None
        self._gloo: Any = None

    @contextmanager
    def run(self, *, threads: bool = True) -> Iterator[None]:
        """Apply the changes for a simulation inside this context, in threads or, for one rank, in this process."""
        _forget_compiled()
        with self._lock:
            self._runs += 1
            if self._runs == 1:
                _forget_default_groups()
                self._state = {name: getattr(_Module, name) for name in _STATE} | {"excepthook": sys.excepthook}
                _isolate(threads)
        try:
            with self.rank():
                yield
        finally:
            with self._lock:
                self._runs -= 1
                if not self._runs:
                    self._end()

    def _end(self) -> None:
        _isolate(False)
        _forget_default_groups()
        _forget_meshes()
        forget_environments()
        for name in _STATE:
            setattr(_Module, name, self._state[name])
        sys.excepthook = self._state["excepthook"]

    @contextmanager
    def rank(self) -> Iterator[None]:
        """Replace PyTorch's functions while a rank runs inside this context."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._install()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._uninstall()

    def _install(self) -> None:
        self._functions = {name: getattr(_Module, name) for name in REPLACED}
        for name, replacement in REPLACED.items():
            self._put(name, _per_rank(replacement, self._functions[name]))
        for name, store in STORES.items():
            setattr(dist, name, store)
        self._gloo = _gloo.__init__
        _gloo.__init__ = refuse_gloo(self._gloo)
        c10d_world.__class__ = _WorldOfRank
        self._start = threading.Thread.start
        threading.Thread.start = functools.partialmethod(_start_thread, self._start)  # type: ignore[assignment]

    def _uninstall(self) -> None:
        threading.Thread.start = self._start  # type: ignore[method-assign]
        c10d_world.__class__ = _World
        _gloo.__init__ = self._gloo
        for name, store in STORES.items():
            setattr(dist, name, store.plain)
        for name, function in self._functions.items():
            self._put(name, function)

    def _put(self, name: str, value: Any) -> None:
        """Set a name in PyTorch's module, and in the package if it exports the name."""
        if getattr(dist, name, None) is getattr(_Module, name):
            setattr(dist, name, value)
        setattr(_Module, name, value)


def _start_thread(thread: threading.Thread, plain: Callable[[threading.Thread], None]) -> None:
    start_thread(plain, thread)


def _forget_meshes() -> None:
    """Clear the caches in which PyTorch's DTensor keeps every mesh on which a tensor was redistributed."""
    redistribution: Any = sys.modules.get("torch.distributed.tensor._redistribute")
    if redistribution is not None:
        redistribution.clear_redistribute_planner_cache()
        redistribution._gen_transform_infos.cache_clear()  # noqa: SLF001 - PyTorch's comment names it as the way
    costs: Any = sys.modules.get("torch.distributed.tensor._collective_utils")
    if costs is not None:
        costs.MeshTopoInfo.build_from_mesh.cache_clear()


def _forget_compiled() -> None:
    """Drop code that was compiled outside of ranks: each rank would run it, with the outside world as a constant."""
    compiler: Any = sys.modules.get("torch._dynamo")
    if compiler is not None:
        compiler.reset_code_caches()


def _forget_default_groups() -> None:
    """Replace groups that are defaults of arguments of PyTorch's functions by None, which means the world."""
    for module in filter(None, map(sys.modules.get, _KEEPING_GROUPS)):
        for function in vars(module).values():
            defaults = getattr(function, "__defaults__", None)
            if defaults:
                kept = (None if isinstance(value, dist.ProcessGroup) else value for value in defaults)
                function.__defaults__ = tuple(kept)


INSTALLATION = Installation()
"""The only installation of this process."""


def _identity(mesh: Any) -> Any:
    return mesh.__dict__.get("_thread_id")


def _identify(mesh: Any, value: Any) -> None:
    """A mesh belongs to the rank that creates it: PyTorch's caches must not confuse meshes of different ranks."""
    rank = current_rank()
    mesh.__dict__["_thread_id"] = value if rank is None else rank.identity


DeviceMesh._thread_id = property(_identity, _identify)  # type: ignore[assignment]  # noqa: SLF001 - PyTorch's own mark for worlds in threads


def _update(mesh: Any, state: dict[str, Any]) -> None:
    vars(mesh).update(state)


_set_state: Callable[[Any, dict[str, Any]], None] = getattr(DeviceMesh, "__setstate__", _update)  # new in 2.12


def _read_mesh(mesh: Any, state: dict[str, Any]) -> None:
    """Unpickle a mesh: the rank that reads it from a checkpoint becomes its owner, as a process would."""
    _set_state(mesh, {name: value for name, value in state.items() if name != "_hash"})
    mesh._thread_id = None  # noqa: SLF001 - set to the rank that reads


DeviceMesh.__setstate__ = _read_mesh  # type: ignore[method-assign, assignment]
