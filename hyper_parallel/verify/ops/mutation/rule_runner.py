"""The power of the verifier: which changed rules it notices.

A mutant is judged as a rule of its own would be: by the rule level of the quick sweep. What that does not notice is
held against the full mode, and compared with the rule itself, claim by claim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.shard.rule import OpCall, Rule, Strategies, find_rule
from hyper_parallel.core.shard.sample import samples_of
from hyper_parallel.platform.select import use_platform
from hyper_parallel.verify.ops.claims import bind_sample, claims, mesh_of, possible
from hyper_parallel.verify.ops.local_calls import CallCache, name_of
from hyper_parallel.verify.ops.mutation.report import MutantResult
from hyper_parallel.verify.ops.mutation.rule_mutants import Mutant, mutants_of
from hyper_parallel.verify.ops.report import OperatorReport
from hyper_parallel.verify.ops.selection import QUICK, Effort
from hyper_parallel.verify.ops.sweep import StopSweep, Sweep
from hyper_parallel.verify.ops.values import seed_of, size_choices

if TYPE_CHECKING:
    from hyper_parallel.verify.ops.claims import Claim, SampleCall
    from hyper_parallel.verify.ops.local_check import LocalChecker, LocalResult
    from hyper_parallel.verify.ops.values import FilledSample

__all__ = ["judged"]

NOTICING = replace(QUICK, public=False, reproducers=False)
FULL = Effort(choices=6, public=False, reproducers=False, missing=0, seconds=60.0)


def judged(platform: str, op: str, seed: int) -> MutantResult:
    """The verdict on ``name#number``: a mutant of an operator, by its number among those that ``seed`` shuffled."""
    name, _, number = op.partition("#")
    with use_platform(platform):
        return _hunt(platform, name).judge(op, int(number), seed)


@lru_cache(maxsize=1)
def _hunt(platform: str, op: str) -> _OperatorMutants:
    return _OperatorMutants(platform, op)


class _MutantSweep(Sweep):
    """A sweep of a changed rule, with the plain runs and local calls of the hunt."""

    def __init__(self, hunt: _OperatorMutants, mutant: Mutant | None, effort: Effort) -> None:
        rule = hunt.rule if mutant is None else hunt.changed(mutant)
        super().__init__(OperatorReport(hunt.op, hunt.platform), hunt.platform, hunt.op, rule, hunt.samples, effort)
        self.hunt, self.mutant = hunt, mutant

    def _case(self, number: int, sample: Any, sizes: dict[str, int], skipped: list[str], **how: Any) -> Any:
        key = (number, tuple(sizes.items()), how["integral"])
        if key not in self.hunt.cases:
            self.hunt.cases[key] = super()._case(number, sample, sizes, skipped, **how)
        return self.hunt.cases[key]

    def _refer(self, sample: Any, filled: Any, rng: Any) -> Any:
        self.rule, changed = self.hunt.rule, self.rule
        try:
            return super()._refer(sample, filled, rng)
        finally:
            self.rule = changed

    def _calls(self, case: Any) -> CallCache:
        key = id(case)
        if key not in self.hunt.calls:
            self.hunt.calls[key] = super()._calls(case)
        return self.hunt.calls[key]

    def _claims(self, problem: SampleCall, strategies: Strategies) -> Iterator[Claim]:
        change = self.mutant.claim if self.mutant is not None else None
        for one in super()._claims(problem, strategies):
            yield one if change is None else change(one)

    def _batch(self, case: Any, bench: LocalChecker, batch: Sequence[Claim], *, counts: bool) -> None:
        super()._batch(case, bench, batch, counts=counts)
        if self.report.wrong or self.report.crash:
            raise StopSweep

    def _note(self, case: Any, mesh: tuple[int, ...], result: LocalResult, *, counts: bool) -> None:
        if not (self.report.wrong or self.report.crash):
            super()._note(case, mesh, result, counts=counts)

    def noticed(self) -> str:
        """What the sweep found first, or nothing."""
        with contextlib.suppress(StopSweep):
            self.run()
        found = [*self.report.wrong, *self.report.crash]
        return f"{self.report.outcome}: {found[0].problem}" if found else ""


class _OperatorMutants:
    """All mutants of one operator, with everything that they share."""

    def __init__(self, platform: str, op: str) -> None:
        self.platform, self.op = platform, op
        found = find_rule(op)
        self.rule = found if isinstance(found, Rule) else None
        self.samples = samples_of(op)
        self.cases: dict[Any, Any] = {}
        self.calls: dict[int, CallCache] = {}
        self.mutants: list[Mutant] = []
        self.broken = ""
        if self.rule is not None:
            self.broken = _MutantSweep(self, None, NOTICING).noticed()
            self.mutants = self._generated(self.rule)

    def changed(self, mutant: Mutant) -> Rule:
        """The rule with the mutant in it."""
        assert self.rule is not None
        own, change = self.rule.strategies, mutant.answer
        if change is None:
            return self.rule

        def strategies(call: OpCall) -> Any:
            answer = own(call)
            return change(call, answer) if isinstance(answer, Strategies) and not answer.open else answer

        return replace(self.rule, strategies=strategies)

    def _generated(self, rule: Rule) -> list[Mutant]:
        """Of all samples with their first sizes; only rows that their values can be held in."""
        calls, wanted, arrays = [], [], []
        for problem, answer, case in self._problems(rule, [(2,)], 1):
            calls.append((problem.call, answer))
            wanted.append(case.filled.wanted if any(one is not None for one in case.reference.seeds) else ())
            arrays.append(case.filled)
        cases = list(zip(calls, arrays, strict=True))
        return [one for one in mutants_of(calls, wanted) if any(_reached(one, *call, held) for call, held in cases)]

    def _problems(
        self, rule: Rule, meshes: Sequence[tuple[int, ...]], choices: int
    ) -> Iterator[tuple[SampleCall, Strategies, Any]]:
        """Calls that the sweep makes, with what ``rule`` answers."""
        trial = _MutantSweep(self, None, NOTICING)
        for number, sample in enumerate(self.samples):
            for position, sizes in enumerate(size_choices(sample, choices)):
                case = trial.case(number, sample, sizes, first=position == 0)
                if case is None:
                    continue
                for shape in meshes:
                    problem = bind_sample(trial.platform, rule, case.filled, mesh_of(shape), case.reference.tensors)
                    with contextlib.suppress(ValueError):
                        answer = rule.strategies(problem.call)
                        if isinstance(answer, Strategies) and not answer.open and answer.outputs:
                            yield problem, answer, case

    def judge(self, op: str, number: int, seed: int) -> MutantResult:
        """What becomes of mutant ``number``."""
        count = len(self.mutants)
        if number >= count:
            return MutantResult(op, self.platform, generated=count)
        order = np.random.default_rng([seed, seed_of(self.op)]).permutation(count)
        mutant = self.mutants[int(order[number])]
        found = MutantResult(op, self.platform, mutant.kind, mutant.change, generated=count)
        if self.broken:
            return replace(found, outcome="broken", detail=self.broken)
        noticed = _MutantSweep(self, mutant, NOTICING).noticed()
        if noticed:
            return replace(found, outcome="killed", detail=noticed)
        if self._claims_nothing_new(mutant):
            return replace(found, outcome="equivalent", detail="all that it claims the rule claims too")
        trial = _MutantSweep(self, mutant, FULL)
        if trial.noticed():
            return replace(found, outcome="survived", detail="killed")
        said = f"the full mode checked {trial.report.checks} claims, and all hold"
        return replace(found, outcome="true", detail=said)

    # -- equivalence -------------------------------------------------------------------------------------------------

    def _claims_nothing_new(self, mutant: Mutant) -> bool:
        assert self.rule is not None
        rule = self.changed(mutant)
        for problem, answer, case in self._problems(self.rule, FULL.meshes, FULL.choices):
            changed = rule.strategies(problem.call)
            assert isinstance(changed, Strategies)
            own = {self._said(one, case, problem, mutant) for one in claims(problem, answer)}
            for one in claims(problem, changed):
                said = self._said(one if mutant.claim is None else mutant.claim(one), case, problem, mutant)
                if said not in own:
                    return False
        return True

    @staticmethod
    def _said(claim: Claim, case: Any, problem: SampleCall, mutant: Mutant) -> Any:
        """A claim as far as anybody can tell: where what is, which gradients are reduced, what ranks call."""
        choice = claim.choice
        seen = any(one is not None for one in case.reference.seeds)
        varying = tuple(
            axes for axes, wanted in zip(choice.varying, case.filled.wanted, strict=True) if wanted and seen
        )
        said = (choice.targets, choice.outputs, varying)
        if not mutant.adapter:
            return said
        return (*said, tuple(_local_names(claim, problem)))


def _reached(mutant: Mutant, call: OpCall, answer: Strategies, filled: FilledSample) -> bool:
    """Whether these values can be held as a changed row has them."""
    if mutant.answer is None or mutant.adapter:
        return True
    return any(possible(row, filled) for row in set(mutant.answer(call, answer).rows) - set(answer.rows))


def _local_names(claim: Claim, problem: SampleCall) -> Iterator[Any]:
    from hyper_parallel.core.dtensor.layout import Layout

    mesh, localize = problem.call.mesh, claim.strategies.localize
    for rank in mesh.ranks:
        if localize is None:
            yield None
            continue
        seen = mesh.for_rank(rank)
        targets, outputs = (
            tuple(Layout.of(seen, one.dim_axes, one.partials, one.shape) for one in layouts)
            for layouts in (claim.choice.targets, claim.choice.outputs)
        )
        try:
            local = localize(problem.placed(targets, seen), targets, outputs)
            yield None if local is None else name_of((local.args, local.run))
        except Exception:  # noqa: BLE001 - a changed adapter may raise anything, and what has no name is like nothing
            yield object()
