"""``--harden`` of `verify model`: changes the case before it is trained, so that it hides fewer errors.

Equal axis sizes, evenly divisible rows, a single step and constant parameters hide errors. These properties are changed
if the user's functions allow it. The report lists every change and the blind spots that remain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel._text import first_line
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.verify.engine.blind_spots import BLIND, BlindSpot
from hyper_parallel.verify.engine.repairs import STEPS, spread_constant
from hyper_parallel.verify.engine.sizes import unequal_sizes
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.model_training import why_untrainable

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.model_case import ModelCase, ParallelPlan

__all__ = ["Attempt", "CaseInspection", "attempts", "fewer_rows", "with_fewer_rows"]


@dataclass(frozen=True)
class Attempt:
    """A hardened run to try; if its ranks fail, the next attempt is tried.

    Attributes:
        shape: sizes of the mesh.
        rows: whether rows may be removed from batches.
        weights: whether random values are added to constant parameters.
        changes: changes of mesh and steps, in words.
        blind: the blind spot that remains if this attempt fails, for the report.
    """

    shape: tuple[int, ...]
    rows: bool = False
    weights: bool = False
    changes: tuple[str, ...] = ()
    blind: str = ""


def attempts(axes: Mapping[str, int], steps: int) -> tuple[list[Attempt], int]:
    """Return the hardened runs to try, that with the most changes first, and their number of steps.

    Args:
        axes: sizes of the axes by name, as the user gave them.
        steps: number of steps, as the user gave it.
    """
    shape, unequal = tuple(axes.values()), unequal_sizes(axes)
    longer = (f"{STEPS} steps are made instead of {steps}",) if steps == 1 else ()
    tries = [
        Attempt(shape, rows=True, weights=True, changes=longer, blind=f"{BLIND['even-dims']}: with fewer rows"),
        Attempt(shape, weights=True, changes=longer),
    ]
    if unequal != dict(axes):
        changes = (f"the mesh is {_product(unequal)} instead of {_product(axes)}", *longer)
        blind = f"{BLIND['equal-sizes']}: with the mesh {_product(unequal)}"
        tries.insert(0, Attempt(tuple(unequal.values()), rows=True, weights=True, changes=changes, blind=blind))
    return tries, STEPS if steps == 1 else steps


def _product(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in mesh.items())


def fewer_rows(rows: int, sizes: Sequence[int]) -> int:
    """Return the largest number of rows below ``rows`` that no axis divides and that gives every rank a row.

    Args:
        rows: number of rows of the batch.
        sizes: sizes of the axes that the batch is sharded over.

    Returns:
        ``rows`` itself if no axis divides it, or if no smaller number fits.
    """
    proper = [size for size in sizes if size > 1]
    candidates = range(rows, max(proper, default=1) - 1, -1)
    return next((count for count in candidates if all(count % size for size in proper)), rows)


def with_fewer_rows(platform: Platform, case: ModelCase, sizes: Sequence[int]) -> ModelCase:
    """Return a case whose batches are uneven over axes of these ``sizes``; the case itself if there are no axes."""
    if not sizes:
        return case
    return replace(case, batches=[_shorter(platform, batch, sizes) for batch in case.batches])


@dataclass
class CaseInspection:
    """Inspects a case and changes it as far as the attempt allows; every rank gets the same result.

    Attributes:
        platform: framework.
        attempt: the changes that are allowed.
        axes: sizes of the mesh by name.
        seed: seed of the random values.
        rows_over: sizes of the axes for which rows were removed to make the batches uneven.
        changes: changes made, in words.
        blind: blind spots that remain because a change was not possible, with the reason.
    """

    platform: Platform
    attempt: Attempt
    axes: Mapping[str, int]
    seed: int
    rows_over: tuple[int, ...] = ()
    changes: list[str] = field(default_factory=list)
    blind: list[str] = field(default_factory=list)

    def case(self, case: ModelCase, plan: ParallelPlan) -> ModelCase:
        """Return the case, with uneven batches if the attempt allows them.

        Args:
            case: the case that SPEC returned.
            plan: plan that declares the axes over which batches are sharded.
        """
        for index, item in enumerate(case.batches[0]):
            _require_readable(partial(_array, self.platform), item, index)
        sizes = self._splitting(plan)
        rows = [_rows(self.platform, batch) for batch in case.batches]
        even = {axis: size for axis, size in sizes.items() if any(count % size == 0 for count in rows)}
        hardened = with_fewer_rows(self.platform, case, tuple(sizes.values()))
        before, after = _listed(rows), _listed([_rows(self.platform, batch) for batch in hardened.batches])
        if not (even and self.attempt.rows and before != after):
            return case
        why = self._why_untrainable(hardened)
        if not why:
            self.rows_over = tuple(sizes.values())
            self.changes.append(f"the batch has {after} rows instead of {before}")
            return hardened
        facts = f"the batch has {before} rows, which {' and '.join(f'{a}={size}' for a, size in even.items())} divides"
        why = f"with {after} rows the single-device model fails: {why}"
        self.blind.append(str(BlindSpot("even-dims", "", facts, why)))
        return case

    def weights(self, state: dict[str, Any], trainable: Sequence[str]) -> dict[str, Any]:
        """Return the initial state, with random values added to constant parameters if the attempt allows it.

        Args:
            state: arrays by path.
            trainable: paths of the parameters that receive gradients.
        """
        if not self.attempt.weights:
            return state
        spread = {path: spread_constant(state[path], self.seed, path) for path in trainable}
        constant = [path for path in trainable if spread[path] is not state[path]]
        self.changes += [f"{path} is spread around its constant value {state[path].flat[0]:g}" for path in constant]
        return {**state, **{path: spread[path] for path in constant}}

    def _splitting(self, plan: ParallelPlan) -> dict[str, int]:
        """Return the axes over which rows are sharded, by the plan; all axes if a function may shard them."""
        proper = {axis: size for axis, size in self.axes.items() if size > 1}
        if plan.batch is None:
            return proper if callable(plan.styles) else {}
        return {axis: size for axis, size in proper.items() if plan.batch.get(axis) == Shard(0)}

    def _why_untrainable(self, case: ModelCase) -> str:
        """Return the reason why the first rank cannot train the case on one device; empty if it can."""
        transport = self.platform.transport()
        why = why_untrainable(self.platform, case, self.seed) if transport.rank == 0 else ""
        answers: list[str] = transport.all_gather_object(why, tuple(range(transport.world_size)))
        return answers[0]


def _array(platform: Platform, item: Any) -> Any:
    return platform.tensor_to_numpy(item) if platform.is_tensor(item) else np.asarray(item)


def _rows(platform: Platform, batch: tuple[Any, ...]) -> int:
    return next((int(shape[0]) for shape in (_array(platform, item).shape for item in batch) if shape), 1)


def _shorter(platform: Platform, batch: tuple[Any, ...], sizes: Sequence[int]) -> tuple[Any, ...]:
    rows = _rows(platform, batch)
    count = fewer_rows(rows, sizes)
    shapes = [_array(platform, item).shape for item in batch]
    return tuple(
        (item if platform.is_tensor(item) else np.asarray(item))[:count] if shape and shape[0] == rows else item
        for item, shape in zip(batch, shapes, strict=True)
    )


def _require_readable(array: Callable[[Any], Any], item: Any, index: int) -> None:
    """Raise an InputError if an entry of a batch has no values, or is sparse."""
    try:
        array(item)
    except (NotImplementedError, TypeError) as error:
        msg = f"SPEC: array {index} of a batch cannot be read: {first_line(error)}"
        raise InputError(msg) from None


def _listed(counts: Sequence[int]) -> str:
    return " or ".join(map(str, dict.fromkeys(counts)))
