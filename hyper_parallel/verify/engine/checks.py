"""The comparison of each tensor, for reports that list equal values as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hyper_parallel.verify.engine.bounds import Key
    from hyper_parallel.verify.engine.distance import Distance
    from hyper_parallel.verify.engine.pairing import PairedRuns
    from hyper_parallel.verify.engine.verdict import Difference

__all__ = ["TensorCheck", "tensor_checks"]


@dataclass(frozen=True)
class TensorCheck:
    """One tensor compared on one rank.

    Attributes:
        kind: one of ``KINDS`` in ``verify/frameworks/contract/records.py``, or a kind that only a front end compares.
        module: path of its module.
        name: its full name.
        step: training step, from 0; -1 before training.
        rank: the rank that has it.
        values: number of elements; 0 if one of the runs does not have the tensor.
        error: largest difference, relative to the tensor's magnitude.
        bound: tolerance of the element with that error, relative to the same magnitude.
        why: description of the error; empty if there is none.
    """

    kind: str
    module: str
    name: str
    step: int
    rank: int
    values: int
    error: float
    bound: float
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.why

    @property
    def share(self) -> float:
        """The error divided by the tolerance; infinite for an error with a tolerance of zero."""
        if self.bound:
            return self.error / self.bound
        return float("inf") if self.error else 0.0

    @property
    def when(self) -> str:
        """The step, in words."""
        return f"step {self.step + 1}" if self.step >= 0 else "before training"

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.when}, {self.kind} of {self.name}, rank {self.rank}: {self.why or 'equal'}"


def tensor_checks(
    runs: PairedRuns, measured: Mapping[Key, Mapping[int, Distance]], differences: Mapping[Key, Difference]
) -> Iterator[TensorCheck]:
    """Yield the differences in the order of execution, then all equal values.

    Args:
        runs: both runs.
        measured: distances by value and rank.
        differences: differences by value, in order.
    """
    for key, difference in differences.items():
        for rank in difference.ranks:
            distance = measured.get(key, {}).get(rank)
            if distance is None or distance.ratio <= 1:
                why = difference.why.removeprefix(f"rank {rank} ")
                yield TensorCheck(key[0], difference.module, _named(key), key[2], rank, 0, np.inf, 0.0, why)
            else:
                yield _check(runs, key, rank, distance, distance.why)
    for key, distances in measured.items():
        wrong: Sequence[int] = differences[key].ranks if key in differences else ()
        yield from (_check(runs, key, rank, found, "") for rank, found in distances.items() if rank not in wrong)


def _check(runs: PairedRuns, key: Key, rank: int, distance: Distance, why: str) -> TensorCheck:
    record = runs.ranks[rank][key]
    return TensorCheck(
        key[0],
        record.module,
        _named(key),
        key[2],
        rank,
        int(np.size(record.value)),
        distance.error,
        distance.bound,
        why,
    )


def _named(key: Key) -> str:
    return key[1] if not key[3] else f"{key[1]}, call {key[3] + 1}"
