"""Pointwise operators: every dim may be sharded; whether Partial passes depends on the operator's linearity.

By default an operator counts as nonlinear: partial values are reduced first. Partial(max) and Partial(min) pass only
through non-decreasing operators whose gradient is zero where they are constant, so that gradients stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import PARTIAL_OPS, Partial, Placement, Shard
from hyper_parallel.core.shard.labels import LINEAR_OPS, Labels, broadcast_labels, labelled_rows
from hyper_parallel.core.shard.rule import (
    LocalCall,
    OpCall,
    Operand,
    R,
    Row,
    Rule,
    Strategies,
    UnknownOperandError,
    decomposition,
    register_rule,
    replicated_row,
)
from hyper_parallel.core.shard.sample import (
    Sample,
    between,
    booleans,
    complex_,
    dtype,
    integers,
    nonfinite,
    real,
    sample,
    sample_call,
    size,
)
from hyper_parallel.errors import short_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["elementwise", "is_floating_dtype", "partial_rows"]


def elementwise(
    call: OpCall,
    *,
    each: Sequence[int] = (),
    joint: Sequence[int] = (),
    monotone: Sequence[str] = (),
    extra: Sequence[Row] = (),
    outputs: int = 1,
) -> Strategies:
    """Strategies of a pointwise operator: operands broadcast, and Partial passes as declared.

    Args:
        call: the call.
        each: operands in each of which the operator is linear while the others are fixed.
        joint: operands in which the operator is linear together.
        monotone: Partial reductions (``max``, ``min``) that pass through an increasing operator.
        extra: further rows.
        outputs: number of outputs.

    Raises:
        UnknownOperandError: (a TypeError) an operand is a list, which each rank would combine with its shard although
            the list is global.
    """
    for name in ("x", "y"):
        if isinstance(call.args.get(name), (list, tuple)):
            type_name = type(call.args[name]).__name__
            msg = f"{call.op}: {name} is a {type_name}; convert it to a tensor of the framework, and distribute it"
            raise UnknownOperandError(msg)
    inputs, output, shape = broadcast_labels([operand.shape for operand in call.operands])
    labels = Labels(inputs, (output,) * outputs, None, each=tuple(each), joint=tuple(joint), monotone=tuple(monotone))
    rows, ordered = (*labelled_rows(labels), *extra), call.args.get("memory_format") is None
    return Strategies(rows, (shape,) * outputs, many=outputs > 1, ordered=ordered)


def partial_rows(count: int, partial: Sequence[int], ops: Sequence[str] = LINEAR_OPS) -> tuple[Row, ...]:
    """Rows in which the operands with these indices (of ``count``) are Partial, and so is the output."""
    return tuple(_partial_row(count, partial, op) for op in ops)


def _partial_row(count: int, partial: Sequence[int], op: str) -> Row:
    inputs: list[Placement] = [Partial(op) if index in partial else R for index in range(count)]
    return Row(tuple(inputs), (Partial(op),))


# -- classes of linearity ----------------------------------------------------------------------------------------------


def _nonlinear(call: OpCall) -> Strategies:
    return elementwise(call)


def _stepwise(call: OpCall) -> Strategies:
    # Non-decreasing, with gradient zero wherever different values have the same result.
    return elementwise(call, monotone=("max", "min"))


def _linear(call: OpCall) -> Strategies:
    return elementwise(call, joint=(0,))


def _mantissa(call: OpCall) -> Strategies:
    return elementwise(call, outputs=2)


def _masked_scale(call: OpCall) -> Strategies:
    return elementwise(call, each=_indices(call, "x"))


def _additive(call: OpCall) -> Strategies:
    # A Python number would be added on every rank, so Partial must not pass.
    both = isinstance(call["x"], Operand) and isinstance(call["y"], Operand)
    return elementwise(call, joint=(0, 1) if both else ())


def _multiplicative(call: OpCall) -> Strategies:
    return elementwise(call, each=tuple(range(len(call.operands))))


def _quotient(call: OpCall) -> Strategies:
    numerator = call.index_of("x")
    linear = numerator is not None and call["rounding_mode"] is None
    return elementwise(call, each=(numerator,) if linear else ())  # type: ignore[arg-type]


def _lerp(call: OpCall) -> Strategies:
    return elementwise(call, joint=_indices(call, "x", "end"))


def _addcmul(call: OpCall) -> Strategies:
    count = len(call.operands)
    pairs = (_indices(call, "x", "tensor1"), _indices(call, "x", "tensor2"))
    return elementwise(call, extra=[row for pair in pairs for row in partial_rows(count, pair)])


def _addcdiv(call: OpCall) -> Strategies:
    return elementwise(call, joint=_indices(call, "x", "tensor1"))


def _extremum_of_two(call: OpCall) -> Strategies:
    """Maxima over ranks stay Partial(max); if a gradient is needed they are reduced first, since ties share it."""
    tensors = call.operands
    exact = len(tensors) == len(call.args) and not any(operand.floating and operand.needs_grad for operand in tensors)
    same = len({operand.dtype for operand in tensors}) == 1 and not str(tensors[0].dtype).lower().endswith("bool")
    return elementwise(call, extra=partial_rows(2, (0, 1), (call.op.removesuffix("imum"),)) if exact and same else ())


def _where(call: OpCall) -> Strategies:
    """Linear in ``x`` and ``y`` together, unless one of them is a nonzero Python number."""
    picked = [name for name in ("x", "y") if isinstance(call[name], Operand)]
    rest = [call[name] for name in ("x", "y") if name not in picked]
    if any(value != 0 for value in rest):
        return elementwise(call)
    return elementwise(call, joint=_indices(call, *picked))


def _masked_fill(call: OpCall) -> Strategies:
    zero = not isinstance(call["value"], Operand) and call["value"] == 0
    return elementwise(call, joint=_indices(call, "x") if zero else ())


def _indices(call: OpCall, *names: str) -> tuple[int, ...]:
    indices = (call.index_of(name) for name in names)
    return tuple(index for index in indices if index is not None)


# -- the tables --------------------------------------------------------------------------------------------------------

# Operators by signature. An operator with options has its own line.
_STEPWISE = {
    "relu floor ceil trunc sign": "x",
    "round": "x, *, decimals=0",
}
_NONLINEAR = {
    "abs exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal square sin cos tan asin acos atan sinh "
    "cosh asinh acosh atanh tanh sigmoid erf erfc erfinv silu selu relu6 hardswish hardsigmoid mish "
    "logsigmoid lgamma digamma frac isnan isinf isfinite isneginf isposinf signbit sgn sinc logical_not "
    "bitwise_not angle entr erfcx log_ndtr ndtr ndtri i0 i0e i1 i1e airy_ai bessel_j0 bessel_j1 bessel_y0 "
    "bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 "
    "scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0": "x",
    "gelu": "x, approximate='none'",
    "softplus": "x, beta=1, threshold=20",
    "elu": "x, alpha=1.0",
    "celu": "x, alpha=1.0",
    "leaky_relu": "x, negative_slope=0.01",
    "hardtanh": "x, min_val=-1.0, max_val=1.0",
    "threshold": "x, threshold, value",
    "logit": "x, eps=None",
    "nan_to_num": "x, nan=0.0, posinf=None, neginf=None",
    "hardshrink": "x, lambd=0.5",
    "softshrink": "x, lambd=0.5",
    "polygamma": "x, n",
    "mvlgamma": "x, p",
}
POLYNOMIALS = (
    "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h "
    "hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t "
    "shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w"
)
_BINARY = {
    "pow fmax fmin atan2 fmod remainder floor_divide hypot copysign logaddexp logaddexp2 "
    "xlogy xlog1py heaviside eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or "
    "bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm ldexp nextafter igamma igammac zeta complex "
    "polar": "x, y",
    "isclose": "x, y, rtol=1e-05, atol=1e-08, equal_nan=False",
    POLYNOMIALS: "x, y",
}
# Names of the operators above, for the tables of both frameworks.
STEPWISE, NONLINEAR = (" ".join(table) for table in (_STEPWISE, _NONLINEAR))
BINARY = " ".join(("maximum minimum", *_BINARY))
_OTHERS: tuple[tuple[str, str, Callable[[OpCall], Strategies], bool], ...] = (
    # canonical name, signature, placement function, whether Python numbers influence placement
    ("neg", "x", _linear, False),
    ("deg2rad", "x", _linear, False),
    ("rad2deg", "x", _linear, False),
    ("frexp", "x", _mantissa, False),
    ("dropout_backward", "x, mask, scale", _masked_scale, False),
    ("add", "x, y, *, alpha=1", _additive, False),
    ("sub", "x, y, *, alpha=1", _additive, False),
    ("rsub", "x, y, *, alpha=1", _additive, False),
    ("mul", "x, y", _multiplicative, False),
    ("div", "x, y, *, rounding_mode=None", _quotient, False),
    ("lerp", "x, end, weight", _lerp, False),
    ("addcmul", "x, tensor1, tensor2, *, value=1", _addcmul, False),
    ("addcdiv", "x, tensor1, tensor2, *, value=1", _addcdiv, False),
    ("clamp", "x, min=None, max=None", _nonlinear, False),
    ("where", "condition, x, y", _where, True),
    ("masked_fill", "x, mask, value", _masked_fill, True),
)

for _table, _monotone in ((_STEPWISE, True), (_NONLINEAR, False), (_BINARY, False)):
    for _names, _signature in _table.items():
        for _name in _names.split():
            register_rule(Rule(_name, _signature, _stepwise if _monotone else _nonlinear, by_value=False))
for _name, _signature, _strategies, _by_value in _OTHERS:
    register_rule(Rule(_name, _signature, _strategies, by_value=_by_value))
for _name in ("maximum", "minimum"):
    register_rule(Rule(_name, "x, y", _extremum_of_two, by_value=False, by_dtype=True))


# -- copies, fills and factories --------------------------------------------------------------------------------------


def _identity(call: OpCall) -> Strategies:
    return elementwise(call, extra=partial_rows(1, (0,), PARTIAL_OPS))


def _conjugate(call: OpCall) -> Strategies:
    """The conjugate, or the operand itself if it is real; linear."""
    dtype = call["x"].dtype
    is_complex = dtype is not None and short_dtype(dtype).startswith("c")
    return _linear(call) if is_complex else _identity(call)


def _cast(call: OpCall) -> Strategies:
    """Partial sums pass between floating dtypes; no Partial passes to an integer or boolean dtype."""
    x, dtype = call["x"], call["dtype"]
    if dtype is None or dtype == x.dtype:
        return _identity(call)
    return elementwise(call, joint=(0,) if x.floating and is_floating_dtype(dtype) else ())


def is_floating_dtype(dtype: object) -> bool:
    """True for the real floating dtypes of either framework."""
    name = str(dtype).rsplit(".", maxsplit=1)[-1].lower()
    return name in {"float64", "float32", "float16", "bfloat16", "double", "float", "half"}


def _copy(call: OpCall) -> Strategies:
    y = call["y"]
    return _written(call, y) if isinstance(y, Operand) else elementwise(call)


def _written(call: OpCall, values: Operand) -> Strategies:
    """Write ``values`` to ``x``; Partial passes if both are Partial and the conversion is linear and monotone."""
    x = call["x"]
    between_floats = (*LINEAR_OPS, "max", "min") if x.floating and values.floating else ()
    ops = PARTIAL_OPS if x.dtype == values.dtype else between_floats
    return elementwise(call, extra=partial_rows(2, (0, 1), ops))


def _like(call: OpCall) -> Strategies:
    # The result does not depend on the old values, so a Partial operand needs no reduction; the result is replicated.
    return elementwise(call, extra=[Row(_with_replicated_fill_value(call, Partial(op)), (R,)) for op in PARTIAL_OPS])


def _new(call: OpCall) -> Strategies:
    x, shape = call["x"], tuple(call["size"])
    placements = [R, *(Shard(dim) for dim in range(x.ndim)), *(Partial(op) for op in PARTIAL_OPS)]
    return Strategies(
        tuple(Row(_with_replicated_fill_value(call, placement), (R,)) for placement in placements), (shape,)
    )


def _with_replicated_fill_value(call: OpCall, placement: Placement) -> tuple[Placement, ...]:
    """Placements of the operands: ``placement`` for ``x``, Replicate for a fill value that is a tensor."""
    x = call.index_of("x")
    return tuple(placement if index == x else R for index in range(len(call.operands)))


def _range(call: OpCall) -> Strategies:
    """Strategies of a range between two numbers or 0-d tensors; the result is replicated."""
    return Strategies((replicated_row(len(call.operands)),), ((call["steps"],),))


def _zero(call: OpCall) -> Strategies:
    return elementwise(call, extra=partial_rows(1, (0,), PARTIAL_OPS))


def _fill(call: OpCall) -> Strategies:
    if isinstance(call["value"], Operand):
        return _written(call, call["value"])
    # The avg, max and min of equal constants are the constant; of a sum, rank 0 of the axis holds it.
    elements = elementwise(call, extra=partial_rows(1, (0,), ("sum", "avg", "max", "min")))
    return Strategies(elements.rows, elements.outputs, _summand)


def _summand(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall | None:
    """This rank's partial value of a constant."""
    del call, outputs
    coordinate = targets[0].mesh.own_coordinate()
    rest = any(op == "sum" and coordinate[axis] for axis, op in targets[0].partials)
    return LocalCall({"value": 0}) if rest else None


_OPTIONS = "dtype=None, layout=None, device=None, pin_memory=None, requires_grad=False"
register_rule(Rule("prelu", "x, weight", _nonlinear))  # the weight already broadcasts
register_rule(Rule("clone", "x, *, memory_format=None", _identity))
register_rule(Rule("contiguous", "x, memory_format=None", _identity, view=True, itself=True))
register_rule(Rule("detach", "x", _identity, view=True, itself=True))
register_rule(
    Rule(
        "cast",
        "x, dtype=None, device=None, non_blocking=False, copy=False, memory_format=None",
        _cast,
        by_dtype=True,
        itself=True,
    )
)
for _name in ("zeros_like", "ones_like", "empty_like"):
    register_rule(Rule(_name, f"x, *, {_OPTIONS}, memory_format=None", _like))
register_rule(Rule("full_like", f"x, fill_value, *, {_OPTIONS}, memory_format=None", _like, by_value=False))
for _name in ("new_zeros", "new_ones", "new_empty"):
    register_rule(Rule(_name, f"x, *size, {_OPTIONS}", _new))
register_rule(Rule("new_empty_strided", f"x, size, stride, *, {_OPTIONS}", _new))
register_rule(Rule("new_full", f"x, size, fill_value, *, {_OPTIONS}", _new))
for _name, _base in (("linspace", ""), ("logspace", ", base=10.0")):
    register_rule(Rule(_name, f"start, end, steps{_base}, *, {_OPTIONS}", _range))
register_rule(Rule("copy", "x, y, non_blocking=False", _copy, by_dtype=True))
register_rule(Rule("zero", "x", _zero))
register_rule(Rule("fill", "x, value", _fill, by_value=False, by_dtype=True))


# -- parts of complex numbers ------------------------------------------------------------------------------------------

for _name in ("conj", "real"):
    register_rule(Rule(_name, "x", _conjugate, by_dtype=True, view=True))
register_rule(Rule("imag", "x", _linear, view=True))
register_rule(Rule("conj_physical", "x", _conjugate, by_dtype=True, itself=True))
for _name in ("resolve_conj", "resolve_neg"):
    register_rule(Rule(_name, "x", _identity, view=True))


@decomposition("glu", "x, dim=-1")
def glu(ops: Any, x: Any, dim: int) -> Any:
    """One half of ``dim`` times the sigmoid of the other half (Dauphin et al., 2016)."""
    size = tuple(x.shape)[dim]
    if size % 2:
        msg = f"glu: dim {dim} of size {size} must be even to be split in two"
        raise ValueError(msg)
    half = size // 2
    value, gate = ops.split(x, [half, half], dim)
    return ops.mul(value, ops.sigmoid(gate))


# -- samples -----------------------------------------------------------------------------------------------------------

_DIFFERENTIABLE_UNARY = (
    "abs neg exp expm1 exp2 square sin cos tan sinh cosh tanh asinh atan erf erfc sigmoid sinc frac relu silu gelu "
    "hardswish hardsigmoid mish softplus logsigmoid elu celu selu leaky_relu sgn floor ceil trunc round sign clone "
    "contiguous detach"
)
# PyTorch's gradients of these at NaN depend on an element's position in memory (vectorised or remainder loop).
_POSITION_DEPENDENT = ("celu", "elu", "hardswish", "selu")
_DEFINED_AT_NAN = " ".join(op for op in _DIFFERENTIABLE_UNARY.split() if op not in _POSITION_DEPENDENT)
sample(f"{_DEFINED_AT_NAN} isnan isinf isfinite isneginf isposinf nan_to_num signbit", nonfinite("ab"))
sample(" ".join(_POSITION_DEPENDENT), nonfinite("ab").fixed)
# The last four also get no nonfinite values: their gradient at NaN depends on the position in a vector register.
sample(f"{_DIFFERENTIABLE_UNARY} relu6 hardtanh softshrink hardshrink", real("ab"))
sample("abs neg relu tanh floor round sign clone", real("abc"))
sample("abs neg square sign clone signbit isnan", integers(-9, 9, "ab"))
sample("reciprocal log log1p log2 log10 sqrt rsqrt lgamma digamma", between(0.3, 9.0, "ab"))
sample("asin acos atanh erfinv", between(-0.9, 0.9, "ab"))
sample("acosh", between(1.3, 9.0, "ab"))
sample("logit", between(0.1, 0.9, "ab"))
sample("logit", real("ab"), 0.25)
sample("threshold", real("ab"), 0.25, -2.0)
sample("logical_not bitwise_not", booleans("ab"))
sample("bitwise_not", integers(-9, 9, "ab"))
sample("gelu", real("ab"), approximate="tanh")
sample("round", real("ab"), decimals=1)
sample("softplus", real("ab"), 2.0, 1.0)
sample("elu", real("ab"), 0.5)
sample("celu", real("ab"), 0.5)
sample("leaky_relu", real("ab"), 0.25)
sample("hardtanh", real("ab"), -0.5, 0.25)
sample("hardshrink softshrink", real("ab"), 0.25)
sample("nan_to_num", nonfinite("ab"), 0.5, 3.0, -3.0)
_COMPARED = "eq ne lt le gt ge"
_SMOOTH = "add sub rsub mul maximum minimum atan2 logaddexp fmod remainder fmax fmin hypot copysign isclose"
sample(f"{_SMOOTH} {_COMPARED}", real("ab"), between(0.3, 4.0, "ab"))
sample(f"{_SMOOTH} {_COMPARED}", real("ab"), between(0.3, 4.0, "b"))
sample(f"add sub rsub mul maximum minimum hypot {_COMPARED}", real("b1"), real("abc"))
sample(f"add sub rsub mul maximum minimum {_COMPARED}", real("a1c"), real("b1"))
sample("add sub mul div", real("ab"), real())
sample("add sub rsub mul div eq lt pow remainder fmod", between(0.3, 4.0, "ab"), 1.5)
sample("floor_divide", real("ab").fixed, 1.5)
sample(f"add sub mul maximum minimum {_COMPARED}", integers(-3, 4, "ab"), integers(-3, 4, "b"))
sample("add sub rsub", real("ab"), real("b"), alpha=3)
sample("div", real("ab"), between(0.3, 4.0, "ab"))
sample("div", real("a1"), between(0.3, 4.0, "b"))
sample("floor_divide", real("ab").fixed, between(0.3, 4.0, "ab").fixed)
sample("floor_divide", real("a1").fixed, between(0.3, 4.0, "b").fixed)
sample("div", real("ab"), between(0.3, 4.0, "b"), rounding_mode="floor")
sample("div", real("ab"), between(0.3, 4.0, "b"), rounding_mode="trunc")
sample("pow xlogy", between(0.3, 3.0, "ab"), between(0.3, 3.0, "ab"))
sample("pow xlogy", between(0.3, 3.0, "a1"), between(0.3, 3.0, "b"))
sample("pow", real("ab"), 2)
sample("heaviside", real("ab").fixed, real("b").fixed)
sample("logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor", booleans("ab"), booleans("ab"))
sample("logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor", booleans("a1"), booleans("b"))
sample("bitwise_and bitwise_or bitwise_xor", integers(-9, 9, "ab"), integers(-9, 9, "b"))
sample("lerp", real("ab"), real("ab"), 0.25)
sample("lerp", real("ab"), real("b"), between(0.0, 1.0, "a1"))
sample("addcmul addcdiv", real("ab"), real("ab"), between(0.3, 4.0, "ab"), value=2)
sample("addcmul addcdiv", real("ab"), real("a1"), between(0.3, 4.0, "b"))
sample("where", booleans("ab"), real("ab"), real("ab"))
sample("where", booleans("a1"), real("ab"), real("b"))
sample("where", booleans("ab"), real("ab"), 0.0)
sample("where", booleans("ab"), 1.5, real("b"))
sample("clamp", real("ab"), -0.5, 1.0)
sample("clamp", real("ab"), 0.5)
sample("clamp", real("ab"), max=0.5)
sample("clamp", real("ab"), real("b"), real("a1"))
sample("masked_fill", real("ab"), booleans("ab"), 2.0)
sample("masked_fill", real("ab"), booleans("b"), 0)
sample("masked_fill", real("ab"), booleans("a1"), real())
sample("cast", real("ab"), dtype("float32"))
sample("cast", between(0.3, 4.0, "ab"), dtype("int64"))
sample("cast", integers(-3, 4, "ab"), dtype("float32"))
sample_call("zeros_like ones_like", Sample((real("ab"),), constant=True))
sample_call("empty_like", Sample((real("ab"),), constant=True, uninitialized=True))
sample_call("full_like", Sample((real("ab"), 3.0), constant=True))
sample_call("new_zeros new_ones", Sample((real("ab"), (size("b"), 2)), constant=True))
sample_call("new_empty", Sample((real("ab"), (size("b"), 2)), constant=True, uninitialized=True))
sample_call("new_full", Sample((real("ab"), (size("b"), 2), 3.0), constant=True))
sample_call("zero", Sample((real("ab"),), writes=True, constant=True))
sample_call("fill", Sample((real("ab"), 3.0), writes=True, constant=True))
sample_call("fill", Sample((real("ab"), real()), writes=True, constant=True))
sample_call("copy", Sample((real("ab"), real("ab")), writes=True))
sample_call("copy", Sample((real("ab"), real("b")), writes=True))
sample_call("copy", Sample((real("ab"), integers(-3, 4, "ab")), writes=True))
sample("clone contiguous detach", booleans("ab"))
sample("cast", booleans("ab"), dtype("bool"))
sample("cast", real("ab"), dtype("float64"))
sample_call("copy", Sample((booleans("ab"), booleans("ab")), writes=True))
sample_call("zeros_like ones_like", Sample((booleans("ab"),), constant=True))
sample_call("empty_like", Sample((booleans("ab"),), constant=True, uninitialized=True))
sample_call("full_like", Sample((booleans("ab"), True), constant=True))
sample_call("new_zeros new_ones", Sample((booleans("ab"), (size("b"), 2)), constant=True))
sample_call("new_empty", Sample((booleans("ab"), (size("b"), 2)), constant=True, uninitialized=True))
sample_call("new_full", Sample((booleans("ab"), (size("b"), 2), True), constant=True))
sample_call("zero", Sample((booleans("ab"),), writes=True, constant=True))
sample("angle deg2rad rad2deg frexp i0 i0e i1 i1e erfcx log_ndtr ndtr", real("ab"))
sample("angle frexp isnan", nonfinite("ab").fixed)
sample("airy_ai bessel_j0 bessel_j1 modified_bessel_i0 modified_bessel_i1 spherical_bessel_j0", real("ab"))
sample(
    "bessel_y0 bessel_y1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1",
    between(0.3, 9.0, "ab"),
)
sample("ndtri", between(0.1, 0.9, "ab"))
sample("polygamma", between(0.3, 4.0, "ab"), 1)
sample("mvlgamma", between(3.3, 9.0, "ab"), 2)
sample("entr", between(0.3, 4.0, "ab"))
sample("dropout_backward", real("ab"), booleans("ab"), 2.0)
sample("logaddexp2 xlog1py complex", between(0.3, 3.0, "ab"), between(0.3, 3.0, "b"))
sample("logaddexp2 xlog1py complex polar", between(0.3, 3.0, "a1"), between(0.3, 3.0, "ab"))
sample("zeta", between(1.3, 4.0, "ab").fixed, between(0.3, 4.0, "b"))
sample("igamma igammac", between(0.3, 4.0, "ab").fixed, between(0.3, 4.0, "b"))
sample_call("nextafter", Sample((real("ab").fixed, real("b").fixed), exact=True))
sample("ldexp", real("ab"), integers(-3, 4, "b"))
sample("gcd lcm bitwise_left_shift bitwise_right_shift", integers(0, 9, "ab"), integers(0, 9, "b"))
# Steeper polynomials amplify the rounding of partial values beyond the tolerance.
sample(POLYNOMIALS, between(0.3, 0.7, "ab").fixed, integers(0, 4, "ab"))
sample(POLYNOMIALS, between(0.3, 0.7, "a1").fixed, integers(0, 4, "b"))
for _x in (real("ab"), booleans("ab")):
    sample_call("new_empty_strided", Sample((_x, (3, 2), (2, 1)), constant=True, uninitialized=True))
sample("linspace logspace", real(), real().fixed, 5)
sample("linspace logspace", 0.5, real(), 4)
sample("prelu", real("nch"), real("c1"))
sample("prelu", real("nc"), real(1))
sample("conj conj_physical real imag resolve_conj resolve_neg", complex_("ab"))
sample("conj conj_physical real resolve_conj resolve_neg", real("ab"))
sample("resolve_conj resolve_neg", booleans("ab"))
sample("glu", real("a", 6))
sample("glu", real(6, "b"), 0)
