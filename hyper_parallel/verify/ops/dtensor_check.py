"""The public path: placements checked on DTensors in the simulated cluster, with dispatch and collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.boxes import coordinates
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Placement
from hyper_parallel.core.dtensor.transition import dual
from hyper_parallel.core.shard.entry import OpEntry, binder
from hyper_parallel.core.shard.rule import Rule, find_rule
from hyper_parallel.errors import CollectiveMismatchError, HyperParallelError, RankFailedError, ShardMismatchError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.check import on_other_device, seedable
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.ops.compare import difference
from hyper_parallel.verify.ops.reference import SEED, as_list
from hyper_parallel.verify.ops.shards import extremum_gradients, local_box, local_shards
from hyper_parallel.verify.ops.user_operators import UserOperator, resolve
from hyper_parallel.verify.ops.values import FilledSample, Slot, substitute
from hyper_parallel.verify.simulate import simulate

if TYPE_CHECKING:
    from hyper_parallel.core.shard.sample import Sample
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["DTensorJob", "DTensorResult", "Places", "check_on_dtensors", "operator"]

EXTREMA = ("max", "min")
UNDIFFERENTIATED = ("prod", "all", "any")
Places = tuple[tuple[Placement, ...], ...]
"""Per operand a placement per axis."""


@dataclass(frozen=True)
class DTensorJob:
    """One filled sample on one mesh, and the placements to try.

    Attributes:
        platform: name of the framework.
        op: canonical name, or a user's function.
        sample: as declared.
        filled: its values.
        outputs: of the reference.
        cotangents: of the outputs.
        grads: gradients of the reference.
        exact: the reference made no rounding error.
        eps: rounding unit of the coarsest dtype.
        mesh: shape.
        places: per check the placements of every operand.
        seed: of the partial values.
        device: on which ranks compute.
    """

    platform: str
    op: str | UserOperator
    sample: Sample
    filled: FilledSample
    outputs: Sequence[Any]
    cotangents: Sequence[Any]
    grads: Sequence[Any]
    exact: bool
    eps: float
    mesh: tuple[int, ...]
    places: Sequence[Places]
    seed: int
    device: str = "cpu"

    def with_places(self, places: Sequence[Places]) -> DTensorJob:
        """Return the job with other placements."""
        return DTensorJob(**{**self.__dict__, "places": places})


@dataclass
class DTensorResult:
    """The result of checking one tuple of placements.

    Attributes:
        outcome: ``ok``, ``rejected``, ``wrong``, ``crash``, or ``abandoned`` after too many failures.
        text: the message or the difference.
        backward: whether gradients were compared.
    """

    outcome: str
    text: str = ""
    backward: bool = False


def operator(platform: Platform, op: str | UserOperator, sample: Sample) -> Callable[..., list[Any]]:
    """Return the operator as a function of a filled sample's arguments, plain or distributed."""
    if isinstance(op, UserOperator):
        function = resolve(platform.platform_type, op)
        return lambda args, kwargs: as_list(function(*args, **kwargs))
    if not sample.writes:
        func = getattr(platform.dispatcher.ops, op)
        return lambda args, kwargs: as_list(func(*args, **kwargs))
    rule = find_rule(op)
    assert isinstance(rule, Rule)
    in_place_op = harness_of(platform).writing_op(op)
    entry = OpEntry(op, in_place_op, binder(rule.signature), rule, in_place_op, canonical=True, in_place=True)

    def write(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        result = platform.dispatcher.ops.clone(args[0])
        platform.dispatcher.dispatch(entry, (result, *args[1:]), kwargs)
        return [result]

    return write


def check_on_dtensors(job: DTensorJob, patience: list[int], timeout: float = 120.0) -> list[DTensorResult]:
    """Check every tuple of placements; in halves where a rank failed.

    Args:
        job: what to check.
        patience: number of runs that may still fail, counted down: each costs a new set of ranks.
        timeout: seconds per run.
    """
    if patience[0] <= 0:
        return [DTensorResult("abandoned") for _ in job.places]
    world_size = math.prod(job.mesh)
    try:
        results_per_rank = simulate(
            _check_rank, world_size, platform=job.platform, args=(job,), timeout=timeout, device=job.device
        )
    except RankFailedError as error:
        patience[0] -= 1
        if len(job.places) == 1:
            return [DTensorResult("crash", _cause_of(error))]
        middle = len(job.places) // 2
        return [
            *check_on_dtensors(job.with_places(job.places[:middle]), patience, timeout),
            *check_on_dtensors(job.with_places(job.places[middle:]), patience, timeout),
        ]
    return [_worst(results) for results in zip(*results_per_rank, strict=True)]


def _cause_of(error: RankFailedError) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"


def _worst(results: Sequence[DTensorResult]) -> DTensorResult:
    for outcome in ("crash", "wrong", "rejected"):
        for rank, result in enumerate(results):
            if result.outcome == outcome:
                text = result.text if outcome == "rejected" else f"rank {rank}: {result.text}"
                return DTensorResult(outcome, text, result.backward)
    return results[0]


def _check_rank(job: DTensorJob) -> list[DTensorResult]:
    platform = platform_named(job.platform)
    names = [f"m{axis}" for axis in range(len(job.mesh))]
    checker = _RankChecker(platform, job, init_device_mesh(job.device, job.mesh, mesh_dim_names=names))
    return [checker.check(places, number) for number, places in enumerate(job.places)]


class _RankChecker:
    """The checks of a job on one rank."""

    def __init__(self, platform: Platform, job: DTensorJob, mesh: Any) -> None:
        self.platform, self.job, self.mesh = platform, job, mesh
        self.run = operator(platform, job.op, job.sample)
        self.coordinate = mesh.coordinate
        self.rank = list(coordinates(mesh)).index(self.coordinate)

    def check(self, places: Places, number: int) -> DTensorResult:
        """Check tuple ``number`` of placements."""
        arrays, integral = self.job.filled.arrays, self.job.filled.integral
        layouts = [
            Layout.place(self.mesh, placements, array.shape) for placements, array in zip(places, arrays, strict=True)
        ]
        shards = [
            local_shards(array, layout, np.random.default_rng([self.job.seed, number, index]), integral=integral)
            for index, (array, layout) in enumerate(zip(arrays, layouts, strict=True))
        ]
        try:
            outs, grads = self._differentiate(layouts, [per_rank[self.rank] for per_rank in shards])
            exact = self._is_exact(layouts)
            problems = self._output_problems(outs, exact=exact)
            if elsewhere := on_other_device([out._local for out in outs], self.job.device):
                problems.append(f"output {elsewhere}")
            compared = [index for index, compare in enumerate(self._requires_grad(layouts)) if compare]
            for index in compared:
                expected = self._expected_gradient(index, layouts[index], shards[index])
                problems.extend(self._gradient_problems(index, grads[index], expected, exact=exact))
        except (CollectiveMismatchError, ShardMismatchError) as error:
            raise RuntimeError(str(error)) from error
        except HyperParallelError as error:
            return DTensorResult("rejected", f"{type(error).__name__}: {error}")
        return DTensorResult("wrong" if problems else "ok", "; ".join(problems), bool(compared))

    def _is_exact(self, layouts: Sequence[Layout]) -> bool:
        """Return False where division by three rounds: averages, and gradients shared by three tied ranks."""
        return self.job.exact and not any(op in ("avg", *EXTREMA) for layout in layouts for _, op in layout.partials)

    def _requires_grad(self, layouts: Sequence[Layout]) -> list[bool]:
        """Return which gradients are compared; none passes a reduction by product, `all` or `any`."""
        if any(op in UNDIFFERENTIATED for layout in layouts for _, op in layout.partials):
            return [False] * len(layouts)
        return list(self.job.filled.requires_grad)

    def _differentiate(self, layouts: Sequence[Layout], shards: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        platform, filled = self.platform, self.job.filled
        outputs: list[Any] = []

        def run_on_locals(*leaves: Any) -> list[Any]:
            operands = [platform.wrap(leaf, layout) for leaf, layout in zip(leaves, layouts, strict=True)]

            def operand_of(leaf: Any) -> Any:
                return operands[leaf.index] if isinstance(leaf, Slot) else leaf

            if self.job.sample.random:
                random.manual_seed(SEED)
            outs = self.run(substitute(filled.args, operand_of), substitute(filled.kwargs, operand_of))
            outputs[:] = outs = seedable(outs)
            return [out._local for out in outs]

        def local_cotangents(_: Sequence[Any]) -> list[Any]:
            return [
                None if cotangent is None else platform.from_numpy(np.array(self._local_box(cotangent, out.layout)))
                for cotangent, out in zip(self.job.cotangents, outputs, strict=True)
            ]

        leaves = [platform.from_numpy(shard) for shard in shards]
        _, grads = harness_of(platform).vjp(run_on_locals, leaves, local_cotangents, self._requires_grad(layouts))
        return outputs, grads

    def _local_box(self, array: Any, layout: Layout) -> Any:
        """Return this rank's box of a cotangent or gradient of a tensor with ``layout``."""
        return local_box(array, dual(layout), self.coordinate)

    def _output_problems(self, outs: Sequence[Any], *, exact: bool) -> list[str]:
        problems = []
        for index, (out, expected) in enumerate(zip(outs, self.job.outputs, strict=True)):
            actual = self.platform.tensor_to_numpy(self.platform.detach(out.full_tensor()))
            if self.job.sample.uninitialized and actual.shape == expected.shape:
                actual = np.broadcast_to(expected, actual.shape)
            actual = np.ascontiguousarray(actual).reshape(actual.shape)
            problem = difference(actual, expected, exact=exact, eps=self.job.eps)
            if problem is not None:
                problems.append(f"output {index} {list(out.placements)} {problem}")
        return problems

    def _expected_gradient(self, index: int, layout: Layout, shards: Sequence[Any]) -> Any:
        gradient = self.job.grads[index]
        if any(op in EXTREMA for _, op in layout.partials):
            return extremum_gradients(gradient, layout, shards)[self.rank]
        averaged = math.prod(self.mesh.shape[axis] for axis, op in layout.partials if op == "avg")
        return np.asarray(self._local_box(gradient, layout) / averaged, gradient.dtype)

    def _gradient_problems(self, index: int, grad: Any, expected: Any, *, exact: bool) -> list[str]:
        problem = difference(self.platform.tensor_to_numpy(grad), expected, exact=exact, eps=self.job.eps)
        return [] if problem is None else [f"gradient of operand {index} {problem}"]
