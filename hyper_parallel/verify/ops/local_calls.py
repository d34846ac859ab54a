"""Caches the local calls of one sample with values, so that equal local calls are computed once.

Ranks with the same local shards, the same local call and the same cotangents compute the same result. Examples are
ranks along an axis on which all operands are replicated, equal shards on meshes of different shapes, and equal rows on
different axes. Equal shards are recognized by a key (operand, index range, random split into partial values), never by
their values.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.boxes import coordinates
from hyper_parallel.core.dtensor.transition import average_divisor, dual
from hyper_parallel.verify.checker.checker import EXTREMA
from hyper_parallel.verify.checker.difference import difference, rounding_bound
from hyper_parallel.verify.checker.shards import (
    extremum_gradients,
    partial_axes,
    partial_coordinate,
    partial_values,
    reduce_group,
)
from hyper_parallel.verify.frameworks import harness_of

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Box, Layout
    from hyper_parallel.core.shard.rule import LocalCall
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.ops.reference import Caller, Reference
    from hyper_parallel.verify.ops.values import FilledSample

__all__ = ["CallCache", "ComputedCall", "LocalShard", "name_of"]


class LocalShard:
    """The local shard of one rank: an array, converted to a tensor on first use.

    Shards are compared by identity: :class:`CallCache` makes one object per key.
    """

    __slots__ = ("_tensor", "array")

    def __init__(self, array: Any) -> None:
        self.array = array
        self._tensor: Any = None

    def tensor(self, platform: Platform) -> Any:
        """Return the shard as a tensor of the framework, converted once."""
        if self._tensor is None:
            self._tensor = platform.from_numpy(self.array)
        return self._tensor


class ComputedCall:
    """One local call: its arguments, and its results once it has been computed.

    Attributes:
        shards: local shard per operand.
        local: differences between the local call and the caller's call; None if there are none.
        cotangents: cotangent per output; None for an output without one.
        outs: outputs as arrays; None until the call is computed.
        grads: gradient per operand; None for an operand without one.
    """

    __slots__ = ("cotangents", "grads", "local", "outs", "shards")

    def __init__(
        self, shards: Sequence[LocalShard], local: LocalCall | None, cotangents: Sequence[LocalShard | None]
    ) -> None:
        self.shards, self.local, self.cotangents = shards, local, list(cotangents)
        self.outs: list[Any] | None = None
        self.grads: list[Any] = []


class CallCache:
    """Local shards, local calls and comparisons of one filled sample, on all meshes.

    Args:
        platform: the framework.
        reference: results and gradients of one device.
        filled: values of the sample.
        seed: seed of the partial values.
    """

    def __init__(self, platform: Platform, reference: Reference, filled: FilledSample, seed: int) -> None:
        self.platform, self.reference, self.filled, self.seed = platform, reference, filled, seed
        self._shards: dict[Hashable, LocalShard] = {}
        self._boxes: dict[Layout, list[tuple[tuple[int, ...], Box]]] = {}
        self._shards_by_layout: dict[Hashable, list[LocalShard]] = {}
        self._partial_values: dict[Hashable, dict[tuple[int, ...], Any]] = {}
        self._calls: dict[Hashable, ComputedCall] = {}
        self._differences: dict[Hashable, str] = {}

    # -- local shards ------------------------------------------------------------------------------------------------

    def operand(self, index: int, layout: Layout, split: int) -> list[LocalShard]:
        """Return the shards of operand ``index`` on all ranks; ``split`` selects a random split into partial values."""
        kinds = partial_axes(layout)
        key = ("operand", index, layout, split if kinds else 0)
        shards = self._shards_by_layout.get(key)
        if shards is None:
            parts: dict[tuple[int, ...], Any] = {(): self.filled.arrays[index]}
            if kinds:
                parts = self._split_operand(index, kinds, split)
            name = ("operand", index, kinds, split if kinds else 0)
            shards = self._shards_by_layout[key] = self._cut(name, parts, layout)
        return shards

    def expected_output(self, index: int, layout: Layout) -> list[LocalShard]:
        """Return the shards of the expected output ``index`` on all ranks, after reductions."""
        return self._plain_shards("output", index, self.reference.outputs[index], layout)

    def cotangent(self, index: int, layout: Layout) -> list[LocalShard]:
        """Return the shards of the cotangent of output ``index`` on all ranks, in the dual layout."""
        return self._plain_shards("cotangent", index, self.reference.cotangents[index], layout, average_divisor(layout))

    def expected_gradient(self, index: int, layout: Layout, split: int) -> list[LocalShard]:
        """Return the shards of the expected gradient of operand ``index`` on all ranks."""
        gradient = self.reference.grads[index]
        if not any(op in EXTREMA for _, op in layout.partials):
            return self._plain_shards("gradient", index, gradient, layout, average_divisor(layout))
        key = ("gradient", index, layout, split)
        shards = self._shards_by_layout.get(key)
        if shards is None:
            operands = [shard.array for shard in self.operand(index, layout, split)]
            gradients = extremum_gradients(gradient, layout, operands)
            shards = self._shards_by_layout[key] = [LocalShard(local) for local in gradients]
        return shards

    def _plain_shards(self, role: str, index: int, array: Any, layout: Layout, factor: int = 1) -> list[LocalShard]:
        key = (role, index, layout)
        shards = self._shards_by_layout.get(key)
        if shards is None:
            scaled = array if factor == 1 else np.asarray(array / factor, array.dtype)
            shards = self._shards_by_layout[key] = self._cut((role, index, factor), {(): scaled}, dual(layout))
        return shards

    def _cut(self, name: tuple[Hashable, ...], parts: dict[tuple[int, ...], Any], layout: Layout) -> list[LocalShard]:
        """Return the local shards of all ranks; shards with the same ``name``, partial value and box are one object."""
        shards = []
        for at, box in self._rank_boxes(dual(layout)):
            steps = partial_coordinate(layout, at)
            key = (name, steps, box)
            shard = self._shards.get(key)
            if shard is None:
                part = parts[steps][tuple([slice(start, stop) for start, stop in box])]
                shard = self._shards[key] = LocalShard(np.array(part, order="C"))
            shards.append(shard)
        return shards

    def shapes(self, layout: Layout) -> list[tuple[int, ...]]:
        """Return the local shape on every rank."""
        return [tuple([stop - start for start, stop in box]) for _, box in self._rank_boxes(dual(layout))]

    def _rank_boxes(self, layout: Layout) -> list[tuple[tuple[int, ...], Box]]:
        """Return the coordinate of every rank and the box (index ranges) of its shard."""
        boxes = self._boxes.get(layout)
        if boxes is None:
            boxes = self._boxes[layout] = [(at, layout.box_at(at)) for at in coordinates(layout.mesh)]
        return boxes

    def _split_operand(self, index: int, kinds: tuple[tuple[str, int], ...], split: int) -> dict[tuple[int, ...], Any]:
        key = (index, kinds, split)
        parts = self._partial_values.get(key)
        if parts is None:
            rng = np.random.default_rng([self.seed, index, split, zlib.crc32(repr(kinds).encode())])
            parts = partial_values(self.filled.arrays[index], kinds, rng, integral=self.filled.integral)
            self._partial_values[key] = parts
        return parts

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(
        self, shards: tuple[LocalShard, ...], local: LocalCall | None, cotangents: tuple[LocalShard | None, ...]
    ) -> ComputedCall:
        """Return the cached call with these arguments; a new one if :func:`name_of` has no key for the local call."""
        try:
            key = (shards, cotangents, None if local is None else name_of((local.args, local.run)))
        except TypeError:
            return ComputedCall(shards, local, cotangents)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = ComputedCall(shards, local, cotangents)
        return call

    def compute(self, calls: Sequence[ComputedCall], caller: Caller, set_late_cotangents: Callable[[], None]) -> None:
        """Compute ``calls`` in one forward and one backward.

        Args:
            calls: calls that have not been computed.
            caller: runs the operator.
            set_late_cotangents: called when the outputs are known; sets cotangents that depend on them.

        Raises:
            Exception: any error that the operator raises.
        """
        platform, width = self.platform, len(self.reference.outputs)
        operands = len(self.filled.arrays)

        def run(*leaves: Any) -> list[Any]:
            all_outs: list[Any] = []
            for position, call in enumerate(calls):
                outs = caller(leaves[position * operands : (position + 1) * operands], call.local)
                if len(outs) != width:
                    msg = f"the local call returned {len(outs)} outputs, the plain one {width}"
                    raise ValueError(msg)
                all_outs.extend(outs)
            return all_outs

        def cotangents(all_outs: Sequence[Any]) -> list[Any]:
            for position, call in enumerate(calls):
                outs = all_outs[position * width : (position + 1) * width]
                call.outs = [platform.tensor_to_numpy(platform.detach(out)) for out in outs]
            set_late_cotangents()
            return [self._fitting_cotangent(call, index) for call in calls for index in range(width)]

        try:
            leaves = [shard.tensor(platform) for call in calls for shard in call.shards]
            wanted = list(self.filled.requires_grad) * len(calls)
            _, all_grads = harness_of(platform).vjp(run, leaves, cotangents, wanted)
        except Exception:
            for call in calls:
                call.outs = None
            raise
        for position, call in enumerate(calls):
            grads = all_grads[position * operands : (position + 1) * operands]
            call.grads = [None if grad is None else platform.tensor_to_numpy(grad) for grad in grads]

    def _fitting_cotangent(self, call: ComputedCall, index: int) -> Any:
        """Return the cotangent of an output; None if the output has a wrong shape, which is reported separately."""
        cotangent = call.cotangents[index]
        assert call.outs is not None
        if cotangent is None or cotangent.array.shape != call.outs[index].shape:
            return None
        return cotangent.tensor(self.platform)

    # -- comparisons -------------------------------------------------------------------------------------------------

    def output_difference(
        self,
        index: int,
        calls: tuple[ComputedCall, ...],
        kinds: Sequence[tuple[str, int]],
        expected: LocalShard,
        *,
        exact: bool,
    ) -> str:
        """Return how output ``index``, reduced over one group of ranks, differs from ``expected``."""
        key = ("output", index, calls, expected, exact, tuple(kinds))
        if key not in self._differences:
            parts = [call.outs[index] for call in calls if call.outs is not None]
            self._differences[key] = self._difference(parts, kinds, expected, exact=exact)
        return self._differences[key]

    def gradient_difference(
        self,
        index: int,
        calls: tuple[ComputedCall, ...],
        kinds: Sequence[tuple[str, int]],
        expected: LocalShard,
        *,
        exact: bool,
    ) -> str:
        """Return how the gradient of operand ``index``, reduced over one group of ranks, differs from ``expected``."""
        key = ("gradient", index, calls, expected, exact, tuple(kinds))
        if key not in self._differences:
            parts = [call.grads[index] for call in calls]
            self._differences[key] = self._difference(parts, kinds, expected, exact=exact)
        return self._differences[key]

    def _difference(
        self, parts: Sequence[Any], kinds: Sequence[tuple[str, int]], expected: LocalShard, *, exact: bool
    ) -> str:
        actual = np.asarray(reduce_group(parts, kinds))
        if exact:
            return difference(actual, expected.array)
        summed = _summed_magnitude(parts, kinds)
        return difference(actual, expected.array, rounding_bound(expected.array, eps=self.reference.eps, summed=summed))


def _summed_magnitude(parts: Sequence[Any], kinds: Sequence[tuple[str, int]]) -> float:
    """Return the largest sum of magnitudes of partial values; 0 if nothing is summed."""
    if len(parts) < 2 or not any(op in {"sum", "avg"} for op, _ in kinds):
        return 0.0
    total = np.sum([np.abs(part) for part in parts], 0)
    return float(np.max(total, initial=0.0, where=np.isfinite(total)))


def name_of(value: Any) -> Hashable:
    """Return a key that different values never share; it includes types, and for functions their code and closure.

    Raises:
        TypeError: there is no such key for ``value``.
    """
    if isinstance(value, (list, tuple)):
        return (type(value), *map(name_of, value))
    if isinstance(value, dict):
        return (dict, *((name_of(key), name_of(item)) for key, item in value.items()))
    if isinstance(value, slice):
        return (slice, name_of(value.start), name_of(value.stop), name_of(value.step))
    if isinstance(value, FunctionType):
        closure = tuple(name_of(cell.cell_contents) for cell in value.__closure__ or ())
        return (value.__code__, name_of(value.__defaults__), name_of(value.__kwdefaults__), closure)
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))  # distinguishes 0.0 from -0.0
    hash(value)
    return (type(value), value)
