"""Checks a sample call in many placements on DTensors, on simulated ranks (the public path)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel._tree import as_list
from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.shard.entry import OpEntry, binder
from hyper_parallel.core.shard.rule import Rule, find_rule
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.checker.batch import Failed, World, run_batch
from hyper_parallel.verify.checker.checker import DTensors, Expected, PlacementChecker, Places
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.ops.reference import SEED
from hyper_parallel.verify.ops.user_operators import UserOperator, resolve
from hyper_parallel.verify.ops.values import FilledSample

if TYPE_CHECKING:
    from hyper_parallel.core.shard.sample import Sample
    from hyper_parallel.errors import RankFailedError
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.checker.checker import Checked

__all__ = ["DTensorJob", "DTensorResult", "check_on_dtensors", "operator"]

_TIMEOUT = 120.0


@dataclass(frozen=True)
class DTensorJob:
    """A sample with values, to be checked on one mesh.

    Attributes:
        platform: name of the framework.
        op: canonical name, or a user's function.
        sample: the sample as declared.
        filled: the sample's arguments with values.
        expected: results of the reference.
        mesh: shape of the mesh.
        seed: seed of the partial values.
        device: device that ranks compute on.
    """

    platform: str
    op: str | UserOperator
    sample: Sample
    filled: FilledSample
    expected: Expected
    mesh: tuple[int, ...]
    seed: int
    device: str = "cpu"


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
    """Return the operator as a function of a sample's arguments, on plain tensors or DTensors."""
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


def check_on_dtensors(job: DTensorJob, places: Sequence[Places], max_failures: list[int]) -> list[DTensorResult]:
    """Check every tuple of placements; after too many failures, the remaining tuples are abandoned.

    Args:
        job: the sample and mesh to check.
        places: the placements of every operand, per check.
        max_failures: list of one number: how many checks may still end their ranks, each of which costs a new set of
            ranks; it is decremented here.
    """
    world = World(job.platform, math.prod(job.mesh), _TIMEOUT, job.device, in_step=False)
    done = run_batch(world, _prepare, (job,), list(enumerate(places)), max_failures[0])
    max_failures[0] -= sum(isinstance(ranks, Failed) for ranks in done)
    results = [_crash(ranks.error) if isinstance(ranks, Failed) else _worst(ranks) for ranks in done]
    return results + [DTensorResult("abandoned") for _ in places[len(done) :]]


def _crash(error: RankFailedError) -> DTensorResult:
    cause = error.__cause__ or error
    return DTensorResult("crash", f"{type(cause).__name__}: {cause}")


def _worst(ranks: Sequence[Checked]) -> DTensorResult:
    for rank, result in enumerate(ranks):
        if result.problems:
            text = "; ".join(map(str, result.problems))
            return DTensorResult("wrong", f"rank {rank}: {text}", bool(result.gradients))
    for result in ranks:
        if result.refused_by:
            return DTensorResult("rejected", f"{result.refused_by}: {result.refusal}")
    return DTensorResult("ok", backward=bool(ranks[0].gradients))


def _prepare(job: DTensorJob) -> Callable[[tuple[int, Places]], Checked]:
    """Return the function that checks one numbered tuple of placements on this rank."""
    platform = platform_named(job.platform)
    mesh = init_device_mesh(job.device, job.mesh, mesh_dim_names=[f"m{axis}" for axis in range(len(job.mesh))])
    run = operator(platform, job.op, job.sample)

    def call(operands: Sequence[Any]) -> list[Any]:
        if job.sample.random:
            random.manual_seed(SEED)
        return run(*job.filled.with_operands(operands))

    checker = PlacementChecker(
        call, job.filled.arrays, job.expected, mesh, DTensors(platform, mesh, len(job.expected.outputs)),
        integral=job.filled.integral, values=not job.sample.uninitialized,
    )  # fmt: skip
    return lambda item: checker.check(item[1], job.seed, item[0])
