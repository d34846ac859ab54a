"""From a call to a plan: which layouts the operands need, what the outputs become. Pure; no tensor in sight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard.rule import Fixed, Listed, LocalCall, OpCall, Operand, Rule, Strategies
from hyper_parallel.core.shard.strategy import Choice, cheapest, choose, varying_operands
from hyper_parallel.errors import LayoutError, MeshMismatchError, ShardMismatchError, UnsupportedOperatorError

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["OpPlan", "propagate"]


@dataclass(frozen=True)
class OpPlan:
    """What the dispatcher applies.

    Attributes:
        call: the call that was planned.
        choice: layouts of operands and outputs.
        local: the local call where it differs from the caller's.
        many: True when the outputs come as a sequence.
        impl: what to call on locals instead of the spelled function, or None.
        open: True when the outputs, all of them whole, are only known after the call.
    """

    call: OpCall
    choice: Choice
    local: LocalCall | None
    many: bool
    impl: Callable[..., Any] | None = None
    open: bool = False

    @property
    def moves(self) -> bool:
        """True when an operand has to change its layout."""
        return any(
            operand.layout is not target
            for operand, target in zip(self.call.operands, self.choice.targets, strict=True)
        )


def propagate(call: OpCall, rule: Rule, *, in_place: bool = False) -> OpPlan:
    """Plan ``call`` by ``rule``.

    Raises:
        UnsupportedOperatorError: an in-place call that would have to move what it writes to, or a tensor where the
            rule reads a number.
        LayoutError: the rule does not accept the shapes.
        MeshMismatchError: a user's strategy names layouts of another mesh.
        ShardMismatchError: a row of the rule is not about as many tensors as the call has.
    """
    try:
        return _planned(call, rule, in_place=in_place)
    except (TypeError, ValueError) as error:
        _refuse_tensors_for_numbers(call, error)
        raise


def _planned(call: OpCall, rule: Rule, *, in_place: bool) -> OpPlan:
    try:
        strategies = rule.strategies(call)
    except ValueError as error:
        msg = f"{describe(call)}: {error}"
        raise (MeshMismatchError if isinstance(error, MeshMismatchError) else LayoutError)(msg) from error
    if isinstance(strategies, Fixed):
        layouts = tuple(one.layout for one in call.operands)
        stay = Choice(layouts, strategies.outputs, varying_operands(call, layouts))
        _check_written(call, stay, in_place=in_place)
        return OpPlan(call, stay, None, strategies.many, strategies.impl)
    if isinstance(strategies, Listed):
        best = cheapest(call, strategies)
        _check_written(call, best, in_place=in_place)
        return OpPlan(call, best, None, strategies.many)
    _check_rows(call, strategies)
    choice = choose(call, strategies, in_place=in_place)
    if choice is None:
        raise UnsupportedOperatorError(_in_place_message(call))
    local = strategies.localize(call, choice.targets, choice.outputs) if strategies.localize else None
    return OpPlan(call, choice, local, strategies.many, open=strategies.open)


def _check_written(call: OpCall, choice: Choice, *, in_place: bool) -> None:
    """What is written keeps its layout; the rows of a rule cannot say otherwise, whole layouts can."""
    if not in_place:
        return
    first, (output, *_) = call.operands[0], choice.outputs
    if output.with_shape(first.shape) is not first.layout:
        msg = (
            f"{describe(call)}: it writes into {first.name}, which stays {first.layout.notation()}; "
            f"its rule says that the result is {output.with_shape(first.shape).notation()}"
        )
        raise LayoutError(msg)


def _check_rows(call: OpCall, strategies: Strategies) -> None:
    """A row for another number of tensors says nothing about this call."""
    wanted = (len(call.operands), len(strategies.outputs))
    for row in strategies.rows:
        given = (len(row.inputs), len(row.outputs))
        if given != wanted:
            msg = (
                f"{describe(call)}: a row of the rule is about {given[0]} operands and {given[1]} outputs, the call "
                f"has {wanted[0]} and {wanted[1]}; this is a wrong rule, please report it"
            )
            raise ShardMismatchError(msg)


def _refuse_tensors_for_numbers(call: OpCall, error: Exception) -> None:
    """A rule reads sizes, dims and counts as numbers; frameworks also take tensors of one for them."""
    single = [one for one in call.operands[1:] if not one.ndim and not one.floating]
    if single and (isinstance(error, ShardMismatchError) or Operand.__name__ in str(error)):
        said = f"{describe(call)}: {single[0].name} is a tensor where the rule asks for a number; say int(...) of it"
        raise UnsupportedOperatorError(said) from error


def describe(call: OpCall) -> str:
    """``add(x=f32[4@tp, 3], y=f32[4, 3])``: the operator with its operands in the one notation."""
    operands = ", ".join(f"{one.name}={one.layout.notation(one.dtype)}" for one in call.operands)
    return f"{call.op}({operands})"


def _in_place_message(call: OpCall) -> str:
    first = call.operands[0]
    whole = ", ".join("Replicate()" for _ in range(call.mesh.ndim))
    return (
        f"{describe(call)}: writing in place would have to change the layout of {first.name}; "
        f"use the out-of-place form, or {first.name} = {first.name}.redistribute(placements=[{whole}]) first"
    )
