"""Groups of a transport on host arrays under the names that MindSpore's own functions take."""

from __future__ import annotations

from typing import Any

from mindspore.mint import distributed

from hyper_parallel.errors import MeshError
from hyper_parallel.transport.base import ForwardingTransport, Ranks, unknown_group
from hyper_parallel.transport.frontends.mindspore_comm.world import active_world

__all__ = ["NamedGroups"]


class NamedGroups(ForwardingTransport):
    """A transport whose group handles are names, as over HCCL, where this process has a world of MindSpore's.

    Members of a named group are in the order of their numbers, as MindSpore has them.
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
        """Return the name of the group of ``ranks``, which MindSpore derives from the ranks; None without a world."""
        world = active_world()
        if world is None:
            return handle
        key = _ordered(ranks)
        named = [name for name, group in world.groups.items() if group.ranks == key]
        return named[0] if named else distributed.new_group(None if len(key) == world.size else list(key))

    def ranks_of(self, group: Any) -> Ranks:
        """See :meth:`Transport.ranks_of`.

        Raises:
            MeshError: there is no group of this name, or it was destroyed.
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
