"""The power of the verifier: which changed rules it notices.

A mutant is judged as a rule of its own would be: by the rule level of the quick sweep. What that does not notice is
held against the full mode, and compared with the rule itself, claim by claim.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.shard.rule import OpCall, Rule, Strategies, find_rule
from hyper_parallel.core.shard.sample import samples_of
from hyper_parallel.platform.select import use_platform
from hyper_parallel.verify.ops.effort import QUICK, Effort
from hyper_parallel.verify.ops.local_calls import Calls, name_of
from hyper_parallel.verify.ops.mutants import Mutant, mutants_of
from hyper_parallel.verify.ops.report import OperatorReport
from hyper_parallel.verify.ops.rows import claims, mesh_of, possible, problem_of
from hyper_parallel.verify.ops.sweep import Enough, Sweep
from hyper_parallel.verify.ops.values import seed_of, size_choices

if TYPE_CHECKING:
    from hyper_parallel.verify.ops.rows import Claim, Problem
    from hyper_parallel.verify.ops.rule_level import Bench, Result
    from hyper_parallel.verify.ops.values import Filled

__all__ = ["Score", "Verdict", "judged"]

NOTICING = replace(QUICK, public=False, reproducers=False)
FULL = Effort(choices=6, public=False, reproducers=False, missing=0, seconds=60.0)


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant.

    Attributes:
        op: operator, and the number of the mutant among those drawn.
        platform: the framework.
        kind: what slipped.
        change: where.
        outcome: ``killed``, ``equivalent``, ``true`` (what it claims holds in the full mode), ``survived``, ``none``
            where the operator has no further mutant, or ``broken`` where the rule itself does not hold.
        detail: what noticed it, why it is equivalent, or what the full mode says.
        generated: number of mutants of the operator.
    """

    op: str
    platform: str
    kind: str = ""
    change: str = ""
    outcome: str = "none"
    detail: str = ""
    generated: int = 0

    @property
    def name(self) -> str:
        """The operator."""
        return self.op.partition("#")[0]

    def json(self) -> dict[str, Any]:
        """For the parent."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Verdict:
        """What :meth:`json` wrote."""
        return cls(**data)

    @classmethod
    def lost(cls, op: str, platform: str, died: str) -> Verdict:
        """The process that ran it died, which nobody overlooks; one that was not done in time noticed nothing."""
        outcome = "survived" if died.startswith("did not finish") else "killed"
        return cls(op, platform, "death of the process", died.partition("\n")[0], outcome, "not finished")


def judged(platform: str, op: str, seed: int) -> Verdict:
    """The verdict on ``name#number``: a mutant of an operator, by its number among those that ``seed`` shuffled."""
    name, _, number = op.partition("#")
    with use_platform(platform):
        return _hunt(platform, name).judge(op, int(number), seed)


@lru_cache(maxsize=1)
def _hunt(platform: str, op: str) -> _Hunt:
    return _Hunt(platform, op)


class _Trial(Sweep):
    """A sweep of a changed rule, with the plain runs and local calls of the hunt."""

    def __init__(self, hunt: _Hunt, mutant: Mutant | None, effort: Effort) -> None:
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

    def _calls(self, case: Any) -> Calls:
        key = id(case)
        if key not in self.hunt.calls:
            self.hunt.calls[key] = super()._calls(case)
        return self.hunt.calls[key]

    def _claims(self, problem: Problem, strategies: Strategies) -> Iterator[Claim]:
        change = self.mutant.claim if self.mutant is not None else None
        for one in super()._claims(problem, strategies):
            yield one if change is None else change(one)

    def _batch(self, case: Any, bench: Bench, batch: Sequence[Claim], *, counts: bool) -> None:
        super()._batch(case, bench, batch, counts=counts)
        if self.report.wrong or self.report.crash:
            raise Enough

    def _note(self, case: Any, mesh: tuple[int, ...], result: Result, *, counts: bool) -> None:
        if not (self.report.wrong or self.report.crash):
            super()._note(case, mesh, result, counts=counts)

    def noticed(self) -> str:
        """What the sweep found first, or nothing."""
        with contextlib.suppress(Enough):
            self.run()
        found = [*self.report.wrong, *self.report.crash]
        return f"{self.report.outcome}: {found[0].problem}" if found else ""


class _Hunt:
    """All mutants of one operator, with everything that they share."""

    def __init__(self, platform: str, op: str) -> None:
        self.platform, self.op = platform, op
        found = find_rule(op)
        self.rule = found if isinstance(found, Rule) else None
        self.samples = samples_of(op)
        self.cases: dict[Any, Any] = {}
        self.calls: dict[int, Calls] = {}
        self.mutants: list[Mutant] = []
        self.broken = ""
        if self.rule is not None:
            self.broken = _Trial(self, None, NOTICING).noticed()
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
    ) -> Iterator[tuple[Problem, Strategies, Any]]:
        """Calls that the sweep makes, with what ``rule`` answers."""
        trial = _Trial(self, None, NOTICING)
        for number, sample in enumerate(self.samples):
            for position, sizes in enumerate(size_choices(sample, choices)):
                case = trial.case(number, sample, sizes, first=position == 0)
                if case is None:
                    continue
                for shape in meshes:
                    problem = problem_of(trial.platform, rule, case.filled, mesh_of(shape), case.reference.tensors)
                    with contextlib.suppress(ValueError):
                        answer = rule.strategies(problem.call)
                        if isinstance(answer, Strategies) and not answer.open and answer.outputs:
                            yield problem, answer, case

    def judge(self, op: str, number: int, seed: int) -> Verdict:
        """What becomes of mutant ``number``."""
        count = len(self.mutants)
        if number >= count:
            return Verdict(op, self.platform, generated=count)
        order = np.random.default_rng([seed, seed_of(self.op)]).permutation(count)
        mutant = self.mutants[int(order[number])]
        found = Verdict(op, self.platform, mutant.kind, mutant.change, generated=count)
        if self.broken:
            return replace(found, outcome="broken", detail=self.broken)
        noticed = _Trial(self, mutant, NOTICING).noticed()
        if noticed:
            return replace(found, outcome="killed", detail=noticed)
        if self._claims_nothing_new(mutant):
            return replace(found, outcome="equivalent", detail="all that it claims the rule claims too")
        trial = _Trial(self, mutant, FULL)
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
    def _said(claim: Claim, case: Any, problem: Problem, mutant: Mutant) -> Any:
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


def _reached(mutant: Mutant, call: OpCall, answer: Strategies, filled: Filled) -> bool:
    """Whether these values can be held as a changed row has them."""
    if mutant.answer is None or mutant.adapter:
        return True
    return any(possible(row, filled) for row in set(mutant.answer(call, answer).rows) - set(answer.rows))


def _local_names(claim: Claim, problem: Problem) -> Iterator[Any]:
    from hyper_parallel.core.dtensor.layout import Layout

    mesh, localize = problem.call.mesh, claim.strategies.localize
    for rank in mesh.ranks:
        if localize is None:
            yield None
            continue
        seen = mesh.seen_by(rank)
        targets, outputs = (
            tuple(Layout.of(seen, one.dim_axes, one.partials, one.shape) for one in layouts)
            for layouts in (claim.choice.targets, claim.choice.outputs)
        )
        try:
            local = localize(problem.placed(targets, seen), targets, outputs)
            yield None if local is None else name_of((local.args, local.run))
        except Exception:  # noqa: BLE001 - a changed adapter may raise anything, and what has no name is like nothing
            yield object()


class Score:
    """All verdicts.

    Args:
        platform: the framework.
        wanted: how many mutants were asked for.
        seed: what drew them.
    """

    def __init__(self, platform: str, wanted: int, seed: int) -> None:
        self.platform, self.wanted, self.seed = platform, wanted, seed
        self.verdicts: list[Verdict] = []
        self.generated: dict[str, int] = {}
        self.interrupted = ""
        self.seconds = 0.0

    def add(self, verdict: Verdict) -> None:
        """Count one."""
        self.generated[verdict.name] = max(verdict.generated, self.generated.get(verdict.name, 0))
        if verdict.outcome != "none":
            self.verdicts.append(verdict)

    @property
    def score(self) -> float:
        """Killed of those that claim what is false."""
        counts = Counter(one.outcome for one in self.verdicts)
        return counts["killed"] / max(len(self.verdicts) - counts["equivalent"] - counts["true"], 1)

    @property
    def strict(self) -> float:
        """Killed of those that are not equivalent, whether or not what they claim is true."""
        counts = Counter(one.outcome for one in self.verdicts)
        return counts["killed"] / max(len(self.verdicts) - counts["equivalent"], 1)

    def ok(self, floor: float) -> bool:
        """Whether enough were noticed of as many as were asked for, and every rule held to begin with."""
        return (
            not self.interrupted
            and len(self.verdicts) >= self.wanted
            and self.score >= floor
            and not any(one.outcome == "broken" for one in self.verdicts)
        )

    def json(self) -> dict[str, Any]:
        """For the page."""
        listed = {
            name: [
                {"op": one.name, "kind": one.kind, "change": one.change, key: one.detail}
                for one in self.verdicts
                if one.outcome == outcome
            ]
            for name, outcome, key in (
                ("survivors", "survived", "full"),
                ("true_claims", "true", "reason"),
                ("equivalents", "equivalent", "reason"),
                ("broken", "broken", "reason"),
            )
        }
        return {
            "platform": self.platform,
            "wanted": self.wanted,
            "seed": self.seed,
            "generated": sum(self.generated.values()),
            **_counts(self.verdicts),
            "score": round(self.score, 5),
            "strict": round(self.strict, 5),
            "seconds": round(self.seconds, 3),
            **({"interrupted": self.interrupted} if self.interrupted else {}),
            "kinds": _grouped(self.verdicts, "kind"),
            "operators": _grouped(self.verdicts, "name"),
            **listed,
        }

    def text(self) -> str:
        """For people."""
        data = self.json()
        lines = [
            f"survived    {one['op']}: {one['kind']}: {one['change']} (full mode: {one['full']})"
            for one in data["survivors"]
        ]
        lines.extend(f"broken      {one['op']}: the rule itself: {one['reason']}" for one in data["broken"])
        lines.append(
            f"{self.platform}: {data['mutants']} mutants of {data['generated']} (seed {self.seed}): "
            f"{data['killed']} killed, {data['survived']} survived, {data['equivalent']} equivalent, "
            f"{data['true']} true; score {100 * self.score:.2f} % ({100 * self.strict:.2f} % with true ones counted as "
            f"missed); {self.seconds:.0f} s"
        )
        if self.interrupted:
            lines.append(self.interrupted)
        return "\n".join(lines)


def _counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    counts = Counter(one.outcome for one in verdicts)
    return {"mutants": len(verdicts), **{name: counts[name] for name in ("killed", "equivalent", "true", "survived")}}


def _grouped(verdicts: Sequence[Verdict], by: str) -> dict[str, dict[str, int]]:
    names = sorted({getattr(one, by) for one in verdicts})
    return {name: _counts([one for one in verdicts if getattr(one, by) == name]) for name in names}
