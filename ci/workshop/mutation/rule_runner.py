"""Runs the quick sweep on mutated rules.

A mutant is checked as a rule is: by the rule level of the quick sweep. What that does not notice is checked in the full
mode, and compared with the rule itself, claim by claim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.rule import OpCall, Rule, Strategies, find_rule
from hyper_parallel.core.shard.sample import samples_of
from hyper_parallel.platform.select import use_platform
from hyper_parallel.verify.ops.claims import bind_sample, claims, fits_values, mesh_of
from hyper_parallel.verify.ops.local_calls import CallCache, name_of
from hyper_parallel.verify.ops.report import OperatorReport
from hyper_parallel.verify.ops.selection import QUICK, Effort
from hyper_parallel.verify.ops.sweep import Sweep, SweepEndError
from hyper_parallel.verify.ops.values import seed_of, size_choices
from workshop.mutation.report import MutantResult
from workshop.mutation.rule_mutants import Mutant, mutants_of

if TYPE_CHECKING:
    from hyper_parallel.verify.ops.claims import Claim, SampleCall
    from hyper_parallel.verify.ops.local_check import LocalChecker, LocalResult
    from hyper_parallel.verify.ops.values import FilledSample

__all__ = ["OperatorMutants", "run_one_of", "run_rule_mutant"]

QUICK_RULE_LEVEL = replace(QUICK, public=False, reproducers=False)
FULL_RULE_LEVEL = Effort(choices=6, public=False, reproducers=False, missing=0, seconds=60.0)


def run_rule_mutant(platform: str, op: str, seed: int) -> MutantResult:
    """Return the result of mutant ``name#number``: an operator, and a number in the order that ``seed`` shuffles."""
    return run_one_of(OperatorMutants, platform, op, seed)


def run_one_of(kind: Callable[[str, str], OperatorMutants], platform: str, op: str, seed: int) -> MutantResult:
    """Return the result of mutant ``name#number`` as ``kind`` judges it."""
    name, _, number = op.partition("#")
    with use_platform(platform):
        return _operator_mutants(kind, platform, name).run(op, int(number), seed)


@lru_cache(maxsize=1)
def _operator_mutants(kind: Callable[[str, str], OperatorMutants], platform: str, op: str) -> OperatorMutants:
    return kind(platform, op)


class _MutantSweep(Sweep):
    """A sweep of a changed rule that stops at the first failure; it shares references and local calls with others."""

    def __init__(self, shared: OperatorMutants, mutant: Mutant | None, effort: Effort) -> None:
        rule = shared.rule if mutant is None else shared.changed(mutant)
        report = OperatorReport(shared.op, shared.platform)
        super().__init__(report, shared.platform, shared.op, rule, shared.samples, effort)
        self.shared, self.mutant = shared, mutant

    def _make_case(self, number: int, sample: Any, sizes: dict[str, int], skipped: list[str], **options: Any) -> Any:
        key = (number, tuple(sizes.items()), options["integral"])
        if key not in self.shared.cases:
            self.shared.cases[key] = super()._make_case(number, sample, sizes, skipped, **options)
        return self.shared.cases[key]

    def _reference(self, sample: Any, filled: Any, rng: Any) -> Any:
        self.rule, changed = self.shared.rule, self.rule
        try:
            return super()._reference(sample, filled, rng)
        finally:
            self.rule = changed

    def _call_cache(self, case: Any) -> CallCache:
        key = id(case)
        if key not in self.shared.calls:
            self.shared.calls[key] = super()._call_cache(case)
        return self.shared.calls[key]

    def _claims(self, sample_call: SampleCall, strategies: Strategies) -> Iterator[Claim]:
        change = self.mutant.change_claim if self.mutant is not None else None
        for claim in super()._claims(sample_call, strategies):
            yield claim if change is None else change(claim)

    def _check_batch(self, case: Any, checker: LocalChecker, batch: Sequence[Claim], *, counts: bool) -> None:
        super()._check_batch(case, checker, batch, counts=counts)
        if self.report.wrong or self.report.crash:
            raise SweepEndError

    def _add_local(self, case: Any, mesh: tuple[int, ...], result: LocalResult, *, counts: bool) -> None:
        if not (self.report.wrong or self.report.crash):
            super()._add_local(case, mesh, result, counts=counts)

    def first_failure(self) -> str:
        """Run the sweep and return the first failure, or nothing."""
        with contextlib.suppress(SweepEndError):
            self.run()
        failures = [*self.report.wrong, *self.report.crash]
        return f"{self.report.outcome}: {failures[0].problem}" if failures else ""


class OperatorMutants:
    """All mutants of one operator, with everything that they share."""

    def __init__(self, platform: str, op: str) -> None:
        self.platform, self.op = platform, op
        rule = find_rule(op)
        self.rule = rule if isinstance(rule, Rule) else None
        self.samples = samples_of(op)
        self.cases: dict[Any, Any] = {}
        self.calls: dict[int, CallCache] = {}
        self.mutants: list[Mutant] = []
        if self.rule is not None:
            self.mutants = self._generate(self.rule)

    @cached_property
    def broken(self) -> str:
        """The failure of the unchanged rule, or nothing."""
        return _MutantSweep(self, None, QUICK_RULE_LEVEL).first_failure()

    def changed(self, mutant: Mutant) -> Rule:
        """Return the rule with the mutant's change."""
        assert self.rule is not None
        unchanged, change = self.rule.strategies, mutant.change_strategies
        if change is None:
            return self.rule

        def strategies(call: OpCall) -> Any:
            answer = unchanged(call)
            return change(call, answer) if isinstance(answer, Strategies) and not answer.open else answer

        return replace(self.rule, strategies=strategies)

    def _generate(self, rule: Rule) -> list[Mutant]:
        """Return the mutants from all samples with their first sizes whose changed rows their values fit."""
        calls, requires_grad, values = [], [], []
        for sample_call, strategies, case in self._calls(rule, [(2,)], 1):
            calls.append((sample_call.call, strategies))
            has_cotangent = any(cotangent is not None for cotangent in case.reference.cotangents)
            requires_grad.append(case.filled.requires_grad if has_cotangent else ())
            values.append(case.filled)
        cases = list(zip(calls, values, strict=True))
        return [
            mutant
            for mutant in mutants_of(calls, requires_grad)
            if any(_fits_values(mutant, *call, filled) for call, filled in cases)
        ]

    def _calls(
        self, rule: Rule, meshes: Sequence[tuple[int, ...]], choices: int
    ) -> Iterator[tuple[SampleCall, Strategies, Any]]:
        """Yield the calls of a sweep with the strategies of ``rule``."""
        sweep = _MutantSweep(self, None, QUICK_RULE_LEVEL)
        for number, sample in enumerate(self.samples):
            for position, sizes in enumerate(size_choices(sample, choices)):
                case = sweep.case(number, sample, sizes, first=position == 0)
                if case is None:
                    continue
                for shape in meshes:
                    sample_call = bind_sample(sweep.platform, rule, case.filled, mesh_of(shape), case.reference.tensors)
                    with contextlib.suppress(ValueError):
                        strategies = rule.strategies(sample_call.call)
                        if isinstance(strategies, Strategies) and not strategies.open and strategies.outputs:
                            yield sample_call, strategies, case

    def run(self, op: str, number: int, seed: int) -> MutantResult:
        """Return the result of mutant ``number``."""
        count = len(self.mutants)
        if number >= count:
            return MutantResult(op, self.platform, generated=count)
        order = np.random.default_rng([seed, seed_of(self.op)]).permutation(count)
        mutant = self.mutants[int(order[number])]
        return self.judged(MutantResult(op, self.platform, mutant.kind, mutant.change, generated=count), mutant)

    def judged(self, result: MutantResult, mutant: Mutant) -> MutantResult:
        """Return ``result`` with the outcome of ``mutant``."""
        if self.broken:
            return replace(result, outcome="broken", detail=self.broken)
        failure = self.noticed(mutant)
        if failure:
            return replace(result, outcome="killed", detail=failure)
        if self._is_equivalent(mutant):
            return replace(result, outcome="equivalent", detail="the rule makes all of its claims too")
        full_sweep = _MutantSweep(self, mutant, FULL_RULE_LEVEL)
        if full_sweep.first_failure():
            return replace(result, outcome="survived", detail="killed")
        detail = f"the full mode checked {full_sweep.report.checks} claims, and all hold"
        return replace(result, outcome="true", detail=detail)

    def noticed(self, mutant: Mutant) -> str:
        """Return the first failure of the quick sweep, or nothing."""
        return _MutantSweep(self, mutant, QUICK_RULE_LEVEL).first_failure()

    # -- equivalence -------------------------------------------------------------------------------------------------

    def _is_equivalent(self, mutant: Mutant) -> bool:
        """Whether the rule makes every claim of the mutant, on all calls of the full mode."""
        assert self.rule is not None
        rule = self.changed(mutant)
        for sample_call, strategies, case in self._calls(self.rule, FULL_RULE_LEVEL.meshes, FULL_RULE_LEVEL.choices):
            changed = rule.strategies(sample_call.call)
            assert isinstance(changed, Strategies)
            own = {self._effect(claim, case, sample_call, mutant) for claim in claims(sample_call, strategies)}
            for claim in claims(sample_call, changed):
                changed_claim = claim if mutant.change_claim is None else mutant.change_claim(claim)
                if self._effect(changed_claim, case, sample_call, mutant) not in own:
                    return False
        return True

    @staticmethod
    def _effect(claim: Claim, case: Any, sample_call: SampleCall, mutant: Mutant) -> Any:
        """Return what can be observed of a claim: layouts, gradients that are reduced, local calls of the ranks."""
        choice = claim.choice
        has_cotangent = any(cotangent is not None for cotangent in case.reference.cotangents)
        varying = tuple(
            axes
            for axes, requires_grad in zip(choice.varying, case.filled.requires_grad, strict=True)
            if requires_grad and has_cotangent
        )
        effect = (choice.targets, choice.outputs, varying)
        if not mutant.changes_adapter:
            return effect
        return (*effect, tuple(_local_call_names(claim, sample_call)))


def _fits_values(mutant: Mutant, call: OpCall, strategies: Strategies, filled: FilledSample) -> bool:
    """Whether these values can be split into the partial values that a changed row takes."""
    if mutant.change_strategies is None or mutant.changes_adapter:
        return True
    changed = set(mutant.change_strategies(call, strategies).rows) - set(strategies.rows)
    return any(fits_values(row, filled) for row in changed)


def _local_call_names(claim: Claim, sample_call: SampleCall) -> Iterator[Any]:
    mesh, localize = sample_call.call.mesh, claim.strategies.localize
    for rank in mesh.ranks:
        if localize is None:
            yield None
            continue
        seen = mesh.for_rank(rank)
        targets, outputs = (
            tuple(Layout.of(seen, layout.dim_axes, layout.partials, layout.shape) for layout in layouts)
            for layouts in (claim.choice.targets, claim.choice.outputs)
        )
        try:
            local = localize(sample_call.with_layouts(targets, seen), targets, outputs)
            yield None if local is None else name_of((local.args, local.run))
        except Exception:  # noqa: BLE001 - a changed adapter may raise anything, and a call without name equals no other
            yield object()
