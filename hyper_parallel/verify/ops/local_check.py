"""Checks claimed placements on plain tensors in one process.

Operands are sliced from the global values, the local call of the plan runs once per rank, and outputs and gradients are
compared with the shards of the global results. Nothing communicates, so no collective can hide an error. Many checks
share one backward pass, and ranks with the same computation share its result.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from hyper_parallel.core.dtensor.boxes import coordinates
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import PARTIAL_OPS, Placement, Replicate, Shard
from hyper_parallel.core.shard.rule import LocalCall, Row, Strategies
from hyper_parallel.core.shard.strategy import combine
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.verify.attempt import Raised, attempt
from hyper_parallel.verify.checker.checker import EXTREMA, UNDIFFERENTIATED
from hyper_parallel.verify.checker.choices import possible_placements
from hyper_parallel.verify.checker.shards import NUMBERS, extremum_gradients, reduction_groups
from hyper_parallel.verify.ops.claims import Claim
from hyper_parallel.verify.ops.local_calls import CallCache, ComputedCall, LocalShard
from hyper_parallel.verify.ops.reference import Caller

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hyper_parallel.core.dtensor.boxes import Coordinate
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.shard.sample import Sample
    from hyper_parallel.verify.ops.claims import SampleCall

__all__ = ["LocalChecker", "LocalResult", "unclaimed_rows"]

_MOST_INPUTS = 80  # maximum number of tuples of placements per sample and mesh


@dataclass
class LocalResult:
    """The result of one check.

    Attributes:
        claim: the placements.
        problems: differences from the reference; empty if there are none.
        crash: the error that the local call raised, or empty.
        rejected: message of the error with which the library refused the local call, or empty.
        backward: whether gradients were compared.
    """

    claim: Claim
    problems: list[str] = field(default_factory=list)
    crash: str = ""
    rejected: str = ""
    backward: bool = False


@dataclass
class _ReductionGroups:
    """Groups of ranks whose partial values are reduced together.

    Attributes:
        kinds: reductions, each with its number of ranks.
        groups: per group, the coordinate of the first rank, and all ranks.
    """

    kinds: tuple[tuple[str, int], ...]
    groups: list[tuple[Coordinate, list[int]]]


class _ClaimRun:
    """The local calls of one claim on all ranks.

    Args:
        claim: the placements.
    """

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.calls: list[ComputedCall] = []

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts of operands and outputs."""
        return (*self.claim.choice.targets, *self.claim.choice.outputs)

    @cached_property
    def differentiable(self) -> bool:
        """False if a layout has a reduction by product, `all` or `any`, which have no gradient."""
        return not any(op in UNDIFFERENTIATED for layout in self.layouts for _, op in layout.partials)

    @cached_property
    def rounds(self) -> bool:
        """Whether a layout has an average over a number of ranks that is not a power of two, which rounds."""
        return any(op == "avg" and layout.mesh.shape[axis] not in (1, 2, 4)
                   for layout in self.layouts for axis, op in layout.partials)  # fmt: skip

    @cached_property
    def late_outputs(self) -> list[int]:
        """Outputs that are a partial maximum or minimum: their cotangents depend on which ranks attain it."""
        return [
            index
            for index, layout in enumerate(self.claim.choice.outputs)
            if any(op in EXTREMA for _, op in layout.partials)
        ]


class LocalChecker:
    """Checks the claims of one sample with values on one mesh; checks share shards, local calls and backward passes.

    Args:
        sample: the sample as declared.
        calls: local calls of the sample on all meshes.
        mesh: the mesh, as rank 0 has it.
    """

    def __init__(self, sample: Sample, calls: CallCache, mesh: DeviceMesh) -> None:
        self.sample, self.calls, self.mesh = sample, calls, mesh
        self.reference, self.filled = calls.reference, calls.filled
        assert self.reference.sample_call is not None
        self.sample_call = self.reference.sample_call
        self.caller = Caller(calls.platform, self.sample_call, sample)
        self.coordinates = list(coordinates(mesh))
        self.meshes = [mesh.for_rank(rank) for rank in mesh.ranks]
        self._groups: dict[tuple[tuple[int, str], ...], _ReductionGroups] = {}
        self._shapes: dict[Layout, list[tuple[int, ...]]] = {}
        self._rank_layouts: dict[tuple[Layout, int], Layout] = {}

    def run(self, claims: Sequence[Claim], split: int = 0) -> list[LocalResult]:
        """Check all ``claims`` in one backward pass; if it raises an error, check them one by one.

        Args:
            claims: placements to check.
            split: number of the random split into partial values.
        """
        results = attempt(self._run, claims, split)
        if not isinstance(results, Raised):
            return results
        if len(claims) > 1:
            return [result for claim in claims for result in self.run([claim], split)]
        if not isinstance(results.error, HyperParallelError):
            return [LocalResult(claims[0], crash=str(results))]
        refusing = self._refusing_ranks(claims[0])
        if refusing and len(refusing) < len(self.coordinates):
            crash = f"refused at {list(refusing)} alone, where others would wait: {results}"
            return [LocalResult(claims[0], crash=crash)]
        return [LocalResult(claims[0], rejected=str(results))]

    def outputs_hold(self, claims: Sequence[Claim]) -> list[bool]:
        """Return for each claim whether its outputs are correct; no gradient is computed.

        Raises:
            Exception: any error that the operator raises.
        """
        runs = [self._claim_run(claim, 0, with_cotangents=False) for claim in claims]
        self._compute(runs)
        outputs = range(len(self.reference.outputs))
        return [not any(self._output_problems(index, run) for index in outputs) for run in runs]

    def _refusing_ranks(self, claim: Claim) -> list[Coordinate]:
        """Return the coordinates of the ranks on which the local call of a claim is refused."""
        calls = self._claim_run(claim, 0, with_cotangents=False).calls
        return [at for at, call in zip(self.coordinates, calls, strict=True) if self._is_refused(call)]

    def _is_refused(self, call: ComputedCall) -> bool:
        try:
            self.calls.compute([call], self.caller, lambda: None)
        except HyperParallelError:
            return True
        return False

    def _run(self, claims: Sequence[Claim], split: int) -> list[LocalResult]:
        runs = [self._claim_run(claim, split) for claim in claims]
        self._compute(runs)
        return [self._compare(run, split) for run in runs]

    def _compute(self, runs: Sequence[_ClaimRun]) -> None:
        waiting = {id(call): call for run in runs for call in run.calls if call.outs is None}
        if waiting:
            self.calls.compute(list(waiting.values()), self.caller, lambda: self._set_late_cotangents(runs))

    # -- local calls -----------------------------------------------------------------------------------------------

    def _claim_run(self, claim: Claim, split: int, *, with_cotangents: bool = True) -> _ClaimRun:
        run = _ClaimRun(claim)
        if not with_cotangents:
            run.late_outputs = []
        operands = [self.calls.operand(index, layout, split) for index, layout in enumerate(claim.choice.targets)]
        outputs = enumerate(claim.choice.outputs)
        cotangents = [self._cotangents(index, layout) if with_cotangents else None for index, layout in outputs]
        for rank in range(len(self.coordinates)):
            local_operands = tuple(shards[rank] for shards in operands)
            local_cotangents = tuple(None if shards is None else shards[rank] for shards in cotangents)
            make = ComputedCall if run.late_outputs else self.calls.call  # late cotangents cannot be shared
            run.calls.append(make(local_operands, self._local_call(claim, rank), local_cotangents))
        return run

    def _local_call(self, claim: Claim, rank: int) -> LocalCall | None:
        localize = claim.strategies.localize
        if localize is None:
            return None
        targets = tuple(self._seen_by(layout, rank) for layout in claim.choice.targets)
        outputs = tuple(self._seen_by(layout, rank) for layout in claim.choice.outputs)
        return localize(self.sample_call.with_layouts(targets, self.meshes[rank]), targets, outputs)

    def _seen_by(self, layout: Layout, rank: int) -> Layout:
        seen = self._rank_layouts.get((layout, rank))
        if seen is None:
            seen = Layout.of(self.meshes[rank], layout.dim_axes, layout.partials, layout.shape)
            self._rank_layouts[(layout, rank)] = seen
        return seen

    def _cotangents(self, index: int, layout: Layout) -> list[LocalShard] | None:
        """Return the cotangent of output ``index`` per rank; None if it depends on the outputs."""
        if self.reference.cotangents[index] is None:
            return None
        if any(op in UNDIFFERENTIATED or op in EXTREMA for _, op in layout.partials):
            return None
        return self.calls.cotangent(index, layout)

    def _set_late_cotangents(self, runs: Sequence[_ClaimRun]) -> None:
        """Divide the cotangent of a partial maximum or minimum equally among the ranks that attain it."""
        for run in runs:
            for index in run.late_outputs:
                cotangent, layout = self.reference.cotangents[index], run.claim.choice.outputs[index]
                if cotangent is None or any(op in UNDIFFERENTIATED for _, op in layout.partials):
                    continue
                outs = [call.outs[index] for call in run.calls if call.outs is not None]
                for call, share in zip(run.calls, extremum_gradients(cotangent, layout, outs), strict=True):
                    call.cotangents[index] = LocalShard(share)

    # -- comparison ------------------------------------------------------------------------------------------------

    def _compare(self, run: _ClaimRun, split: int) -> LocalResult:
        result = LocalResult(run.claim)
        for index in range(len(self.reference.outputs)):
            result.problems.extend(self._output_problems(index, run))
        for index, requires_grad in enumerate(self.filled.requires_grad):
            if requires_grad and run.differentiable:
                result.problems.extend(self._gradient_problems(index, run, split))
                result.backward = True
        return result

    def _reduction_groups(self, layout: Layout, partials: tuple[tuple[int, str], ...]) -> _ReductionGroups:
        groups = self._groups.get(partials)
        if groups is None:
            kinds = tuple((op, self.mesh.shape[axis]) for axis, op in partials)
            groups = _ReductionGroups(kinds, reduction_groups(layout, [axis for axis, _ in partials]))
            self._groups[partials] = groups
        return groups

    def _local_shapes(self, layout: Layout) -> list[tuple[int, ...]]:
        shapes = self._shapes.get(layout)
        if shapes is None:
            shapes = self._shapes[layout] = self.calls.shapes(layout)
        return shapes

    def _output_problems(self, index: int, run: _ClaimRun) -> list[str]:
        layout = run.claim.choice.outputs[index]
        for at, call, shape in zip(self.coordinates, run.calls, self._local_shapes(layout), strict=True):
            assert call.outs is not None
            actual = call.outs[index].shape
            if actual != shape:
                claimed = f"{layout.notation()} says {list(shape)}"
                return [f"output {index} at {list(at)} has shape {list(actual)}, {claimed}"]
        dtype = self.reference.outputs[index].dtype
        impossible = [op for _, op in layout.partials if dtype.kind not in NUMBERS[op]]
        if impossible:
            return [f"output {index} has dtype {dtype}, of which no {impossible[0]} is taken"]
        if self.sample.uninitialized:
            return []
        expected, exact = self.calls.expected_output(index, layout), self.reference.exact and not run.rounds
        groups = self._reduction_groups(layout, layout.partials)
        for at, ranks in groups.groups:
            calls = tuple([run.calls[rank] for rank in ranks])
            problem = self.calls.output_difference(index, calls, groups.kinds, expected[ranks[0]], exact=exact)
            if problem:
                return [f"output {index} at {list(at)} {problem}"]
        return []

    def _gradient_problems(self, index: int, run: _ClaimRun, split: int) -> list[str]:
        layout, varying = run.claim.choice.targets[index], run.claim.choice.varying[index]
        expected = self.calls.expected_gradient(index, layout, split)
        # If three ranks attain an extremum, each gets a third of the gradient, which rounds.
        exact = self.reference.exact and not run.rounds and not any(op in EXTREMA for _, op in layout.partials)
        groups = self._reduction_groups(layout, tuple((axis, "sum") for axis in varying))
        for at, ranks in groups.groups:
            calls = tuple([run.calls[rank] for rank in ranks])
            problem = self.calls.gradient_difference(index, calls, groups.kinds, expected[ranks[0]], exact=exact)
            if problem:
                return [f"gradient of operand {index} at {list(at)} {problem}"]
        return []


# -- valid placements that are not claimed -----------------------------------------------------------------------------


def unclaimed_rows(checker: LocalChecker, sample_call: SampleCall, strategies: Strategies) -> Iterator[Row]:
    """Yield rows that the rule lacks, but that give correct outputs and gradients on this sample.

    Only rows that need no changed local call are found. Only one axis and the first 80 tuples of placements are
    searched.
    """
    known = {row.inputs for row in strategies.rows}
    options = [possible_placements(array, PARTIAL_OPS) for array in checker.filled.arrays]
    for inputs in itertools.islice(itertools.product(*options), _MOST_INPUTS):
        if inputs in known or all(placement == Replicate() for placement in inputs):
            continue
        row = _true_row(checker, sample_call, strategies, inputs)
        if row is not None:
            yield row


def _true_row(
    checker: LocalChecker, sample_call: SampleCall, strategies: Strategies, inputs: Sequence[Placement]
) -> Row | None:
    """Return a valid row with these ``inputs``, or None; gradients are checked for candidates with correct outputs."""
    candidates = []
    for outputs in _output_candidates(checker):
        row = Row(tuple(inputs), outputs)
        plain = Strategies((row,), strategies.outputs, None, strategies.many)
        choice = combine(sample_call.call, plain, (row,), (0,))
        assert choice is not None, "a row without conditions fits all sizes"
        candidates.append(Claim((row,), choice, plain))
    holds = attempt(checker.outputs_hold, candidates)
    if isinstance(holds, Raised):  # the local call cannot run on these shards with any output placement
        return None
    for claim, hold in zip(candidates, holds, strict=True):
        if not hold:
            continue
        (result,) = checker.run([claim])
        if result.crash or result.rejected:
            return None
        if not result.problems:
            return claim.rows[0]
    return None


def _output_candidates(checker: LocalChecker) -> Iterator[tuple[Placement, ...]]:
    """Yield candidates for the placements of the outputs: the same placement for all outputs."""
    outputs = checker.reference.outputs
    for placement in possible_placements(outputs[0], PARTIAL_OPS):
        if all(not isinstance(placement, Shard) or placement.dim < output.ndim for output in outputs):
            yield (placement,) * len(outputs)
