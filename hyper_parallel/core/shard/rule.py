"""The rule language: what one operator does along one mesh axis, as rows of placements.

A row maps placements of the operands to placements of the outputs. Rules never see several axes, uneven shards,
costs or gradients: those are derived (``strategy``, ``propagation``, ``dispatch``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from hyper_parallel.core.dtensor.placements import Placement, Replicate

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = [
    "Decomposition",
    "Fixed",
    "Listed",
    "LocalCall",
    "OpCall",
    "Operand",
    "R",
    "Ref",
    "Row",
    "Rule",
    "Strategies",
    "UnknownOperandError",
    "decomposition",
    "find_rule",
    "register_rule",
    "replicated_row",
    "rule",
    "rule_names",
    "whole",
]

R = Replicate()
Shape = tuple[int, ...]
Localize = Callable[["OpCall", "tuple[Layout, ...]", "tuple[Layout, ...]"], "LocalCall | None"]


class UnknownOperandError(TypeError):
    """The operator does not know the other operand, and leaves it to that one to answer."""


@dataclass(frozen=True)
class Operand:
    """One tensor argument: where it stands, and its layout (with global shape).

    Attributes:
        name: parameter name, with the position in a list: ``tensors[1]``.
        layout: placement and global shape before any redistribution.
        dtype: the framework's own dtype object.
        floating: True for floating and complex tensors.
    """

    name: str
    layout: Layout
    dtype: Any = None
    floating: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Global sizes."""
        return self.layout.shape  # type: ignore[return-value] # operands always carry one

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.layout.dim_axes)


@dataclass(frozen=True)
class Ref:
    """Stands in bound arguments for operand number ``index``."""

    index: int


@dataclass(frozen=True)
class OpCall:
    """A canonical operator with its operands and its other arguments.

    Attributes:
        op: canonical name.
        mesh: the mesh that every operand lives on.
        operands: tensor arguments, flattened, in the order in which they were bound.
        args: every argument by canonical name; tensors are :class:`Ref`, lists keep their nesting.
    """

    op: str
    mesh: DeviceMesh
    operands: tuple[Operand, ...]
    args: dict[str, Any] = field(hash=False)

    def __getitem__(self, name: str) -> Any:
        """The argument ``name``: an :class:`Operand` where it is a tensor, the value (or list of those) otherwise."""
        return self._resolve(self.args.get(name))

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.operands[value.index]
        if isinstance(value, (list, tuple)):
            return type(value)(self._resolve(item) for item in value)
        return value

    def index_of(self, name: str) -> int | None:
        """Operand number of the tensor argument ``name``, or None where it is no tensor."""
        value = self.args.get(name)
        return value.index if isinstance(value, Ref) else None


@dataclass(frozen=True)
class LocalCall:
    """What to call on locals when it is not the caller's own call.

    Attributes:
        args: canonical arguments that replace the bound ones.
        run: ``run(platform, args) -> output`` on bound local arguments; None calls the canonical operator.
    """

    args: dict[str, Any] | None = None
    run: Any = None


@dataclass(frozen=True)
class Row:
    """One true statement about one mesh axis.

    Attributes:
        inputs: placement of each operand.
        outputs: placement of each output.
        even: pairs of operand number and dim whose size must divide by everything that cuts it, because the local
            call would otherwise not see whole rows of the global one.
        full: the same pairs for "no rank may hold an empty chunk".
        sizes: triples of operand number, dim and another size that must divide by everything that cuts the dim.
        cut: operand number, dim and the number of parts that axes further left must have cut the dim into; with a
            fourth number, a multiple of these, and what this axis adds to it must divide that number.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    even: tuple[tuple[int, int], ...] = ()
    full: tuple[tuple[int, int], ...] = ()
    sizes: tuple[tuple[int, int, int], ...] = ()
    cut: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Strategies:
    """What a rule answers for one call.

    Attributes:
        rows: true statements, any one of which may be used on any axis.
        outputs: global shape per output.
        localize: how the local call differs from the caller's, given the operands' and outputs' final layouts.
        many: True when the operator returns a tuple or list, also of one tensor.
        open: True where only the values tell how many outputs there are and how large; see :func:`whole`.
    """

    rows: tuple[Row, ...]
    outputs: tuple[Shape, ...]
    localize: Localize | None = None
    many: bool = False
    open: bool = False


@dataclass(frozen=True)
class Fixed:
    """An answer in whole layouts instead of rows: the operands stay where they are.

    Attributes:
        outputs: layout per output; one without a global shape gets that of even shards.
        many: True when the operator returns a sequence.
        impl: what to call on locals instead of the spelled function, or None.
    """

    outputs: tuple[Layout, ...]
    many: bool = False
    impl: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Listed:
    """An answer in whole layouts to choose from: the cheapest one to reach is taken.

    Attributes:
        options: layouts of the operands, layouts of the outputs, and what reaching them costs: bytes that one rank
            receives, negative where a local slice saves more than it takes; None has it computed.
        many: True when the operator returns a sequence.
        varying: per operand, the axes on which it is whole while an operand that it meets differs; None where every
            operand meets every other one.
    """

    options: tuple[tuple[tuple[Layout, ...], tuple[Layout, ...], float | None], ...]
    many: bool = False
    varying: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Rule:
    """A canonical operator: its name, its parameters and its placement function.

    Attributes:
        op: canonical name.
        signature: parameters, as in ``"x, weight, bias=None"``.
        strategies: the placement function.
        by_value: False where Python scalars do not influence placement and must not grow the cache.
        by_dtype: True where placement depends on the operands' dtype.
        view: True where the output shares storage with the first operand: if that had to move, writing through the
            output would be lost, so it is read-only.
        itself: True where the framework may return its first operand itself; then so does the call on DTensors.
    """

    op: str
    signature: str
    strategies: Callable[[OpCall], Strategies | Fixed | Listed]
    by_value: bool = True
    by_dtype: bool = False
    view: bool = False
    itself: bool = False


@final
@dataclass(frozen=True)
class Decomposition:
    """A canonical operator written in terms of other canonical operators.

    Attributes:
        op: canonical name.
        signature: parameters, as in a :class:`Rule`.
        run: ``run(ops, **arguments)``; ``ops.softmax(x, dim=-1)`` calls canonical operators on DTensors.
    """

    op: str
    signature: str
    run: Callable[..., Any]


_RULES: dict[str, Rule | Decomposition] = {}
_LOCK = threading.Lock()


def register_rule(new: Rule | Decomposition) -> Rule | Decomposition:
    """Add a rule; a second one of the same name is an error.

    Raises:
        ValueError: the operator already has a rule.
    """
    with _LOCK:
        if new.op in _RULES:
            msg = f"operator {new.op!r} already has a rule"
            raise ValueError(msg)
        _RULES[new.op] = new
    return new


def rule(
    op: str, signature: str, *, by_value: bool = True, by_dtype: bool = False, view: bool = False
) -> Callable[[Callable[[OpCall], Strategies]], Callable[[OpCall], Strategies]]:
    """Declare the placement function of canonical operator ``op``."""

    def declare(strategies: Callable[[OpCall], Strategies]) -> Callable[[OpCall], Strategies]:
        register_rule(Rule(op, signature, strategies, by_value, by_dtype, view))
        return strategies

    return declare


def decomposition(op: str, signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare canonical operator ``op`` as a composition of others."""

    def declare(run: Callable[..., Any]) -> Callable[..., Any]:
        register_rule(Decomposition(op, signature, run))
        return run

    return declare


def find_rule(op: str) -> Rule | Decomposition | None:
    """The rule or decomposition of canonical operator ``op``, or None."""
    return _RULES.get(op)


def rule_names() -> tuple[str, ...]:
    """Canonical names of all operators that have a rule, sorted."""
    return tuple(sorted(_RULES))


def replicated_row(inputs: int, outputs: int = 1) -> Row:
    """The row that is true of every deterministic operator: whole operands give whole outputs."""
    return Row((R,) * inputs, (R,) * outputs)


def whole(call: OpCall) -> Strategies:
    """The placement function of an operator whose operands must all be whole, and whose results say their own sizes."""
    return Strategies((replicated_row(len(call.operands), 0),), (), open=True)
