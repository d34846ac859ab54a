"""Local calls of one filled sample, each computed once.

Ranks that hold the same pieces, make the same local call and get the same cotangents compute the same: whole operands
on two axes, the same chunk on meshes of several shapes, the same rows in another order of axes. What they share is
known by name (operand, box, draw), never by looking at the values, so nothing that could differ is taken for equal.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.boxes import coordinates
from hyper_parallel.core.dtensor.transition import dual
from hyper_parallel.verify.ops.compare import difference
from hyper_parallel.verify.ops.shards import joined, pending, shares, steps_at, summands

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Box, Layout
    from hyper_parallel.core.shard.rule import LocalCall
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.ops.reference import Caller, Reference
    from hyper_parallel.verify.ops.values import FilledSample

__all__ = ["CallCache", "ComputedCall", "LocalShard", "averaged", "name_of"]

EXTREMA = ("max", "min")


class LocalShard:
    """What one rank holds of one global array: as an array, and as a tensor once somebody asks.

    Pieces are compared by identity: :class:`ComputedCalls` makes one per name.
    """

    __slots__ = ("_tensor", "array")

    def __init__(self, array: Any) -> None:
        self.array = array
        self._tensor: Any = None

    def tensor(self, platform: Platform) -> Any:
        """The framework's own."""
        if self._tensor is None:
            self._tensor = platform.from_numpy(self.array)
        return self._tensor


class ComputedCall:
    """One local call: what it is given, and what it gave once it has been computed.

    Attributes:
        pieces: per operand.
        local: how the local call differs from the caller's.
        seeds: cotangent per output, None where it has none.
        outs: arrays; None until it was computed.
        grads: per operand, None where it gets none.
    """

    __slots__ = ("grads", "local", "outs", "pieces", "seeds")

    def __init__(
        self, pieces: Sequence[LocalShard], local: LocalCall | None, seeds: Sequence[LocalShard | None]
    ) -> None:
        self.pieces, self.local, self.seeds = pieces, local, list(seeds)
        self.outs: list[Any] | None = None
        self.grads: list[Any] = []


class CallCache:
    """Pieces, calls and comparisons of one filled sample, on all meshes.

    Args:
        platform: the framework.
        reference: the plain run.
        filled: the sample's values.
        seed: of the summands.
    """

    def __init__(self, platform: Platform, reference: Reference, filled: FilledSample, seed: int) -> None:
        self.platform, self.reference, self.filled, self.seed = platform, reference, filled, seed
        self._pieces: dict[Hashable, LocalShard] = {}
        self._box_lists: dict[Layout, list[tuple[tuple[int, ...], Box]]] = {}
        self._per_layout: dict[Hashable, list[LocalShard]] = {}
        self._summands: dict[Hashable, dict[tuple[int, ...], Any]] = {}
        self._calls: dict[Hashable, ComputedCall] = {}
        self._judged: dict[Hashable, str | None] = {}

    # -- pieces ------------------------------------------------------------------------------------------------------

    def operand(self, index: int, layout: Layout, draw: int) -> list[LocalShard]:
        """Operand ``index`` on all ranks."""
        kinds = pending(layout)
        key = ("operand", index, layout, draw if kinds else 0)
        found = self._per_layout.get(key)
        if found is None:
            parts: dict[tuple[int, ...], Any] = {(): self.filled.arrays[index]}
            if kinds:
                parts = self._summands_of(index, kinds, draw)
            name = ("operand", index, kinds, draw if kinds else 0)
            found = self._per_layout[key] = self._cut(name, parts, layout)
        return found

    def output(self, index: int, layout: Layout) -> list[LocalShard]:
        """What output ``index`` must be on all ranks, pending reductions done."""
        return self._boxes("output", index, self.reference.outputs[index], layout)

    def seed_of(self, index: int, layout: Layout) -> list[LocalShard]:
        """The cotangent of output ``index`` on all ranks, in the dual layout."""
        return self._boxes("seed", index, self.reference.seeds[index], layout, averaged(layout))

    def gradient(self, index: int, layout: Layout, draw: int) -> list[LocalShard]:
        """What the gradient of operand ``index`` must be on all ranks."""
        gradient = self.reference.grads[index]
        if not any(op in EXTREMA for _, op in layout.partials):
            return self._boxes("gradient", index, gradient, layout, averaged(layout))
        key = ("gradient", index, layout, draw)
        found = self._per_layout.get(key)
        if found is None:
            mine = [one.array for one in self.operand(index, layout, draw)]
            found = self._per_layout[key] = [LocalShard(one) for one in shares(gradient, layout, mine)]
        return found

    def _boxes(self, what: str, index: int, array: Any, layout: Layout, factor: int = 1) -> list[LocalShard]:
        key = (what, index, layout)
        found = self._per_layout.get(key)
        if found is None:
            given = array if factor == 1 else np.asarray(array / factor, array.dtype)
            found = self._per_layout[key] = self._cut((what, index, factor), {(): given}, dual(layout))
        return found

    def _cut(self, name: tuple[Hashable, ...], parts: dict[tuple[int, ...], Any], layout: Layout) -> list[LocalShard]:
        """The pieces of all ranks, one per name, summand and box."""
        found = []
        for at, box in self._boxes_of(dual(layout)):
            steps = steps_at(layout, at)
            key = (name, steps, box)
            piece = self._pieces.get(key)
            if piece is None:
                part = parts[steps][tuple([slice(start, stop) for start, stop in box])]
                piece = self._pieces[key] = LocalShard(np.array(part, order="C"))
            found.append(piece)
        return found

    def shapes(self, layout: Layout) -> list[tuple[int, ...]]:
        """Of every rank's piece."""
        return [tuple([stop - start for start, stop in box]) for _, box in self._boxes_of(dual(layout))]

    def _boxes_of(self, layout: Layout) -> list[tuple[tuple[int, ...], Box]]:
        """Coordinates and box of every rank."""
        found = self._box_lists.get(layout)
        if found is None:
            found = self._box_lists[layout] = [(at, layout.box_at(at)) for at in coordinates(layout.mesh)]
        return found

    def _summands_of(self, index: int, kinds: tuple[tuple[str, int], ...], draw: int) -> dict[tuple[int, ...], Any]:
        key = (index, kinds, draw)
        found = self._summands.get(key)
        if found is None:
            rng = np.random.default_rng([self.seed, index, draw, zlib.crc32(repr(kinds).encode())])
            found = summands(self.filled.arrays[index], kinds, rng, integral=self.filled.integral)
            self._summands[key] = found
        return found

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(
        self, pieces: tuple[LocalShard, ...], local: LocalCall | None, seeds: tuple[LocalShard | None, ...]
    ) -> ComputedCall:
        """The one call of these; a new one where the local call has no name by which to know it again."""
        try:
            key = (pieces, seeds, None if local is None else name_of((local.args, local.run)))
        except TypeError:
            return ComputedCall(pieces, local, seeds)
        found = self._calls.get(key)
        if found is None:
            found = self._calls[key] = ComputedCall(pieces, local, seeds)
        return found

    def compute(self, calls: Sequence[ComputedCall], caller: Caller, late: Callable[[], None]) -> None:
        """Compute ``calls`` in one differentiation.

        Args:
            calls: none of them computed.
            caller: runs the operator.
            late: called when outputs are there, for cotangents that depend on them.

        Raises:
            Exception: whatever the operator raises.
        """
        platform, width = self.platform, len(self.reference.outputs)
        operands = len(self.filled.arrays)

        def run(*given: Any) -> list[Any]:
            found: list[Any] = []
            for place, call in enumerate(calls):
                outs = caller(given[place * operands : (place + 1) * operands], call.local)
                if len(outs) != width:
                    msg = f"the local call returned {len(outs)} outputs, the plain one {width}"
                    raise ValueError(msg)
                found.extend(outs)
            return found

        def seeds(outs: Sequence[Any]) -> list[Any]:
            for place, call in enumerate(calls):
                mine = outs[place * width : (place + 1) * width]
                call.outs = [platform.tensor_to_numpy(platform.detach(one)) for one in mine]
            late()
            return [self._fitting(call, index) for call in calls for index in range(width)]

        try:
            leaves = [piece.tensor(platform) for call in calls for piece in call.pieces]
            _, grads = platform.vjp(run, leaves, seeds, list(self.filled.wanted) * len(calls))
        except Exception:
            for call in calls:
                call.outs = None
            raise
        for place, call in enumerate(calls):
            mine = grads[place * operands : (place + 1) * operands]
            call.grads = [None if one is None else platform.tensor_to_numpy(one) for one in mine]

    def _fitting(self, call: ComputedCall, index: int) -> Any:
        """The cotangent; none for an output of a wrong shape, which is reported as such."""
        seed = call.seeds[index]
        assert call.outs is not None
        if seed is None or seed.array.shape != call.outs[index].shape:
            return None
        return seed.tensor(self.platform)

    # -- comparisons -------------------------------------------------------------------------------------------------

    def output_differs(
        self,
        index: int,
        calls: tuple[ComputedCall, ...],
        kinds: Sequence[tuple[str, int]],
        wanted: LocalShard,
        *,
        exact: bool,
    ) -> str | None:
        """What is wrong with output ``index`` of ranks that hold it together."""
        key = ("output", index, calls, wanted, exact, tuple(kinds))
        if key not in self._judged:
            parts = [call.outs[index] for call in calls if call.outs is not None]
            self._judged[key] = self._differs(parts, kinds, wanted, exact=exact)
        return self._judged[key]

    def gradient_differs(
        self,
        index: int,
        calls: tuple[ComputedCall, ...],
        kinds: Sequence[tuple[str, int]],
        wanted: LocalShard,
        *,
        exact: bool,
    ) -> str | None:
        """What is wrong with the gradient of operand ``index`` of ranks that hold it together."""
        key = ("gradient", index, calls, wanted, exact, tuple(kinds))
        if key not in self._judged:
            self._judged[key] = self._differs([call.grads[index] for call in calls], kinds, wanted, exact=exact)
        return self._judged[key]

    def _differs(
        self, parts: Sequence[Any], kinds: Sequence[tuple[str, int]], wanted: LocalShard, *, exact: bool
    ) -> str | None:
        found, eps = np.asarray(joined(parts, kinds)), self.reference.eps
        summed = 0.0 if exact else _magnitude(parts, kinds)
        return difference(found, wanted.array, exact=exact, eps=eps, summed=summed)


def _magnitude(parts: Sequence[Any], kinds: Sequence[tuple[str, int]]) -> float:
    """The largest sum of magnitudes among summands; 0 where nothing is added up."""
    if len(parts) < 2 or not any(op in {"sum", "avg"} for op, _ in kinds):
        return 0.0
    total = np.sum([np.abs(part) for part in parts], 0)
    return float(np.max(total, initial=0.0, where=np.isfinite(total)))


def averaged(layout: Layout) -> int:
    """Number of ranks over which ``layout`` averages."""
    return math.prod(layout.mesh.shape[axis] for axis, op in layout.partials if op == "avg")


def name_of(value: Any) -> Hashable:
    """A name that only equal values have: types count, and functions are known by their code and what they hold.

    Raises:
        TypeError: there is none.
    """
    if isinstance(value, (list, tuple)):
        return (type(value), *map(name_of, value))
    if isinstance(value, dict):
        return (dict, *((name_of(key), name_of(one)) for key, one in value.items()))
    if isinstance(value, slice):
        return (slice, name_of(value.start), name_of(value.stop), name_of(value.step))
    if isinstance(value, FunctionType):
        held = tuple(name_of(cell.cell_contents) for cell in value.__closure__ or ())
        return (value.__code__, name_of(value.__defaults__), name_of(value.__kwdefaults__), held)
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))  # zeros of either sign differ
    hash(value)
    return (type(value), value)
