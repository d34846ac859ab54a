from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard.op_plan import describe, plan_call
from hyper_parallel.core.shard.rule import FixedLayouts, LocalCall, OpCall, Operand, Ref, Row, Rule, Strategies
from hyper_parallel.errors import LayoutError, ShardMismatchError, UnsupportedOperatorError

MESH = DeviceMesh.abstract("cpu", (2, 3), tuple(range(6)), ("dp", "tp"))
R, P, S0 = Replicate(), Partial(), Shard(0)


def call_of(*placements):
    """A call of ``op`` on f32[6, 2] operands."""
    layouts = [Layout.place(MESH, placement, (6, 2)) for placement in placements]
    names = "xyz"
    operands = tuple(Operand(names[n], layout, "float32") for n, layout in enumerate(layouts))
    return OpCall("op", MESH, operands, {names[n]: Ref(n) for n in range(len(operands))})


def rule_of(answer):
    """A rule that always answers ``answer``."""
    return Rule("op", "x, y=None", lambda _: answer)


def test_a_plan_holds_the_choice_and_the_local_call():
    """A plan first chooses layouts and then calls the rule's localize for the local call."""
    asked = []

    def localize(call, targets, outputs):
        asked.append((call, targets, outputs))
        return LocalCall({"x": 1})

    call = call_of((S0, R))
    plan = plan_call(call, rule_of(Strategies((Row((R,), (R,)), Row((S0,), (S0,))), ((6, 2),), localize)))
    assert plan.local == LocalCall({"x": 1})
    assert asked == [(call, plan.choice.targets, plan.choice.outputs)]
    assert not plan.moves
    assert plan_call(call, rule_of(Strategies((Row((R,), (R,)),), ((6, 2),)))).moves


def test_fixed_layouts_leave_operands_alone():
    """Under a fixed answer nothing moves, and a replicated operand varies where another is not replicated."""
    call = call_of((R, S0), (R, R), (P, R))
    plan = plan_call(call, rule_of(FixedLayouts((call.operands[0].layout,), many=True)))
    assert not plan.moves
    assert plan.many
    assert plan.choice.varying == ((0,), (0, 1), (1,))


def test_what_a_rule_refuses_names_the_call():
    """A rule's ValueError becomes a LayoutError that names the call."""

    def refuse(_):
        msg = "no such dim"
        raise ValueError(msg)

    with pytest.raises(LayoutError) as caught:
        plan_call(call_of((S0, P)), Rule("op", "x", refuse))
    assert str(caught.value) == "op(x=f32[6@dp, 2] + Partial(sum)@tp): no such dim"


def test_a_row_for_another_number_of_tensors_is_a_wrong_rule():
    """A row with another number of operands or outputs than the call is refused."""
    for row in (Row((R,), (R,)), Row((R, R), (R, R))):
        with pytest.raises(ShardMismatchError) as caught:
            plan_call(call_of((S0, R), (R, R)), rule_of(Strategies((row,), ((6, 2),))))
        assert str(caught.value) == (
            f"op(x=f32[6@dp, 2], y=f32[6, 2]): a row of the rule has {len(row.inputs)} operands and "
            f"{len(row.outputs)} outputs, but the call has 2 and 1; this is a bug in the rule; please report it"
        )


def test_in_place_that_would_move():
    """An in-place call that would have to move its first operand is refused with the fix."""
    with pytest.raises(UnsupportedOperatorError) as caught:
        plan_call(call_of((S0, P)), rule_of(Strategies((Row((R,), (R,)),), ((6, 2),))), in_place=True)
    assert str(caught.value) == (
        "op(x=f32[6@dp, 2] + Partial(sum)@tp): writing in place would have to change the layout of x; "
        "use the out-of-place form, or x = x.redistribute(placements=[Replicate(), Replicate()]) first"
    )


def test_describe_is_the_one_notation():
    """The description of a call shows its operands in layout notation."""
    assert describe(call_of((S0, S0), (R, P))) == "op(x=f32[6@dp@tp, 2], y=f32[6, 2] + Partial(sum)@tp)"
