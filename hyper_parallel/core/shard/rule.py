"""Sharding rules: what an operator does along one mesh axis, as rows of placements.

A row maps placements of the operands to placements of the outputs. Rules do not handle several axes, uneven shards,
costs or gradients: ``strategy``, ``op_plan`` and ``dispatch`` derive these from the rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, final

from hyper_parallel._tree import tree_map
from hyper_parallel.core.dtensor.placements import Placement, Replicate
from hyper_parallel.core.shard.refusals import duplicate_rule_error

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = [
    "Decomposition",
    "FixedLayouts",
    "LayoutOptions",
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
    """The operator does not support the type of an operand; Python then tries that operand's reflected method."""


@dataclass(frozen=True)
class Operand:
    """One tensor argument, as a rule sees it: its name, layout and global shape.

    Attributes:
        name: parameter name, with the position in a list: ``tensors[1]``.
        layout: placement and global shape before any redistribution.
        dtype: the framework's own dtype object.
        floating: True for floating and complex tensors.
        needs_grad: whether the call records a gradient of it; only rules that are ``by_dtype`` may read it.
    """

    name: str
    layout: Layout
    dtype: Any = None
    floating: bool = True
    needs_grad: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Global sizes."""
        return self.layout.shape  # type: ignore[return-value] # an operand's layout always has a shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.layout.dim_axes)


@dataclass(frozen=True)
class Ref:
    """Placeholder for operand ``index`` in the arguments of a call."""

    index: int


@dataclass(frozen=True)
class OpCall:
    """A canonical operator with its operands and its other arguments.

    Attributes:
        op: canonical name.
        mesh: the mesh of all operands.
        operands: tensor arguments, flattened, in the order in which they were bound.
        args: every argument by canonical name; tensors are :class:`Ref`, lists keep their nesting.
    """

    op: str
    mesh: DeviceMesh
    operands: tuple[Operand, ...]
    args: dict[str, Any] = field(hash=False)

    def __getitem__(self, name: str) -> Any:
        """The argument ``name`` with an :class:`Operand` for each tensor, or None if it was not passed."""
        return tree_map(lambda leaf: self.operands[leaf.index] if isinstance(leaf, Ref) else leaf, self.args.get(name))

    def index_of(self, name: str) -> int | None:
        """The index of the operand passed as argument ``name``, or None if that argument is not a tensor."""
        value = self.args.get(name)
        return value.index if isinstance(value, Ref) else None


@dataclass(frozen=True)
class LocalCall:
    """The call on local tensors, where it differs from the caller's own.

    Attributes:
        args: canonical arguments that replace the bound ones.
        run: ``run(platform, args) -> output`` on bound local arguments; None calls the canonical operator.
    """

    args: dict[str, Any] | None = None
    run: Any = None


@dataclass(frozen=True)
class Row:
    """Placements of all operands and outputs on one mesh axis for which the local call gives the correct result.

    The conditions below refer to an operand by its index. The shards of a dim are counted over all axes that split it.

    Attributes:
        inputs: placement of each operand.
        outputs: placement of each output.
        even: ``(operand, dim)``: the dim must split into equal shards, because the local call needs complete rows.
        full: ``(operand, dim)``: no rank may have an empty shard of the dim.
        sizes: ``(operand, dim, size)``: ``size`` must be divisible by the number of shards of the dim.
        cut: for views. ``(operand, dim, n)``: the axes left of this one must split the dim into ``n`` shards.
            ``(operand, dim, n, size)``: they must split it into ``k * n`` shards, where ``k`` times this axis' size
            divides ``size``.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    even: tuple[tuple[int, int], ...] = ()
    full: tuple[tuple[int, int], ...] = ()
    sizes: tuple[tuple[int, int, int], ...] = ()
    cut: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Strategies:
    """The result of a rule for one call.

    Attributes:
        rows: combinations of placements; every axis may use any of them.
        outputs: global shape per output.
        localize: maps the final layouts of operands and outputs to the local call, if that differs from the caller's.
        many: True if the operator returns a tuple or list, even of one tensor.
        open: True if the number and sizes of outputs depend on the operands' values; see :func:`whole`.
        view: True if this call returns a view of its first operand, unlike other calls of the rule.
        ordered: True if the framework stores the dims of the output in the order of those of its operands.
    """

    rows: tuple[Row, ...]
    outputs: tuple[Shape, ...]
    localize: Localize | None = None
    many: bool = False
    open: bool = False
    view: bool = False
    ordered: bool = False


@dataclass(frozen=True)
class FixedLayouts:
    """The result of a rule as output layouts instead of rows: no operand is redistributed.

    Attributes:
        outputs: layout per output; a layout without a global shape means even shards.
        many: True when the operator returns a sequence.
        impl: function to call on local tensors instead of the framework's, or None.
    """

    outputs: tuple[Layout, ...]
    many: bool = False
    impl: Callable[..., Any] | None = None


@dataclass(frozen=True)
class LayoutOptions:
    """The result of a rule as complete layouts; the option that is cheapest to reach is used.

    Attributes:
        options: layouts of the operands, layouts of the outputs, and the cost of reaching them: bytes that one rank
            receives (negative if a local slice saves more than it costs), or None to compute the cost.
        many: True when the operator returns a sequence.
        varying: per operand, the axes on which it is replicated but an operand that it is combined with is not;
            None if every operand is combined with every other one.
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
        by_value: whether placement depends on the values of Python numbers; if not, the cache key leaves them out.
        by_dtype: True if placement depends on the operands' dtypes, or on whether they need a gradient; "partial" if it
            does only for partial operands.
        view: True if the output shares storage with the first operand. If that operand was redistributed, the output is
            read-only, because a write to it would not reach the operand.
        itself: True if the framework may return its first operand itself; the call on DTensors then does so, too.
    """

    op: str
    signature: str
    strategies: Callable[[OpCall], Strategies | FixedLayouts | LayoutOptions]
    by_value: bool = True
    by_dtype: bool | Literal["partial"] = False
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
    """Add a rule.

    Args:
        new: the rule or decomposition.

    Returns:
        ``new``.

    Raises:
        ValueError: the operator already has a rule.
    """
    with _LOCK:
        if new.op in _RULES:
            raise duplicate_rule_error(new.op)
        _RULES[new.op] = new
    return new


def rule(
    op: str,
    signature: str,
    *,
    by_value: bool = True,
    by_dtype: bool | Literal["partial"] = False,
    view: bool = False,
) -> Callable[[Callable[[OpCall], Strategies]], Callable[[OpCall], Strategies]]:
    """Declare the decorated function as the placement function of ``op``; the arguments are those of :class:`Rule`."""

    def declare(strategies: Callable[[OpCall], Strategies]) -> Callable[[OpCall], Strategies]:
        register_rule(Rule(op, signature, strategies, by_value, by_dtype, view))
        return strategies

    return declare


def decomposition(op: str, signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the decorated function as the :class:`Decomposition` of ``op``."""

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
    """Return the row that every deterministic operator has: all replicated."""
    return Row((R,) * inputs, (R,) * outputs)


def whole(call: OpCall) -> Strategies:
    """The placement function of operators whose output sizes depend on values: all operands replicated."""
    return Strategies((replicated_row(len(call.operands), 0),), (), open=True)
