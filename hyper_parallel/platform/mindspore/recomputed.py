"""Recomputation (``Cell.recompute``, ``ms.recompute``): random numbers and fully sharded parameters of the second run.

The second run samples the same random numbers. It begins inside of the cell's hooks, which gathered the parameters for
the first run and are not called again, so the parameters are gathered again here. A custom backward that runs the
forward again (``_RecomputeCell.bprop``) gets the shards as additional inputs, so that it returns their gradients with
those of the other inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import MethodType
from typing import Any

from mindspore import Tensor, nn, ops

from hyper_parallel.core.dtensor import random
from hyper_parallel.platform.contract.memory import replayable_constructor
from hyper_parallel.platform.mindspore.fully_sharded import FullyShardedGroup, groups_within
from hyper_parallel.platform.mindspore.gradients import local_gradients

__all__ = ["remembering", "replaying", "replaying_later", "with_shards"]

_STATES = "_hyper_parallel_states"
_RUNS = "_hyper_parallel_runs"


class _Run:
    """A first run: the groups of fully sharded parameters that it uses, and their shards, which are its last inputs.

    Attributes:
        groups: groups with parameters of the recomputed cell.
        gathered: groups that had gathered their parameters when the run began.
        count: number of shards.
    """

    def __init__(self, groups: Sequence[FullyShardedGroup]) -> None:
        self.groups = groups
        self.gathered = [group for group in groups if group.is_gathered]
        self.count = sum(len(group.trained) for group in groups)
        self.shards: tuple[Tensor, ...] = ()

    def own(self) -> list[Tensor]:
        """Return this rank's current shards."""
        return [member.local for group in self.groups for member in group.trained]

    @contextmanager
    def gather_again(self, shards: Sequence[Tensor]) -> Iterator[None]:
        """Let the cells compute with the parameters whose shards are ``shards``."""
        rest = iter(shards)
        with ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.replacing_shards([next(rest) for _ in group.trained]))
            for group in self.gathered:
                stack.enter_context(group.gathering(saves=True))
            yield


def _recomputed_cell(self: Any) -> nn.Cell | None:
    """The cell that a :class:`_RecomputeCell` runs."""
    block = self.wrap_cell.function if self.net is self.wrap_cell else self.net
    owner = block.__self__ if isinstance(block, MethodType) else block
    return owner if isinstance(owner, nn.Cell) else None


def with_shards(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call of a recomputing cell to pass it the shards of fully sharded parameters, too."""

    @wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        cell = _recomputed_cell(self)
        run = _Run(groups_within(cell) if cell is not None else [])
        self.__dict__.setdefault(_RUNS, []).append(run)
        if run.groups and cell is not None:
            sharded = {id(member.sharded) for group in run.groups for member in group.members}
            self.internal_params = [param for param in cell.trainable_params() if id(param) not in sharded]
        return plain(self, *args, *run.own(), **kwargs)

    return call


def remembering(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward to keep the random state, and the shards among its inputs."""

    @wraps(plain)
    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.setdefault(_STATES, []).append(random.get_rng_state())
        run = self.__dict__[_RUNS][-1]
        if run.count:
            args, run.shards = args[: -run.count], args[-run.count :]
        return plain(self, *args, **kwargs)

    return construct


def replaying(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backward, which runs the forward again on the arguments that it takes from the stack."""

    @wraps(plain)
    def bprop(self: Any, *args: Any) -> Any:
        run = self.__dict__[_RUNS].pop()
        with random.replay(self.__dict__[_STATES].pop()), local_gradients():
            if not run.count:
                return plain(self, *args)
            inputs, differentiate = len(self.args[-1]), self.grad
            by_shards: list[Any] = []
            self.grad = _differentiating_by_shards(differentiate, run, by_shards)
            try:
                gradients, weights = plain(self, *args)
            finally:
                self.grad = differentiate
            return (*gradients[:inputs], *by_shards, *gradients[inputs:]), weights

    return bprop


def _differentiating_by_shards(differentiate: Any, run: _Run, by_shards: list[Any]) -> Callable[..., Any]:
    """Return ``differentiate`` with the shards as additional inputs; their gradients are appended to ``by_shards``."""

    def operator(function: Callable[..., Any], weights: Any) -> Callable[..., Any]:
        def forward(*inputs: Any, **kwargs: Any) -> Any:
            with run.gather_again(inputs[-run.count :]):
                return function(*inputs[: -run.count], **kwargs)

        def gradient(*inputs: Any, **kwargs: Any) -> Any:
            shards = [ops.stop_gradient(shard) for shard in run.shards]
            found, of_weights = differentiate(forward, weights)(*inputs, *shards, **kwargs)
            by_shards.extend(found[-run.count :])
            return found[: -run.count], of_weights

        return gradient

    return operator


def replaying_later(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of objects, made before the first run, that recompute when a saved tensor is read."""

    @wraps(init)
    def construct(self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        gathered = [group for group in groups_within(None) if group.is_gathered]

        def again(*inputs: Any, **options: Any) -> Any:
            with ExitStack() as stack:
                for group in gathered:
                    stack.enter_context(group.gathering(saves=False))
                return function(*inputs, **options)

        seeded(self, again, *args, **kwargs)

    seeded = replayable_constructor(init, random.get_rng_state, random.replay)
    return construct
