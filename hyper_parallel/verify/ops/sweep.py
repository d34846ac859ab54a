"""One operator on one framework: all samples, all meshes, all claimed placements, and the public path."""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.rule import Decomposition, Row, Rule, Strategies, find_rule
from hyper_parallel.core.shard.sample import Sample, exemption, samples_of
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import platform_named, use_platform
from hyper_parallel.verify.ops.claims import (
    Claim,
    SampleCall,
    bind_sample,
    claimed,
    claims,
    closed,
    mesh_of,
    possible,
    row_text,
)
from hyper_parallel.verify.ops.compare import says_nothing
from hyper_parallel.verify.ops.dtensor_check import DTensorJob, DTensorResult, Places, check_on_dtensors, operator
from hyper_parallel.verify.ops.local_calls import CallCache
from hyper_parallel.verify.ops.local_check import LocalChecker, LocalResult, unclaimed
from hyper_parallel.verify.ops.reference import Case, Reference, plain_run, refer
from hyper_parallel.verify.ops.report import FailedCheck, OperatorReport
from hyper_parallel.verify.ops.reproduce import program
from hyper_parallel.verify.ops.selection import Effort, PlacementChooser, features, offered, offered_by_operands
from hyper_parallel.verify.ops.user_operators import UserOperator, load_user_file, samples_of_user
from hyper_parallel.verify.ops.values import FilledSample, fill, seed_of, size_choices

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.placements import Placement

__all__ = ["StopSweep", "Sweep", "check_one", "sweep_operator", "sweep_user_operator"]

_BATCH = 24
_REPRODUCED = 3
_PATIENCE = 12
_TRIED = 12  # choices of sizes for rows that have a condition
_EMPTY = 3  # among so many choices of sizes one leaves some rank with nothing, of every dim


class StopSweep(Exception):  # noqa: N818 - no error
    """Raised by who needs to know no more of a sweep."""


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


def check_one(
    platform: str,
    op: str,
    *,
    sample: int,
    sizes: dict[str, int],
    mesh: Sequence[int],
    places: Sequence[Sequence[Placement]],
    integral: bool = True,
    dtype: str = "float64",
    file: str | None = None,
) -> OperatorReport:
    """Check operator ``op`` on one of its samples, with these sizes, on one mesh, in one tuple of placements.

    Args:
        platform: ``torch`` or ``mindspore``.
        op: canonical name, or that of a function of ``file``.
        sample: its number.
        sizes: of the sample's letters.
        mesh: shape.
        places: per operand a placement per axis.
        integral: small integers instead of real numbers.
        dtype: floating dtype.
        file: a user's file.
    """
    report = OperatorReport(op, platform)
    platform_named(platform)
    what: str | UserOperator = op
    rule, samples = find_rule(op), samples_of(op)
    if file is not None:
        user = load_user_file(platform, file)[op]
        what, rule, samples = user, None, samples_of_user(user)
    with use_platform(platform):
        sweep = Sweep(report, platform, what, rule, samples, Effort(meshes=(tuple(mesh),)))
        sweep.only(sample, sizes, dtype, tuple(tuple(one) for one in places), integral=integral)
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
        self.chooser = PlacementChooser(self.platform, rule, effort)
        self.claimed: dict[str, bool] = {}
        self.conditional = False
        self.chosen: Places | None = None
        self.absent: dict[str, set[Any]] = {}
        self.looked: dict[str, set[Any]] = {}
        self.patience = [_PATIENCE]
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
        self.report.rows = len(self.chooser.shown)
        self.report.unshown.extend(
            f"{_mesh_text(mesh)}: {row}" for mesh, row in sorted(self.chooser.offered - self.chooser.shown)
        )
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
            cases: list[Case] = []
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
                case.reference.exact = (case.reference.exact and exact) or sample.exact
                self._check(case, again=bool(again))
            if not cases:
                self.report.skipped.update(skipped[:1])
            yield

    def _offers(self, case: Case) -> set[str]:
        """Columns of the coverage matrix that placements of this case can have."""
        found = {"forward", "several axes"}
        differentiated = any(case.filled.wanted) and any(one is not None for one in case.reference.seeds)
        if differentiated:
            found.add("backward")
        rows = claimed(self.platform, self.rule, case, (2,))
        if rows is None:
            return found | offered_by_operands(case.filled.arrays)
        return found | offered(row for row in rows[1].rows if possible(row, case.filled))

    def _sizes(self, sample: Sample) -> Iterator[dict[str, int]]:
        """As many as are asked for, and some that leave ranks with nothing where a rule has a condition for that."""
        yield from size_choices(sample, self.effort.choices)
        if self.effort.choices < _EMPTY and self.conditional:
            yield from size_choices(sample, _EMPTY)[-1:]

    def _check(self, case: Case, *, again: bool) -> None:
        """Both levels; a second set of values for the same sizes is no further check."""
        with self._sparing(case):
            if self.effort.rule_level and isinstance(self.rule, Rule):
                self._rule_level(case, self.rule, counts=not again)
            if self.effort.public and case.first:
                self._public(case, again=again)
            self.report.offers |= self._offers(case)

    @contextmanager
    def _sparing(self, case: Case) -> Iterator[None]:
        """A rule that raises anything costs this sample."""
        try:
            yield
        except StopSweep:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it raises
            where = "".join(traceback.format_tb(error.__traceback__)[-2:])
            problem = f"{type(error).__name__}: {error}\n{where}"
            self.report.crash.append(FailedCheck("rule", case.name, case.filled.sizes, (), "", problem))

    def _case(
        self,
        number: int,
        sample: Sample,
        sizes: dict[str, int],
        skipped: list[str],
        *,
        integral: bool,
        first: bool = False,
    ) -> Case | None:
        """The plain run, in the first dtype that the framework serves; None where there is nothing to compare."""
        seed = seed_of(self.report.op, number, sorted(sizes.items()))
        problem = ""
        for differentiated, dtype in itertools.product((True, False), sample.dtypes):
            try:
                filled = fill(sample, sizes, dtype, seed, integral=integral, to_dtype=self.platform.str_to_dtype)
            except ValueError as error:  # sizes that its values do not have: the sample's own mistake
                self.report.crash.append(
                    FailedCheck("sample", f"sample {number}", sizes, (), "", f"ValueError: {error}")
                )
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
            return Case(number, sample, filled, reference, seed, first=first)
        skipped.append(problem[:200])
        return None

    def case(self, number: int, sample: Sample, sizes: dict[str, int], *, first: bool) -> Case | None:
        """The plain run on small integers, or on real numbers where there are none."""
        for integral in (True, False):
            found = self._case(number, sample, sizes, [], integral=integral, first=first)
            if found is not None:
                return found
        return None

    def _refer(self, sample: Sample, filled: FilledSample, rng: Any) -> Reference:
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
        (outcome,) = check_on_dtensors(self._job(case, shape, [places]), self.patience)
        self._note_public(case, shape, places, outcome, new=True)

    # -- rule level --------------------------------------------------------------------------------------------------

    def _rule_level(self, case: Case, rule: Rule, *, counts: bool) -> None:
        calls = self._calls(case)
        for shape in self.effort.meshes:
            mesh = mesh_of(shape)
            problem = bind_sample(self.platform, rule, case.filled, mesh, case.reference.tensors)
            try:
                strategies = rule.strategies(problem.call)
            except ValueError as error:
                self.report.rejected[f"{rule.op}: {error}"] += 1
                return
            if not isinstance(strategies, Strategies):
                return  # whole layouts: the public path checks those
            strategies = closed(strategies, case)
            if not strategies.outputs:
                return  # a shape that only the call tells: likewise
            self.conditional = self.conditional or any(row.full for row in strategies.rows)
            for row in strategies.rows:
                self.claimed.setdefault(row_text(row), False)
            bench = LocalChecker(case.sample, calls, mesh)
            found = [one for one in self._claims(problem, strategies) if self.chosen in (None, one.places)]
            for start in range(0, len(found), _BATCH):
                self._batch(case, bench, found[start : start + _BATCH], counts=counts)
            if shape in ((2,), (3,)) and case.first and case.number < self.effort.missing:
                self._look_for_missing(case, bench, unclaimed(bench, problem, strategies))

    def _calls(self, case: Case) -> CallCache:
        return CallCache(self.platform, case.reference, case.filled, case.seed)

    def _claims(self, problem: SampleCall, strategies: Strategies) -> Iterator[Claim]:
        return claims(problem, strategies)

    def _look_for_missing(self, case: Case, bench: LocalChecker, found: Iterator[Row]) -> None:
        """A row is missing if it holds for all values on both meshes."""
        mine = dict.fromkeys(f"{case.name}: {row_text(row)}" for row in found)
        key = (bench.mesh.shape, case.filled.integral)
        for text in mine:
            self.absent.setdefault(text, set()).add(key)
        self.looked.setdefault(case.name, set()).add(key)

    def _batch(self, case: Case, bench: LocalChecker, batch: Sequence[Claim], *, counts: bool) -> None:
        for draw in range(self.effort.draws if case.first else 1):
            chosen = batch if draw == 0 else [one for one in batch if _partial(one)]
            if not chosen:
                return
            results = bench.run(chosen, draw)
            for row in {id(row): row for result in results for row in result.claim.rows}.values():
                self.claimed[row_text(row)] = True
            for result in results:
                self._note(case, bench.mesh.shape, result, counts=counts and draw == 0)

    def _note(self, case: Case, mesh: tuple[int, ...], result: LocalResult, *, counts: bool) -> None:
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
        for feature in features(mesh, layouts):
            self.report.features[feature] += 1

    def _finding(self, where: str, case: Case, mesh: tuple[int, ...], places: Places, problem: str) -> FailedCheck:
        text = ", ".join(str(list(one)) for one in places)
        source = ""
        if self.effort.reproducers and len(self.report.wrong) + len(self.report.crash) < _REPRODUCED:
            source = program(self.report.platform, self.op, case.number, case.sample, case.filled, mesh, places)
        return FailedCheck(where, case.name, case.filled.sizes, mesh, text, problem, source)

    # -- public path -------------------------------------------------------------------------------------------------

    def _public(self, case: Case, *, again: bool) -> None:
        """Integers first; averages that round only of real numbers, for integers lie where operators bend."""
        for shape in self.effort.public_meshes or self.effort.meshes:
            if not (case.first or self.chooser.lacking(shape)):
                continue
            places, rows = self.chooser.places(case, shape, again=again)
            if not places:
                continue
            for position, outcome in enumerate(check_on_dtensors(self._job(case, shape, places), self.patience)):
                self._note_public(case, shape, places[position], outcome, new=position >= rows)

    def _show_rest(self) -> None:
        """Rows whose conditions the first sizes did not meet on some mesh: other sizes may."""
        for number, sample in enumerate(self.samples):
            for sizes in size_choices(sample, _TRIED)[1:]:
                for integral in (True, False):
                    if self.chooser.offered <= self.chooser.shown:
                        return
                    case = self._case(number, sample, sizes, [], integral=integral)
                    if case is not None:
                        with self._sparing(case):
                            self._public(case, again=False)

    def _job(self, case: Case, shape: tuple[int, ...], places: Sequence[Places]) -> DTensorJob:
        found = case.reference
        return DTensorJob(
            self.report.platform, self.op, case.sample, case.filled, found.outputs, found.seeds, found.grads,
            found.exact, found.eps, shape, places, case.seed,
        )  # fmt: skip

    def _note_public(
        self, case: Case, mesh: tuple[int, ...], places: Places, outcome: DTensorResult, *, new: bool
    ) -> None:
        report = self.report
        if outcome.kind == "abandoned":
            report.skipped["placements not run on DTensors, after too many that failed"] += 1
            return
        if outcome.kind == "rejected":
            report.rejected[outcome.text[:300]] += 1
            return
        report.public += 1
        known = self.chooser.covered if self.effort.apart else self.effort.rule_level and bool(self.claimed)
        if new or not known:
            report.checks += 1
            report.backward += outcome.backward
            report.ok += outcome.kind == "ok"
            report.by_mesh[_mesh_text(mesh)] += 1
            self._count_features(mesh, _layouts(case, mesh, places))
        if outcome.kind != "ok":
            kind = report.wrong if outcome.kind == "wrong" else report.crash
            kind.append(self._finding("public", case, mesh, places, outcome.text))


def _modes(position: int, *, exact: bool) -> tuple[bool, ...]:
    """Integers and real numbers at first; afterwards mostly integers where the operator is exact on them."""
    if position == 0:
        return (True, False)
    return (True,) if exact and position % 3 else (False,)


def _partial(claim: Claim) -> bool:
    return any(layout.partials for layout in claim.choice.targets)


def _layouts(case: Case, mesh: tuple[int, ...], places: Places) -> list[Layout]:
    """Of the operands."""
    return [
        Layout.place(mesh_of(mesh), one, array.shape) for one, array in zip(places, case.filled.arrays, strict=True)
    ]


def _mesh_text(mesh: tuple[int, ...]) -> str:
    return "x".join(map(str, mesh))
