"""Groups of ranks: created once per set of ranks, looked up, adopted, split, destroyed, waited on."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any

from hyper_parallel.errors import MeshError
from hyper_parallel.platform.contract.agreement import AgreementFacet
from hyper_parallel.platform.contract.identity import distinct_ranks
from hyper_parallel.transport.base import Transport, active_transport
from hyper_parallel.transport.checks.agreement import BARRIER, must_agree
from hyper_parallel.transport.work import Work

__all__ = ["BACKENDS", "GroupsFacet"]

# The engines of each device; the first is the default.
BACKENDS = {"cpu": ("gloo", "mccl"), "cuda": ("nccl",), "npu": ("hccl",)}


class GroupsFacet(AgreementFacet):
    """Facet *groups*, over the transport."""

    def init_process_group(
        self,
        backend: str | None = None,
        *,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        pg_options: Any = None,
        device_id: Any = None,
    ) -> None:
        """Join the world; where it exists already, check that nothing said here contradicts it.

        In a simulated world every backend is taken to be played by the simulation.

        Args:
            backend: ``gloo``, ``nccl`` or ``hccl``; by default the engine of this process's device.
            init_method: where ranks find each other; the launcher's environment by default.
            timeout: how long a collective may take.
            world_size: number of ranks; negative leaves it to the launcher.
            rank: this rank's number; negative leaves it to the launcher.
            store: key-value store of the framework, instead of ``init_method``.
            pg_options: options of the engine.
            device_id: the device that this rank uses.

        Raises:
            MeshError: (a ValueError and RuntimeError) the world exists, and an argument contradicts it.
            UnsupportedOnBackend: the framework has no such engine.
        """
        asked = {
            "backend": backend,
            "init_method": init_method,
            "timeout": timeout,
            "world_size": None if world_size < 0 else world_size,
            "rank": None if rank < 0 else rank,
            "store": store,
            "pg_options": pg_options,
            "device_id": device_id,
        }
        if self.has_world():
            _check_agreement(asked, self._known())
            return
        self._join({**asked, "backend": backend or BACKENDS[self.device_type()][0]})
        self._joined_as = asked

    def has_world(self) -> bool:
        """Whether this rank is in a world, alone ones not counted."""
        return active_transport() is not None or self.transport().backend != "single"

    @abc.abstractmethod
    def device_type(self) -> str:
        """As the ledger says."""

    @abc.abstractmethod
    def _join(self, asked: dict[str, Any]) -> None:
        """Join a real world; arguments that were left out are None."""

    _joined_as: dict[str, Any] | None = None

    def _known(self) -> dict[str, Any]:
        """What an argument may contradict: what the world is, and what it was joined with."""
        transport = self.transport()
        known = {} if active_transport() is not None else dict(self._joined_as or {})
        known.update(world_size=transport.world_size, rank=transport.rank)
        known["backend"] = None if transport.backend == "simulated" else transport.backend
        return known

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy ``group`` and what was cached for it; None leaves the world (a simulated one drops its groups).

        Raises:
            MeshError: ``group`` is no group, or this rank has not waited for a message that it receives in it.
        """
        if group is not None:
            self._check_received(group)
            self.transport().drop(group)
            return
        self._leave(self.transport())
        self._joined_as = None

    def _leave(self, transport: Transport) -> None:
        transport.close()

    def _check_received(self, group: Any) -> None:
        """Whoever comes to wait later would wait for what is sent in a group that is no more."""
        channel = self._channel(group)
        handles = self.transport().receiving.get(channel)
        waiting = [what for handle, what in handles.items() if not handle.waited] if handles else []
        if waiting and channel.ranks:
            msg = (
                f"destroy_process_group: rank {self.get_rank()} still receives {', '.join(waiting)} in the group "
                f"{list(channel.ranks)}; wait for what irecv returned first"
            )
            raise MeshError(msg)

    def create_group(self, rank_list: Sequence[int]) -> Any:
        """The group of these ranks, whatever their order in the list; built on first use.

        Raises:
            MeshError: (a ValueError) ranks repeat or lie outside the world.
        """
        ranks = self._distinct("create_group", rank_list)
        found = self.transport().known_group(ranks)
        return self._create_group(ranks) if found is None else found

    def _create_group(self, rank_list: Sequence[int]) -> Any:
        """Build the group of these ranks; the transport keeps it."""
        return self.transport().group(self._distinct("_create_group", rank_list))

    def get_created_group(self, rank_list: Sequence[int]) -> Any:
        """The group of these ranks if it was created or adopted and not destroyed since, else None."""
        return self.transport().known_group(self._distinct("get_created_group", rank_list))

    def mark_created_groups(self, process_group: Any) -> None:
        """Adopt one group, or several, that the framework's own functions built: they are found from now on.

        Raises:
            MeshError: (a ValueError) it is no group of this world.
        """
        several = isinstance(process_group, Iterable) and not isinstance(process_group, str)
        for one in process_group if several else (process_group,):
            if one is None:
                msg = "mark_created_groups: None is the world, not a group of it; give what built the group returned"
                raise MeshError(msg)
            self.transport().adopt(one)

    def split_group(
        self,
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> Any:
        """The caller's part of ``parent_pg``, or None where no list names the caller.

        Args:
            parent_pg: the group to split; None is the world.
            split_ranks: disjoint lists of global ranks.
            timeout: of the new group, where its engine has one of its own.
            pg_options: of the new group, where its engine takes any.
            group_desc: its name in the engine's logs.

        Raises:
            MeshError: (a ValueError) no list, an empty or overlapping one, or a rank outside ``parent_pg``.
        """
        parent = self.ranks_of(parent_pg)
        listed: list[Any] = list(split_ranks or ())
        given = [list(one) if isinstance(one, Iterable) else one for one in listed]
        parts = [distinct_ranks(one, self.get_world_size()) or () for one in given]
        named = [rank for ranks in parts for rank in ranks]
        if not parts or () in parts or len(set(named)) != len(named) or set(named) - set(parent):
            msg = f"split_group: split_ranks {given} must be disjoint lists of ranks of the group {list(parent)}"
            raise MeshError(msg)
        parts = [tuple(sorted(ranks)) for ranks in parts]
        options = {"timeout": timeout, "pg_options": pg_options, "group_desc": group_desc}
        given_options = {name: value for name, value in options.items() if value is not None}
        for ranks in parts:
            if self.get_rank() in ranks:
                transport = self.transport()
                found = transport.known_group(ranks)
                return transport.build_group(ranks, **given_options) if found is None else found
        return None

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Sequence[int] | None = None) -> Any:
        """Return once every member of ``group`` has called it; with ``async_op`` at once, with a handle.

        Args:
            group: the members.
            async_op: give back a handle whose ``wait()`` is the barrier.
            device_ids: accepted; the device of a rank is known.
        """
        del device_ids
        ranks = self.ranks_of(group)
        if must_agree(self.transport(), ranks):
            return self._started("barrier", BARRIER, None, ranks) if async_op else self._agree("barrier", None, ranks)
        if not async_op:
            return self.transport().barrier(ranks)
        pending = self.transport().start("all_reduce", self._token(), "sum", ranks)
        return Work("barrier", lambda: (pending.wait(), None)[1])

    @abc.abstractmethod
    def _token(self) -> Any:
        """A small tensor where this rank's engine carries tensors."""

    def _distinct(self, member: str, rank_list: Any) -> tuple[int, ...]:
        ranks, world = distinct_ranks(rank_list, self.get_world_size()), self.get_world_size()
        if ranks is None:
            given = list(rank_list) if isinstance(rank_list, Iterable) and not isinstance(rank_list, str) else rank_list
            msg = f"{member}: rank_list {given!r} must name different ranks of the world of {world}"
            raise MeshError(msg)
        return tuple(sorted(ranks))


def _check_agreement(asked: dict[str, Any], known: dict[str, Any]) -> None:
    for name, value in asked.items():
        held = known.get(name)
        if value is not None and held is not None and value != held:
            msg = (
                f"init_process_group: the world exists already with {name}={held!r}, which {name}={value!r} "
                f"contradicts; leave the argument out, or call destroy_process_group() first"
            )
            raise MeshError(msg)
