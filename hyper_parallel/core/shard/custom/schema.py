"""Arguments and results of user strategies (`OpSchema`, `OpStrategy`, …), without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel._tree import leaves
from hyper_parallel.core.dtensor.layout import Layout

__all__ = [
    "OpInfo",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "OutputSharding",
    "RuntimeSchemaInfo",
    "TensorMeta",
    "TupleStrategy",
]

Layouts = tuple[Layout, ...]


@dataclass(frozen=True)
class RuntimeSchemaInfo:
    """Selects the non-tensor arguments in the cache key.

    Attributes:
        static_argnum: position of the first argument in the key.
        static_kwargkey: names of the keyword arguments in the key.
        needs_pytree: True if arguments may be sequences of tensors.
    """

    static_argnum: int = 100
    static_kwargkey: tuple[str, ...] | None = None
    needs_pytree: bool = False


@dataclass(frozen=True)
class OpSchema:
    """One call: its arguments in order, with a layout (and global shape) for each tensor.

    Attributes:
        op: the operator's name, function or overload.
        args_schema: positional arguments.
        kwargs_schema: keyword arguments.
        schema_info: the arguments in the key; None for all.
    """

    op: Any
    args_schema: tuple[Any, ...]
    kwargs_schema: dict[str, Any] = field(default_factory=dict)
    schema_info: RuntimeSchemaInfo | None = None

    @property
    def args_spec(self) -> Layouts:
        """Layouts of the tensors, in order, including those in sequences."""
        return tuple(_layouts_in((*self.args_schema, *self.kwargs_schema.values())))

    @property
    def args_strategy(self) -> tuple[OpStrategy, ...]:
        """The tensors as strategies with one option each, which is the present layout."""
        return tuple(OpStrategy((OpSpec(layout),)) for layout in self.args_spec)

    @property
    def key(self) -> Any:
        """The key that distinguishes this call from others of the operator."""
        info = self.schema_info
        positional = tuple(
            _frozen(value)
            for index, value in enumerate(self.args_schema)
            if info is None or index >= info.static_argnum or _layouts_in(value)
        )
        named = tuple(
            (name, _frozen(value))
            for name, value in sorted(self.kwargs_schema.items())
            if info is None or name in (info.static_kwargkey or ()) or _layouts_in(value)
        )
        return (self.op, positional, named)

    def __hash__(self) -> int:
        """Hash :attr:`key`."""
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        """Compare :attr:`key`."""
        return isinstance(other, OpSchema) and self.key == other.key


@dataclass(frozen=True)
class OpSpec:
    """One option for a call: layouts of its outputs, and the operands' layouts from which they are computed.

    Attributes:
        output_specs: layout of the output, or one per output.
        input_specs: layout per operand, in order; None if the operands keep theirs.
        redistribute_cost: per operand, the bytes to redistribute it, as a number or a list whose first entry counts;
            a negative number makes this option cheaper than one without redistribution. None to compute the cost.
    """

    output_specs: Layout | Sequence[Layout]
    input_specs: Sequence[Layout] | None = None
    redistribute_cost: Sequence[float | Sequence[float]] | None = None

    @property
    def outputs(self) -> Layouts:
        """Layout per output."""
        return (self.output_specs,) if isinstance(self.output_specs, Layout) else tuple(self.output_specs)

    @property
    def output_spec(self) -> Layout:
        """Layout of the only output."""
        (only,) = self.outputs
        return only

    @property
    def cost(self) -> float | None:
        """The declared cost of all operands, summed."""
        if self.redistribute_cost is None:
            return None
        return float(sum(cost[0] if isinstance(cost, Sequence) else cost for cost in self.redistribute_cost))


@dataclass(frozen=True)
class OpStrategy:
    """All options for a call; the cheapest to reach is used."""

    strategies: tuple[OpSpec, ...]

    def __init__(self, strategies: Sequence[OpSpec]) -> None:
        """Store ``strategies`` as a tuple."""
        object.__setattr__(self, "strategies", tuple(strategies))


@dataclass(frozen=True)
class TupleStrategy:
    """One strategy per element, for operators of lists of tensors; each element's option is chosen separately.

    ``children[i]`` describes the i-th tensor of every list argument, in argument order, and the i-th output.
    """

    children: tuple[OpStrategy, ...]

    def __init__(self, children: Sequence[OpStrategy]) -> None:
        """Store ``children`` as a tuple."""
        object.__setattr__(self, "children", tuple(children))


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of a tensor.

    Attributes:
        shape: the global shape.
        dtype: dtype of the framework.
    """

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class OutputSharding:
    """The result of propagation.

    Attributes:
        output_spec: layout of the output, or one per output.
        redistribute_schema: the call with the layouts that its operands need, and with local sizes and strides; None
            if it equals the caller's.
        needs_redistribute: whether an operand must be redistributed.
    """

    output_spec: Layout | Sequence[Layout]
    redistribute_schema: OpSchema | None = None
    needs_redistribute: bool = False


@dataclass
class OpInfo:
    """A call and, after propagation, its result.

    Attributes:
        schema: the call.
        output_sharding: the result of propagation; None before it.
    """

    schema: OpSchema
    output_sharding: OutputSharding | None = None


def _layouts_in(value: Any) -> list[Layout]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Layout)]


def _frozen(value: Any) -> Any:
    """``value`` as a hashable key, in which 1, 1.0 and True differ."""
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_frozen, value))
    if isinstance(value, dict):
        return (dict, *((name, _frozen(item)) for name, item in value.items()))
    if isinstance(value, slice):
        return (slice, *map(_frozen, (value.start, value.stop, value.step)))
    return (type(value), value)
