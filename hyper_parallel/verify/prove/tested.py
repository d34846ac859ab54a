"""Tests rows that no law proves: on small sizes, including empty and single-element shards, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hyper_parallel.core.shard.rule import Rule, Strategies, find_rule
from hyper_parallel.core.shard.sample import Sample, samples_of
from hyper_parallel.verify.attempt import attempt
from hyper_parallel.verify.ops.claims import Claim, bind_sample, claims, mesh_of, row_text
from hyper_parallel.verify.ops.local_calls import CallCache
from hyper_parallel.verify.ops.local_check import LocalChecker
from hyper_parallel.verify.ops.reference import rule_reference
from hyper_parallel.verify.ops.values import fill, seed_of, size_choices

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["EXTENT", "TestedRows"]

EXTENT = "sizes 1 to 5 of every dim, on 2, 3 and 4 ranks"
_RANKS = (2, 3, 4)
_SIZES = (3, 5, 1, 4, 2)
_MOST = 7
"""Number of choices of sizes per sample, so that each size of each letter occurs at least once."""


class TestedRows:
    """Test results of one sample's rows: those that passed every check that reached them, and the others.

    Args:
        platform: the framework.
        op: the operator.
        number: number of the sample.
    """

    def __init__(self, platform: Platform, op: str, number: int) -> None:
        self.held: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self._platform, self._rule = platform, find_rule(op)
        if isinstance(self._rule, Rule):
            sample = samples_of(op)[number]
            for sizes, integral in itertools.product(_choices(sample), (True, False)):
                attempt(self._check, sample, sizes, integral)  # raises for sizes that the operator rejects

    def result(self, row: str) -> str:
        """Return the reason why ``row`` is not tested, or an empty text if it is."""
        return self.failed.get(row, "" if self.held.get(row) else "no size reaches it")

    def _check(self, sample: Sample, sizes: dict[str, int], integral: bool) -> None:
        rule = self._rule
        assert isinstance(rule, Rule)
        seed = seed_of(rule.op, sorted(sizes.items()))
        to_dtype = self._platform.str_to_dtype
        filled = fill(sample, sizes, sample.dtypes[0], seed, integral=integral, to_dtype=to_dtype)
        if filled is None:
            return
        reference = rule_reference(self._platform, rule, sample, filled, np.random.default_rng(seed))
        calls = CallCache(self._platform, reference, filled, seed)
        for ranks in _RANKS:
            mesh = mesh_of((ranks,))
            call = bind_sample(self._platform, rule, filled, mesh, reference.tensors)
            answer = rule.strategies(call.call)
            if isinstance(answer, Strategies) and not answer.open:
                self._run(LocalChecker(sample, calls, mesh), list(claims(call, answer)))

    def _run(self, checker: LocalChecker, asked: list[Claim]) -> None:
        for result in checker.run(asked):
            row = row_text(result.claim.rows[0])
            problem = result.crash or (result.problems[0] if result.problems else "")
            if problem:
                self.failed.setdefault(row, problem)
            elif not result.rejected:
                self.held[row] = self.held.get(row, 0) + 1


def _choices(sample: Sample) -> Iterator[dict[str, int]]:
    letters = list(size_choices(sample, 1)[0])
    for first in range(_MOST if letters else 1):
        yield {letter: _SIZES[(first + place * (first + 1)) % len(_SIZES)] for place, letter in enumerate(letters)}
