"""Creates and caches the process groups of a ``torch.distributed`` world."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.platform.torch.versions import default_store
from hyper_parallel.transport.base import EngineTransport, Ranks, after_dropped, check_ranks, unknown_group

__all__ = ["C10dGroups"]


class C10dGroups(EngineTransport):
    """The groups of an initialised world, by ranks; :class:`C10dTransport` adds the collectives."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.backend = str(dist.get_backend())
        self.framework = "torch"
        self._groups: dict[Ranks, Any] = {tuple(range(self.world_size)): dist.group.WORLD}
        self._retired: dict[Ranks, Any] = {}
        self._dropped: dict[Ranks, int] = {}
        self._claims: dict[Ranks, int] = {}
        self._builds: dict[Ranks, int] = {}

    def group(self, ranks: Ranks) -> Any:
        """Return a ``ProcessGroup`` of ``ranks``, in rank order as in ``torch.distributed``."""
        group = self._groups.get(ranks)
        if group is not None:
            return group
        key = tuple(sorted(ranks))
        if key not in self._groups:
            whole = key == tuple(range(self.world_size))
            self._groups[key] = dist.group.WORLD if whole else self._built(key, {})
        return self._groups[key]

    def ranks_of(self, group: Any) -> Ranks:
        """See :meth:`Transport.ranks_of`.

        Raises:
            MeshError: ``group`` is not a group of this world, or was destroyed.
        """
        if group is None:
            return tuple(range(self.world_size))
        try:
            if any(retired is group for retired in self._retired.values()):
                raise ValueError(group)  # noqa: TRY301 - reported like a group that torch.distributed does not know
            return tuple(dist.get_process_group_ranks(group))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise unknown_group(group, self._groups) from error

    def claim(self, proposal: str, ranks: Ranks) -> list[str]:
        """See :meth:`Transport.claim`; members count the collectives that they start, so that each has a number."""
        check_ranks(ranks, self.rank, self.world_size)
        key = tuple(sorted(ranks))
        self._claims[key] = self._claims.get(key, 0) + 1
        name = f"hyper_parallel/started/{'-'.join(map(str, key))}/{self._claims[key]}"
        store = default_store()
        turn = store.add(name, 1)
        store.set(f"{name}/{turn}", proposal)
        proposals = [store.get(f"{name}/{earlier}").decode() for earlier in range(1, turn)]
        if store.add(f"{name}/read", 1) == len(key):  # the last reader deletes the key
            for entry in ("", "/read", *(f"/{turn}" for turn in range(1, len(key) + 1))):
                store.delete_key(name + entry)
        return proposals

    def build_group(self, ranks: Ranks, **options: Any) -> Any:
        """See :meth:`Transport.build_group`."""
        key = tuple(sorted(ranks))
        self._groups[key] = self._built(key, options)
        return self._groups[key]

    def _built(self, key: Ranks, options: dict[str, Any]) -> Any:
        retired = None if options else self._retired.pop(key, None)
        if retired is not None:
            return retired
        self._builds[key] = self._builds.get(key, 0) + 1
        with _named(_name_of(key, self._builds[key])):
            return dist.new_group(list(key), use_local_synchronization=True, **{**self._limits(), **options})

    def _limits(self) -> dict[str, Any]:
        """Return default options of every group: none, unless a transport defines some."""
        return {}

    def build_of(self, ranks: Ranks, group: Any = None) -> str:
        """See :meth:`Transport.build_of`: PyTorch's name of the group, and the number of groups destroyed before."""
        handle: Any = self._groups.get(ranks) if group is None else group
        usual = handle is None or handle is dist.group.WORLD or handle.group_name == _name_of(ranks, 1)
        names = ("" if usual else f"named {handle.group_name!r}", after_dropped(self._dropped.get(ranks, 0)))
        return ", ".join(filter(None, names))

    def known_group(self, ranks: Ranks) -> Any:
        """See :meth:`Transport.known_group`."""
        return self._groups.get(tuple(sorted(ranks)))

    def adopt(self, group: Any) -> None:
        """See :meth:`Transport.adopt`."""
        self._groups[tuple(sorted(self.ranks_of(group)))] = group

    def drop(self, group: Any) -> None:
        """See :meth:`Transport.drop`."""
        ranks = tuple(sorted(self.ranks_of(group)))
        # A second gloo group of the same ranks may find the first group's addresses in the store and wait forever, so
        # the first group is kept for the next request. Destroying the world's group would destroy all others, see
        # close().
        if self.backend == "gloo" and group is not dist.group.WORLD:
            self._retired[ranks] = group
        elif group is not dist.group.WORLD:
            dist.destroy_process_group(group)
        if self._groups.get(ranks) is group:
            del self._groups[ranks]
            if group is not dist.group.WORLD:
                self._dropped[ranks] = self._dropped.get(ranks, 0) + 1


def _name_of(ranks: Ranks, build: int) -> str:
    return f"hyper_parallel {'-'.join(map(str, ranks))} {build}"


_NAMING = threading.Lock()  # locked while PyTorch's function that names a group is replaced


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Inside this context, a new group gets the name ``name``.

    PyTorch derives the name from the number of groups of this process, which differs between members of overlapping
    groups, so that they would wait for each other forever. PyTorch has no public option for the name.
    """
    with _NAMING:
        usual = distributed_c10d._hash_ranks_to_str  # noqa: SLF001 - as above
        distributed_c10d._hash_ranks_to_str = lambda ranks: name  # noqa: ARG005, SLF001 - as above
        try:
            yield
        finally:
            distributed_c10d._hash_ranks_to_str = usual  # noqa: SLF001 - as above
