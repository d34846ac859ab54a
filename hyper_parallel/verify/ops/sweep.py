"""Checks one operator on one framework: all samples, meshes and claimed placements, on two levels.

The rule level runs local calls on plain tensors in one process; the public level runs DTensors on simulated ranks.
"""

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
from hyper_parallel.verify.attempt import Raised, attempt
from hyper_parallel.verify.checker.checker import Places
from hyper_parallel.verify.checker.difference import is_uninformative
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.ops.claims import (
    Claim,
    SampleCall,
    bind_sample,
    case_strategies,
    claims,
    fits_values,
    mesh_of,
    row_text,
    with_known_outputs,
)
from hyper_parallel.verify.ops.dtensor_check import DTensorJob, DTensorResult, check_on_dtensors, operator
from hyper_parallel.verify.ops.local_calls import CallCache
from hyper_parallel.verify.ops.local_check import LocalChecker, LocalResult, unclaimed_rows
from hyper_parallel.verify.ops.reference import Case, Reference, function_reference, rule_reference
from hyper_parallel.verify.ops.report import FailedCheck, OperatorReport
from hyper_parallel.verify.ops.reproduce import program
from hyper_parallel.verify.ops.selection import Effort, PlacementChooser, layout_features, operand_columns, row_columns
from hyper_parallel.verify.ops.user_operators import UserOperator, load_user_file, samples_of_user
from hyper_parallel.verify.ops.values import FilledSample, fill, seed_of, size_choices
from hyper_parallel.verify.spec import error_summary

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.placements import Placement

__all__ = ["Sweep", "SweepEndError", "check_one", "sweep_operator", "sweep_user_operator"]

_BATCH = 24  # claims per backward pass
_REPRODUCED = 3
_MAX_FAILURES = 12
_CONDITION_CHOICES = 12  # maximum number of choices of sizes that are tried to meet the conditions of rows
_EMPTY_CHOICES = 3  # number of choices of sizes among which, for every dim, one gives some rank an empty shard


class SweepEndError(Exception):
    """Raised to end a sweep early."""


def sweep_operator(platform: str, op: str, effort: Effort) -> OperatorReport:
    """Check canonical operator ``op`` on ``platform``."""
    started = time.monotonic()
    report = OperatorReport(op, platform)
    with use_platform(platform), harness_of(platform_named(platform)).on_device(effort.device):
        Sweep(report, platform, op, find_rule(op), samples_of(op), effort).run()
    report.seconds = time.monotonic() - started
    return report


def sweep_user_operator(platform: str, user: UserOperator, effort: Effort) -> OperatorReport:
    """Check a user's function on DTensors: every placement of every operand, unless there are too many."""
    started = time.monotonic()
    report = OperatorReport(user.name, platform)
    with use_platform(platform), harness_of(platform_named(platform)).on_device(effort.device):
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
    device: str = "cpu",
) -> OperatorReport:
    """Check operator ``op`` on one of its samples, with these sizes, on one mesh, in one tuple of placements.

    Args:
        platform: ``torch`` or ``mindspore``.
        op: canonical name, or the name of a function of ``file``.
        sample: number of the sample.
        sizes: sizes of the sample's letters.
        mesh: shape of the mesh.
        places: one placement per axis, for each operand.
        integral: whether values are small integers instead of real numbers.
        dtype: floating dtype.
        file: a user's file.
        device: device that the reference and the ranks compute on.
    """
    report = OperatorReport(op, platform)
    platform_named(platform)
    function: str | UserOperator = op
    rule, samples = find_rule(op), samples_of(op)
    if file is not None:
        user = load_user_file(platform, file)[op]
        function, rule, samples = user, None, samples_of_user(user)
    with use_platform(platform), harness_of(platform_named(platform)).on_device(device):
        effort = Effort(meshes=(tuple(mesh),), device=device)
        sweep = Sweep(report, platform, function, rule, samples, effort)
        sweep.check_one(sample, sizes, dtype, tuple(map(tuple, places)), integral=integral)
    return report


class Sweep:
    """Checks one operator's samples on both levels.

    Args:
        report: receives the results.
        platform: name of the framework.
        op: canonical name, or a user's function.
        rule: rule of the operator, None for a user's function.
        samples: the operator's samples, as declared.
        effort: amount of checking.
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
        self.claimed: dict[str, bool] = {}  # whether a check reached the row, by row
        self.has_conditions = False
        self.only_places: Places | None = None
        self.unclaimed: dict[str, set[Any]] = {}  # by unclaimed row: meshes and values on which the row is valid
        self.searched: dict[str, set[Any]] = {}  # by sample: meshes and values that were searched for such rows
        self.max_failures = [_MAX_FAILURES]
        self.deadline = time.process_time() + effort.seconds

    def run(self) -> None:
        """Check all samples, and list the claims that no check reached."""
        self.report.exempt = exemption(self.report.op) if not self.samples else ""
        if isinstance(self.rule, Rule):
            module = self.rule.strategies.__module__.removeprefix("hyper_parallel.")
            self.report.rule = f"{self.rule.op}({self.rule.signature}) in {module}"
            try:
                self.platform.local_op(self.rule.op)
            except (KeyError, UnsupportedOperatorError):
                self.report.absent = True
                return
        self._take_turns([self._check_sample(number, sample) for number, sample in enumerate(self.samples)])
        if self.effort.public and self.effort.public_meshes is None:
            self._show_conditional_rows()
        self.report.rows = len(self.chooser.shown)
        self.report.unshown.extend(
            f"{_mesh_text(mesh)}: {row}" for mesh, row in sorted(self.chooser.available - self.chooser.shown)
        )
        self.report.unexercised.extend(row for row, reached in self.claimed.items() if not reached)
        for row, holds_on in self.unclaimed.items():
            if holds_on == self.searched[row.partition(":")[0]]:
                self.report.missing.append(row)

    def _take_turns(self, samples: list[Iterator[None]]) -> None:
        """Check the first sizes of every sample even after the deadline; check further sizes only before it."""
        for turn in itertools.count():
            if not samples:
                return
            for sample in list(samples):
                if turn and time.process_time() > self.deadline:
                    return
                if next(sample, self) is self:
                    samples.remove(sample)

    def _check_sample(self, number: int, sample: Sample) -> Iterator[None]:
        """Check the sample with one choice of sizes after the other, and yield after each choice."""
        exact = False
        for position, sizes in enumerate(self._sizes(sample)):
            skipped: list[str] = []
            cases: list[Case] = []
            for integral in _value_modes(position, exact=exact):
                if cases and not self.effort.both_values:
                    break
                case = self._make_case(number, sample, sizes, skipped, integral=integral, first=position == 0)
                if case is not None:
                    cases.append(case)
            if position == 0:
                exact = any(case.reference.exact for case in cases)
            for again, case in enumerate(cases):
                # A result of one element may be an integer by chance.
                case.reference.exact = (case.reference.exact and exact) or sample.exact
                self._check_case(case, again=bool(again))
            if not cases:
                self.report.skipped.update(skipped[:1])
            yield

    def _columns(self, case: Case) -> set[str]:
        """Return the columns of the coverage matrix that checks of this case can cover."""
        columns = {"forward", "several axes"}
        has_cotangent = any(cotangent is not None for cotangent in case.reference.cotangents)
        if any(case.filled.requires_grad) and has_cotangent:
            columns.add("backward")
        claimed = case_strategies(self.platform, self.rule, case, (2,))
        if claimed is None:
            return columns | operand_columns(case.filled.arrays)
        return columns | row_columns(row for row in claimed[1].rows if fits_values(row, case.filled))

    def _sizes(self, sample: Sample) -> Iterator[dict[str, int]]:
        """Yield the choices of sizes, and one more with empty shards if a row has a condition that excludes them."""
        yield from size_choices(sample, self.effort.choices)
        if self.effort.choices < _EMPTY_CHOICES and self.has_conditions:
            yield from size_choices(sample, _EMPTY_CHOICES)[-1:]

    def _check_case(self, case: Case, *, again: bool) -> None:
        """Check a case on both levels; checks of a second set of values for the same sizes are not counted."""
        with self._crash_is_reported(case):
            if self.effort.rule_level and isinstance(self.rule, Rule):
                self._check_rule_level(case, self.rule, counts=not again)
            if self.effort.public and case.first:
                self._check_public(case, again=again)
            self.report.offers |= self._columns(case)

    @contextmanager
    def _crash_is_reported(self, case: Case) -> Iterator[None]:
        """Report an exception inside this context as a crash of this case, so that other cases are still checked."""
        try:
            yield
        except SweepEndError:
            raise
        except Exception as error:  # noqa: BLE001 - a rule may raise anything
            traceback_end = "".join(traceback.format_tb(error.__traceback__)[-2:])
            problem = f"{type(error).__name__}: {error}\n{traceback_end}"
            self.report.crash.append(FailedCheck("rule", case.name, case.filled.sizes, (), "", problem))

    def _make_case(
        self,
        number: int,
        sample: Sample,
        sizes: dict[str, int],
        skipped: list[str],
        *,
        integral: bool,
        first: bool = False,
    ) -> Case | None:
        """Compute the reference in the first dtype that the framework supports; None if there is nothing to compare."""
        own = [self.effort.seed] if self.effort.seed else []
        seed = seed_of(*own, self.report.op, number, sorted(sizes.items()))
        problem = ""
        for differentiated, dtype in itertools.product((True, False), sample.dtypes):
            try:
                rng, to_dtype = self.draws(seed, integral), self.platform.str_to_dtype
                filled = fill(sample, sizes, dtype, seed, integral=integral, to_dtype=to_dtype, rng=rng)
            except ValueError as error:  # the sample has no values for these sizes, which is a defect of the sample
                failed = FailedCheck("sample", f"sample {number}", sizes, (), "", f"ValueError: {error}")
                self.report.crash.append(failed)
                return None
            if filled is None:
                return None
            if not differentiated:  # a framework may implement the operator but not its gradient
                if not any(filled.requires_grad):
                    continue
                filled = replace(filled, requires_grad=(False,) * len(filled.requires_grad))
            reference = attempt(self._reference, sample, filled, self.draws(seed, 1))
            if isinstance(reference, Raised):
                if isinstance(reference.error, UnsupportedOperatorError):
                    self.report.absent = True  # unless another sample can be computed
                    return None
                problem = problem or f"sample {number} has no plain result: {error_summary(reference.error)}"
                continue
            if is_uninformative(reference.outputs, constant=sample.constant):
                skipped.append(f"sample {number} has outputs that a wrong result could equal")
                return None
            if not differentiated:
                self.report.skipped[f"gradients of {problem[:200]}"] += 1
            return Case(number, sample, filled, reference, seed, first=first)
        skipped.append(problem[:200])
        return None

    def draws(self, *seed: int) -> Any:
        """Return the generator of the values of operands and cotangents."""
        return np.random.default_rng(seed)

    def case(self, number: int, sample: Sample, sizes: dict[str, int], *, first: bool) -> Case | None:
        """Return a sample with values and reference: small integers if the sample supports them, else real numbers."""
        for integral in (True, False):
            case = self._make_case(number, sample, sizes, [], integral=integral, first=first)
            if case is not None:
                return case
        return None

    def _reference(self, sample: Sample, filled: FilledSample, rng: Any) -> Reference:
        if isinstance(self.rule, Rule):
            return rule_reference(self.platform, self.rule, sample, filled, rng)
        return function_reference(self.platform, operator(self.platform, self.op, sample), filled, rng)

    def check_one(self, number: int, sizes: dict[str, int], dtype: str, places: Places, *, integral: bool) -> None:
        """Check one sample with one choice of sizes, on one mesh, in one tuple of placements, on both levels."""
        sample = replace(self.samples[number], dtypes=(dtype,))
        skipped: list[str] = []
        case = self._make_case(number, sample, sizes, skipped, integral=integral)
        if case is None:
            self.report.skipped.update(skipped)
            return
        self.only_places = places
        self.effort = replace(self.effort, reproducers=False)
        if isinstance(self.rule, Rule):
            self._check_rule_level(case, self.rule, counts=True)
        (shape,) = self.effort.meshes
        (result,) = check_on_dtensors(self._dtensor_job(case, shape), [places], self.max_failures)
        self._add_public(case, shape, places, result, new=True)

    # -- rule level --------------------------------------------------------------------------------------------------

    def _check_rule_level(self, case: Case, rule: Rule, *, counts: bool) -> None:
        calls = self._call_cache(case)
        for shape in self.effort.meshes:
            mesh = mesh_of(shape)
            sample_call = bind_sample(self.platform, rule, case.filled, mesh, case.reference.tensors)
            try:
                strategies = rule.strategies(sample_call.call)
            except ValueError as error:
                self.report.rejected[f"{rule.op}: {error}"] += 1
                return
            if not isinstance(strategies, Strategies):
                return  # layouts of the mesh instead of rows; the public path checks them
            strategies = with_known_outputs(strategies, case)
            if not strategies.outputs:
                return  # only the call determines the shape; the public path checks it
            self.has_conditions = self.has_conditions or any(row.full for row in strategies.rows)
            for row in strategies.rows:
                self.claimed.setdefault(row_text(row), False)
            checker = LocalChecker(case.sample, calls, mesh)
            chosen = [
                claim for claim in self._claims(sample_call, strategies) if self.only_places in (None, claim.places)
            ]
            for start in range(0, len(chosen), _BATCH):
                self._check_batch(case, checker, chosen[start : start + _BATCH], counts=counts)
            if shape in ((2,), (3,)) and case.first and case.number < self.effort.missing:
                self._add_unclaimed(case, checker, unclaimed_rows(checker, sample_call, strategies))

    def _call_cache(self, case: Case) -> CallCache:
        return CallCache(self.platform, case.reference, case.filled, case.seed)

    def _claims(self, sample_call: SampleCall, strategies: Strategies) -> Iterator[Claim]:
        return claims(sample_call, strategies)

    def _add_unclaimed(self, case: Case, checker: LocalChecker, rows: Iterator[Row]) -> None:
        """Record valid rows; ``run`` reports a row as missing if it is valid on all meshes and values of its sample."""
        texts = dict.fromkeys(f"{case.name}: {row_text(row)}" for row in rows)
        key = (checker.mesh.shape, case.filled.integral)
        for text in texts:
            self.unclaimed.setdefault(text, set()).add(key)
        self.searched.setdefault(case.name, set()).add(key)

    def _check_batch(self, case: Case, checker: LocalChecker, batch: Sequence[Claim], *, counts: bool) -> None:
        for split in range(self.effort.splits if case.first else 1):
            chosen = batch if split == 0 else [claim for claim in batch if _takes_partial(claim)]
            if not chosen:
                return
            results = checker.run(chosen, split)
            for row in {id(row): row for result in results for row in result.claim.rows}.values():
                self.claimed[row_text(row)] = True
            for result in results:
                self._add_local(case, checker.mesh.shape, result, counts=counts and split == 0)

    def _add_local(self, case: Case, mesh: tuple[int, ...], result: LocalResult, *, counts: bool) -> None:
        claim, report = result.claim, self.report
        if result.rejected:
            report.rejected[result.rejected[:300]] += 1
            return
        if counts:
            self._count(case, mesh, (*claim.choice.targets, *claim.choice.outputs), backward=result.backward)
        if result.crash or result.problems:
            failures = report.crash if result.crash else report.wrong
            problem = result.crash or result.problems[0]
            failures.append(self._failed_check("rule", case, mesh, claim.places, problem))
        elif counts:
            report.ok += 1

    def _count(self, case: Case, mesh: tuple[int, ...], layouts: Sequence[Layout], *, backward: bool) -> None:
        report = self.report
        report.checks += 1
        report.backward += backward
        report.by_mesh[_mesh_text(mesh)] += 1
        report.by_sample[case.name] += 1
        if len(mesh) == 1:
            report.by_placement[", ".join(str(layout.placement_on(0)) for layout in layouts)] += 1
        for feature in layout_features(mesh, layouts):
            report.features[feature] += 1

    def _failed_check(self, level: str, case: Case, mesh: tuple[int, ...], places: Places, problem: str) -> FailedCheck:
        text = ", ".join(str(list(placements)) for placements in places)
        source = ""
        if self.effort.reproducers and len(self.report.wrong) + len(self.report.crash) < _REPRODUCED:
            source = program(
                self.report.platform, self.op, case.number, case.sample, case.filled, mesh, places, self.effort.device
            )
        return FailedCheck(level, case.name, case.filled.sizes, mesh, text, problem, source)

    # -- public path -------------------------------------------------------------------------------------------------

    def _check_public(self, case: Case, *, again: bool) -> None:
        """Check placements on DTensors; averages that round are checked on real numbers (see :func:`is_due`)."""
        for shape in self.effort.public_meshes or self.effort.meshes:
            if not (case.first or self.chooser.has_unshown(shape)):
                continue
            places, rows = self.chooser.places(case, shape, again=again)
            if not places:
                continue
            results = check_on_dtensors(self._dtensor_job(case, shape), places, self.max_failures)
            for position, result in enumerate(results):
                self._add_public(case, shape, places[position], result, new=position >= rows)

    def _show_conditional_rows(self) -> None:
        """Run rows with other sizes if the first sizes did not meet their conditions on some mesh."""
        for number, sample in enumerate(self.samples):
            for sizes in size_choices(sample, _CONDITION_CHOICES)[1:]:
                for integral in (True, False):
                    if self.chooser.available <= self.chooser.shown:
                        return
                    case = self._make_case(number, sample, sizes, [], integral=integral)
                    if case is not None:
                        with self._crash_is_reported(case):
                            self._check_public(case, again=False)

    def _dtensor_job(self, case: Case, shape: tuple[int, ...]) -> DTensorJob:
        return DTensorJob(
            self.report.platform, self.op, case.sample, case.filled, case.reference.expected, shape, case.seed,
            self.effort.device,
        )  # fmt: skip

    def _add_public(
        self, case: Case, mesh: tuple[int, ...], places: Places, result: DTensorResult, *, new: bool
    ) -> None:
        report, effort = self.report, self.effort
        if result.outcome == "abandoned":
            report.skipped["placements not run on DTensors, after too many that failed"] += 1
            return
        if result.outcome == "rejected":
            report.rejected[result.text[:300]] += 1
            return
        report.public += 1
        known = self.chooser.rule_level_covers if effort.separate else effort.rule_level and bool(self.claimed)
        if new or not known:
            self._count(case, mesh, _operand_layouts(case, mesh, places), backward=result.backward)
            report.ok += result.outcome == "ok"
        if result.outcome != "ok":
            failures = report.wrong if result.outcome == "wrong" else report.crash
            failures.append(self._failed_check("public", case, mesh, places, result.text))


def _value_modes(position: int, *, exact: bool) -> tuple[bool, ...]:
    """Return whether to use integers (True) or real numbers: both for the first sizes, then mostly one of them."""
    if position == 0:
        return (True, False)
    return (True,) if exact and position % 3 else (False,)


def _takes_partial(claim: Claim) -> bool:
    return any(layout.partials for layout in claim.choice.targets)


def _operand_layouts(case: Case, mesh: tuple[int, ...], places: Places) -> list[Layout]:
    return [
        Layout.place(mesh_of(mesh), placements, array.shape)
        for placements, array in zip(places, case.filled.arrays, strict=True)
    ]


def _mesh_text(mesh: tuple[int, ...]) -> str:
    return "x".join(map(str, mesh))
