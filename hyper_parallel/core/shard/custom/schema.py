"""What a registered strategy sees of a call, and what it answers. Values; no tensor in sight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    """Which arguments besides layouts tell calls of one operator apart.

    Attributes:
        static_argnum: from this position on, arguments that are no tensors belong to the key of the cache.
        static_kwargkey: names of keyword arguments that do.
        needs_pytree: tensors come in sequences too.
    """

    static_argnum: int = 100
    static_kwargkey: tuple[str, ...] | None = None
    needs_pytree: bool = False


@dataclass(frozen=True)
class OpSchema:
    """One call: every argument in order, with a layout (global shape included) in place of each tensor.

    Attributes:
        op: the operator's name, function or overload.
        args_schema: positional arguments.
        kwargs_schema: keyword arguments.
        schema_info: what belongs to the key; all arguments without it.
    """

    op: Any
    args_schema: tuple[Any, ...]
    kwargs_schema: dict[str, Any] = field(default_factory=dict)
    schema_info: RuntimeSchemaInfo | None = None

    @property
    def args_spec(self) -> Layouts:
        """Layouts of the tensors, in order, those in sequences included."""
        return tuple(_layouts((*self.args_schema, *self.kwargs_schema.values())))

    @property
    def args_strategy(self) -> tuple[OpStrategy, ...]:
        """The same as strategies, each with the one choice of where its tensor is now."""
        return tuple(OpStrategy((OpSpec(layout),)) for layout in self.args_spec)

    @property
    def key(self) -> Any:
        """What tells this call from others of the operator."""
        info = self.schema_info
        positional = tuple(
            _frozen(value)
            for index, value in enumerate(self.args_schema)
            if info is None or index >= info.static_argnum or any(True for _ in _layouts([value]))
        )
        names = sorted(self.kwargs_schema)
        named = tuple(
            (name, _frozen(self.kwargs_schema[name]))
            for name in names
            if info is None
            or name in (info.static_kwargkey or ())
            or any(True for _ in _layouts([self.kwargs_schema[name]]))
        )
        return (self.op, positional, named)

    def __hash__(self) -> int:
        """By :attr:`key`."""
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        """By :attr:`key`."""
        return isinstance(other, OpSchema) and self.key == other.key


@dataclass(frozen=True)
class OpSpec:
    """One true statement about a call on the whole mesh.

    Attributes:
        output_specs: layout of the output, or one per output.
        input_specs: layout per operand, in order; None where the operands may stay.
        redistribute_cost: bytes to bring each operand there, a number or a list whose first entry counts, per
            operand; negative where a local slice saves more than it takes. None has it computed.
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
        """The declared cost of all operands together."""
        if self.redistribute_cost is None:
            return None
        return float(sum(one[0] if isinstance(one, Sequence) else one for one in self.redistribute_cost))


@dataclass(frozen=True)
class OpStrategy:
    """All statements about a call; the cheapest to reach is taken."""

    strategies: tuple[OpSpec, ...]

    def __init__(self, strategies: Sequence[OpSpec]) -> None:
        """Keep them as a tuple."""
        object.__setattr__(self, "strategies", tuple(strategies))


@dataclass(frozen=True)
class TupleStrategy:
    """For operators of lists of tensors: one strategy per element, chosen element by element.

    ``children[i]`` speaks of the i-th tensor of every list argument, in the order of the arguments, and of the i-th
    output.
    """

    children: tuple[OpStrategy, ...]

    def __init__(self, children: Sequence[OpStrategy]) -> None:
        """Keep them as a tuple."""
        object.__setattr__(self, "children", tuple(children))


@dataclass(frozen=True)
class TensorMeta:
    """What is known of a tensor without its values.

    Attributes:
        shape: the global shape.
        dtype: the framework's.
    """

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class OutputSharding:
    """What propagation found.

    Attributes:
        output_spec: layout of the output, or one per output.
        redistribute_schema: the call with its operands where they must be, and with sizes and strides made local;
            None where it is the caller's own.
        needs_redistribute: whether an operand has to move.
    """

    output_spec: Layout | Sequence[Layout]
    redistribute_schema: OpSchema | None = None
    needs_redistribute: bool = False


@dataclass
class OpInfo:
    """A call on its way through propagation.

    Attributes:
        schema: the call.
        output_sharding: what was found, once it was looked for.
    """

    schema: OpSchema
    output_sharding: OutputSharding | None = None


def _layouts(values: Any) -> Iterator[Layout]:
    for value in values:
        if isinstance(value, Layout):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _layouts(value)


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_frozen, value))
    if isinstance(value, dict):
        return (dict, *((name, _frozen(item)) for name, item in value.items()))
    if isinstance(value, slice):
        return (slice, *map(_frozen, (value.start, value.stop, value.step)))
    return (type(value), value)
