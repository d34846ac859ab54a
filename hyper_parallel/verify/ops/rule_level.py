"""The bulk of the verification: claimed placements computed on plain tensors, every rank in this one process.

Operands are cut from the global values, the local call that the plan names runs once per rank, outputs are put
together again, and so are the gradients. Nothing communicates, so nothing can hide behind a collective. Many checks
share one differentiation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.boxes import coordinates
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.transition import dual
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.verify.ops.equal import difference
from hyper_parallel.verify.ops.pieces import box_of, held, reduced, shares
from hyper_parallel.verify.ops.reference import Caller, Reference

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.boxes import Coordinate
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.shard.call import LocalCall
    from hyper_parallel.core.shard.sample import Sample
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.ops.rows import Claim

__all__ = ["Bench", "Result"]

EXTREMA = ("max", "min")
UNDIFFERENTIATED = ("prod", "all", "any")


@dataclass
class Result:
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


class Bench:
    """One filled sample on one mesh, with everything that many checks share.

    Args:
        platform: the framework.
        sample: as declared.
        reference: the plain run.
        mesh: as rank 0 sees it.
        seed: of the summands.
    """

    def __init__(self, platform: Platform, sample: Sample, reference: Reference, mesh: DeviceMesh, seed: int) -> None:
        self.platform, self.sample, self.reference, self.mesh, self.seed = platform, sample, reference, mesh, seed
        assert reference.problem is not None
        self.problem = reference.problem
        self.filled = self.problem.filled
        self.caller = Caller(platform, self.problem, sample)
        self.at = list(coordinates(mesh))
        self.meshes = [mesh.seen_by(rank) for rank in mesh.ranks]
        self._pieces: dict[tuple[int, Layout, int], tuple[list[Any], list[Any]]] = {}
        self._gradients: dict[tuple[int, Layout, int], dict[Coordinate, Any]] = {}
        self._seeds: dict[tuple[int, Layout], list[Any]] = {}

    def run(self, claims: Sequence[Claim], draw: int = 0) -> list[Result]:
        """Check all ``claims`` in one differentiation; one by one where that fails."""
        try:
            return self._run(claims, draw)
        except Exception as error:  # noqa: BLE001 - whatever an operator raises is what became of the check
            if len(claims) > 1:
                return [result for claim in claims for result in self.run([claim], draw)]
            text = f"{type(error).__name__}: {error}"
            refused = isinstance(error, HyperParallelError)
            return [Result(claims[0], rejected=text) if refused else Result(claims[0], crash=text)]

    def _run(self, claims: Sequence[Claim], draw: int) -> list[Result]:
        calls: list[tuple[int, int, LocalCall | None]] = []
        leaves: list[Any] = []
        operands = len(self.filled.arrays)
        for number, claim in enumerate(claims):
            tensors = [self._piece(index, layout, draw)[1] for index, layout in enumerate(claim.choice.targets)]
            for rank in range(len(self.at)):
                calls.append((number, rank, self._local(claim, rank)))
                leaves.extend(one[rank] for one in tensors)
        counts: list[int] = []

        def run(*given: Any) -> list[Any]:
            found: list[Any] = []
            counts.clear()
            for place, (_, _, local) in enumerate(calls):
                outs = self.caller(given[place * operands : (place + 1) * operands], local)
                counts.append(len(outs))
                found.extend(outs)
            return found

        kept: list[Any] = []

        def seeds(outs: Sequence[Any]) -> list[Any]:
            kept[:] = [self.platform.tensor_to_numpy(self.platform.detach(one)) for one in outs]
            return self._all_seeds(claims, kept, len(outs))

        wanted = list(self.filled.wanted) * len(calls)
        _, grads = self.platform.vjp(run, leaves, seeds, wanted)
        return self._judge(claims, kept, counts, grads, draw)

    # -- what ranks hold -------------------------------------------------------------------------------------------

    def _piece(self, index: int, layout: Layout, draw: int) -> tuple[list[Any], list[Any]]:
        """Operand ``index`` on all ranks, as arrays and as tensors."""
        key = (index, layout, draw if layout.partials else 0)
        found = self._pieces.get(key)
        if found is None:
            rng = np.random.default_rng([self.seed, index, draw, len(self._pieces)])
            arrays = held(self.filled.arrays[index], layout, rng, integral=self.filled.integral)
            found = self._pieces[key] = (arrays, [self.platform.from_numpy(one) for one in arrays])
        return found

    def _local(self, claim: Claim, rank: int) -> LocalCall | None:
        localize = claim.strategies.localize
        if localize is None:
            return None
        mesh = self.meshes[rank]
        targets = tuple(_seen(layout, mesh) for layout in claim.choice.targets)
        outputs = tuple(_seen(layout, mesh) for layout in claim.choice.outputs)
        return localize(self.problem.placed(targets, mesh), targets, outputs)

    # -- cotangents ------------------------------------------------------------------------------------------------

    def _all_seeds(self, claims: Sequence[Claim], outs: Sequence[Any], count: int) -> list[Any]:
        ranks, width = len(self.at), len(self.reference.outputs)
        if count != len(claims) * ranks * width:
            msg = f"the local call returned {count / len(claims) / ranks:g} outputs, the plain one {width}"
            raise ValueError(msg)
        found: list[Any] = []
        for number, claim in enumerate(claims):
            start = number * ranks * width
            per_output = [
                self._output_seeds(index, layout, [outs[start + rank * width + index] for rank in range(ranks)])
                for index, layout in enumerate(claim.choice.outputs)
            ]
            for rank in range(ranks):
                for index in range(width):
                    # An output of a wrong shape is reported as such; its cotangent would not fit.
                    fits = outs[start + rank * width + index].shape == claim.choice.outputs[index].local_shape_at(
                        self.at[rank]
                    )
                    found.append(per_output[index][rank] if fits else None)
        return found

    def _output_seeds(self, index: int, layout: Layout, outs: Sequence[Any]) -> list[Any]:
        """Per rank the cotangent of output ``index``: that of the global one, in the dual layout."""
        seed = self.reference.seeds[index]
        if seed is None or any(op in UNDIFFERENTIATED for _, op in layout.partials):
            return [None] * len(self.at)
        if any(op in EXTREMA for _, op in layout.partials):
            return [self.platform.from_numpy(one) for one in shares(seed, layout, outs)]
        found = self._seeds.get((index, layout))
        if found is None:
            local, factor = dual(layout), _averaged(layout)
            found = self._seeds[(index, layout)] = [
                self.platform.from_numpy(np.asarray(box_of(seed, local, at) / factor, seed.dtype)) for at in self.at
            ]
        return found

    # -- judgement -------------------------------------------------------------------------------------------------

    def _judge(
        self, claims: Sequence[Claim], outs: Sequence[Any], counts: Sequence[int], grads: Sequence[Any], draw: int
    ) -> list[Result]:
        del counts
        ranks, width, operands = len(self.at), len(self.reference.outputs), len(self.filled.arrays)
        results = []
        for number, claim in enumerate(claims):
            result = Result(claim)
            start = number * ranks
            for index in range(width):
                mine = [outs[(start + rank) * width + index] for rank in range(ranks)]
                result.problems.extend(self._outputs_differ(index, claim, mine))
            for index in range(operands):
                if self.filled.wanted[index] and self._differentiable(claim):
                    mine = [grads[(start + rank) * operands + index] for rank in range(ranks)]
                    result.problems.extend(self._gradients_differ(index, claim, mine, draw))
                    result.backward = True
            results.append(result)
        return results

    def _wanted(self, index: int, layout: Layout, draw: int) -> dict[Coordinate, Any]:
        """What the gradient of operand ``index`` must be, by position."""
        extremum = any(op in EXTREMA for _, op in layout.partials)
        key = (index, layout, draw if extremum else 0)
        found = self._gradients.get(key)
        if found is None:
            gradient = self.reference.grads[index]
            if extremum:
                values = shares(gradient, layout, self._piece(index, layout, draw)[0])
            else:
                local, factor = dual(layout), _averaged(layout)
                values = [np.asarray(box_of(gradient, local, at) / factor, gradient.dtype) for at in self.at]
            found = self._gradients[key] = dict(zip(self.at, values, strict=True))
        return found

    def _exact(self, claim: Claim) -> bool:
        """Averages over other than a power of two ranks round."""
        if not self.reference.exact:
            return False
        layouts = (*claim.choice.targets, *claim.choice.outputs)
        return all(op != "avg" or self.mesh.shape[axis] in (1, 2, 4) for one in layouts for axis, op in one.partials)

    @staticmethod
    def _differentiable(claim: Claim) -> bool:
        layouts = (*claim.choice.targets, *claim.choice.outputs)
        return not any(op in UNDIFFERENTIATED for layout in layouts for _, op in layout.partials)

    def _outputs_differ(self, index: int, claim: Claim, outs: Sequence[Any]) -> list[str]:
        layout, wanted = claim.choice.outputs[index], self.reference.outputs[index]
        for at, out in zip(self.at, outs, strict=True):
            if out.shape != layout.local_shape_at(at):
                found, wanted_shape = list(out.shape), list(layout.local_shape_at(at))
                return [f"output {index} at {list(at)} has shape {found}, {layout.notation()} says {wanted_shape}"]
        if self.sample.unset:
            return []
        local, exact = dual(layout), self._exact(claim)
        for at, value in reduced(outs, layout, layout.partials):
            problem = difference(np.asarray(value), box_of(wanted, local, at), exact=exact, eps=self.reference.eps)
            if problem is not None:
                return [f"output {index} at {list(at)} {problem}"]
        return []

    def _gradients_differ(self, index: int, claim: Claim, grads: Sequence[Any], draw: int) -> list[str]:
        layout, varying = claim.choice.targets[index], claim.choice.varying[index]
        arrays = [self.platform.tensor_to_numpy(one) for one in grads]
        wanted = self._wanted(index, layout, draw)
        # A tie of three ranks gives each a third.
        exact = self._exact(claim) and not any(op in EXTREMA for _, op in layout.partials)
        for at, found in reduced(arrays, layout, [(axis, "sum") for axis in varying]):
            problem = difference(np.asarray(found), wanted[at], exact=exact, eps=self.reference.eps)
            if problem is not None:
                return [f"gradient of operand {index} at {list(at)} {problem}"]
        return []


def _averaged(layout: Layout) -> int:
    """Number of ranks over which ``layout`` averages."""
    return math.prod(layout.mesh.shape[axis] for axis, op in layout.partials if op == "avg")


def _seen(layout: Layout, mesh: DeviceMesh) -> Layout:
    return Layout.of(mesh, layout.dim_axes, layout.partials, layout.shape)
