"""Runs many checks on the same simulated ranks; if a check ends its ranks, only its own result is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.errors import RankFailedError
from hyper_parallel.transport.base import active_transport
from hyper_parallel.verify.simulate import simulate

__all__ = ["Failed", "World", "run_batch"]

_STATE = "_hyper_parallel_batch_state"
"""Attribute of an error that ended a rank: the number of items that the rank had completed, and its next result."""


@dataclass(frozen=True)
class World:
    """The ranks of a batch.

    Attributes:
        platform: name of the framework.
        size: number of ranks.
        timeout: seconds for all items together.
        device: device that ranks compute on.
        in_step: whether ranks wait for each other after each item. If False, they do so only when items are repeated
            after a failure, to find the item that failed.
    """

    platform: str
    size: int
    timeout: float
    device: str = "cpu"
    in_step: bool = True


@dataclass(frozen=True)
class Failed:
    """The failure of an item that ended the ranks.

    Attributes:
        error: the error that ended the ranks.
        results: results of the ranks that completed the item before the failure.
    """

    error: RankFailedError
    results: Sequence[Any]

    @property
    def failures(self) -> Mapping[int, BaseException]:
        """The exception of each failed rank, if it is known."""
        failures: Mapping[int, BaseException] = getattr(self.error, "failures", {})
        return failures


def run_batch(
    world: World,
    prepare: Callable[..., Callable[[Any], Any]],
    arguments: Sequence[Any],
    items: Sequence[Any],
    failures: int | None = None,
) -> list[list[Any] | Failed]:
    """Call ``prepare(*arguments)`` on every rank, and the function that it returns on every item.

    Args:
        world: the ranks.
        prepare: called once per rank; returns the function that checks an item.
        arguments: arguments of ``prepare``.
        items: arguments of the function, which is called with one after the other.
        failures: number of items that may end the ranks before the remaining items are skipped; None for no limit.

    Returns:
        for each item the results of all ranks, or the failure that ended the ranks. After too many failures, there are
        fewer results than items.
    """
    done: list[list[Any] | Failed] = []
    in_step = world.in_step
    while len(done) < len(items) and (failures is None or failures > 0):
        more = _run_until_failure(world, prepare, arguments, items[len(done) :], in_step=in_step)
        if more is None:
            in_step = True
            continue
        failures = failures if failures is None else failures - isinstance(more[-1], Failed)
        in_step = world.in_step
        done += more
    return done


def _run_until_failure(
    world: World, prepare: Any, arguments: Sequence[Any], items: Sequence[Any], *, in_step: bool
) -> list[list[Any] | Failed] | None:
    """Return the results of the first items, at least one; the last returned item may have failed.

    Returns None if it is unknown which item failed, because ranks were not in step.
    """
    shared: list[list[Any]] = [[] for _ in range(world.size)]  # threads fill these lists, processes fill copies
    passed = [0] * world.size
    given = (prepare, arguments, items, shared, passed, in_step)
    try:
        per_rank = simulate(_run_rank, world.size, world.platform, given, timeout=world.timeout, device=world.device)
    except RankFailedError as error:
        if not in_step and len(items) > 1:
            return None
        states = [getattr(failed, _STATE) for failed in Failed(error, ()).failures.values() if hasattr(failed, _STATE)]
        # If any rank has continued after an item, all ranks have completed it.
        finished = min(max([*passed, *(number for number, _ in states)]), len(items) - 1)
        if any(passed) or (not finished and (states or len(items) == 1)):
            made = [result for number, result in states if number == finished and result is not None]
            return [*([results[number] for results in shared] for number in range(finished)), Failed(error, made)]
        # Results of rank processes are lost when the processes end: the items before the failed one run again. If it is
        # unknown which item failed, the first half of the items runs again.
        before = items[: finished or len(items) // 2]
        return _run_until_failure(world, prepare, arguments, before, in_step=True)
    return [list(results) for results in zip(*per_rank, strict=True)]


def _run_rank(
    prepare: Any,
    arguments: Sequence[Any],
    items: Sequence[Any],
    shared: Sequence[list[Any]],
    passed: list[int],
    in_step: bool,
) -> list[Any]:
    transport = active_transport()
    assert transport is not None
    run = prepare(*arguments)
    rank, ranks = transport.rank, tuple(range(transport.world_size))
    for number, item in enumerate(items):
        result = None
        try:
            result = run(item)
            shared[rank].append(result)
            if in_step:
                transport.barrier(ranks)
        except Exception as error:
            setattr(error, _STATE, (number, result))
            raise
        passed[rank] = number + 1
    return shared[rank]
