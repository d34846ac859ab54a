"""The same comparison on DTensors in the simulated cluster: dispatch, redistribution and collectives included."""

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
from hyper_parallel.verify.check import seedable
from hyper_parallel.verify.ops.compare import difference
from hyper_parallel.verify.ops.reference import SEED, as_list
from hyper_parallel.verify.ops.shards import box_of, held, shares
from hyper_parallel.verify.ops.user_operators import UserOperator, resolve
from hyper_parallel.verify.ops.values import FilledSample, Slot, substitute
from hyper_parallel.verify.simulate import simulate

if TYPE_CHECKING:
    from hyper_parallel.core.shard.sample import Sample
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["DTensorJob", "DTensorResult", "check_on_dtensors", "operator"]

EXTREMA = ("max", "min")
UNDIFFERENTIATED = ("prod", "all", "any")
Places = tuple[tuple[Placement, ...], ...]


@dataclass(frozen=True)
class DTensorJob:
    """One filled sample on one mesh, and the placements to try.

    Attributes:
        platform: name of the framework.
        op: canonical name, or a user's function.
        sample: as declared.
        filled: its values.
        outputs: of the plain run.
        seeds: cotangents.
        grads: gradients of the plain run.
        exact: the plain run made no rounding error.
        eps: rounding unit of the coarsest dtype.
        mesh: shape.
        places: per check the placements of every operand.
        seed: of the summands.
    """

    platform: str
    op: str | UserOperator
    sample: Sample
    filled: FilledSample
    outputs: Sequence[Any]
    seeds: Sequence[Any]
    grads: Sequence[Any]
    exact: bool
    eps: float
    mesh: tuple[int, ...]
    places: Sequence[Places]
    seed: int

    def only(self, places: Sequence[Places]) -> DTensorJob:
        """The same with other placements."""
        return DTensorJob(**{**self.__dict__, "places": places})


@dataclass
class DTensorResult:
    """What became of one tuple of placements.

    Attributes:
        kind: ``ok``, ``rejected``, ``wrong``, ``crash``, or ``abandoned`` after too many of those.
        text: the message or the difference.
        backward: whether gradients were compared.
    """

    kind: str
    text: str = ""
    backward: bool = False


def operator(platform: Platform, op: str | UserOperator, sample: Sample) -> Callable[..., list[Any]]:
    """The operator as a function of a filled sample's operands, plain or distributed."""
    if isinstance(op, UserOperator):
        own = resolve(platform.platform_type, op)
        return lambda args, kwargs: as_list(own(*args, **kwargs))
    if not sample.writes:
        func = getattr(platform.dispatcher.ops, op)
        return lambda args, kwargs: as_list(func(*args, **kwargs))
    rule = find_rule(op)
    assert isinstance(rule, Rule)
    writing = platform.writing_op(op)
    entry = OpEntry(op, writing, binder(rule.signature), rule, writing, canonical=True, in_place=True)

    def write(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        written = platform.dispatcher.ops.clone(args[0])
        platform.dispatcher.dispatch(entry, (written, *args[1:]), kwargs)
        return [written]

    return write


def check_on_dtensors(job: DTensorJob, patience: list[int], timeout: float = 120.0) -> list[DTensorResult]:
    """Check every tuple of placements; one by one where a rank strayed from the others.

    Args:
        job: what to check.
        patience: how many runs may still fail, counted down: each costs a new set of ranks.
        timeout: seconds per run.
    """
    if patience[0] <= 0:
        return [DTensorResult("abandoned") for _ in job.places]
    world = math.prod(job.mesh)
    try:
        per_rank = simulate(_check_rank, world, platform=job.platform, args=(job,), timeout=timeout)
    except RankFailedError as error:
        patience[0] -= 1
        if len(job.places) == 1:
            return [DTensorResult("crash", _first_line(error))]
        middle = len(job.places) // 2
        return [
            *check_on_dtensors(job.only(job.places[:middle]), patience, timeout),
            *check_on_dtensors(job.only(job.places[middle:]), patience, timeout),
        ]
    return [_worst(outcomes) for outcomes in zip(*per_rank, strict=True)]


def _first_line(error: RankFailedError) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"


def _worst(outcomes: Sequence[DTensorResult]) -> DTensorResult:
    for kind in ("crash", "wrong", "rejected"):
        for rank, one in enumerate(outcomes):
            if one.kind == kind:
                text = one.text if kind == "rejected" else f"rank {rank}: {one.text}"
                return DTensorResult(kind, text, one.backward)
    return outcomes[0]


def _check_rank(job: DTensorJob) -> list[DTensorResult]:
    platform = platform_named(job.platform)
    names = [f"m{axis}" for axis in range(len(job.mesh))]
    checker = _Rank(platform, job, init_device_mesh("cpu", job.mesh, mesh_dim_names=names))
    return [checker.check(places, number) for number, places in enumerate(job.places)]


class _Rank:
    """One rank's side."""

    def __init__(self, platform: Platform, job: DTensorJob, mesh: Any) -> None:
        self.platform, self.job, self.mesh = platform, job, mesh
        self.run = operator(platform, job.op, job.sample)
        self.at = mesh.coordinate
        self.index = list(coordinates(mesh)).index(self.at)

    def check(self, places: Places, number: int) -> DTensorResult:
        """Check one tuple of placements."""
        arrays = self.job.filled.arrays
        layouts = [Layout.place(self.mesh, one, array.shape) for one, array in zip(places, arrays, strict=True)]
        pieces = [
            held(
                array, layout, np.random.default_rng([self.job.seed, number, index]), integral=self.job.filled.integral
            )
            for index, (array, layout) in enumerate(zip(arrays, layouts, strict=True))
        ]
        try:
            outs, grads = self._differentiate(layouts, [one[self.index] for one in pieces])
            exact = self._exact(layouts)
            problems = self._outputs_differ(outs, exact=exact)
            compared = [index for index, want in enumerate(self._wanted(layouts)) if want]
            for index in compared:
                problems.extend(self._gradient_differs(index, layouts[index], pieces[index], grads[index], exact=exact))
        except (CollectiveMismatchError, ShardMismatchError) as error:
            raise RuntimeError(str(error)) from error
        except HyperParallelError as error:
            return DTensorResult("rejected", f"{type(error).__name__}: {error}")
        return DTensorResult("wrong" if problems else "ok", "; ".join(problems), bool(compared))

    def _exact(self, layouts: Sequence[Layout]) -> bool:
        """Thirds round: of averages, and of a gradient that three ranks share which tie."""
        return self.job.exact and not any(op in ("avg", *EXTREMA) for one in layouts for _, op in one.partials)

    def _wanted(self, layouts: Sequence[Layout]) -> list[bool]:
        """No gradient passes the reduction of a product or of truths."""
        if any(op in UNDIFFERENTIATED for layout in layouts for _, op in layout.partials):
            return [False] * len(layouts)
        return list(self.job.filled.wanted)

    def _differentiate(self, layouts: Sequence[Layout], pieces: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        platform, filled = self.platform, self.job.filled
        kept: list[Any] = []

        def on_locals(*locals_: Any) -> list[Any]:
            operands = [platform.wrap(local, layout) for local, layout in zip(locals_, layouts, strict=True)]

            def one(leaf: Any) -> Any:
                return operands[leaf.index] if isinstance(leaf, Slot) else leaf

            if self.job.sample.random:
                random.manual_seed(SEED)
            outs = self.run(substitute(filled.args, one), substitute(filled.kwargs, one))
            kept[:] = outs = seedable(outs)
            return [out._local for out in outs]

        def seeds(_: Sequence[Any]) -> list[Any]:
            return [
                None if seed is None else platform.from_numpy(np.array(box_of(seed, dual(out.layout), self.at)))
                for seed, out in zip(self.job.seeds, kept, strict=True)
            ]

        leaves = [platform.from_numpy(piece) for piece in pieces]
        _, grads = platform.vjp(on_locals, leaves, seeds, self._wanted(layouts))
        return kept, grads

    def _outputs_differ(self, outs: Sequence[Any], *, exact: bool) -> list[str]:
        problems = []
        for index, (out, wanted) in enumerate(zip(outs, self.job.outputs, strict=True)):
            whole = self.platform.tensor_to_numpy(self.platform.detach(out.full_tensor()))
            if self.job.sample.uninitialized:
                whole = np.broadcast_to(wanted, whole.shape) if whole.shape == wanted.shape else whole
            problem = difference(
                np.ascontiguousarray(whole).reshape(whole.shape), wanted, exact=exact, eps=self.job.eps
            )
            if problem is not None:
                problems.append(f"output {index} {list(out.placements)} {problem}")
        return problems

    def _gradient_differs(
        self, index: int, layout: Layout, pieces: Sequence[Any], grad: Any, *, exact: bool
    ) -> list[str]:
        gradient = self.job.grads[index]
        extremum = any(op in EXTREMA for _, op in layout.partials)
        if extremum:
            wanted = shares(gradient, layout, pieces)[self.index]
        else:
            factor = math.prod(self.mesh.shape[axis] for axis, op in layout.partials if op == "avg")
            wanted = np.asarray(box_of(gradient, dual(layout), self.at) / factor, gradient.dtype)
        problem = difference(self.platform.tensor_to_numpy(grad), wanted, exact=exact, eps=self.job.eps)
        return [] if problem is None else [f"gradient of operand {index} {problem}"]
