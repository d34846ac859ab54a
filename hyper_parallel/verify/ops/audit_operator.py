"""Audits one operator: calls every sample by its public function, in many placements, on simulated ranks."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel._tree import as_list
from hyper_parallel.core.dtensor.placements import Placement, Replicate
from hyper_parallel.core.shard.entry import binder
from hyper_parallel.core.shard.rule import find_rule
from hyper_parallel.core.shard.sample import exemption, samples_of
from hyper_parallel.errors import CollectiveMismatchError, UnsupportedOperatorError
from hyper_parallel.platform.select import use_platform
from hyper_parallel.transport.base import active_transport
from hyper_parallel.transport.simulated.endpoint import RankAbortedError
from hyper_parallel.verify.attempt import Raised, attempt
from hyper_parallel.verify.checker.batch import Failed, World, run_batch
from hyper_parallel.verify.checker.checker import DistributedTensors, PlacementChecker
from hyper_parallel.verify.checker.choices import possible_placements
from hyper_parallel.verify.ops.audit import OUTCOMES, TARGETS, WORLDS, AuditFinding, OperatorAudit
from hyper_parallel.verify.ops.claims import mesh_of
from hyper_parallel.verify.ops.reference import Reference, function_reference
from hyper_parallel.verify.ops.report import OperatorReport
from hyper_parallel.verify.ops.selection import QUICK
from hyper_parallel.verify.ops.sweep import Sweep
from hyper_parallel.verify.ops.values import seed_of, size_choices

if TYPE_CHECKING:
    from hyper_parallel.core.shard.sample import Sample
    from hyper_parallel.verify.checker.checker import Operand
    from hyper_parallel.verify.ops.reference import Case
    from hyper_parallel.verify.ops.values import FilledSample

__all__ = ["audit_operator"]

_CHOICES = 2  # choices of sizes per sample
_MOST = 24  # tuples of placements per sample, choice of sizes and world
_MAX_FAILURES = 20  # maximum number of failed runs per operator and world: each ends its ranks
_EARLIER = 100  # maximum number of earlier calls that are tried as the cause, because the library caches per call
_TIMEOUT = 300.0
_MISMATCH = f"{CollectiveMismatchError.__module__}.{CollectiveMismatchError.__qualname__}"
_REFUSALS = (
    "strategy",
    "not supported",
    "not implemented",
    "unsupported",
    "DTensor",
    "lacement",
    "redistribut",
    "evenly sharded",
)

Places = tuple[Placement, ...]
Run = Callable[[Any, Any], list[Any]]


@dataclass(frozen=True)
class _Job:
    """One call in one tuple of placements.

    Attributes:
        case: the sample with its values and reference.
        run: the public call, as a function of the sample's arguments.
        places: one placement per operand.
        growth: change of the results when the operands are rounded, in units of the results' rounding; at least 1.
    """

    case: Case
    run: Run
    places: Places
    growth: float

    def call(self, operands: Sequence[Any]) -> list[Any]:
        """Call the operator with ``operands`` in place of the sample's operands."""
        return self.run(*self.case.filled.with_operands(operands))

    def checker(self, world: int, tensors: Any = None) -> PlacementChecker:
        """Return the checker of the call on ``world`` ranks."""
        case = self.case
        exact = case.reference.exact and _halves(world)
        expected = replace(case.reference.expected, exact=exact, eps=case.reference.eps * self.growth)
        return PlacementChecker(
            self.call, case.filled.arrays, expected, mesh_of((world,)), tensors,
            integral=case.filled.integral, values=not case.sample.uninitialized, first_only=True,
        )  # fmt: skip

    @property
    def tuples(self) -> tuple[tuple[Placement, ...], ...]:
        """The placements as tuples, for a mesh of one axis."""
        return tuple((placement,) for placement in self.places)


@dataclass(frozen=True)
class _Outcome:
    """Outcome of one check on one rank.

    Attributes:
        kind: one of :data:`OUTCOMES`.
        text: the message or the difference.
        error: name of the exception.
        gradient: whether the failure occurred in backward or in a gradient.
        which: index of the output, or of the operand whose gradient failed.
        backward: whether gradients were compared.
        rank: rank on which the failure occurred.
    """

    kind: str
    text: str = ""
    error: str = ""
    gradient: bool = False
    which: int = 0
    backward: bool = False
    rank: int = 0


def audit_operator(target: str, op: str) -> OperatorAudit:
    """Audit canonical operator ``op`` of ``target``, a key of ``TARGETS``."""
    with use_platform(TARGETS[target].framework):
        return _Auditor(target, op).run()


class _PublicSweep(Sweep):
    """The samples of an operator, computed with the framework's public functions.

    Attributes:
        public: name and function of the public call of the last case.
        module: module of the target library.
        writer: writes programs, and draws values that these programs can draw again.
    """

    def __init__(self, target: str, op: str) -> None:
        framework, peer, writer = TARGETS[target]
        super().__init__(OperatorReport(op, framework), framework, op, find_rule(op), samples_of(op), QUICK)
        self.module = importlib.import_module(peer)
        self.writer = importlib.import_module(writer)
        self.public: tuple[str, Run] | None = None

    def draws(self, *seed: int) -> Any:
        """Return the generator of values; programs use the same generator for long arrays."""
        return self.writer.Draws(*seed)

    def public_case(self, number: int, sizes: dict[str, int], skipped: list[str], *, integral: bool) -> Case | None:
        """Return a sample with values and reference; None if it has no reference, with the reason in ``skipped``.

        Values are small integers, so that results are exact, if ``integral`` is set and the sample supports them;
        otherwise they are real numbers.
        """
        for values in (True, False) if integral else (False, True):
            case = self._make_case(number, self.samples[number], sizes, skipped, integral=values)
            if case is not None:
                return case
        return None

    def _reference(self, sample: Sample, filled: FilledSample, rng: Any) -> Reference:
        """Compute the reference with the first public function that works on plain tensors."""
        assert self.rule is not None
        canonical = binder(self.rule.signature)
        bound = canonical.bind(filled.args, filled.kwargs)
        problem: Exception | None = None
        for name, function in self.module.public_calls(self.rule.op, bound, canonical, writes=sample.writes):
            run = _bound_call(function, canonical, writes=sample.writes)
            reference = attempt(function_reference, self.platform, run, filled, rng)
            if isinstance(reference, Raised):  # the next public function may accept these arguments
                problem = problem or reference.error
                continue
            self.public = name, run
            return reference
        raise problem or UnsupportedOperatorError(f"{self.report.op} has no public spelling with these arguments")


def _bound_call(function: Callable[..., Any], canonical: Any, *, writes: bool) -> Run:
    """Return a function of a sample's arguments; an in-place call writes a copy of the first operand."""

    def run(args: Any, kwargs: Any) -> list[Any]:
        bound = canonical.bind(args, kwargs)
        if not writes:
            return as_list(function(**bound))
        written = canonical.names[0]
        bound[written] = bound[written].clone()
        function(**bound)
        return [bound[written]]

    return run


class _Auditor:
    """Audits one operator."""

    def __init__(self, target: str, op: str) -> None:
        self.target, self.op = target, op
        self.audit = OperatorAudit(op)
        self.sweep = _PublicSweep(target, op)
        self.peer = self.sweep.module.Peer
        self.reproducer = self.sweep.writer

    def run(self) -> OperatorAudit:
        """Check every sample on every world."""
        self.audit.exempt = exemption(self.op)
        for world in () if self.audit.exempt else WORLDS:
            jobs = [
                _Job(case, run, places, growth)
                for case, run, growth in self._cases(world)
                for places in _tuples(case.filled.arrays, seed_of(self.op, case.number, world))
            ]
            self._check(jobs, world)
        if not self.audit.spellings and not self.audit.skipped and not self.audit.exempt:
            self.audit.exempt = "no public spelling of its own: its users are audited"
        return self.audit

    def _cases(self, world: int) -> Iterator[tuple[Case, Run, float]]:
        """Yield every sample with its public call, and the factor by which the call amplifies rounding of operands."""
        spellings, skipped = Counter[str](), Counter[str]()
        for number, sample in enumerate(self.sweep.samples):
            if sample.random:
                skipped["random: another library draws other numbers"] += 1
                continue
            reasons: list[str] = []
            cases = 0
            for sizes in size_choices(sample, _CHOICES):
                case = self.sweep.public_case(number, sizes, reasons, integral=_halves(world))
                if case is not None and self.sweep.public is not None:
                    name, run = self.sweep.public
                    spellings[name] += 1
                    cases += 1
                    yield case, run, self._growth(case, run)
            if reasons and not cases:
                skipped[reasons[0]] += 1
        self.audit.spellings, self.audit.skipped = spellings, self.audit.skipped | skipped

    def _growth(self, case: Case, run: Run) -> float:
        """Measure how far results and gradients change if operands are rounded, in units of ``eps``; at least 1."""
        reference, growth = case.reference, 1.0
        if not reference.eps:
            return growth
        for sign in (1.0, -1.0):
            moved = replace(case.filled, arrays=tuple(_rounded(array, sign) for array in case.filled.arrays))
            again = function_reference(self.sweep.platform, run, moved, self.sweep.draws(case.seed, 1))
            pairs = [
                *zip(again.outputs, reference.outputs, strict=True),
                *zip(again.grads, reference.grads, strict=True),
            ]
            growth = max([growth, *(_distance(actual, expected) / reference.eps for actual, expected in pairs)])
        return growth

    def _check(self, jobs: Sequence[_Job], world: int) -> None:
        """Check all jobs; if a job ends its ranks, new ranks continue with the next job."""
        ranks = World(self.sweep.platform.platform_type, world, _TIMEOUT)
        results = run_batch(ranks, _prepare, (self.peer,), jobs, _MAX_FAILURES)
        if len(results) < len(jobs):
            self.audit.skipped[f"after {_MAX_FAILURES} runs of {world} ranks failed"] += len(jobs) - len(results)
        for number, (job, outcomes) in enumerate(zip(jobs, results, strict=False)):
            worst = _failure(outcomes) if isinstance(outcomes, Failed) else min(outcomes, key=_badness)
            self.audit.counts[worst.kind] += 1
            self.audit.backward += worst.kind == "ok" and worst.backward
            if worst.kind in ("crash", "wrong", "plain"):
                self._note(job, worst, world, jobs[max(0, number - _EARLIER) : number])

    def _note(self, job: _Job, outcome: _Outcome, world: int, earlier: Sequence[_Job]) -> None:
        """Keep the first finding of each kind, in outputs and in gradients, with its programs."""
        case = job.case
        where = "gradient" if outcome.gradient else "output"
        label = f"{where} of {self.sweep.report.op}"
        if any(finding.kind == outcome.kind and finding.text.startswith(where) for finding in self.audit.findings):
            return
        places = ", ".join(map(str, job.places))
        text = f"{label}, sample {case.number} {case.filled.sizes or ''} on {world} ranks [{places}]: {outcome.text}"
        error = outcome.error if outcome.kind == "crash" else "AssertionError"
        right = None
        kind = outcome.kind
        if kind == "crash" and not outcome.error and not outcome.gradient:
            kind = "wrong"  # ranks that diverge hang on real processes, or compute arbitrary values
        if kind == "wrong":
            right = (case.reference.grads if outcome.gradient else case.reference.outputs)[outcome.which]
        finding = self.reproducer.Finding(
            self._recorded(job, world), kind, outcome.gradient, outcome.which, case.reference.cotangents, right
        )
        befores = [None, *(self._recorded(call, world) for call in reversed(earlier))]
        programs = (self.reproducer.program(finding, before) for before in befores)
        written = list(dict.fromkeys(program for program in programs if program is not None))
        self.audit.findings.append(AuditFinding(outcome.kind, text[:400], world, error, written))

    def _recorded(self, job: _Job, world: int) -> Any:
        filled = job.case.filled
        shards = [operand.shards for operand in job.checker(world).operands(job.tuples, job.case.seed)]
        return self.reproducer.RecordedCall(job.call, filled.arrays, shards, job.places, filled.requires_grad)


def _halves(world: int) -> bool:
    """Whether division by ``world`` is exact; the target may divide a replicated tensor to make it a pending sum."""
    return world.bit_count() == 1


def _rounded(array: Any, sign: float) -> Any:
    """Perturb floating-point numbers as rounding in a pending sum may, alternately up and down."""
    if array.dtype.kind != "f" or not array.size:
        return array
    largest = np.abs(array[np.isfinite(array)]).max(initial=0.0)
    alternating = np.where(np.arange(array.size).reshape(array.shape) % 2, sign, -sign)
    moved: Any = (array + alternating * largest * np.finfo(array.dtype).eps).astype(array.dtype)
    return moved


def _distance(actual: Any, expected: Any) -> float:
    """Return the largest difference of finite numbers, relative to their largest magnitude."""
    if actual is None or expected is None or actual.shape != expected.shape or expected.dtype.kind not in "fc":
        return 0.0
    finite = np.isfinite(actual) & np.isfinite(expected)
    scale = float(np.abs(expected[finite]).max(initial=0.0))
    return float(np.abs(actual - expected)[finite].max(initial=0.0)) / scale if scale else 0.0


def _failure(failed: Failed) -> _Outcome:
    """Return the outcome of a check that ended its ranks: the error of a rank that failed alone, or the cause."""
    for outcome in failed.results:
        if outcome.error:
            text = f"rank {outcome.rank} alone raises {outcome.text}; the others wait for it"
            alone: _Outcome = replace(outcome, kind="crash", text=text)
            return alone
    cause = failed.error.__cause__ or failed.error
    return _Outcome("crash", f"{type(cause).__name__}: {cause}")


def _badness(outcome: _Outcome) -> int:
    return OUTCOMES.index(outcome.kind)


def _tuples(arrays: Sequence[Any], seed: int) -> Iterator[Places]:
    """Yield all tuples of placements, one placement per operand; a random choice if there are too many."""
    options = [possible_placements(array, ("sum",) if array.dtype.kind in "fc" else ()) for array in arrays]
    tuples = list(itertools.islice(itertools.product(*options), 20000))
    if len(tuples) > _MOST:
        order = np.random.default_rng(seed).permutation(len(tuples))[:_MOST]
        tuples = [tuples[int(index)] for index in sorted(order)]
    return iter(tuples)


# -- on a rank ---------------------------------------------------------------------------------------------------------


def _prepare(peer_class: Any) -> Callable[[_Job], _Outcome]:
    """Return the function that checks one job on this rank."""
    transport = active_transport()
    assert transport is not None
    peer = peer_class(transport.world_size)
    return lambda job: _outcome(job, _PeerTensors(peer, job.places, transport.rank), transport.world_size)


def _outcome(job: _Job, tensors: _PeerTensors, world: int) -> _Outcome:
    """Run the call and its gradients, and compare."""
    checked = attempt(job.checker(world, tensors).check, job.tuples, job.case.seed)
    if isinstance(checked, Raised):
        error, text = checked.error, str(checked)
        if isinstance(error, RankAbortedError):
            raise error
        if isinstance(error, _PlainResultError):
            return _Outcome("plain", str(error), "", error.gradient, error.index)
        refused = isinstance(error, (RuntimeError, NotImplementedError, ValueError, AssertionError))
        kind = "rejects" if refused and any(word in text for word in _REFUSALS) else "crash"
        home = type(error).__module__
        name = type(error).__qualname__ if home == "builtins" else f"{home}.{type(error).__qualname__}"
        return _Outcome(kind, text, "" if name == _MISMATCH else name, tensors.backward, rank=tensors.rank)
    for problem in checked.problems:
        return _Outcome("wrong", str(problem), "", problem.gradient, problem.index)
    return _Outcome("ok", backward=bool(checked.gradients))


class _PlainResultError(Exception):
    """An output or a gradient is a plain tensor."""

    def __init__(self, text: str, index: int, *, gradient: bool) -> None:
        super().__init__(text)
        self.index, self.gradient = index, gradient


class _PeerTensors(DistributedTensors):
    """The target's tensors in the placements of one job.

    Attributes:
        backward: whether the backward has started.
    """

    def __init__(self, peer: Any, places: Places, rank: int) -> None:
        self.peer, self.places, self.rank = peer, places, rank
        self.backward = False

    def results(
        self, call: Callable[[Sequence[Any]], list[Any]], operands: Sequence[Operand], cotangents: Sequence[Any]
    ) -> Iterator[list[Any]]:
        """Yield gathered outputs, then gathered gradients of the global operands."""
        peer = self.peer
        leaves = [
            peer.wrap(operand.shards[self.rank], place, operand.layout.shape, differentiated=operand.wanted)
            for operand, place in zip(operands, self.places, strict=True)
        ]
        outs = call(leaves)
        for index, out in enumerate(outs):
            if not peer.is_wrapped(out):
                raise _PlainResultError("a result is a plain tensor", index, gradient=False)
        yield [(peer.whole(out), out.placements) for out in outs]
        if not any(out.requires_grad for out in outs):
            return
        self.backward = True
        seeds = [None if seed is None else peer.wrap(np.array(seed), Replicate(), seed.shape) for seed in cotangents]
        peer.backward(outs, seeds)
        yield [self._gradient(index, leaf) for index, leaf in enumerate(leaves)]

    def _gradient(self, index: int, leaf: Any) -> Any:
        if not leaf.requires_grad or leaf.grad is None:
            return None
        if not self.peer.is_wrapped(leaf.grad):
            raise _PlainResultError(f"gradient of operand {index} is a plain tensor", index, gradient=True)
        return self.peer.whole(leaf.grad)

    def expected_gradient(self, gradient: Any, operand: Operand) -> Any:
        """Return the gradient of one device, because the ranks' gradients are gathered before the comparison."""
        del operand
        return gradient
