"""Reduces a failing program while it fails in the same way: fewer steps, smaller tensors, a smaller mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.attempt import Raised, attempt
from hyper_parallel.verify.fuzz.execution import execute, plain_leaves
from hyper_parallel.verify.fuzz.idioms import MOVE
from hyper_parallel.verify.fuzz.language import language_of
from hyper_parallel.verify.fuzz.program import Leaf, Program, operands
from hyper_parallel.verify.fuzz.truth import result_of
from hyper_parallel.verify.ops.values import substitute

if TYPE_CHECKING:
    from hyper_parallel.verify.fuzz.program import Outcome

__all__ = ["SECONDS", "shrink"]

SECONDS = 30.0
"""Time limit of the reduction of one finding; the smallest program found so far is reported."""

Judge = Callable[[Program], "Outcome"]


def shrink(
    program: Program, outcome: Outcome, judge: Judge, framework: str, seconds: float = SECONDS
) -> tuple[Program, Outcome]:
    """Return the smallest program found with an outcome of the same kind, and its outcome.

    Args:
        program: a program that fails.
        outcome: outcome of the program.
        judge: runs a program and returns its outcome.
        framework: name of the framework.
        seconds: time after which no further change is tried.
    """
    until = time.monotonic() + seconds
    changed = True
    while changed and time.monotonic() < until:
        changed = False
        for candidate in _smaller(program, framework):
            if time.monotonic() > until:
                break
            result = judge(candidate)
            if result.kind == outcome.kind:
                program, outcome, changed = candidate, result, True
                break
    return program, outcome


def _smaller(program: Program, framework: str) -> Iterator[Program]:
    """Yield smaller programs, those with the largest reduction first."""
    for candidate in (
        *_without_steps(program),
        *_cut(program, framework),
        *_without_differentiation(program),
        *_simpler_placements(program),
        *_smaller_dims(program),
        *_smaller_mesh(program),
    ):
        used = candidate.with_used_leaves()
        if _is_whole(used):
            yield used


def _is_whole(program: Program) -> bool:
    """Whether every tensor that is read exists, and at least one step runs."""
    known = set(program.leaves)
    for step in program.steps:
        if not set(operands(step)) <= known:
            return False
        known.update(step.outs)
    return bool(program.steps or program.outputs) and set(program.outputs) <= known


# -- fewer steps -------------------------------------------------------------------------------------------------------


def _without_steps(program: Program) -> Iterator[Program]:
    """Yield the program without a sequence of steps whose results are unused, the longest sequence first."""
    count = len(program.steps)
    size = count
    while size:
        for start in range(0, count, size):
            dropped = program.steps[start : start + size]
            gone = {number for step in dropped for number in step.outs}
            steps = (*program.steps[:start], *program.steps[start + size :])
            yield _without_outputs(replace(program, steps=steps), gone)
        size //= 2


def _without_outputs(program: Program, gone: set[int]) -> Program:
    """Return the program without the outputs ``gone`` and their cotangents."""
    kept = [
        (number, seed) for number, seed in zip(program.outputs, program.cotangents, strict=True) if number not in gone
    ]
    outputs, cotangents = tuple(number for number, _ in kept), tuple(seed for _, seed in kept)
    seeds = set(cotangents)
    lost = set(program.cotangents) - seeds
    second = tuple(pair for pair in program.second if pair[0] not in lost)
    return replace(program, outputs=outputs, cotangents=cotangents, second=second,
                   mode=program.mode if outputs else "forward")  # fmt: skip


def _cut(program: Program, framework: str) -> Iterator[Program]:
    """Yield programs in which the results of the first steps are leaves instead."""
    platform, language = platform_named(framework), language_of(framework)
    for count in range(len(program.steps), 0, -1):
        head = replace(program, steps=program.steps[:count], mode="forward", outputs=(), cotangents=(), second=())
        values = attempt(execute, head, plain_leaves(head, platform, language), platform, language)
        if isinstance(values, Raised):  # a single device rejects these steps
            continue
        leaves = dict(program.leaves)
        for (_, number), tensor in values.items():
            result = result_of(tensor, platform)
            assert result is not None
            grad = result.dtype.startswith(("float", "bfloat", "complex")) and program.mode != "forward"
            for placements in (_first_shards(result.array.ndim, program.mesh),):
                leaves[number] = Leaf(result.array, result.dtype, placements, grad)
        yield replace(program, steps=program.steps[count:], leaves=leaves)


def _first_shards(ndim: int, mesh: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(Shard(axis) if axis < ndim else Replicate() for axis in range(len(mesh)))


def _without_differentiation(program: Program) -> Iterator[Program]:
    if program.mode == "forward":
        return
    yield replace(program, mode="forward", outputs=(), cotangents=(), second=())
    if program.mode == "double":
        yield replace(program, mode="grad", second=())
    for number in program.outputs:
        if len(program.outputs) > 1:
            yield _without_outputs(program, {number})
    for number in program.differentiated:
        if len(program.differentiated) > 1 or program.mode == "forward":
            leaves = {**program.leaves, number: replace(program.leaves[number], requires_grad=False)}
            yield replace(program, leaves=leaves, second=tuple(pair for pair in program.second if pair[0] != number))
    for pair in program.second:
        if len(program.second) > 1:
            yield replace(program, second=tuple(other for other in program.second if other != pair))


# -- placements, sizes, mesh -------------------------------------------------------------------------------------------


def _simpler_placements(program: Program) -> Iterator[Program]:
    for number, leaf in program.leaves.items():
        for axis, placement in enumerate(leaf.placements):
            if placement == Replicate():
                continue
            simpler = (*leaf.placements[:axis], Replicate(), *leaf.placements[axis + 1 :])
            yield replace(program, leaves={**program.leaves, number: replace(leaf, placements=simpler)})


def _smaller_dims(program: Program) -> Iterator[Program]:
    """Yield programs with one size reduced, in all leaves and arguments that have this size."""
    sizes = sorted({size for leaf in program.leaves.values() for size in leaf.array.shape if size > 1}, reverse=True)
    for size in sizes:
        for smaller in sorted({1, 2, size // 2, size - 1} - {0}):
            if smaller < size:
                yield _resized(program, size, smaller)
    for number, leaf in program.leaves.items():
        for dim, size in enumerate(leaf.array.shape):
            if size > 1:
                array = np.take(leaf.array, range(size - 1), axis=dim)
                yield replace(program, leaves={**program.leaves, number: replace(leaf, array=array)})


def _resized(program: Program, size: int, smaller: int) -> Program:
    def resized(value: Any) -> Any:
        return smaller if type(value) is int and value == size else value

    def resized_array(array: Any) -> Any:
        part = array[tuple(slice(0, smaller) if length == size else slice(None) for length in array.shape)]
        return np.minimum(part, smaller - 1) if array.dtype.kind == "i" else part

    leaves = {number: replace(leaf, array=resized_array(leaf.array)) for number, leaf in program.leaves.items()}
    steps = [
        replace(
            step,
            args=tuple(substitute(value, resized) for value in step.args),
            kwargs={name: substitute(value, resized) for name, value in step.kwargs.items()},
        )
        if step.call != MOVE
        else step
        for step in program.steps
    ]
    return replace(program, leaves=leaves, steps=tuple(steps))


def _smaller_mesh(program: Program) -> Iterator[Program]:
    """Yield programs without a mesh axis, and with fewer ranks on an axis."""
    for axis, size in enumerate(program.mesh):
        if len(program.mesh) > 1:
            yield _without_axis(program, axis)
        if size > 1:
            mesh = (*program.mesh[:axis], size - 1, *program.mesh[axis + 1 :])
            yield replace(program, mesh=mesh)


def _without_axis(program: Program, axis: int) -> Program:
    def without(placements: Any) -> Any:
        return type(placements)((*placements[:axis], *placements[axis + 1 :]))

    leaves = {number: replace(leaf, placements=without(leaf.placements)) for number, leaf in program.leaves.items()}
    steps = tuple(
        replace(step, args=(step.args[0], without(step.args[1]))) if step.call == MOVE else step
        for step in program.steps
    )
    return replace(program, mesh=without(program.mesh), leaves=leaves, steps=steps)
