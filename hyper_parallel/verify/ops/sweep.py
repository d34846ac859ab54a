"""One operator on one framework: all samples, all meshes, all claimed placements, and the public path."""

from __future__ import annotations

import itertools
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.boxes import coordinates
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import PARTIAL_OPS, Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard.rule import Decomposition, Row, Rule, Strategies, find_rule, replicated_row
from hyper_parallel.core.shard.sample import Sample, exemption, samples_of
from hyper_parallel.core.shard.strategy import combine
from hyper_parallel.errors import HyperParallelError, UnsupportedOperatorError
from hyper_parallel.platform.select import platform_named, use_platform
from hyper_parallel.verify.ops.equal import says_nothing
from hyper_parallel.verify.ops.local_calls import Calls
from hyper_parallel.verify.ops.missing import unclaimed
from hyper_parallel.verify.ops.offers import offered, offered_by_operands
from hyper_parallel.verify.ops.pieces import allows
from hyper_parallel.verify.ops.public import Outcome, Places, PublicJob, check_public, operator
from hyper_parallel.verify.ops.reference import Reference, plain_run, refer
from hyper_parallel.verify.ops.report import Finding, OperatorReport
from hyper_parallel.verify.ops.reproduce import program
from hyper_parallel.verify.ops.rows import Claim, Problem, claims, commute, mesh_of, possible, problem_of
from hyper_parallel.verify.ops.rule_level import Bench, Result
from hyper_parallel.verify.ops.user import UserOperator, samples_of_user
from hyper_parallel.verify.ops.values import Filled, fill, seed_of, size_choices

__all__ = ["MESHES", "QUICK", "USER", "Effort", "Enough", "Sweep", "sweep_operator", "sweep_user_operator"]

MESHES: tuple[tuple[int, ...], ...] = ((1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2))
_BATCH = 24
_REPRODUCED = 3
_PATIENCE = 12
# On several axes a row comes with itself and with the next one; or first beside rows near it, if both are new.
_USUAL: tuple[tuple[int, bool], ...] = ((0, False), (1, False))
_SPARING = ((1, True), (2, True), (3, True), *_USUAL)
_TRIED = 12  # choices of sizes for rows that have a condition
_EMPTY = 3  # among so many choices of sizes one leaves some rank with nothing, of every dim


class Enough(Exception):  # noqa: N818 - no error
    """Raised by who needs to know no more of a sweep."""


@dataclass(frozen=True)
class Effort:
    """How much is checked.

    Attributes:
        meshes: shapes.
        choices: choices of sizes per sample.
        draws: random splits into summands, of the first choice of sizes.
        both: check the first choice of sizes with integers and with real numbers, not with one of them only.
        rule_level: check claimed rows on plain tensors.
        public: run every row on DTensors.
        public_meshes: on these meshes; None for all.
        apart: the rule level has a process of its own, and ranks are processes: on DTensors a row runs once per mesh,
            on several axes beside another one that has not run yet, and further placements on one mesh per sample,
            or fewer on each where there are no rows; what the rule level checks does not count again.
        moved: how many further placements per sample and mesh go through implicit redistribution.
        seconds: of processor time after which no further choice of sizes is begun.
        reproducers: write programs that show what is wrong.
        missing: number of samples on which to look for placements that are true and not claimed.
    """

    meshes: tuple[tuple[int, ...], ...] = MESHES
    choices: int = 60
    draws: int = 2
    both: bool = True
    rule_level: bool = True
    public: bool = True
    public_meshes: tuple[tuple[int, ...], ...] | None = None
    apart: bool = False
    moved: int = 1
    seconds: float = 30.0
    reproducers: bool = True
    missing: int = 2


QUICK = Effort(
    meshes=((3,), (2, 2)), choices=1, draws=1, both=False, public_meshes=((2,),), moved=0, seconds=10.0, missing=0
)
USER = Effort(choices=2, moved=16, seconds=8.0)


@dataclass(frozen=True)
class _Case:
    """A filled sample with its plain result."""

    number: int
    sample: Sample
    filled: Filled
    reference: Reference
    seed: int
    first: bool

    @property
    def name(self) -> str:
        return f"sample {self.number}"


def sweep_operator(platform: str, op: str, effort: Effort) -> OperatorReport:
    """Check canonical operator ``op`` on ``platform``."""
    started = time.monotonic()
    report = OperatorReport(op, platform)
    with use_platform(platform):
        Sweep(report, platform, op, find_rule(op), samples_of(op), effort).run()
    report.seconds = time.monotonic() - started
    return report


def sweep_user_operator(platform: str, user: UserOperator, effort: Effort) -> OperatorReport:
    """Check a user's function on DTensors, every placement of every operand where there are not too many."""
    started = time.monotonic()
    report = OperatorReport(user.name, platform)
    with use_platform(platform):
        Sweep(report, platform, user, None, samples_of_user(user), effort).run()
    report.seconds = time.monotonic() - started
    return report


class Sweep:
    """One operator's samples on their way through both levels.

    Args:
        report: what is filled.
        platform: name of the framework.
        op: canonical name, or a user's function.
        rule: of the operator, None for a user's function.
        samples: as declared.
        effort: how much is checked.
    """

    def __init__(
        self,
        report: OperatorReport,
        platform: str,
        op: str | UserOperator,
        rule: Rule | Decomposition | None,
        samples: Sequence[Sample],
        effort: Effort,
    ) -> None:
        self.report, self.op, self.rule, self.samples, self.effort = report, op, rule, samples, effort
        self.platform = platform_named(platform)
        self.claimed: dict[str, bool] = {}
        self.conditional = False
        self.covered = False
        self.chosen: Places | None = None
        self.absent: dict[str, set[Any]] = {}
        self.looked: dict[str, set[Any]] = {}
        self.patience = [_PATIENCE]
        self.offered: set[tuple[tuple[int, ...], str]] = set()
        self.shown: set[tuple[tuple[int, ...], str]] = set()
        self.until = time.process_time() + effort.seconds

    def run(self) -> None:
        """All samples; then what was claimed and never reached."""
        self.report.exempt = exemption(self.report.op) if not self.samples else ""
        if isinstance(self.rule, Rule):
            try:
                self.platform.local_op(self.rule.op)
            except (KeyError, UnsupportedOperatorError):
                self.report.absent = True
                return
        self._take_turns([self._sample(number, sample) for number, sample in enumerate(self.samples)])
        if self.effort.public and self.effort.public_meshes is None:
            self._show_rest()
        self.report.rows = len(self.shown)
        self.report.unshown.extend(f"{_mesh_text(mesh)}: {row}" for mesh, row in sorted(self.offered - self.shown))
        self.report.unexercised.extend(row for row, reached in self.claimed.items() if not reached)
        for text, held in self.absent.items():
            if held == self.looked[text.partition(":")[0]]:
                self.report.missing.append(text)

    def _take_turns(self, samples: list[Iterator[None]]) -> None:
        """The first sizes of every sample, whatever they cost; the next ones of each as long as there is time."""
        for turn in itertools.count():
            if not samples:
                return
            for one in list(samples):
                if turn and time.process_time() > self.until:
                    return
                if next(one, self) is self:
                    samples.remove(one)

    def _sample(self, number: int, sample: Sample) -> Iterator[None]:
        """One choice of sizes after the other."""
        exact = False
        for position, sizes in enumerate(self._sizes(sample)):
            skipped: list[str] = []
            cases: list[_Case] = []
            for integral in _modes(position, exact=exact):
                if cases and not self.effort.both:
                    break
                case = self._case(number, sample, sizes, skipped, integral=integral, first=position == 0)
                if case is not None:
                    cases.append(case)
            if position == 0:
                exact = any(case.reference.exact for case in cases)
            for again, case in enumerate(cases):
                # One element may be a whole number by accident.
                case.reference.exact = (case.reference.exact and exact) or sample.sharp
                self._check(case, again=bool(again))
            if not cases:
                self.report.skipped.update(skipped[:1])
            yield

    def _offers(self, case: _Case) -> set[str]:
        """Columns of the coverage matrix that placements of this case can have."""
        found = {"forward", "several axes"}
        differentiated = any(case.filled.wanted) and any(one is not None for one in case.reference.seeds)
        if differentiated:
            found.add("backward")
        strategies = self._strategies(case, (2,))
        if strategies is None:
            return found | offered_by_operands(case.filled.arrays)
        return found | offered(row for row in strategies.rows if possible(row, case.filled))

    def _strategies(self, case: _Case, shape: tuple[int, ...]) -> Strategies | None:
        """What the rule claims of the case, whole operands; None where it answers otherwise, or refuses."""
        if not isinstance(self.rule, Rule):
            return None
        problem = problem_of(self.platform, self.rule, case.filled, mesh_of(shape), case.reference.tensors)
        try:
            found = self.rule.strategies(problem.call)
        except (ValueError, HyperParallelError):
            return None
        return found if isinstance(found, Strategies) else None

    def _sizes(self, sample: Sample) -> Iterator[dict[str, int]]:
        """As many as are asked for, and some that leave ranks with nothing where a rule has a condition for that."""
        yield from size_choices(sample, self.effort.choices)
        if self.effort.choices < _EMPTY and self.conditional:
            yield from size_choices(sample, _EMPTY)[-1:]

    def _check(self, case: _Case, *, again: bool) -> None:
        """Both levels; a second set of values for the same sizes is no further check."""
        with self._sparing(case):
            if self.effort.rule_level and isinstance(self.rule, Rule):
                self._rule_level(case, self.rule, counts=not again)
            if self.effort.public and case.first:
                self._public(case, again=again)
            self.report.offers |= self._offers(case)

    @contextmanager
    def _sparing(self, case: _Case) -> Iterator[None]:
        """A rule that raises anything costs this sample."""
        try:
            yield
        except Enough:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it raises
            where = "".join(traceback.format_tb(error.__traceback__)[-2:])
            problem = f"{type(error).__name__}: {error}\n{where}"
            self.report.crash.append(Finding("rule", case.name, case.filled.sizes, (), "", problem))

    def _case(
        self,
        number: int,
        sample: Sample,
        sizes: dict[str, int],
        skipped: list[str],
        *,
        integral: bool,
        first: bool = False,
    ) -> _Case | None:
        """The plain run, in the first dtype that the framework serves; None where there is nothing to compare."""
        seed = seed_of(self.report.op, number, sorted(sizes.items()))
        problem = ""
        for differentiated, dtype in itertools.product((True, False), sample.dtypes):
            try:
                filled = fill(sample, sizes, dtype, seed, integral=integral, to_dtype=self.platform.str_to_dtype)
            except ValueError as error:  # sizes that its values do not have: the sample's own mistake
                self.report.crash.append(Finding("sample", f"sample {number}", sizes, (), "", f"ValueError: {error}"))
                return None
            if filled is None:
                return None
            if not differentiated:  # a framework may have the operator and not its gradient
                if not any(filled.wanted):
                    continue
                filled = replace(filled, wanted=(False,) * len(filled.wanted))
            try:
                reference = self._refer(sample, filled, np.random.default_rng([seed, 1]))
            except UnsupportedOperatorError:
                self.report.absent = True  # unless another sample can be computed
                return None
            except Exception as error:  # noqa: BLE001 - whatever a framework says to sizes or dtypes it does not take
                problem = problem or f"sample {number} has no plain result: {type(error).__name__}: {error}"
                continue
            if says_nothing(reference.outputs, constant=sample.constant):
                skipped.append(f"sample {number} gives outputs that say nothing")
                return None
            if not differentiated:
                self.report.skipped[f"gradients of {problem[:200]}"] += 1
            return _Case(number, sample, filled, reference, seed, first=first)
        skipped.append(problem[:200])
        return None

    def case(self, number: int, sample: Sample, sizes: dict[str, int], *, first: bool) -> _Case | None:
        """The plain run on small integers, or on real numbers where there are none."""
        for integral in (True, False):
            found = self._case(number, sample, sizes, [], integral=integral, first=first)
            if found is not None:
                return found
        return None

    def _refer(self, sample: Sample, filled: Filled, rng: Any) -> Reference:
        if isinstance(self.rule, Rule):
            return refer(self.platform, self.rule, sample, filled, rng)
        return plain_run(self.platform, operator(self.platform, self.op, sample), filled, rng)

    def only(self, number: int, sizes: dict[str, int], dtype: str, places: Places, *, integral: bool) -> None:
        """One sample, one choice of sizes, one mesh, one tuple of placements: both levels."""
        sample = replace(self.samples[number], dtypes=(dtype,))
        skipped: list[str] = []
        case = self._case(number, sample, sizes, skipped, integral=integral)
        if case is None:
            self.report.skipped.update(skipped)
            return
        self.chosen = places
        self.effort = replace(self.effort, reproducers=False)
        if isinstance(self.rule, Rule):
            self._rule_level(case, self.rule, counts=True)
        (shape,) = self.effort.meshes
        (outcome,) = check_public(self._job(case, shape, [places]), self.patience)
        self._note_public(case, shape, places, outcome, new=True)

    # -- rule level --------------------------------------------------------------------------------------------------

    def _rule_level(self, case: _Case, rule: Rule, *, counts: bool) -> None:
        calls = self._calls(case)
        for shape in self.effort.meshes:
            mesh = mesh_of(shape)
            problem = problem_of(self.platform, rule, case.filled, mesh, case.reference.tensors)
            try:
                strategies = rule.strategies(problem.call)
            except ValueError as error:
                self.report.rejected[f"{rule.op}: {error}"] += 1
                return
            if not isinstance(strategies, Strategies):
                return  # whole layouts: the public path checks those
            strategies = _closed(strategies, case)
            if not strategies.outputs:
                return  # a shape that only the call tells: likewise
            self.conditional = self.conditional or any(row.full for row in strategies.rows)
            for row in strategies.rows:
                self.claimed.setdefault(_row_text(row), False)
            bench = Bench(case.sample, calls, mesh)
            found = [one for one in self._claims(problem, strategies) if self.chosen in (None, one.places)]
            for start in range(0, len(found), _BATCH):
                self._batch(case, bench, found[start : start + _BATCH], counts=counts)
            if shape in ((2,), (3,)) and case.first and case.number < self.effort.missing:
                self._look_for_missing(case, bench, unclaimed(bench, problem, strategies))

    def _calls(self, case: _Case) -> Calls:
        return Calls(self.platform, case.reference, case.filled, case.seed)

    def _claims(self, problem: Problem, strategies: Strategies) -> Iterator[Claim]:
        return claims(problem, strategies)

    def _look_for_missing(self, case: _Case, bench: Bench, found: Iterator[Row]) -> None:
        """A row is missing if it holds for all values on both meshes."""
        mine = {f"{case.name}: {_row_text(row)}" for row in found}
        key = (bench.mesh.shape, case.filled.integral)
        for text in mine:
            self.absent.setdefault(text, set()).add(key)
        self.looked.setdefault(case.name, set()).add(key)

    def _batch(self, case: _Case, bench: Bench, batch: Sequence[Claim], *, counts: bool) -> None:
        for draw in range(self.effort.draws if case.first else 1):
            chosen = batch if draw == 0 else [one for one in batch if _partial(one)]
            if not chosen:
                return
            results = bench.run(chosen, draw)
            for row in {id(row): row for result in results for row in result.claim.rows}.values():
                self.claimed[_row_text(row)] = True
            for result in results:
                self._note(case, bench.mesh.shape, result, counts=counts and draw == 0)

    def _note(self, case: _Case, mesh: tuple[int, ...], result: Result, *, counts: bool) -> None:
        claim, report = result.claim, self.report
        if result.rejected:
            report.rejected[result.rejected[:300]] += 1
            return
        if counts:
            self._count(mesh, (*claim.choice.targets, *claim.choice.outputs), backward=result.backward)
        if result.crash or result.problems:
            kind = report.crash if result.crash else report.wrong
            problem = result.crash or result.problems[0]
            kind.append(self._finding("rule", case, mesh, claim.places, problem))
        elif counts:
            report.ok += 1

    def _count(self, mesh: tuple[int, ...], layouts: Sequence[Layout], *, backward: bool) -> None:
        report = self.report
        report.checks += 1
        report.backward += backward
        report.by_mesh[_mesh_text(mesh)] += 1
        self._count_features(mesh, layouts)

    def _count_features(self, mesh: tuple[int, ...], layouts: Sequence[Layout]) -> None:
        for feature in _features(mesh, layouts):
            self.report.features[feature] += 1

    def _finding(self, where: str, case: _Case, mesh: tuple[int, ...], places: Places, problem: str) -> Finding:
        text = ", ".join(str(list(one)) for one in places)
        source = ""
        if self.effort.reproducers and len(self.report.wrong) + len(self.report.crash) < _REPRODUCED:
            source = program(self.report.platform, self.op, case.number, case.sample, case.filled, mesh, places)
        return Finding(where, case.name, case.filled.sizes, mesh, text, problem, source)

    # -- public path -------------------------------------------------------------------------------------------------

    def _public(self, case: _Case, *, again: bool) -> None:
        """Integers first; averages that round only of real numbers, for integers lie where operators bend."""
        for shape in self.effort.public_meshes or self.effort.meshes:
            if not (case.first or self._lacking(shape)):
                continue
            claimed = list(dict.fromkeys(self._row_places(case, shape, again=again)))
            moved = self._moved_places(case, shape, set(claimed)) if self._moves(case, shape) else []
            places = [one for one in (*claimed, *moved) if _is_due(case, one, shape, again=again)]
            claimed = [one for one in claimed if one in places]
            if not places:
                continue
            for position, outcome in enumerate(check_public(self._job(case, shape, places), self.patience)):
                self._note_public(case, shape, places[position], outcome, new=position >= len(claimed))

    def _show_rest(self) -> None:
        """Rows whose conditions the first sizes did not meet on some mesh: other sizes may."""
        for number, sample in enumerate(self.samples):
            for sizes in size_choices(sample, _TRIED)[1:]:
                for integral in (True, False):
                    if self.offered <= self.shown:
                        return
                    case = self._case(number, sample, sizes, [], integral=integral)
                    if case is not None:
                        with self._sparing(case):
                            self._public(case, again=False)

    def _lacking(self, shape: tuple[int, ...]) -> bool:
        return any(mesh == shape for mesh, _ in self.offered - self.shown)

    def _job(self, case: _Case, shape: tuple[int, ...], places: Sequence[Places]) -> PublicJob:
        found = case.reference
        return PublicJob(
            self.report.platform, self.op, case.sample, case.filled, found.outputs, found.seeds, found.grads,
            found.exact, found.eps, shape, places, case.seed,
        )  # fmt: skip

    def _note_public(self, case: _Case, mesh: tuple[int, ...], places: Places, outcome: Outcome, *, new: bool) -> None:
        report = self.report
        if outcome.kind == "abandoned":
            report.skipped["placements not run on DTensors, after too many that failed"] += 1
            return
        if outcome.kind == "rejected":
            report.rejected[outcome.text[:300]] += 1
            return
        report.public += 1
        known = self.covered if self.effort.apart else self.effort.rule_level and bool(self.claimed)
        if new or not known:
            report.checks += 1
            report.backward += outcome.backward
            report.ok += outcome.kind == "ok"
            report.by_mesh[_mesh_text(mesh)] += 1
            self._count_features(mesh, _layouts(case, mesh, places))
        if outcome.kind != "ok":
            kind = report.wrong if outcome.kind == "wrong" else report.crash
            kind.append(self._finding("public", case, mesh, places, outcome.text))

    def _row_places(self, case: _Case, shape: tuple[int, ...], *, again: bool) -> Iterator[Places]:
        """Placements in which every row that no sample has shown on this mesh is used."""
        self.covered = False
        if not isinstance(self.rule, Rule):
            return
        problem = problem_of(self.platform, self.rule, case.filled, mesh_of(shape), case.reference.tensors)
        try:
            strategies = self.rule.strategies(problem.call)
        except (ValueError, HyperParallelError):
            return
        if not isinstance(strategies, Strategies):
            return
        rows = [row for row in dict.fromkeys(strategies.rows) if possible(row, case.filled)]
        self.offered |= {(shape, _row_text(row)) for row in rows}
        apart, self.covered = self.effort.apart, bool(_closed(strategies, case).outputs)
        for shift, both_new in (_SPARING if apart else _USUAL)[: None if len(shape) > 1 else 1]:
            for position, row in enumerate(rows):
                picked = (row, *(rows[(position + shift) % len(rows)] for _ in shape[1:]))
                fresh = {(shape, _row_text(one)) for one in picked} - self.shown
                if not (fresh or (again and not apart)) or (both_new and len(fresh) < len(picked)):
                    continue
                choice = combine(problem.call, strategies, picked, range(len(shape)))
                if choice is None or not commute(picked):
                    continue
                places = tuple(layout.placements for layout in choice.targets)
                if apart and not _is_due(case, places, shape, again=again):
                    continue  # the other values of this sample will show it
                self.shown |= fresh
                yield places

    def _moves(self, case: _Case, shape: tuple[int, ...]) -> bool:
        """Whether operands of this sample move on this mesh; what has no rows runs in no other way."""
        if not case.first:
            return False
        meshes = self.effort.public_meshes or self.effort.meshes
        return (
            not (self.effort.apart and isinstance(self.rule, Rule)) or shape == meshes[-1 - case.number % len(meshes)]
        )

    def _moved_places(self, case: _Case, shape: tuple[int, ...], known: set[Places]) -> list[Places]:
        """Further placements, drawn at random from all there are: operands have to move, or are refused."""
        rng = np.random.default_rng([case.seed, *shape])
        options = [_placements(array, len(shape)) for array in case.filled.arrays]
        total = math.prod(map(len, options))
        wanted = self.effort.moved
        if not isinstance(self.rule, Rule):  # there is no other way to run it
            wanted = 2 * wanted if self.effort.apart else max(6, 4 * wanted)
        if total <= wanted:
            return [one for one in itertools.product(*options) if one not in known]
        found: dict[Places, None] = {}
        for _ in range(4 * wanted):
            one = tuple(held[int(rng.integers(len(held)))] for held in options)
            if one not in known:
                found[one] = None
            if len(found) == wanted:
                break
        return list(found)


def _modes(position: int, *, exact: bool) -> tuple[bool, ...]:
    """Integers and real numbers at first; afterwards mostly integers where the operator is exact on them."""
    if position == 0:
        return (True, False)
    return (True,) if exact and position % 3 else (False,)


def _is_due(case: _Case, places: Places, shape: tuple[int, ...], *, again: bool) -> bool:
    """Averages that round are shown by real numbers, everything else by integers where there are some."""
    return again == _rounds(places, shape) or not (case.filled.integral or again)


def _rounds(places: Places, shape: tuple[int, ...]) -> bool:
    """True when an average over other than a power of two ranks is among ``places``."""
    return any(
        place == Partial("avg") and size & (size - 1)
        for held in places
        for place, size in zip(held, shape, strict=True)
    )


def _placements(array: Any, axes: int) -> list[tuple[Placement, ...]]:
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(array.ndim))]
    kinds += [Partial(op) for op in PARTIAL_OPS if allows(array, op)]
    found = itertools.product(kinds, repeat=axes)
    return [one for one in found if len({place for place in one if isinstance(place, Partial)}) <= 1]


def _layouts(case: _Case, mesh: tuple[int, ...], places: Places) -> list[Layout]:
    """Of the operands."""
    return [
        Layout.place(mesh_of(mesh), one, array.shape) for one, array in zip(places, case.filled.arrays, strict=True)
    ]


def _closed(strategies: Strategies, case: _Case) -> Strategies:
    """What an operator claims whose results only its values tell: as many as the plain call returned, all whole."""
    if not strategies.open:
        return strategies
    outputs = case.reference.outputs
    return Strategies((replicated_row(len(case.filled.arrays), len(outputs)),), tuple(one.shape for one in outputs))


def _partial(claim: Claim) -> bool:
    return any(layout.partials for layout in claim.choice.targets)


def _mesh_text(mesh: tuple[int, ...]) -> str:
    return "x".join(map(str, mesh))


def _row_text(row: Row) -> str:
    outputs = row.outputs[:1] if len(set(row.outputs)) == 1 else row.outputs
    return f"{', '.join(map(str, row.inputs))} -> {', '.join(map(str, outputs))}"


def _features(mesh: tuple[int, ...], layouts: Sequence[Layout]) -> Iterator[str]:
    if len(mesh) > 1:
        yield "several axes"
    yield from dict.fromkeys(feature for layout in layouts for feature in _layout_features(layout))


@lru_cache(maxsize=4096)
def _layout_features(layout: Layout) -> tuple[str, ...]:
    found = ["partial"] if layout.partials else []
    if any(size % layout.shard_count(dim) for dim, size in enumerate(layout.shape or ())):
        found.append("uneven")
    if any(layout.dim_axes) and 0 in layout.local_shape_at(list(coordinates(layout.mesh))[-1]):
        found.append("empty")
    return tuple(found)
