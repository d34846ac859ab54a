"""The bulk of the verification: claimed placements computed on plain tensors, every rank in this one process.

Operands are cut from the global values, the local call that the plan names runs once per rank, outputs are put
together again, and so are the gradients. Nothing communicates, so nothing can hide behind a collective. Many checks
share one differentiation, and ranks that compute the same share what they computed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.boxes import coordinates
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import PARTIAL_OPS, Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard.rule import LocalCall, Row, Strategies
from hyper_parallel.core.shard.strategy import combine
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.verify.ops.claims import Claim
from hyper_parallel.verify.ops.local_calls import EXTREMA, CallCache, ComputedCall, LocalShard
from hyper_parallel.verify.ops.reference import Caller
from hyper_parallel.verify.ops.shards import NUMBERS, allows, groups, shares

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hyper_parallel.core.dtensor.boxes import Coordinate
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.shard.sample import Sample
    from hyper_parallel.verify.ops.claims import SampleCall

__all__ = ["LocalChecker", "LocalResult", "unclaimed"]

UNDIFFERENTIATED = ("prod", "all", "any")


@dataclass
class LocalResult:
    """What became of one check.

    Attributes:
        claim: the placements.
        problems: what is wrong; empty where everything held.
        crash: the error that the local call raised, or empty.
        rejected: the clear error with which it was refused, or empty.
        backward: whether gradients were compared.
    """

    claim: Claim
    problems: list[str] = field(default_factory=list)
    crash: str = ""
    rejected: str = ""
    backward: bool = False


@dataclass
class _ReductionGroups:
    """How an output or a gradient is held together.

    Attributes:
        kinds: pending reductions, with numbers of ranks.
        groups: position of the first rank, and all ranks, of every group that holds a value together.
    """

    kinds: tuple[tuple[str, int], ...]
    groups: list[tuple[Coordinate, list[int]]]


class _ClaimRun:
    """A claim with what is the same for every draw.

    Args:
        claim: the placements.
        at: coordinates of all ranks.
    """

    def __init__(self, claim: Claim, at: Sequence[Coordinate]) -> None:
        self.claim, self.at = claim, at
        self.calls: list[ComputedCall] = []

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Of operands and outputs."""
        return (*self.claim.choice.targets, *self.claim.choice.outputs)

    @cached_property
    def differentiable(self) -> bool:
        """No gradient passes the reduction of a product or of truths."""
        return not any(op in UNDIFFERENTIATED for layout in self.layouts for _, op in layout.partials)

    @cached_property
    def rounds(self) -> bool:
        """Averages over other than a power of two ranks round."""
        return any(op == "avg" and layout.mesh.shape[axis] not in (1, 2, 4)
                   for layout in self.layouts for axis, op in layout.partials)  # fmt: skip

    @cached_property
    def late(self) -> list[int]:
        """Outputs whose cotangents depend on who attains the extremum."""
        return [
            index
            for index, layout in enumerate(self.claim.choice.outputs)
            if any(op in EXTREMA for _, op in layout.partials)
        ]


class LocalChecker:
    """One filled sample on one mesh, with everything that many checks share.

    Args:
        sample: as declared.
        calls: local calls of the sample, on whatever mesh.
        mesh: as rank 0 sees it.
    """

    def __init__(self, sample: Sample, calls: CallCache, mesh: DeviceMesh) -> None:
        self.sample, self.calls, self.mesh = sample, calls, mesh
        self.reference, self.filled = calls.reference, calls.filled
        assert self.reference.problem is not None
        self.problem = self.reference.problem
        self.caller = Caller(calls.platform, self.problem, sample)
        self.at = list(coordinates(mesh))
        self.meshes = [mesh.for_rank(rank) for rank in mesh.ranks]
        self._held: dict[tuple[tuple[int, str], ...], _ReductionGroups] = {}
        self._shapes: dict[Layout, list[tuple[int, ...]]] = {}
        self._seen: dict[tuple[Layout, int], Layout] = {}

    def run(self, claims: Sequence[Claim], draw: int = 0) -> list[LocalResult]:
        """Check all ``claims`` in one differentiation; one by one where that fails."""
        try:
            return self._run(claims, draw)
        except Exception as error:  # noqa: BLE001 - whatever an operator raises is what became of the check
            if len(claims) > 1:
                return [result for claim in claims for result in self.run([claim], draw)]
            text = f"{type(error).__name__}: {error}"
            if not isinstance(error, HyperParallelError):
                return [LocalResult(claims[0], crash=text)]
            alone = self._refusing(claims[0])
            if alone and len(alone) < len(self.at):
                return [
                    LocalResult(claims[0], crash=f"refused at {list(alone)} alone, where others would wait: {text}")
                ]
            return [LocalResult(claims[0], rejected=text)]

    def forward(self, claims: Sequence[Claim]) -> list[bool]:
        """Which ``claims`` give the outputs they say; no gradient is computed.

        Raises:
            Exception: whatever the operator raises.
        """
        placed = [self._placed(claim, 0, seeded=False) for claim in claims]
        self._compute(placed)
        return [not any(self._outputs_differ(index, one) for index in range(len(self.reference.outputs)))
                for one in placed]  # fmt: skip

    def _refusing(self, claim: Claim) -> list[Coordinate]:
        """Where the local call of a claim is refused."""
        calls = self._placed(claim, 0, seeded=False).calls
        return [where for where, call in zip(self.at, calls, strict=True) if self._refused(call)]

    def _refused(self, call: ComputedCall) -> bool:
        try:
            self.calls.compute([call], self.caller, lambda: None)
        except HyperParallelError:
            return True
        return False

    def _run(self, claims: Sequence[Claim], draw: int) -> list[LocalResult]:
        placed = [self._placed(claim, draw) for claim in claims]
        self._compute(placed)
        return [self._judged(one, draw) for one in placed]

    def _compute(self, placed: Sequence[_ClaimRun]) -> None:
        waiting = {id(call): call for one in placed for call in one.calls if call.outs is None}
        if waiting:
            self.calls.compute(list(waiting.values()), self.caller, lambda: self._late_seeds(placed))

    # -- local calls -----------------------------------------------------------------------------------------------

    def _placed(self, claim: Claim, draw: int, *, seeded: bool = True) -> _ClaimRun:
        placed = _ClaimRun(claim, self.at)
        if not seeded:
            placed.late = []
        operands = [self.calls.operand(index, layout, draw) for index, layout in enumerate(claim.choice.targets)]
        outputs = enumerate(claim.choice.outputs)
        seeds = [self._seeds(index, layout) if seeded else None for index, layout in outputs]
        for rank in range(len(self.at)):
            pieces = tuple(held[rank] for held in operands)
            mine = tuple(None if one is None else one[rank] for one in seeds)
            local = self._local(claim, rank)
            placed.calls.append(
                ComputedCall(pieces, local, mine) if placed.late else self.calls.call(pieces, local, mine)
            )
        return placed

    def _local(self, claim: Claim, rank: int) -> LocalCall | None:
        localize = claim.strategies.localize
        if localize is None:
            return None
        targets = tuple(self._seen_by(layout, rank) for layout in claim.choice.targets)
        outputs = tuple(self._seen_by(layout, rank) for layout in claim.choice.outputs)
        return localize(self.problem.placed(targets, self.meshes[rank]), targets, outputs)

    def _seen_by(self, layout: Layout, rank: int) -> Layout:
        found = self._seen.get((layout, rank))
        if found is None:
            found = Layout.of(self.meshes[rank], layout.dim_axes, layout.partials, layout.shape)
            self._seen[(layout, rank)] = found
        return found

    def _seeds(self, index: int, layout: Layout) -> list[LocalShard] | None:
        """Per rank the cotangent of output ``index``; none yet where it depends on the outputs."""
        if self.reference.seeds[index] is None:
            return None
        if any(op in UNDIFFERENTIATED or op in EXTREMA for _, op in layout.partials):
            return None
        return self.calls.seed_of(index, layout)

    def _late_seeds(self, placed: Sequence[_ClaimRun]) -> None:
        """Ranks that attain an extremum share its cotangent."""
        for one in placed:
            for index in one.late:
                seed, layout = self.reference.seeds[index], one.claim.choice.outputs[index]
                if seed is None or any(op in UNDIFFERENTIATED for _, op in layout.partials):
                    continue
                outs = [call.outs[index] for call in one.calls if call.outs is not None]
                for call, share in zip(one.calls, shares(seed, layout, outs), strict=True):
                    call.seeds[index] = LocalShard(share)

    # -- judgement -------------------------------------------------------------------------------------------------

    def _judged(self, placed: _ClaimRun, draw: int) -> LocalResult:
        result = LocalResult(placed.claim)
        for index in range(len(self.reference.outputs)):
            result.problems.extend(self._outputs_differ(index, placed))
        for index, wanted in enumerate(self.filled.wanted):
            if wanted and placed.differentiable:
                result.problems.extend(self._gradients_differ(index, placed, draw))
                result.backward = True
        return result

    def _together(self, layout: Layout, partials: tuple[tuple[int, str], ...]) -> _ReductionGroups:
        found = self._held.get(partials)
        if found is None:
            kinds = tuple((op, self.mesh.shape[axis]) for axis, op in partials)
            found = self._held[partials] = _ReductionGroups(kinds, groups(layout, [axis for axis, _ in partials]))
        return found

    def _shapes_of(self, layout: Layout) -> list[tuple[int, ...]]:
        found = self._shapes.get(layout)
        if found is None:
            found = self._shapes[layout] = self.calls.shapes(layout)
        return found

    def _outputs_differ(self, index: int, placed: _ClaimRun) -> list[str]:
        layout = placed.claim.choice.outputs[index]
        for at, call, shape in zip(self.at, placed.calls, self._shapes_of(layout), strict=True):
            assert call.outs is not None
            out = call.outs[index]
            if out.shape != shape:
                found, wanted_shape = list(out.shape), list(shape)
                return [f"output {index} at {list(at)} has shape {found}, {layout.notation()} says {wanted_shape}"]
        kind = self.reference.outputs[index].dtype.kind
        odd = [op for _, op in layout.partials if kind not in NUMBERS[op]]
        if odd:
            return [f"output {index} has dtype {self.reference.outputs[index].dtype}, of which no {odd[0]} is taken"]
        if self.sample.uninitialized:
            return []
        wanted, exact = self.calls.output(index, layout), self.reference.exact and not placed.rounds
        held = self._together(layout, layout.partials)
        for at, ranks in held.groups:
            mine = tuple([placed.calls[rank] for rank in ranks])
            problem = self.calls.output_differs(index, mine, held.kinds, wanted[ranks[0]], exact=exact)
            if problem is not None:
                return [f"output {index} at {list(at)} {problem}"]
        return []

    def _gradients_differ(self, index: int, placed: _ClaimRun, draw: int) -> list[str]:
        layout, varying = placed.claim.choice.targets[index], placed.claim.choice.varying[index]
        wanted = self.calls.gradient(index, layout, draw)
        # A tie of three ranks gives each a third.
        exact = self.reference.exact and not placed.rounds and not any(op in EXTREMA for _, op in layout.partials)
        held = self._together(layout, tuple((axis, "sum") for axis in varying))
        for at, ranks in held.groups:
            mine = tuple([placed.calls[rank] for rank in ranks])
            problem = self.calls.gradient_differs(index, mine, held.kinds, wanted[ranks[0]], exact=exact)
            if problem is not None:
                return [f"gradient of operand {index} at {list(at)} {problem}"]
        return []


_MOST = 80  # tuples of placements per sample and mesh


def unclaimed(bench: LocalChecker, problem: SampleCall, strategies: Strategies) -> Iterator[Row]:
    """Rows that hold on this sample, forward and backward, whose operands' placements the rule does not take."""
    known = {row.inputs for row in strategies.rows}
    options = [_kinds(array) for array in bench.filled.arrays]
    for inputs in itertools.islice(itertools.product(*options), _MOST):
        if inputs in known or all(place == Replicate() for place in inputs):
            continue
        found = _true_row(bench, problem, strategies, inputs)
        if found is not None:
            yield found


def _kinds(array: Any) -> list[Placement]:
    pending = (Partial(op) for op in PARTIAL_OPS if allows(array, op))
    return [Replicate(), *(Shard(dim) for dim in range(array.ndim)), *pending]


def _true_row(
    bench: LocalChecker, problem: SampleCall, strategies: Strategies, inputs: Sequence[Placement]
) -> Row | None:
    """Outputs of all candidates come from the same local calls; only those that hold are differentiated."""
    candidates = []
    for outputs in _candidates(bench):
        row = Row(tuple(inputs), outputs)
        plain = Strategies((row,), strategies.outputs, None, strategies.many)
        choice = combine(problem.call, plain, (row,), (0,))
        assert choice is not None, "a row without conditions fits all sizes"
        candidates.append(Claim((row,), choice, plain))
    try:
        holds = bench.forward(candidates)
    except Exception:  # noqa: BLE001 - the local call cannot run on these pieces, whatever is said of the output
        return None
    for claim, true in zip(candidates, holds, strict=True):
        if not true:
            continue
        (result,) = bench.run([claim])
        if result.crash or result.rejected:
            return None
        if not result.problems:
            return claim.rows[0]
    return None


def _candidates(bench: LocalChecker) -> Iterator[tuple[Placement, ...]]:
    """One placement for all outputs."""
    outputs = bench.reference.outputs
    for place in _kinds(outputs[0]):
        if all(not isinstance(place, Shard) or place.dim < one.ndim for one in outputs):
            yield (place,) * len(outputs)
