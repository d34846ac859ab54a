"""Element by element: every dim runs through; what happens to summands depends on the operator's linearity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel.core.shard.call import Operand
from hyper_parallel.core.shard.rule import Rule, Strategies, register_rule
from hyper_parallel.core.shard.signature import Labels, broadcast_labels, labelled_rows

if TYPE_CHECKING:
    from hyper_parallel.core.shard.call import OpCall

__all__ = ["elementwise"]


def elementwise(
    call: OpCall, *, each: tuple[int, ...] = (), joint: tuple[int, ...] = (), monotone: tuple[str, ...] = ()
) -> Strategies:
    """Broadcast all operands; pass summands as declared."""
    inputs, output, shape = broadcast_labels([one.shape for one in call.operands])
    labels = Labels(inputs, (output,), reduce=None, each=each, joint=joint, monotone=monotone)
    return Strategies(labelled_rows(labels), (shape,))


def _nonlinear(call: OpCall) -> Strategies:
    return elementwise(call)


def _increasing(call: OpCall) -> Strategies:
    return elementwise(call, monotone=("max", "min"))


def _linear(call: OpCall) -> Strategies:
    return elementwise(call, joint=tuple(range(len(call.operands))))


def _additive(call: OpCall) -> Strategies:
    # A Python number is a constant that would be added once per rank: then nothing may pass.
    both = isinstance(call["x"], Operand) and isinstance(call["y"], Operand)
    return elementwise(call, joint=(0, 1) if both else ())


def _multiplicative(call: OpCall) -> Strategies:
    return elementwise(call, each=tuple(range(len(call.operands))))


def _quotient(call: OpCall) -> Strategies:
    numerator = call.index_of("x")
    linear = numerator is not None and call["rounding_mode"] is None
    return elementwise(call, each=(numerator,) if linear else ())  # type: ignore[arg-type]


INCREASING = "exp relu sigmoid tanh erf floor ceil round sign sqrt log"
NONLINEAR = "abs rsqrt sin cos silu gelu reciprocal square"
UNARY_SIGNATURES = {"gelu": "x, approximate='none'", "relu": "x, inplace=False", "silu": "x, inplace=False",
                    "round": "x, *, decimals=0"}  # fmt: skip

for _name in INCREASING.split():
    register_rule(Rule(_name, UNARY_SIGNATURES.get(_name, "x"), _increasing))
for _name in NONLINEAR.split():
    register_rule(Rule(_name, UNARY_SIGNATURES.get(_name, "x"), _nonlinear))
register_rule(Rule("neg", "x", _linear))
register_rule(Rule("add", "x, y, *, alpha=1", _additive, by_value=False))
register_rule(Rule("sub", "x, y, *, alpha=1", _additive, by_value=False))
register_rule(Rule("mul", "x, y", _multiplicative, by_value=False))
register_rule(Rule("div", "x, y, *, rounding_mode=None", _quotient, by_value=False))
for _name in ("pow", "maximum", "minimum"):
    register_rule(Rule(_name, "x, y", _nonlinear, by_value=False))
