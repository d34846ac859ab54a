"""Runs a program on plain tensors of a single device or on DTensors of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard.sample import DType
from hyper_parallel.verify.fuzz.idioms import MOVE
from hyper_parallel.verify.fuzz.program import TensorRef, filled_in

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.fuzz.language import Language
    from hyper_parallel.verify.fuzz.program import Program, Step

__all__ = ["Key", "call_step", "execute", "plain_leaves", "returned", "run_step"]

Key = tuple[str, int]
"""Key of a result: ``value``, ``gradient`` or ``second gradient``, and the number of the tensor."""

After = Callable[[int, Any], Any]


def plain_leaves(program: Program, platform: Platform, language: Language) -> dict[int, Any]:
    """Return the leaves of a program as plain tensors."""
    return {
        number: language.leaf(
            platform.from_numpy(leaf.array).to(platform.str_to_dtype(leaf.dtype)), requires_grad=leaf.requires_grad
        )
        for number, leaf in program.leaves.items()
    }


def execute(
    program: Program,
    leaves: Mapping[int, Any],
    platform: Platform,
    language: Language,
    after: After | None = None,
) -> dict[Key, Any]:
    """Run a program and differentiate it.

    Args:
        program: what to run.
        leaves: tensors by number, plain or distributed.
        platform: the framework.
        language: the framework's functions for random programs.
        after: called with the number and the tensor of each new result that shares no memory with other tensors; its
            return value replaces the tensor.

    Returns:
        the results of every step, in their state after the last step, and the gradients.
    """
    tensors: dict[int, Any] = {}

    def body(given_leaves: Mapping[int, Any]) -> list[Any]:
        tensors.update(given_leaves)
        for step in program.steps:
            outs = run_step(step, tensors, platform, language)
            for number, out in zip(step.outs, outs, strict=True):
                tensors[number] = out if after is None or step.aliases else after(number, out)
        return [tensors[number] for number in program.outputs]

    gradients = language.gradients(
        body, leaves, program.differentiated, program.mode, program.cotangents, program.second
    )
    made = {("value", number): tensors[number] for step in program.steps for number in step.outs}
    return made | gradients


def run_step(step: Step, tensors: Mapping[int, Any], platform: Platform, language: Language) -> list[Any]:
    """Run one step; return the tensors in its result."""
    return list(returned(call_step(step, tensors, platform, language), platform))


def call_step(step: Step, tensors: Mapping[int, Any], platform: Platform, language: Language) -> Any:
    """Run one step; return its result."""

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            return tensors[leaf.number]
        return platform.str_to_dtype(leaf.name) if isinstance(leaf, DType) else leaf

    args, kwargs = filled_in(step, value_of)
    if step.call == MOVE:
        tensor, placements = args
        is_distributed = isinstance(tensor, platform.DTensorBase)
        return language.copied(tensor.redistribute(placements=placements) if is_distributed else tensor)
    return language.call_named(step.call)(*args, **kwargs)


def returned(result: Any, platform: Platform) -> Iterator[Any]:
    """Yield the tensors in the result of a call."""
    if isinstance(result, platform.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from returned(item, platform)
