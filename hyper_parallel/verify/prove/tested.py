"""Tests rows on small sizes, including empty and single-element shards, forward and backward.

Rows that no law proves are tested at all these sizes. The laws do not describe which kernels reject empty operands, so
proven rows are tested with empty shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from hyper_parallel.core.shard.rule import Row, Rule, Strategies, find_rule
from hyper_parallel.core.shard.sample import Sample, samples_of
from hyper_parallel.core.shard.strategy import combine
from hyper_parallel.verify.attempt import Raised, attempt
from hyper_parallel.verify.ops.claims import Claim, SampleCall, bind_sample, claims, fits_values, mesh_of, row_text
from hyper_parallel.verify.ops.local_calls import CallCache
from hyper_parallel.verify.ops.local_check import LocalChecker, LocalResult
from hyper_parallel.verify.ops.reference import rule_reference
from hyper_parallel.verify.ops.values import fill, seed_of, size_choices

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["EXTENT", "EmptyParts", "TestedRows"]

EXTENT = "sizes 1 to 5 of every dim, on 2, 3 and 4 ranks"
_RANKS = (2, 3, 4)
_SIZES = (3, 5, 1, 4, 2)
_MOST = 7
"""Number of choices of sizes per sample; with this number, each letter has each size at least once."""
_EMPTY = ((4, 3), (5, 4), (1, 2))
"""Pairs of a size and a number of ranks with which the last rank has an empty shard."""
_OTHERS = ((3, 5, 2, 6, 7), (8, 9, 10, 11, 12), (4, 4, 4, 4, 4))
"""Sizes of the other letters: small ones, sizes above those of convolution kernels, and equal ones."""


class TestedRows:
    """Test results of one sample's rows: ``held`` counts passed checks per row, ``failed`` has the first problem.

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
        calls = _calls(self._platform, rule, sample, sizes, integral=integral)
        if calls is None:
            return
        for ranks in _RANKS:
            found = _answer(self._platform, rule, calls, ranks)
            if found is not None:
                self._run(LocalChecker(sample, calls, mesh_of((ranks,))), list(claims(*found)))

    def _run(self, checker: LocalChecker, asked: list[Claim]) -> None:
        for result in checker.run(asked):
            row = row_text(result.claim.rows[0])
            problem = result.crash or (result.problems[0] if result.problems else "")
            if problem:
                self.failed.setdefault(row, problem)
            elif not result.rejected:
                self.held[row] = self.held.get(row, 0) + 1


class EmptyParts:
    """Tests of one sample's local calls on ranks that have an empty shard.

    Args:
        platform: the framework.
        rule: the operator's rule.
        sample: the sample.
        letters: the sizes of the letters in the sample's shapes; ``problem`` is called with one of them.
    """

    def __init__(self, platform: Platform, rule: Rule, sample: Sample, letters: Mapping[str, int]) -> None:
        self._platform, self._rule, self._sample, self._letters = platform, rule, sample, letters
        self._case = cache(self._made_case)
        self.problem = cache(self._found)

    def _found(self, row: Row, size: int) -> str:
        """Return the reason why ``row`` is wrong if a rank has an empty shard of the dim of ``size``, or ""."""
        letter = next((letter for letter, value in self._letters.items() if value == size), "")
        for choice in itertools.product(_OTHERS, _EMPTY, (True, False)):
            result = attempt(self._run, row, letter, *choice)
            if isinstance(result, LocalResult) and not result.rejected:
                return next(iter((*result.crash.splitlines(), *result.problems)), "")
        return "no size reaches it"

    def _run(
        self, row: Row, letter: str, others: tuple[int, ...], split: tuple[int, int], integral: bool
    ) -> LocalResult | None:
        case = self._case(letter, others, split, integral)
        if case is None:
            return None
        checker, call, answer = case
        outputs = row.outputs[:1] * len(answer.outputs) if len(set(row.outputs)) == 1 else row.outputs
        here = Row(row.inputs, outputs, full=row.full)
        changed = replace(answer, rows=(here,))
        choice = combine(call.call, changed, (here,), (0,)) if fits_values(here, call.filled) else None
        return None if choice is None else checker.run([Claim((here,), choice, changed)])[0]

    def _made_case(
        self, letter: str, others: tuple[int, ...], split: tuple[int, int], integral: bool
    ) -> tuple[LocalChecker, SampleCall, Strategies] | None:
        """Return the checker and the call with these sizes, or None if the operator rejects them."""
        size, ranks = split
        rest = (each for each in self._letters if each != letter)
        sizes = dict(zip(rest, itertools.cycle(others))) | {letter: size}
        calls = attempt(_calls, self._platform, self._rule, self._sample, sizes, integral=integral)
        if calls is None or isinstance(calls, Raised):
            return None
        found = _answer(self._platform, self._rule, calls, ranks)
        return None if found is None else (LocalChecker(self._sample, calls, mesh_of((ranks,))), *found)


def _calls(
    platform: Platform, rule: Rule, sample: Sample, sizes: dict[str, int], *, integral: bool
) -> CallCache | None:
    """Return a cache of local calls of a sample with these sizes; None if the sample has no integral values."""
    seed = seed_of(rule.op, sorted(sizes.items()))
    filled = fill(sample, sizes, sample.dtypes[0], seed, integral=integral, to_dtype=platform.str_to_dtype)
    if filled is None:
        return None
    reference = rule_reference(platform, rule, sample, filled, np.random.default_rng(seed))
    return CallCache(platform, reference, filled, seed)


def _answer(platform: Platform, rule: Rule, calls: CallCache, ranks: int) -> tuple[SampleCall, Strategies] | None:
    """Return the call on a mesh of ``ranks`` ranks with the rule's rows; None if there are none."""
    call = bind_sample(platform, rule, calls.filled, mesh_of((ranks,)), calls.reference.tensors)
    answer = rule.strategies(call.call)
    return (call, answer) if isinstance(answer, Strategies) and not answer.open else None


def _choices(sample: Sample) -> Iterator[dict[str, int]]:
    letters = list(size_choices(sample, 1)[0])
    for first in range(_MOST if letters else 1):
        yield {letter: _SIZES[(first + place * (first + 1)) % len(_SIZES)] for place, letter in enumerate(letters)}
