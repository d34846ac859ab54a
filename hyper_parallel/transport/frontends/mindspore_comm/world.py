"""The world of ``mindspore.communication`` on a rank: its groups, and the replacement of MindSpore's manager."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

from mindspore.mint import distributed

from hyper_parallel.errors import CollectiveMismatchError, MeshError, UnsupportedOnBackend
from hyper_parallel.transport.base import Channel, ForwardingTransport, Ranks, unknown_group
from hyper_parallel.transport.checks.fingerprint import MessageFingerprint
from hyper_parallel.transport.simulated.endpoint import Endpoint

__all__ = [
    "WORLD_NAMES",
    "Group",
    "GroupManager",
    "NamedGroups",
    "World",
    "active_world",
    "begin_world",
    "current_world",
]


_FIRST_TICKET = 1 << 32  # distinct from the transport's own collectives, on the same connection
WORLD_NAMES = ("hccl_world_group", "mccl_world_group", "nccl_world_group")
"""MindSpore's name of the world group, by backend."""


Mailbox = tuple[int, int, int, Channel]
"""Key of messages that are matched in order: source, destination, tag and channel."""
Arrival = tuple[Any, CollectiveMismatchError | None]
"""The payload of a received message, or the reason why it does not match the receive."""


@dataclass(frozen=True, slots=True)
class Group:
    """A communication group.

    Attributes:
        name: name given by the program; empty for the world.
        ranks: global ranks of the members, ascending; group rank i is global rank ``ranks[i]``.
    """

    name: str
    ranks: Ranks

    def __str__(self) -> str:
        return f"group {self.name!r} of ranks {list(self.ranks)}" if self.name else "the world"


class World:
    """The groups of one rank.

    Args:
        rank, size: number of this rank, and number of ranks.
        endpoint: connection to the coordinator, which transfers the payloads.

    Attributes:
        initialised: False between ``destroy_process_group`` and the next ``init``.
    """

    def __init__(self, rank: int, size: int, endpoint: Endpoint) -> None:
        self.rank = rank
        self.size = size
        self.endpoint = endpoint
        self.tickets = itertools.count(_FIRST_TICKET)
        self.posted: dict[Mailbox, deque[MessageFingerprint]] = {}
        self.arrived: dict[int, Arrival] = {}
        self.initialised = True
        self._groups: dict[str, Group] = {}

    def group(self, name: str) -> Group:
        """Return the group with the program's ``name``.

        Raises:
            MeshError: there is no such group, or the world was destroyed.
        """
        if not self.initialised:
            msg = "the process groups were destroyed; call mindspore.communication.init() before further collectives"
            raise MeshError(msg)
        if name in WORLD_NAMES:
            return Group("", tuple(range(self.size)))
        if name not in self._groups:
            msg = f"there is no group {name!r}; known are {[*WORLD_NAMES[:1], *self._groups]}; create_group makes one"
            raise MeshError(msg)
        return self._groups[name]

    def group_of_member(self, name: str) -> Group:
        """Return the group for a call that only members may make.

        Raises:
            CollectiveMismatchError: this rank is not a member.
        """
        group = self.group(name)
        if self.rank not in group.ranks:
            msg = f"rank {self.rank} calls a collective of {group}, of which it is not a member"
            raise CollectiveMismatchError(msg)
        return group

    def create(self, name: str, ranks: Sequence[int]) -> None:
        """Create a group; any rank may call this, and nothing is communicated.

        Raises:
            MeshError: a rank is outside the world, or the ranks are not ascending.
        """
        if any(not 0 <= rank < self.size for rank in ranks):
            msg = f"create_group({name!r}, {list(ranks)}): ranks must lie in 0..{self.size - 1}"
            raise MeshError(msg)
        if list(ranks) != sorted(ranks):
            msg = (
                f"create_group({name!r}, {list(ranks)}): list the ranks in ascending order; for any other order, "
                "MindSpore numbers the members in two different ways, by the list and by the sorted list"
            )
            raise MeshError(msg)
        self._groups[name] = Group(name, tuple(ranks))

    def destroy(self, name: str) -> None:
        """Forget a group.

        Raises:
            MeshError: no group has this name.
        """
        self.group(name)
        del self._groups[name]

    def destroy_all(self) -> None:
        """Remove all groups until the next ``init``."""
        self._groups.clear()
        self.initialised = False

    @property
    def groups(self) -> Mapping[str, Group]:
        """The groups that the program created, by name."""
        return self._groups


_CURRENT: ContextVar[World | None] = ContextVar("hyper_parallel_mindspore_world", default=None)


def begin_world(rank: int, size: int, endpoint: Endpoint) -> World:
    """Create a new world without groups, and make it the current one of this process."""
    world = World(rank, size, endpoint)
    _CURRENT.set(world)
    return world


def active_world() -> World | None:
    """The world of this rank; None in a process that is not a rank."""
    return _CURRENT.get()


def current_world() -> World:
    """The world of this rank.

    Raises:
        MeshError: this thread is not a rank.
    """
    world = _CURRENT.get()
    if world is None:
        msg = (
            "a collective was called in a thread that is not a rank; call collectives in the thread that runs the rank"
        )
        raise MeshError(msg)
    return world


class GroupManager:
    """Implements ``CollectiveManager`` of MindSpore's Python code on the current world."""

    @staticmethod
    def get_instance() -> GroupManager:
        """Return the manager, which has no state."""
        return GroupManager()

    def initialized(self) -> bool:
        """Whether the world can be used."""
        return current_world().initialised

    def get_rank_id(self, group: str) -> int:
        """This rank's number in the group."""
        return self.get_group_rank_from_world_rank(current_world().rank, group)

    def get_group_size(self, group: str) -> int:
        """Number of members."""
        return len(current_world().group(group).ranks)

    def get_local_rank_id(self, group: str) -> int:
        """This rank's number among the members on this machine, which are all members."""
        return self.get_rank_id(group)

    def get_local_group_size(self, group: str) -> int:
        """Number of members on this machine: all of them."""
        return self.get_group_size(group)

    def get_group_ranks(self, group: str) -> list[int]:
        """Global ranks of the members."""
        return list(current_world().group(group).ranks)

    def get_world_rank_from_group_rank(self, group: str, group_rank: int) -> int:
        """Global rank of a member."""
        named = current_world().group(group)
        if not 0 <= group_rank < len(named.ranks):
            msg = f"{named} has no group rank {group_rank}; its ranks are 0..{len(named.ranks) - 1}"
            raise MeshError(msg)
        return named.ranks[group_rank]

    def get_group_rank_from_world_rank(self, world_rank: int, group: str) -> int:
        """Number of a global rank in the group."""
        named = current_world().group(group)
        if world_rank not in named.ranks:
            msg = f"rank {world_rank} is not a member of {named}"
            raise MeshError(msg)
        return named.ranks.index(world_rank)

    def create_group(self, group: str, ranks: Sequence[int], options: Any = None) -> bool:
        """Create a group; backend options are ignored."""
        del options
        current_world().create(group, ranks)
        return True

    def destroy_group(self, group: str) -> bool:
        """Forget a group."""
        current_world().destroy(group)
        return True

    def get_group_map(self) -> dict[str, list[int]]:
        """Return the ranks of all groups."""
        return {name: list(group.ranks) for name, group in current_world().groups.items()}

    def wait_all_comm_init(self) -> bool:
        """Return at once: groups are ready when they are created."""
        return True

    def __getattr__(self, name: str) -> NoReturn:
        msg = f"MindSpore's {name} has no meaning on ranks without devices: it asks for a communicator of HCCL"
        raise UnsupportedOnBackend(msg)


class NamedGroups(ForwardingTransport):
    """A transport whose group handles are names, as over HCCL, if this process has a MindSpore world.

    Members of a named group are in rank order, as in MindSpore.
    """

    def group(self, ranks: Ranks) -> Any:
        """See :meth:`Transport.group`."""
        return self._named(ranks, self._inner.group(_ordered(ranks)))

    def build_group(self, ranks: Ranks, **options: Any) -> Any:
        """See :meth:`Transport.build_group`."""
        return self._named(ranks, self._inner.build_group(_ordered(ranks), **options))

    def known_group(self, ranks: Ranks) -> Any:
        """See :meth:`Transport.known_group`."""
        handle = self._inner.known_group(_ordered(ranks))
        return None if handle is None else self._named(ranks, handle)

    def _named(self, ranks: Ranks, handle: Any) -> Any:
        """Return MindSpore's name of the group of ``ranks``, derived from the ranks; None without a world."""
        world = active_world()
        if world is None:
            return handle
        key = _ordered(ranks)
        named = [name for name, group in world.groups.items() if group.ranks == key]
        return named[0] if named else distributed.new_group(None if len(key) == world.size else list(key))

    def ranks_of(self, group: Any) -> Ranks:
        """See :meth:`Transport.ranks_of`.

        Raises:
            MeshError: no group has this name, or it was destroyed.
        """
        world = active_world()
        if not isinstance(group, str) or world is None:
            return self._inner.ranks_of(group)
        try:
            return world.group(group).ranks
        except MeshError:
            raise unknown_group(group, [known.ranks for known in world.groups.values()]) from None

    def build_of(self, ranks: Ranks, group: Any = None) -> str:
        """See :meth:`Transport.build_of`."""
        return self._inner.build_of(ranks, self._inner.known_group(ranks) if isinstance(group, str) else group)

    def adopt(self, group: Any) -> None:
        """See :meth:`Transport.adopt`."""
        if isinstance(group, str):
            self._inner.group(self.ranks_of(group))
        else:
            self._inner.adopt(group)

    def drop(self, group: Any) -> None:
        """See :meth:`Transport.drop`."""
        world = active_world()
        if not isinstance(group, str) or world is None:
            self._inner.drop(group)
            return
        handle = self._inner.known_group(self.ranks_of(group))
        if handle is not None:
            self._inner.drop(handle)
        if group in world.groups:
            distributed.destroy_process_group(group)


def _ordered(ranks: Ranks) -> Ranks:
    return tuple(sorted(ranks))
