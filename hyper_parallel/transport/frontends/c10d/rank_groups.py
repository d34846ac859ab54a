"""The process groups of one simulated rank, and the functions of ``torch.distributed`` that build them."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from hyper_parallel.errors import MeshError
from hyper_parallel.platform.torch.versions import (
    c10d_world,
    find_group,
    new_group_with_tag,
    register_group,
    unregister_groups,
)
from hyper_parallel.transport.base import Ranks
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, Facts, call_site
from hyper_parallel.transport.checks.torch_distributed import LIBRARY_FILES
from hyper_parallel.transport.frontends.c10d.process_group import Member, SimulatedProcessGroup, WorldGroup
from hyper_parallel.transport.frontends.c10d.simulated_group import CollectiveGroup
from hyper_parallel.transport.simulated.endpoint import Contribution, RankAbortedError
from hyper_parallel.transport.simulated.transport import SimulatedTransport

__all__ = ["FIELDS", "REPLACED", "RankGroups", "current_rank", "enter_rank", "start_thread"]

_C10D: Any = distributed_c10d
_FIELDS = (
    "default_pg",
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "group_count",
    "tags_to_pg",
    "pg_to_tag",
    "pg_coalesce_state",
    "comms",  # from 2.13 on
)
FIELDS = tuple(name for name in _FIELDS if hasattr(type(c10d_world), name))
"""Fields of PyTorch's world object."""

_BACKEND = "gloo"  # backend of a world that the program has not initialised itself, as on real CPU ranks
_DEFAULT_NAME = "0"
_IDENTITIES = itertools.count(1)  # next() of it is atomic
_CREATION = "new_group"  # new_group's calls are counted under this name, apart from the world's collectives


class RankGroups:
    """The fields of PyTorch's world object, for one rank.

    Args:
        transport: transport of the simulated rank.
        store: store of the world.
    """

    def __init__(self, transport: SimulatedTransport, store: Store) -> None:
        self.transport = transport
        self.store = store
        self.implicit = True
        self._closed = False
        self.splits: dict[Any, int] = {}
        self.identity = next(_IDENTITIES)
        self._fields: dict[str, Any] | None = None

    def get(self, name: str) -> Any:
        """The value of one of :data:`FIELDS`; the first access builds the world's group.

        Raises:
            RankAbortedError: the simulation has ended, and this thread outlives it.
        """
        if self._closed:
            raise RankAbortedError
        if self._fields is None:
            self._fields = _empty()
            self._initialise()
        if name == "default_pg" and self.implicit and _inside_init():
            self.implicit = False
            self.clear()
        return self._fields[name]

    def set(self, name: str, value: Any) -> None:
        """Replace the value of one of :data:`FIELDS`."""
        self.get(name)
        if self._fields is not None:
            self._fields[name] = value

    def group_of(self, ranks: Ranks) -> Any:
        """The group of ``ranks``, this one included; built without communication, once."""
        members = tuple(sorted(ranks))
        if len(members) == self.transport.world_size:
            return self.get("default_pg")
        name = f"hyper_parallel {'-'.join(map(str, members))}"
        for known, known_name in self.get("pg_names").items():
            if known_name == name:
                return known
        store = PrefixStore(f"{name}/", self.store)
        group = SimulatedProcessGroup(self.transport, members, store, name, None)
        return self.register(group, members, _BACKEND, store, name, None)

    def clear(self) -> None:
        """Drop every group."""
        self.splits.clear()
        if self._fields is not None:
            self._fields.update(_empty())
            unregister_groups()  # as in PyTorch

    def close(self) -> None:
        """Drop every group for good: the rank or its simulation has ended. C++'s registry ends with the thread."""
        self._closed, self._fields = True, None
        self.splits.clear()

    def _initialise(self) -> None:
        store = PrefixStore("default_pg", self.store)
        self.get("group_count")
        world = tuple(range(self.transport.world_size))
        group = self.register(WORLD_GROUP, world, _BACKEND, store, _DEFAULT_NAME, None)
        self.set("default_pg", group)
        self.set("group_count", 1)

    def register(self, group: Any, ranks: Ranks, backend: str, store: Store, name: str, tag: str | None) -> Any:
        """Register a group of ``ranks``, this one included, under its name."""
        engine = dist.Backend(backend if _is_built(backend) else _BACKEND)
        register_group(
            group,
            tag,
            backend_name=engine,
            store=store,
            group_name=name,
            backend_config=str(_C10D.BackendConfig(engine)),
            rank_mapping={rank: position for position, rank in enumerate(ranks)},
        )
        return group


def _is_built(backend: str) -> bool:
    """Whether PyTorch was built with the program's backend; the simulation needs none, but PyTorch's code does."""
    return "nccl" not in str(backend).lower() or dist.is_nccl_available()


class _OwnGroups(dict[Any, Any]):
    """A mapping of a rank's groups; looking up a group of another rank raises an error."""

    def get(self, group: Any, default: Any = None) -> Any:
        """The value of ``group``."""
        if group not in self and isinstance(group, CollectiveGroup):
            group.check_owner()
        return super().get(group, default)


def _empty() -> dict[str, Any]:
    fields: dict[str, Any] = {name: {} for name in FIELDS}
    fields.update(default_pg=None, group_count=0, comms=[], pg_map=_OwnGroups())
    return fields


def _inside_init() -> bool:
    """Whether the caller is ``init_process_group``, which would mistake the prepared world for an existing one."""
    frame: Any = inspect.currentframe()
    frame = frame.f_back.f_back
    for _ in range(3):
        if frame is not None and frame.f_code is _INIT_CODE:
            return True
        frame = frame and frame.f_back
    return False


def _plain(function: Any) -> Any:
    return inspect.unwrap(function)


_INIT_CODE = _plain(_C10D.init_process_group).__code__
_RANK: ContextVar[RankGroups | None] = ContextVar("hyper_parallel_rank_groups", default=None)


_STARTED: WeakKeyDictionary[threading.Thread, RankGroups] = WeakKeyDictionary()


def current_rank() -> RankGroups | None:
    """The groups of the calling simulated rank, or of the rank that started this thread; None outside of ranks."""
    return _RANK.get() or (_STARTED.get(threading.current_thread()) if _STARTED else None)


def start_thread(plain: Callable[[threading.Thread], None], thread: threading.Thread) -> None:
    """``threading.Thread.start``: a thread started by a rank may query the rank's groups."""
    rank = current_rank()
    if rank is not None:
        _STARTED[thread] = rank
    plain(thread)


def _member() -> Member | None:
    rank = current_rank()
    return None if rank is None else Member(rank.transport, rank.store)


WORLD_GROUP = WorldGroup(_member)
"""The group of all ranks, of every simulation."""


def enter_rank(groups: RankGroups | None) -> None:
    """Set the groups of the rank that runs in this context."""
    _RANK.set(groups)


# -- functions of PyTorch that build groups, for a rank ----------------------------------------------------------------


def _rendezvous(rank_groups: RankGroups, url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[Any]:
    """``rendezvous``: the ranks of a simulation have met already, whatever the address."""
    transport = rank_groups.transport
    _check_world(url, rank, world_size, transport)
    yield rank_groups.store, transport.rank, transport.world_size


def _check_world(where: str, rank: int, world_size: int, transport: SimulatedTransport) -> None:
    wrong = rank not in (-1, transport.rank) or world_size not in (-1, transport.world_size)
    if wrong:
        msg = (
            f"init_process_group({where!r}, rank={rank}, world_size={world_size}) on simulated rank {transport.rank} "
            f"of {transport.world_size}: rank and world size must be those of the simulation; RANK and WORLD_SIZE in "
            "the environment hold them"
        )
        raise MeshError(msg)


def _new_process_group_helper(
    rank_groups: RankGroups,
    group_size: int,
    group_rank: int,
    global_ranks_in_group: list[int],
    backend: str,
    store: Store,
    group_name: str,
    **options: Any,
) -> tuple[Any, Any]:
    """``_new_process_group_helper``: the group of a simulated rank."""
    transport = rank_groups.transport
    if group_name in rank_groups.get("pg_names").values():
        msg = f"the group name {group_name!r} is taken; choose another"
        raise ValueError(msg)
    tag = options.get("pg_tag")
    if tag:
        known = find_group(tag, global_ranks_in_group)  # as PyTorch does
        if known:
            return known, rank_groups.get("pg_map")[known][1]
    if not global_ranks_in_group:
        _check_world("store", group_rank, group_size, transport)
        ranks = tuple(range(transport.world_size))
        return rank_groups.register(WORLD_GROUP, ranks, backend, store, group_name, tag), store
    ranks = tuple(global_ranks_in_group)
    if transport.rank not in ranks:
        return dist.GroupMember.NON_GROUP_MEMBER, None
    prefixed = PrefixStore(f"{group_name}/", store)
    group = SimulatedProcessGroup(transport, ranks, prefixed, group_name, options.get("group_desc"))
    rank_groups.register(group, ranks, backend, prefixed, group_name, tag)
    _meet(transport, ranks, group_name)
    return group, prefixed


def _meet(transport: SimulatedTransport, ranks: Ranks, name: str) -> None:
    """Wait for the members of a new group, as gloo does when the members connect to each other."""
    if len(ranks) > 1:
        fingerprint = _creation(ranks, (), name)
        transport.begin(Contribution(fingerprint, [None] * len(ranks))).wait()


def _creation(ranks: Ranks, facts: Facts, group: str) -> CollectiveFingerprint:
    return CollectiveFingerprint("dist.new_group", ranks, facts, call_site(*LIBRARY_FILES), group=group)


def _checked_new_group(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``_new_group_with_tag`` that compares the ranks of the new group among all ranks of the world."""
    signature = inspect.signature(plain)

    def build(rank_groups: RankGroups, *args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*args, **kwargs)
        asked.apply_defaults()
        if not asked.arguments["use_local_synchronization"] and rank_groups.get("default_pg") is not None:
            _agree(rank_groups.transport, asked.arguments["ranks"], sort=asked.arguments.get("sort_ranks", True))
        return plain(*args, **kwargs)

    return build


def _agree(transport: SimulatedTransport, ranks: Any, *, sort: bool) -> None:
    world = tuple(range(transport.world_size))
    if len(world) == 1:
        return
    members = world if ranks is None else tuple(sorted(ranks) if sort else ranks)
    fingerprint = _creation(world, (("ranks", members),), _CREATION)
    transport.begin(Contribution(fingerprint, [None] * len(world), awaited=False))


def _split_group(
    rank_groups: RankGroups,
    parent_pg: Any = None,
    split_ranks: Any = None,
    timeout: Any = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: Any = None,
) -> Any:
    """``split_group``: groups of the members of ``parent_pg``, whose group ranks ``split_ranks`` lists."""
    del timeout, pg_options
    parent = parent_pg or rank_groups.get("default_pg")
    splits = tuple(tuple(sorted(ranks)) for ranks in split_ranks or ())
    everyone = [rank for ranks in splits for rank in ranks]
    if not everyone or len(set(everyone)) < len(everyone) or not set(everyone) <= set(range(parent.size())):
        msg = (
            f"split_group: split_ranks is {split_ranks}; it must list group ranks below {parent.size()}, each once, in "
            "at least one list"
        )
        raise ValueError(msg)
    number = rank_groups.splits[parent] = rank_groups.splits.get(parent, 0) + 1
    if parent.size() > 1:
        fingerprint = _creation(parent.ranks, (("split_ranks", splits),), parent.group_name)
        fingerprint.operation = "dist.split_group"
        parent.transport.begin(Contribution(fingerprint, [None] * parent.size())).wait()
    for ranks in splits:
        if parent.rank() in ranks:
            name = f"{parent.group_name}/split {number}/{'-'.join(map(str, ranks))}"
            members = tuple(parent.ranks[rank] for rank in ranks)
            engine = str(backend or rank_groups.get("pg_map")[parent][0])
            store = PrefixStore(f"{name}/", parent.get_group_store())
            group = SimulatedProcessGroup(parent.transport, members, store, name, group_desc)
            return rank_groups.register(group, members, engine, store, name, None)
    return None


REPLACED: dict[str, Callable[..., Any]] = {
    "rendezvous": _rendezvous,
    "_new_process_group_helper": _new_process_group_helper,
    "split_group": _split_group,
    "_new_group_with_tag": _checked_new_group(new_group_with_tag),
}
"""Functions of ``distributed_c10d`` by name, and the functions that a simulated rank calls instead, with its groups as
first argument.
"""
