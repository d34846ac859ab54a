"""Differentiation in one spelling, and collectives whose backward follows the algebra without scale factors."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hyper_parallel.errors import CollectiveMismatchError, RendezvousError, UnsupportedOperatorError
from hyper_parallel.platform.contract import autograd_functions
from hyper_parallel.platform.contract.autograd_functions import (
    AllToAllSpec,
    AsyncWaitSpec,
    AutogradFunctions,
    ReductionSpec,
    SwapSpec,
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

    A result that every rank holds (of a gather or an all-reduce) is taken to be used by all ranks alike, so every
    rank's gradient of it is the true one and none is added up. Say ``varying=True`` where each rank goes on with it
    in its own way: then the ranks' gradients are summed. ``group`` as in the collectives.
    """

    Function: Any

    @abc.abstractmethod
    def vjp(
        self,
        fn: Callable[..., Sequence[Any]],
        inputs: Sequence[Any],
        seeds: Sequence[Any] | Callable[[Sequence[Any]], Sequence[Any]],
        wanted: Sequence[bool],
    ) -> tuple[list[Any], list[Any]]:
        """Run ``fn`` on plain tensors and pull cotangents back.

        Args:
            fn: takes the inputs, returns a sequence of plain tensors.
            inputs: plain tensors.
            seeds: cotangent per output (None where it has none), or a function that gives them once outputs exist.
            wanted: which inputs need a gradient.

        Returns:
            the outputs, and per input its gradient (zeros where it does not matter), None where it is not wanted.
        """

    def differentiable_all_gather_concat(
        self, data: Any, group: Any, concat_size: int, concat_dim: int = 0, *, varying: bool = False
    ) -> Any:
        """Every member's ``data`` (equal shapes) along ``concat_dim``; backward takes the own slice.

        Args:
            data: this rank's part.
            group: who takes part.
            concat_size: number of members.
            concat_dim: dim along which parts are put together.
            varying: ranks use the result differently; backward is a reduce-scatter.

        Raises:
            ValueError: ``concat_size`` is not the size of the group, or there is no such dim.
        """
        self._plain("differentiable_all_gather_concat", data)
        ranks = self._of_size("differentiable_all_gather_concat", group, "concat_size", concat_size)
        dim = _dim("differentiable_all_gather_concat", "concat_dim", concat_dim, data)
        self._agree("differentiable_all_gather_concat", data, ranks, concat_dim=dim)
        return self._functions.gather.apply(data, self._reduction(ranks, dim, varying=varying))

    def differentiable_all_reduce(self, data: Any, op: str = "sum", group: Any = None, *, varying: bool = False) -> Any:
        """The reduction on every member; backward is the identity (avg: divided; max, min: to those that attained it).

        Args:
            data: this rank's summand.
            op: a reduction of the algebra.
            group: who takes part.
            varying: ranks use the result differently; their gradients are summed first.

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
        """This member's slice along ``axis`` of the reduction; backward gathers (avg: divided; max, min: shared).

        Args:
            data: this rank's summand.
            dev_num: number of members.
            axis: dim that is scattered.
            op: a reduction of the algebra.
            group: who takes part.

        Raises:
            ValueError: ``dev_num`` is not the size of the group, or the dim does not divide by it.
            UnsupportedOperatorError: a gradient is needed through prod, all or any.
        """
        member = "differentiable_reduce_scatter"
        self._plain(member, data)
        ranks = self._of_size(member, group, "dev_num", dev_num)
        dim = _dim(member, "axis", axis, data)
        if data.shape[dim] % dev_num:
            msg = f"{member}: dim {dim} of size {data.shape[dim]} does not divide by {dev_num} ranks"
            raise ValueError(msg)
        self._check_gradient(member, data, op)
        self._agree(member, data, ranks, reduction=op, axis=dim)
        return self._functions.reduce_scatter.apply(data, self._reduction(ranks, dim, op))

    def differentiable_all_to_all(self, input_data: Any, output_shape: Sequence[int], group: Any = None) -> Any:
        """Equal slices along dim 0, one to each member; what arrives, in ``output_shape``. Backward is the reverse.

        Raises:
            ValueError: dim 0 does not divide by the number of members, or the sizes do not give ``output_shape``.
        """
        ranks = self.ranks_of(group)
        rows = self._rows("differentiable_all_to_all", input_data, ranks)[0].shape[0]
        shape = self._of_equal_volume("differentiable_all_to_all", input_data, output_shape)
        self._agree("differentiable_all_to_all", input_data, ranks)
        even = (rows,) * len(ranks)
        return self.reshape(
            self._functions.all_to_all.apply(input_data, AllToAllSpec(self._self(), ranks, even, even)), shape
        )

    def differentiable_all_to_all_single(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        group: Any = None,
    ) -> Any:
        """Rows of dim 0 to their ranks; backward sends their gradients back.

        Args:
            input_tensor: rows, in the order of the members that they go to.
            input_splits: how many go to each member; equal parts by default.
            output_splits: how many come from each member; equal parts by default.
            group: who takes part.

        Raises:
            ValueError: splits that are not one per member, are negative, or do not add up to the rows.
        """
        route = self._route("differentiable_all_to_all_single", input_tensor, input_splits, output_splits, group)
        apply = self._functions.all_to_all.apply
        joined = self._agree_on_rows(
            "differentiable_all_to_all_single", input_tensor, route, lambda launched: apply(input_tensor, launched)
        )
        return apply(input_tensor, route) if joined is None else joined

    def differentiable_all_to_all_single_async(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        group: Any = None,
    ) -> Any:
        """As :meth:`differentiable_all_to_all_single`, returning after launch; the result's first use waits."""
        route = self._route("differentiable_all_to_all_single_async", input_tensor, input_splits, output_splits, group)
        output, pending = self._rows_in_flight(
            "differentiable_all_to_all_single_async",
            input_tensor,
            route,
            lambda launched: self._functions.all_to_all.apply(input_tensor, launched),
        )
        return self._awaited_on_use(output, pending)

    @abc.abstractmethod
    def _awaited_on_use(self, output: Any, pending: Any) -> Any:
        """``output``, on its graph, such that ``pending`` is waited for before anything reads it."""

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
        """Wait for a pre-launched all-to-all and rebuild its result; backward launches the reverse.

        The launch sent, to each member, its part of ``x`` along ``split_dim``: ``all_to_all_single(stacked,
        stacked.shape, group, async_op=True)`` of the parts stacked along a new dim 0.

        Args:
            x: what was sent; the result's gradient goes to it.
            work: the handle of the launch, or None if it is complete.
            out_perm: the launch's output, parts stacked along dim 0.
            group: who took part.
            world_size: number of members.
            concat_dim: dim of ``x`` along which the parts are put together.
            split_dim: dim of ``x`` that was split.
            handle_box: where backward appends ``(work, buffer)``. ``work.wait()``, to be called by the backward
                pre-hook of what made ``x`` (its only consumer being this), returns the gradient of ``x``; ``buffer``
                then holds its parts. Until then the gradient is NaN. Without a box backward waits itself.

        Raises:
            ValueError: ``world_size`` is not the size of the group, or ``out_perm`` has not that many parts.
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
        rebuild = AsyncWaitSpec(self._self(), ranks, work, out_perm, concat, split, handle_box)
        return self._functions.async_wait.apply(x, rebuild)

    def differentiable_sync_hook(self, x: Any, hook_name: str, coordinator: HookCoordinator) -> Any:
        """``x``; forward and backward meet the coordinator's other thread at position ``hook_name`` (A, B, C or D)."""
        self._plain("differentiable_sync_hook", x)
        return self._functions.meet.apply(x, hook_name, coordinator)

    def p2p_exchange(self, tensor: Any, peer_rank: int, group: Any = None) -> Any:
        """The tensor of global rank ``peer_rank``, which gets this one (equal shapes); backward is the same swap.

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
        return self._functions.swap.apply(
            tensor, SwapSpec(self._self(), int(peer_rank), self._channel(group, "p2p_exchange"))
        )

    # -- inside --------------------------------------------------------------------------------------------------

    def _self(self) -> Any:
        return self

    def _reduction(self, ranks: Ranks, dim: int, op: str = "sum", *, varying: bool = False) -> ReductionSpec:
        return ReductionSpec(self._self(), ranks, dim, op, varying)

    @property
    def _functions(self) -> AutogradFunctions:
        """The autograd functions over the framework's ``Function``, built once and kept on the platform."""
        functions: AutogradFunctions | None = self.__dict__.get(_CACHE)
        if functions is None:
            with _LOCK:
                functions = self.__dict__.setdefault(_CACHE, autograd_functions.build(self.Function))
        return functions

    def _of_size(self, member: str, group: Any, name: str, count: int) -> Ranks:
        ranks = self.ranks_of(group)
        if count != len(ranks):
            msg = f"{member}: {name} is {count}, the group of ranks {list(ranks)} has {len(ranks)} members"
            raise ValueError(msg)
        return ranks

    def _route(
        self, member: str, data: Any, sent: Sequence[int] | None, received: Sequence[int] | None, group: Any
    ) -> AllToAllSpec:
        self._plain(member, data)
        ranks = self.ranks_of(group)
        if not len(data.shape):
            msg = f"{member}: the tensor has no dim of rows"
            raise ValueError(msg)
        if sent is None or received is None:
            rows = self._rows(member, data, ranks)[0].shape[0]
            sent = (rows,) * len(ranks) if sent is None else sent
            received = (rows,) * len(ranks) if received is None else received
        for name, splits in (("input_splits", sent), ("output_splits", received)):
            if len(splits) != len(ranks) or not all(is_integer(rows) and rows >= 0 for rows in splits):
                msg = f"{member}: {name} {list(splits)} must be one row count per rank of the group {list(ranks)}"
                raise ValueError(msg)
        if sum(sent) != data.shape[0]:
            msg = f"{member}: input_splits {list(sent)} add up to {sum(sent)}, the input has {data.shape[0]} rows"
            raise ValueError(msg)
        return AllToAllSpec(self._self(), ranks, tuple(map(int, sent)), tuple(map(int, received)))

    def _check_gradient(self, member: str, data: Any, op: str) -> None:
        if op not in _DIFFERENTIABLE and self.is_floating(data) and self.needs_grad(data) and self.grad_enabled():
            msg = f"{member}: no gradient passes the reduction {op!r}; detach() the tensor first"
            raise UnsupportedOperatorError(msg)

    @abc.abstractmethod
    def grad_enabled(self) -> bool:
        """True when operations are being recorded for backward."""

    @abc.abstractmethod
    def needs_grad(self, local: Any) -> bool:
        """True when ``local`` (a plain tensor) may receive a gradient."""


def _dim(member: str, name: str, dim: int, data: Any) -> int:
    count = len(data.shape)
    if not is_integer(dim) or not -count <= dim < count:
        msg = f"{member}: {name} is {dim!r}, the tensor has {count} dims"
        raise ValueError(msg)
    return dim % count


class HookCoordinator:
    """Lets two threads pass their positions in turn: each waits at a position until the other has come to one.

    One thread may be in its forward while the other is in its backward, so that one computes while the other's
    all-to-all travels. A thread that is done calls :meth:`leave` (or ends its :meth:`taking_part`); from then on the
    other passes without waiting. Who waits longer than ``timeout`` raises, and so does its partner.

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
            where the other thread is, for example ``"C (backward)"``, or None when it has left.

        Raises:
            ValueError: unknown position.
            RendezvousError: (a TimeoutError) the other thread did not come in time, or failed.
        """
        if position not in POSITIONS:
            msg = f"rendezvous: position {position!r} is none of {', '.join(POSITIONS)}"
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
            found, self._waiting, self._partner = self._waiting, None, here
            self._round += 1
            self._arrival.notify_all()
            return found

    def _wait(self, here: str, me: str) -> str | None:
        turn, self._waiting = self._round, here
        came = self._arrival.wait_for(
            lambda: self._round != turn or self._alone or self._failure is not None, self.timeout
        )
        if self._round != turn:
            return self._partner
        self._waiting = None
        if self._failure is None and not came:
            self._failure = (
                f"HookCoordinator: thread {me!r} waited {self.timeout:g} s at {here} for its partner, "
                f"{self._whereabouts(me)}; both threads must pass the same number of positions, or call leave()"
            )
            self._arrival.notify_all()
        if self._failure is not None:
            raise RendezvousError(self._failure)
        return None

    def _whereabouts(self, me: str) -> str:
        others = [f"thread {name!r}, last at {place}" for name, place in self._last.items() if name != me]
        return ", ".join(others) if others else "which never came to any position"

    def leave(self) -> None:
        """The calling thread passes no more positions: the other one goes on without it."""
        with self._arrival:
            self._alone = True
            self._arrival.notify_all()

    def abort(self, reason: str) -> None:
        """Let whoever waits, or comes later, raise with ``reason``."""
        with self._arrival:
            self._failure = self._failure or reason
            self._arrival.notify_all()

    def reset(self) -> None:
        """Be as new, for the next pair of passes."""
        with self._arrival:
            self._waiting, self._alone, self._failure = None, False, None
            self._last.clear()

    @contextmanager
    def taking_part(self) -> Iterator[HookCoordinator]:
        """The body of one of the threads: leaves at its end; an exception makes the partner raise, too."""
        try:
            yield self
        except BaseException as error:
            who = threading.current_thread().name
            self.abort(f"HookCoordinator: the partner thread {who!r} raised {type(error).__name__}: {error}")
            raise
        self.leave()
