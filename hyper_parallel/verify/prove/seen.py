"""The call that a rule's ``localize`` function reads to make the local call, with symbolic global and local sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hyper_parallel.core.dtensor.placements import Partial, Placement, Shard
from hyper_parallel.core.shard.rule import OpCall, Row, Strategies

__all__ = ["SeenCall"]


class _SeenMesh:
    """A mesh in which the coordinate of the rank is unknown."""

    coordinate = None  # with None, random numbers depend only on local shapes

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)

    def own_coordinate(self) -> tuple[Any, ...]:
        """Return the coordinate of this rank as an unknown value."""
        return (_Unknown(),)


class _Unknown:
    """A number that differs between ranks, such as the start of a shard; its use raises an error and ends the trace."""

    def __bool__(self) -> bool:
        raise self._error()

    def __eq__(self, other: object) -> bool:
        raise self._error()

    __hash__ = None  # type: ignore[assignment] # equality with other values is unknown

    def __getattr__(self, name: str) -> Any:
        raise self._error()

    def _error(self) -> ValueError:
        return ValueError("it depends on the rank, such as on where its part starts")


class _SeenLayout:
    """A layout over one axis, with symbolic sizes; it lacks other properties.

    If ``localize`` reads a property that is missing here, the row is tested, not proven.
    """

    def __init__(self, shape: Sequence[Any], local_shape: Sequence[Any], place: Placement, mesh: Any) -> None:
        self.shape, self.local_shape, self.placements = tuple(shape), tuple(local_shape), (place,)
        self.mesh = _SeenMesh(mesh)
        split = place.dim if isinstance(place, Shard) else -1
        self.dim_axes = tuple((0,) if dim == split else () for dim in range(len(self.shape)))
        self.partials = ((0, place.reduce_op),) if isinstance(place, Partial) else ()
        self.ndim = len(self.shape)

    def local_box(self) -> tuple[tuple[Any, Any], ...]:
        """Return the index range of a rank's shard per dim; both ends are unknown for a sharded dim."""
        return tuple(
            (_Unknown(), _Unknown()) if axes else (0, size)
            for axes, size in zip(self.dim_axes, self.shape, strict=True)
        )

    def placement_on(self, axis: int) -> Placement:
        """The placement on the only axis."""
        return self.placements[axis]

    @property
    def is_replicated(self) -> bool:
        """Whether the value is replicated."""
        return not self.partials and not any(self.dim_axes)


class SeenCall:
    """A sample call whose operands and results have the placements of a row, and symbolic sizes.

    Args:
        whole: the call with replicated operands, in which each letter of the sample has its example size.
        answer: the return value of the rule.
        row: the row with the placements.
        known: the symbolic global size of each letter.
        letters: the example size of each letter.
        shapes: symbolic local shapes of the operands.
    """

    def __init__(
        self,
        whole: OpCall,
        answer: Strategies,
        row: Row,
        known: dict[str, Any],
        letters: dict[str, int],
        shapes: Sequence[Sequence[Any]],
    ) -> None:
        self._whole, self._answer, self._row, self._known, self._letters = whole, answer, row, known, letters
        self._local: dict[str, Any] = dict(known)
        self._shapes = shapes
        for operand, place, shape in zip(whole.operands, row.inputs, shapes, strict=False):
            if isinstance(place, Shard):
                for letter, value in letters.items():
                    if value == operand.shape[place.dim]:
                        self._local[letter] = shape[place.dim]

    def operands(self) -> tuple[Any, ...]:
        """Return the operands' layouts."""
        pairs = zip(self._whole.operands, self._row.inputs, self._shapes, strict=False)
        return tuple(
            _SeenLayout([self._size(size, self._known) for size in operand.shape], shape, place, self._whole.mesh)
            for operand, place, shape in pairs
        )

    def outputs(self) -> tuple[Any, ...]:
        """Return the results' layouts."""
        return tuple(
            _SeenLayout(
                [self._size(size, self._known) for size in shape],
                [
                    self._size(size, self._local if isinstance(place, Shard) and place.dim == dim else self._known)
                    for dim, size in enumerate(shape)
                ],
                place,
                self._whole.mesh,
            )
            for shape, place in zip(self._answer.outputs, self._row.outputs, strict=True)
        )

    def call(self, args: dict[str, Any]) -> OpCall:
        """Return the call with arguments ``args``."""
        operands = tuple(
            replace(operand, layout=layout)
            for operand, layout in zip(self._whole.operands, self.operands(), strict=True)
        )
        return OpCall(self._whole.op, self._whole.mesh, operands, args)

    def _size(self, size: int, sizes: dict[str, Any]) -> Any:
        """Return a size as a product of letters; each letter's example size is a prime that no sample contains."""
        factors, rest = [], size
        for letter, value in self._letters.items():
            while rest and rest % value == 0:
                factors.append(sizes[letter])
                rest //= value
        return math.prod(factors) * rest if factors else size
