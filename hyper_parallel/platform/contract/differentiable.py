"""Differentiable collectives, and ``HookCoordinator`` for two overlapping threads.

The gradients follow the rules of core/dtensor's README; none of them is scaled.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hyper_parallel.errors import CollectiveMismatchError, RendezvousError, UnsupportedOperatorError
from hyper_parallel.platform.contract import autograd_functions
from hyper_parallel.platform.contract.autograd_functions import (
    AllToAllSpec,
    AsyncWaitSpec,
    AutogradFunctions,
    PeerExchangeSpec,
    ReductionSpec,
)
from hyper_parallel.platform.contract.collectives import CollectivesFacet
from hyper_parallel.platform.contract.identity import is_integer
from hyper_parallel.transport.base import Ranks

__all__ = ["POSITIONS", "DifferentiableFacet", "HookCoordinator"]

# Around MoE: before dispatch, after dispatch, before combine, after combine.
POSITIONS = ("A", "B", "C", "D")

_LOCK = threading.Lock()
_CACHE = "_hyper_parallel_functions"
_DIFFERENTIABLE = ("sum", "avg", "max", "min")


class DifferentiableFacet(CollectivesFacet):
    """Facet *differentiable*, on plain tensors.

    A result that every rank holds (of a gather or an all-reduce) is assumed to be used by all ranks in the same way:
    every rank's gradient of it is complete, and gradients are not summed. Pass ``varying=True`` if ranks use the result
    in different ways: then their gradients are summed. ``group`` is given as for facet *collectives*.
    """

    Function: Any

    def differentiable_all_gather_concat(
        self, data: Any, group: Any, concat_size: int, concat_dim: int = 0, *, varying: bool = False
    ) -> Any:
        """Concatenate the members' ``data``, of equal shapes, along ``concat_dim``; backward returns this rank's slice.

        Args:
            data: this rank's tensor.
            group: the members.
            concat_size: number of members.
            concat_dim: dim along which the tensors are concatenated.
            varying: True if ranks use the result in different ways; backward is then a reduce-scatter.

        Raises:
            ValueError: ``concat_size`` is not the size of the group, or there is no such dim.
        """
        self._plain("differentiable_all_gather_concat", data)
        ranks = self._of_size("differentiable_all_gather_concat", group, "concat_size", concat_size)
        dim = _dim("differentiable_all_gather_concat", "concat_dim", concat_dim, data)
        self._agree("differentiable_all_gather_concat", data, ranks, concat_dim=dim)
        return self._functions.gather.apply(data, self._reduction(ranks, dim, varying=varying))

    def differentiable_all_reduce(self, data: Any, op: str = "sum", group: Any = None, *, varying: bool = False) -> Any:
        """Reduce the members' ``data`` on every member; backward is the identity.

        The gradient of avg is divided by the number of members; that of max and min goes to the ranks that attained it.

        Args:
            data: this rank's partial value.
            op: sum, avg, max, min, prod, all or any.
            group: the members.
            varying: True if ranks use the result in different ways; their gradients are then summed.

        Raises:
            UnsupportedOperatorError: a gradient is needed through prod, all or any.
        """
        self._plain("differentiable_all_reduce", data)
        self._check_gradient("differentiable_all_reduce", data, op)
        ranks = self.ranks_of(group)
        self._agree("differentiable_all_reduce", data, ranks, reduction=op)
        return self._functions.reduce.apply(data, self._reduction(ranks, 0, op, varying=varying))

    def differentiable_reduce_scatter(
        self, data: Any, dev_num: int, axis: int, op: str = "sum", group: Any = None
    ) -> Any:
        """Reduce the members' ``data`` and return this member's slice along ``axis``; backward gathers.

        The gradient of avg is divided by the number of members; that of max and min goes to the ranks that attained it.

        Args:
            data: this rank's partial value.
            dev_num: number of members.
            axis: dim that is scattered.
            op: sum, avg, max, min, prod, all or any.
            group: the members.

        Raises:
            ValueError: ``dev_num`` is not the size of the group, or the dim is not divisible by it.
            UnsupportedOperatorError: a gradient is needed through prod, all or any.
        """
        member = "differentiable_reduce_scatter"
        self._plain(member, data)
        ranks = self._of_size(member, group, "dev_num", dev_num)
        dim = _dim(member, "axis", axis, data)
        if data.shape[dim] % dev_num:
            msg = f"{member}: dim {dim} of size {data.shape[dim]} is not divisible by {dev_num} ranks"
            raise ValueError(msg)
        self._check_gradient(member, data, op)
        self._agree(member, data, ranks, reduction=op, axis=dim)
        return self._functions.reduce_scatter.apply(data, self._reduction(ranks, dim, op))

    def differentiable_all_to_all(self, input_data: Any, output_shape: Sequence[int], group: Any = None) -> Any:
        """Send an equal slice along dim 0 to each member; return the received slices in ``output_shape``.

        Backward is the reverse all-to-all.

        Raises:
            ValueError: dim 0 is not divisible by the number of members, or the input cannot have ``output_shape``.
        """
        ranks = self.ranks_of(group)
        rows = self._rows("differentiable_all_to_all", input_data, ranks)
        shape = self._of_equal_volume("differentiable_all_to_all", input_data, output_shape)
        self._agree("differentiable_all_to_all", input_data, ranks)
        even = (rows,) * len(ranks)
        return self.reshape(
            self._functions.all_to_all.apply(input_data, AllToAllSpec(self._as_platform(), ranks, even, even)), shape
        )

    def differentiable_all_to_all_single(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        group: Any = None,
    ) -> Any:
        """Send rows of dim 0 to their ranks; backward sends their gradients back.

        Args:
            input_tensor: rows, in the order of the members that they are sent to.
            input_splits: rows sent to each member; equal parts by default.
            output_splits: rows received from each member; equal parts by default.
            group: the members.

        Raises:
            ValueError: splits that are not one per member, are negative, or do not add up to the rows.
        """
        spec = self._all_to_all_spec(
            "differentiable_all_to_all_single", input_tensor, input_splits, output_splits, group
        )
        apply = self._functions.all_to_all.apply
        joined = self._agree_on_rows(
            "differentiable_all_to_all_single", input_tensor, spec, lambda launched: apply(input_tensor, launched)
        )
        return apply(input_tensor, spec) if joined is None else joined

    def differentiable_all_to_all_single_async(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        group: Any = None,
    ) -> Any:
        """Launch :meth:`differentiable_all_to_all_single` and return; the first use of the result waits for it."""
        spec = self._all_to_all_spec(
            "differentiable_all_to_all_single_async", input_tensor, input_splits, output_splits, group
        )
        output, work = self._rows_in_flight(
            "differentiable_all_to_all_single_async",
            input_tensor,
            spec,
            lambda launched: self._functions.all_to_all.apply(input_tensor, launched),
        )
        return self._awaited_on_use(output, work)

    @abc.abstractmethod
    def _awaited_on_use(self, output: Any, work: Any) -> Any:
        """Return ``output``, on its graph, such that ``work`` is waited for before anything reads it."""

    def differentiable_async_a2a_wait(
        self,
        x: Any,
        work: Any,
        out_perm: Any,
        group: Any,
        world_size: int,
        concat_dim: int,
        split_dim: int,
        handle_box: list[Any] | None = None,
    ) -> Any:
        """Wait for a pre-launched all-to-all and join its result; backward launches the reverse one.

        The launch sent to each member its part of ``x`` along ``split_dim``: ``all_to_all_single(stacked,
        stacked.shape, group, async_op=True)``, with the parts stacked along a new dim 0.

        Args:
            x: the tensor that was sent, which receives the gradient.
            work: the handle of the launch, or None if it is complete.
            out_perm: the output of the launch, with parts stacked along dim 0.
            group: the members.
            world_size: number of members.
            concat_dim: dim of ``x`` along which the parts are concatenated.
            split_dim: dim of ``x`` that was split.
            handle_box: list to which backward appends ``(work, buffer)``. The backward pre-hook of the module that
                computed ``x`` (which has no other consumer) must call ``work.wait()``, which returns the gradient of
                ``x``; ``buffer`` then holds its parts. Until then the gradient is NaN.
                Without a list, backward itself waits.

        Raises:
            ValueError: ``world_size`` is not the size of the group, or ``out_perm`` does not have that many parts.
        """
        member = "differentiable_async_a2a_wait"
        ranks = self._of_size(member, group, "world_size", world_size)
        self._plain(member, x)
        self._plain(member, out_perm)
        concat, split = _dim(member, "concat_dim", concat_dim, x), _dim(member, "split_dim", split_dim, x)
        part = [size // (world_size if dim == split else 1) for dim, size in enumerate(x.shape)]
        if list(out_perm.shape) != [world_size, *part] or x.shape[split] % world_size:
            msg = (
                f"{member}: x of {list(x.shape)} split along dim {split} over {world_size} ranks arrives as "
                f"{[world_size, *part]}, out_perm is {list(out_perm.shape)}"
            )
            raise ValueError(msg)
        spec = AsyncWaitSpec(self._as_platform(), ranks, work, out_perm, concat, split, handle_box)
        return self._functions.async_wait.apply(x, spec)

    def differentiable_sync_hook(self, x: Any, hook_name: str, coordinator: HookCoordinator) -> Any:
        """Return ``x``; forward and backward wait for the coordinator's other thread at position ``hook_name``.

        Args:
            x: a plain tensor.
            hook_name: ``A``, ``B``, ``C`` or ``D``.
            coordinator: shared by the two threads.
        """
        self._plain("differentiable_sync_hook", x)
        return self._functions.rendezvous.apply(x, hook_name, coordinator)

    def p2p_exchange(self, tensor: Any, peer_rank: int, group: Any = None) -> Any:
        """Exchange tensors of equal shapes with global rank ``peer_rank``; backward is the same exchange.

        Raises:
            CollectiveMismatchError: ``peer_rank`` is not in ``group``.
        """
        ranks = self.ranks_of(group)
        if not is_integer(peer_rank) or peer_rank not in ranks:
            msg = f"p2p_exchange: rank {peer_rank!r} is not in the group of ranks {list(ranks)}"
            raise CollectiveMismatchError(msg)
        self._plain("p2p_exchange", tensor)
        if peer_rank == self.get_rank():
            return tensor
        return self._functions.exchange.apply(
            tensor, PeerExchangeSpec(self._as_platform(), int(peer_rank), self._channel(group, "p2p_exchange"))
        )

    # -- helpers -------------------------------------------------------------------------------------------------

    def _as_platform(self) -> Any:
        return self

    def _reduction(self, ranks: Ranks, dim: int, op: str = "sum", *, varying: bool = False) -> ReductionSpec:
        return ReductionSpec(self._as_platform(), ranks, dim, op, varying)

    @property
    def _functions(self) -> AutogradFunctions:
        """The autograd functions over the framework's ``Function``, built once and kept on the platform."""
        functions: AutogradFunctions | None = self.__dict__.get(_CACHE)
        if functions is None:
            with _LOCK:
                functions = self.__dict__.setdefault(_CACHE, autograd_functions.make_autograd_functions(self.Function))
        return functions

    def _of_size(self, member: str, group: Any, name: str, count: int) -> Ranks:
        ranks = self.ranks_of(group)
        if count != len(ranks):
            msg = f"{member}: {name} is {count}, the group of ranks {list(ranks)} has {len(ranks)} members"
            raise ValueError(msg)
        return ranks

    def _all_to_all_spec(
        self, member: str, data: Any, sent: Sequence[int] | None, received: Sequence[int] | None, group: Any
    ) -> AllToAllSpec:
        self._plain(member, data)
        ranks = self.ranks_of(group)
        if not len(data.shape):
            msg = f"{member}: the tensor has no dim of rows"
            raise ValueError(msg)
        if sent is None or received is None:
            rows = self._rows(member, data, ranks)
            sent = (rows,) * len(ranks) if sent is None else sent
            received = (rows,) * len(ranks) if received is None else received
        for name, splits in (("input_splits", sent), ("output_splits", received)):
            if len(splits) != len(ranks) or not all(is_integer(rows) and rows >= 0 for rows in splits):
                msg = f"{member}: {name} {list(splits)} must be one row count per rank of the group {list(ranks)}"
                raise ValueError(msg)
        if sum(sent) != data.shape[0]:
            msg = f"{member}: input_splits {list(sent)} add up to {sum(sent)}, the input has {data.shape[0]} rows"
            raise ValueError(msg)
        return AllToAllSpec(self._as_platform(), ranks, tuple(map(int, sent)), tuple(map(int, received)))

    def _check_gradient(self, member: str, data: Any, op: str) -> None:
        if op not in _DIFFERENTIABLE and self.is_floating(data) and self.needs_grad(data) and self.grad_enabled():
            msg = f"{member}: the reduction {op!r} has no gradient; detach() the tensor first"
            raise UnsupportedOperatorError(msg)

    def has_tangent(self, local: Any) -> bool:
        """Return True if ``local`` has a forward-mode tangent, which no collective passes on."""
        del local
        return False

    @abc.abstractmethod
    def grad_enabled(self) -> bool:
        """Return True if operations are recorded for backward."""

    @abc.abstractmethod
    def needs_grad(self, local: Any) -> bool:
        """Return True if ``local``, a plain tensor, may receive a gradient."""


def _dim(member: str, name: str, dim: int, data: Any) -> int:
    count = len(data.shape)
    if not is_integer(dim) or not -count <= dim < count:
        msg = f"{member}: {name} is {dim!r}, the tensor has {count} dims"
        raise ValueError(msg)
    return dim % count


class HookCoordinator:
    """A rendezvous for two threads: at each position a thread waits until the other has reached a position too.

    One thread may be in forward while the other is in backward, so that one computes while the other's all-to-all is in
    flight. A thread that is done calls :meth:`leave` (or ends its :meth:`taking_part`); from then on the other passes
    without waiting. A thread that waits longer than ``timeout`` raises, and so does its partner.

    Args:
        timeout: seconds.
    """

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self._arrival = threading.Condition()
        self._waiting: str | None = None
        self._round = 0
        self._partner = ""
        self._alone = False
        self._failure: str | None = None
        self._last: dict[str, str] = {}

    def rendezvous(self, position: str, phase: str = "forward") -> str | None:
        """Wait at ``position`` for the other thread.

        Args:
            position: ``A``, ``B``, ``C`` or ``D``.
            phase: ``forward`` or ``backward``.

        Returns:
            the position of the other thread, for example ``"C (backward)"``, or None if it has left.

        Raises:
            ValueError: unknown position.
            RendezvousError: (a TimeoutError) the other thread did not come in time, or failed.
        """
        if position not in POSITIONS:
            msg = f"rendezvous: position must be one of {', '.join(POSITIONS)}, got {position!r}"
            raise ValueError(msg)
        here, me = f"{position} ({phase})", threading.current_thread().name
        with self._arrival:
            self._last[me] = here
            if self._failure is not None:
                raise RendezvousError(self._failure)
            if self._alone:
                return None
            if self._waiting is None:
                return self._wait(here, me)
            partner, self._waiting, self._partner = self._waiting, None, here
            self._round += 1
            self._arrival.notify_all()
            return partner

    def _wait(self, here: str, me: str) -> str | None:
        own_round, self._waiting = self._round, here
        in_time = self._arrival.wait_for(
            lambda: self._round != own_round or self._alone or self._failure is not None, self.timeout
        )
        if self._round != own_round:
            return self._partner
        self._waiting = None
        if self._failure is None and not in_time:
            self._failure = (
                f"HookCoordinator: thread {me!r} waited {self.timeout:g} s at {here} for its partner, "
                f"{self._partner_status(me)}; both threads must pass the same number of positions, or call leave()"
            )
            self._arrival.notify_all()
        if self._failure is not None:
            raise RendezvousError(self._failure)
        return None

    def _partner_status(self, me: str) -> str:
        others = [f"thread {name!r}, last at {position}" for name, position in self._last.items() if name != me]
        return ", ".join(others) if others else "which never reached any position"

    def leave(self) -> None:
        """Leave: the other thread passes positions without waiting from now on."""
        with self._arrival:
            self._alone = True
            self._arrival.notify_all()

    def abort(self, reason: str) -> None:
        """Make every thread that waits, or arrives later, raise RendezvousError with ``reason``."""
        with self._arrival:
            self._failure = self._failure or reason
            self._arrival.notify_all()

    def reset(self) -> None:
        """Return to the initial state, for the next pair of passes."""
        with self._arrival:
            self._waiting, self._alone, self._failure = None, False, None
            self._last.clear()

    @contextmanager
    def taking_part(self) -> Iterator[HookCoordinator]:
        """Leave at the end of the block; an exception inside makes the partner raise too."""
        try:
            yield self
        except BaseException as error:
            who = threading.current_thread().name
            self.abort(f"HookCoordinator: the partner thread {who!r} raised {type(error).__name__}: {error}")
            raise
        self.leave()
