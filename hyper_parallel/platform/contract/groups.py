"""Facet *groups*: create, look up, adopt, split and destroy groups of ranks; barriers."""

from __future__ import annotations

import abc
import atexit
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from hyper_parallel.errors import MeshError, WorldNotJoinedError
from hyper_parallel.platform.contract.agreement import AgreementFacet
from hyper_parallel.platform.contract.identity import distinct_ranks
from hyper_parallel.platform.contract.launcher_env import launched_rank
from hyper_parallel.transport.base import Ranks, Transport, active_transport
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
        """Join the world; if the rank is in one already, check that the arguments do not contradict it.

        In a simulated world the simulation stands in for every backend. A world over gloo is destroyed at the end of
        the process, if not earlier.

        Args:
            backend: ``gloo``, ``nccl`` or ``hccl``; by default the engine of this process's device.
            init_method: URL where ranks find each other; by default the environment of torchrun or msrun.
            timeout: limit for a collective.
            world_size: number of ranks; a negative number leaves it to the launcher.
            rank: this rank's number; a negative number leaves it to the launcher.
            store: key-value store of the framework, instead of ``init_method``.
            pg_options: options of the engine.
            device_id: the device that this rank uses.

        Raises:
            MeshError: (a ValueError and RuntimeError) an argument contradicts the world that exists.
            UnsupportedOnBackend: the framework has no such engine.
        """
        arguments = {
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
            _check_consistent(arguments, self._known())
            return
        engine = backend or BACKENDS[self.device_type()][0]
        self._join({**arguments, **self._launched(engine, arguments), "backend": engine})
        self._joined_as = arguments
        if engine == "gloo":
            # Threads of gloo that still run at the end of a process can abort it.
            atexit.unregister(self._leave_joined)
            atexit.register(self._leave_joined)

    def join_launched_world(self, device_type: str) -> None:
        """Join the world that torchrun or msrun describes in the environment, unless this rank is in one.

        Without the variables of a launcher, or in a world of one, nothing happens. On CPU, msrun's scheduler, which is
        not a rank, exits here with status 0, as it does on devices.

        Args:
            device_type: chooses the engine: ``cpu``, ``cuda`` or ``npu``. A process that uses no device yet takes the
                one that ``LOCAL_RANK`` numbers.

        Raises:
            RendezvousError: the ranks did not meet.
        """
        if self.has_world() or launched_rank() is None:
            return
        if device_type != "cpu":
            self._choose_device(device_type)
        self.init_process_group(BACKENDS[device_type][0])

    def _launched(self, engine: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that msrun sets and the program does not pass; engines read other launchers' variables.

        Raises:
            SystemExit: (status 0) this process is msrun's scheduler.
            MeshError: msrun did not number this rank.
        """
        launched = launched_rank()
        if engine != "gloo" or launched is None or launched.init_method is None:
            return {}
        if any(asked[name] is not None for name in ("init_method", "store")):
            return {}
        if launched.scheduler:
            sys.exit(0)
        if launched.rank is None:
            msg = "init_process_group: msrun set no RANK_ID; start it with --node_rank on each machine"
            raise MeshError(msg)
        given = {"rank": launched.rank, "world_size": launched.world_size, "init_method": launched.init_method}
        return {name: value for name, value in given.items() if asked[name] is None}

    def _leave_joined(self) -> None:
        """Leave the world at the end of the process, unless the program has left it already."""
        if self.has_world():
            self.destroy_process_group()

    def _choose_device(self, device_type: str) -> None:
        """Use the device that the launcher gave this rank; does nothing where the framework does this itself."""

    def has_world(self) -> bool:
        """Return True if this rank is in a world of more than itself, simulated or real."""
        try:
            return active_transport() is not None or self.transport().backend != "single"
        except WorldNotJoinedError:
            return False

    @abc.abstractmethod
    def device_type(self) -> str:
        """Return the device type; see :class:`.LedgerFacet`."""

    @abc.abstractmethod
    def _join(self, arguments: dict[str, Any]) -> None:
        """Join a real world; arguments that were not given are None."""

    _joined_as: dict[str, Any] | None = None

    def _known(self) -> dict[str, Any]:
        """Return the facts about the world, and how it was joined, that arguments must not contradict."""
        transport = self.transport()
        known = {} if active_transport() is not None else dict(self._joined_as or {})
        known.update(world_size=transport.world_size, rank=transport.rank)
        known["backend"] = None if transport.backend == "simulated" else transport.backend
        return known

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy ``group`` and what is cached for it; with None, leave the world (a simulated world drops its groups).

        Raises:
            MeshError: ``group`` is not a group, or a receive of this rank in it was not waited for.
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
        """Raise if a group to destroy has receives that were not waited for."""
        channel = self._channel(group)
        handles = self.transport().receiving.get(channel)
        waiting = [message for handle, message in handles.items() if not handle.waited] if handles else []
        if waiting and channel.ranks:
            msg = (
                f"destroy_process_group: rank {self.get_rank()} has pending receives {', '.join(waiting)} in the "
                f"group {list(channel.ranks)}; first call wait() on the handles that irecv returned"
            )
            raise MeshError(msg)

    def create_group(self, rank_list: Sequence[int]) -> Any:
        """Return the group of these ranks, in any order; it is built on first use.

        Raises:
            MeshError: (a ValueError) ranks repeat or lie outside the world.
        """
        ranks = self._distinct("create_group", rank_list)
        group = self.transport().known_group(ranks)
        return self._create_group(ranks) if group is None else group

    def _create_group(self, rank_list: Sequence[int]) -> Any:
        """Build the group of these ranks, which the transport keeps."""
        return self.transport().group(self._distinct("_create_group", rank_list))

    def mesh_group(self, ranks: Ranks) -> Any:
        """Return the group of ``ranks``, this one included, for the framework's own functions."""
        return self.transport().group(ranks)

    def get_created_group(self, rank_list: Sequence[int]) -> Any:
        """Return the group of these ranks if it was created or adopted and not destroyed, else None."""
        return self.transport().known_group(self._distinct("get_created_group", rank_list))

    def mark_created_groups(self, process_group: Any) -> None:
        """Adopt groups that the framework's own functions built, so that they are found from now on.

        Args:
            process_group: a group, or several.

        Raises:
            MeshError: (a ValueError) not a group of this world.
        """
        several = isinstance(process_group, Iterable) and not isinstance(process_group, str)
        for group in process_group if several else (process_group,):
            if group is None:
                msg = "mark_created_groups: None stands for the world; pass the group itself"
                raise MeshError(msg)
            self.transport().adopt(group)

    def split_group(
        self,
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> Any:
        """Split a group into disjoint groups; return the caller's, or None if no list names the caller.

        Args:
            parent_pg: the group to split; None is the world.
            split_ranks: disjoint lists of global ranks.
            timeout: timeout of the new group, if its engine supports one.
            pg_options: options of the new group, if its engine supports any.
            group_desc: name of the group in the engine's logs.

        Raises:
            MeshError: (a ValueError) no list, an empty or overlapping one, or a rank outside ``parent_pg``.
        """
        parent = self.ranks_of(parent_pg)
        untyped: list[Any] = list(split_ranks or ())
        listed = [list(ranks) if isinstance(ranks, Iterable) else ranks for ranks in untyped]
        parts = [distinct_ranks(ranks, self.get_world_size()) or () for ranks in listed]
        named = [rank for ranks in parts for rank in ranks]
        if not parts or () in parts or len(set(named)) != len(named) or set(named) - set(parent):
            msg = f"split_group: split_ranks {listed} must be disjoint lists of ranks of the group {list(parent)}"
            raise MeshError(msg)
        parts = [tuple(sorted(ranks)) for ranks in parts]
        options = {"timeout": timeout, "pg_options": pg_options, "group_desc": group_desc}
        given_options = {name: value for name, value in options.items() if value is not None}
        for ranks in parts:
            if self.get_rank() in ranks:
                transport = self.transport()
                group = transport.known_group(ranks)
                return transport.build_group(ranks, **given_options) if group is None else group
        return None

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Sequence[int] | None = None) -> Any:
        """Wait until every member of ``group`` has called this.

        Args:
            group: the members.
            async_op: return at once, with a handle whose ``wait()`` is the barrier.
            device_ids: ignored; the device of a rank is known.
        """
        del device_ids
        ranks = self.ranks_of(group)
        if must_agree(self.transport(), ranks):
            return self._started("barrier", BARRIER, None, ranks) if async_op else self._agree("barrier", None, ranks)
        if not async_op:
            return self.transport().barrier(ranks)
        work = self.transport().start("all_reduce", self._barrier_tensor(), "sum", ranks)
        return Work("barrier", lambda: (work.wait(), None)[1])

    @abc.abstractmethod
    def _barrier_tensor(self) -> Any:
        """Return a small tensor on a device whose tensors this rank's engine communicates."""

    def _distinct(self, member: str, rank_list: Any) -> tuple[int, ...]:
        ranks, world = distinct_ranks(rank_list, self.get_world_size()), self.get_world_size()
        if ranks is None:
            listed = rank_list
            if isinstance(rank_list, Iterable) and not isinstance(rank_list, str):
                listed = list(rank_list)
            msg = f"{member}: rank_list {listed!r} must name distinct ranks of the world of {world}"
            raise MeshError(msg)
        return tuple(sorted(ranks))


def _check_consistent(arguments: dict[str, Any], known: dict[str, Any]) -> None:
    for name, value in arguments.items():
        fact = known.get(name)
        if value is not None and fact is not None and value != fact:
            msg = (
                f"init_process_group: the world already exists with {name}={fact!r}, which {name}={value!r} "
                f"contradicts; leave the argument out, or call destroy_process_group() first"
            )
            raise MeshError(msg)
