"""Pointwise operators of MindSpore, with casts, and constants of a tensor's shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops
from mindspore.mint.nn import functional as F

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import LayoutError, UnsupportedOperatorError
from hyper_parallel.platform.mindspore.ops.empty_shards import COMPUTED, empty_safe
from hyper_parallel.platform.mindspore.ops.kernels import (
    broadcast_operands,
    copied,
    filled,
    is_leaf,
    one_operand,
    promoted,
    requires_grad,
    single_precision,
    tensor_operands,
    two_operands,
    write_over,
)
from hyper_parallel.platform.mindspore.ops.registry import (
    METHOD,
    decomposition,
    expect,
    kernel,
    spelling,
    spellings,
)
from hyper_parallel.platform.mindspore.versions import no_grad

__all__ = ["addcdiv", "addcmul", "into"]

# -- spellings ---------------------------------------------------------------------------------------------------------

spellings("""
Abs abs  Neg neg  Exp exp  Exp2 exp2  Expm1 expm1  Log log  Log2 log2  Log10 log10  Log1p log1p  Sqrt sqrt
Rsqrt rsqrt  Square square  Sin sin  Cos cos  Tan tan  AsinExt asin  Asin asin  AcosExt acos  ACos acos  AtanExt atan
Atan atan  Sinh sinh  Cosh cosh  Tanh tanh  AsinhExt asinh  Asinh asinh  AcoshExt acosh  Acosh acosh  Atanh atanh
Erf erf  Erfc erfc  Erfinv erfinv  Sigmoid sigmoid  Sign sign  Ceil ceil  Floor floor  Round round  Trunc trunc
Frac frac  Reciprocal reciprocal  Sinc sinc  NanToNum nan_to_num
IsFinite isfinite  IsInf isinf  IsNegInf isneginf
IsNan isnan  LogicalNot logical_not  BitwiseNot bitwise_not  Invert bitwise_not
Lgamma lgamma  Digamma digamma
ReLU relu  ReLU6 relu6  SiLU silu  GeluExt gelu  HSwish hardswish  HSigmoid hardsigmoid  MishExt mish  Mish mish
SoftShrink softshrink  HShrink hardshrink  SeLUExt selu  SeLU selu  LeakyReLUExt leaky_relu
LeakyReLU leaky_relu  EluExt elu  Elu elu
CeLU celu  SoftplusExt softplus  Softplus softplus  Hardtanh hardtanh  Threshold threshold
AddExt add  AddScalar add  Add add  SubExt sub  SubScalar sub  Sub sub  Mul mul  Muls mul
Div div  Divs div  Pow pow  PowTensorScalar pow  PowScalarTensor pow  Maximum maximum  Minimum minimum
Atan2Ext atan2  Atan2 atan2  FmodTensor fmod  FmodScalar fmod  RemainderTensorTensor remainder
RemainderTensorScalar remainder  RemainderScalarTensor remainder  FloorDiv floor_divide  FloorDivScalar floor_divide
FloorMod remainder  Mod fmod
Xlogy xlogy  XLogYScalarOther xlogy  XLogYScalarSelf xlogy  LogAddExp logaddexp  Hypot hypot
Equal eq  EqScalar eq  NotEqual ne  NeScalar ne  Less lt  LessScalar lt  LessEqual le  LessEqualScalar le
Greater gt  GreaterScalar gt  GreaterEqual ge  GreaterEqualScalar ge
LogicalAnd logical_and  LogicalOr logical_or  LogicalXor logical_xor
BitwiseAndTensor bitwise_and  BitwiseAndScalar bitwise_and  BitwiseOrTensor bitwise_or  BitwiseOrScalar bitwise_or
BitwiseXorTensor bitwise_xor  BitwiseXorScalar bitwise_xor
BitwiseAnd bitwise_and  BitwiseOr bitwise_or  BitwiseXor bitwise_xor  Fmax fmax  Fmin fmin  Heaviside heaviside
BesselJ0 bessel_j0  BesselJ1 bessel_j1  BesselY0 bessel_y0  BesselY1 bessel_y1  BesselI0 i0  BesselI0e i0e
BesselI1 i1  BesselI1e i1e  BesselK0 modified_bessel_k0  BesselK1 modified_bessel_k1
BesselK0e scaled_modified_bessel_k0  BesselK1e scaled_modified_bessel_k1  Gcd gcd  Lcm lcm  Igamma igamma
Igammac igammac  Zeta zeta  NextAfter nextafter
Polar polar  Complex complex  Real real  RealView real  Imag imag  ImagView imag  Conj conj
GLU glu  LeftShift bitwise_left_shift  RightShift bitwise_right_shift  Mvlgamma mvlgamma  LogAddExp2 logaddexp2
IsClose isclose  Lerp lerp  LerpScalar lerp  ClampScalar clamp  ClampTensor clamp  AddcmulExt addcmul
AddcdivExt addcdiv  Select where  MaskedFill masked_fill  MaskedFillScalar masked_fill  MaskedFillScalars masked_fill
Clone clone  StopGradient detach  Contiguous contiguous  Cast cast  ToDtype cast
ZerosLike zeros_like  OnesLike ones_like
""")
# ops.gelu and nn.GELU call this operator for the tanh approximation.
spelling("gelu", "GeLU", signature="x, approximate='tanh'")
spelling("zeros_like", "ZerosLikeExt", signature="x, dtype=None, device=None")
spelling("ones_like", "OnesLikeExt", signature="x, dtype=None, device=None")
spelling("full_like", "FullLike", signature="x, fill_value, dtype=None, device=None")
spelling("empty_like", "EmptyLike", signature="x, dtype=None, device=None, pin_memory=None")
spelling("new_full", "NewFull", signature="x, size, fill_value, dtype=None")
spelling("new_empty", "NewEmpty", signature="x, size, dtype=None, device=None")
spelling("new_zeros", "NewZeros", signature="x, size, dtype=None")
spelling("new_ones", "NewOnes", signature="x, size, dtype=None")
spellings(
    """
InplaceAddExt add  InplaceAddsExt add  InplaceSubExt sub  InplaceSubScalar sub  InplaceMul mul  InplaceMuls mul
InplaceDiv div  InplaceDivs div  InplaceCopy copy  InplaceZero zero  InplaceFillScalar fill  InplaceFillTensor fill
InplaceExp exp  InplaceReLU relu  InplaceTanh tanh  InplaceSigmoid sigmoid  InplaceFloor floor  InplaceLog log
InplaceClampScalar clamp  InplaceClampTensor clamp  InplaceMaskedFillScalar masked_fill
InplaceMaskedFillTensor masked_fill  InplaceFloorDivide floor_divide  InplaceFloorDivides floor_divide
InplaceElu elu  InplaceHardtanh hardtanh  InplaceThreshold threshold  InplaceErfinv erfinv  InplaceSign sign
InplaceRemainderTensorScalar remainder  InplaceRemainderTensorTensor remainder
""",
    in_place=True,
)

# -- kernels: one operand ----------------------------------------------------------------------------------------------

INFINITY = float("inf")


def _by_name(home: Any, names: str, operands: Callable[..., Any]) -> None:
    """Register functions of ``home`` that have the canonical operator's name, with its parameter names."""
    for name in names.split():
        kernel(name)(operands(getattr(home, name)))


_by_name(
    mint,
    "abs neg exp expm1 log log1p sqrt rsqrt square sin cos tan sinh cosh tanh atanh erf erfc erfinv sigmoid floor trunc"
    " reciprocal sinc isnan isfinite isinf logical_not",
    one_operand,
)
_by_name(ops, "asin acos atan asinh acosh frac lgamma digamma bessel_j0 bessel_j1 bessel_y0 bessel_y1", one_operand)
_by_name(F, "relu silu hardswish hardsigmoid", one_operand)
kernel("ceil", no_gradient=(0,))(lambda x: mint.ceil(x))
kernel("sign", "sgn", no_gradient=(0,))(lambda x: mint.sign(x))
# MindSpore's names of the modified Bessel functions that have other names elsewhere.
for _name, _own in {
    "i0": "i0", "i0e": "i0e", "i1": "i1", "i1e": "i1e", "modified_bessel_i0": "i0", "modified_bessel_i1": "i1",
    "modified_bessel_k0": "k0", "modified_bessel_k1": "k1", "scaled_modified_bessel_k0": "k0e",
    "scaled_modified_bessel_k1": "k1e",
}.items():  # fmt: skip
    kernel(_name)(one_operand(getattr(ops, f"bessel_{_own}")))

kernel("softshrink")(lambda x, lambd=0.5: F.softshrink(x, lambd))
kernel("hardshrink")(lambda x, lambd=0.5: F.hardshrink(x, lambd))
kernel("nan_to_num")(lambda x, nan=0.0, posinf=None, neginf=None: mint.nan_to_num(x, nan, posinf, neginf))
kernel("exp2")(lambda x: mint.exp(x * math.log(2)))
kernel("isneginf")(lambda x: x == -INFINITY)
kernel("isposinf")(lambda x: x == INFINITY)
kernel("bitwise_not")(lambda x: mint.logical_not(x) if x.dtype == mindspore.bool_ else -x - 1)
kernel("gelu")(lambda x, approximate="none": ops.gelu(x, approximate))
# The gradient is 0 at 0 and 1 at 6, as in MindSpore's own kernel, which does not support float64.
kernel("relu6")(lambda x: mint.clamp(mint.nn.functional.relu(x), max=6))
kernel("hardtanh")(lambda x, min_val=-1.0, max_val=1.0: mint.clamp(x, min_val, max_val))
kernel("leaky_relu")(lambda x, negative_slope=0.01: mint.where(x > 0, x, x * negative_slope))
kernel("threshold")(lambda x, threshold, value: mint.where(x > threshold, x, ops.full_like(x, value)))
kernel("deg2rad")(lambda x: x * (math.pi / 180))
kernel("rad2deg")(lambda x: x * (180 / math.pi))
# The kernel of mvlgamma refuses the sizes 1 and 2, with which other operators' empty results are extrapolated.
kernel("mvlgamma", empty_shape=COMPUTED)(lambda x, p: ops.mvlgamma(x, p))
kernel("polygamma")(lambda x, n: ops.polygamma(Tensor(n, mindspore.int32), x))
kernel("real")(lambda x: ops.real(x) if x.is_complex() else copied(x))
kernel("imag")(lambda x: ops.imag(x))
kernel("conj")(lambda x: ops.conj(x) if x.is_complex() else copied(x))


@kernel("round", no_gradient=(0,))
def _round(x: Tensor, *, decimals: int = 0) -> Tensor:
    return mint.round(x, decimals=decimals) if decimals else mint.round(x)


def _log_to(base: float) -> Callable[[Tensor], Tensor]:
    return lambda x: mint.log(x) / math.log(base)


kernel("log2")(_log_to(2))
kernel("log10")(_log_to(10))


@kernel("elu")
def _elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return mint.where(x > 0, x, alpha * mint.expm1(mint.clamp(x, max=0)))


@kernel("celu")
def _celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return mint.where(x > 0, x, alpha * mint.expm1(mint.clamp(x, max=0) / alpha))


@kernel("selu")
def _selu(x: Tensor) -> Tensor:
    if not x.is_floating_point():  # for integers, MindSpore truncates the exponential, and rounds both factors to one
        return mint.where(x > 0, x, ops.cast(mint.expm1(ops.cast(x, mindspore.float32)), x.dtype))
    return 1.0507009873554805 * _elu(x, 1.6732632423543772)


@kernel("mish")
def _mish(x: Tensor) -> Tensor:
    """``x * tanh(softplus(x))`` as a fraction: on CPU the kernel of ``tanh`` is off by 1e-4 in float32."""
    wide = single_precision(x)
    exponential = mint.exp(mint.clamp(wide, max=20.0))
    part = exponential * (exponential + 2)
    return ops.cast(wide * (part / (part + 2)), x.dtype)


@kernel("softplus")
def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    steep = x * beta
    low = mint.where(steep > threshold, ops.zeros_like(x), steep)
    return mint.where(steep > threshold, x, mint.log1p(mint.exp(low)) / beta)


@kernel("logsigmoid")
def _logsigmoid(x: Tensor) -> Tensor:
    return mint.minimum(x, ops.zeros_like(x)) - mint.log1p(mint.exp(-mint.abs(x)))


@kernel("logit")
def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    inside = x if eps is None else mint.clamp(x, eps, 1 - eps)
    return mint.log(inside / (1 - inside))


@kernel("signbit")
def _signbit(x: Tensor) -> Tensor:
    return mint.logical_or(x < 0, mint.logical_and(x == 0, mint.reciprocal(x) < 0))


# -- kernels: two operands and more ------------------------------------------------------------------------------------

kernel("fmod")(lambda x, y: mint.fmod(*_as_tensors(x, y)))
_by_name(mint, "maximum minimum remainder eq ne lt le gt ge logical_and logical_or logical_xor", two_operands)
_by_name(ops, "atan2 logaddexp hypot gcd lcm igamma igammac", two_operands)
_by_name(mint, "bitwise_and", tensor_operands)
_by_name(ops, "bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift", tensor_operands)
kernel("zeta")(broadcast_operands(ops.zeta))
kernel("nextafter")(broadcast_operands(ops.nextafter))
kernel("polar")(broadcast_operands(ops.polar))
kernel("complex")(broadcast_operands(ops.Complex()))

kernel("isclose")(lambda x, y, rtol=1e-05, atol=1e-08, equal_nan=False: mint.isclose(x, y, rtol, atol, equal_nan))
kernel("rsub")(lambda x, y, *, alpha=1: _sub(y, x, alpha=alpha))
kernel("mul")(lambda x, y: x * y)
kernel("pow")(lambda x, y: x**y)  # mint.pow has no second derivative
kernel("heaviside", no_gradient=(0,))(lambda x, y: mint.where(x == 0, y, ops.cast(x > 0, x.dtype)))
kernel("fmin")(lambda x, y: -_fmax(-x, -y))
kernel("ldexp")(lambda x, y: x * ops.pow(Tensor(2.0, x.dtype), y))
kernel("xlog1py")(lambda x, y: mint.xlogy(x, y + 1))
kernel("where")(lambda condition, x, y: mint.where(condition, x, y))
kernel("lerp")(lambda x, end, weight: x + weight * (end - x))
kernel("addcmul")(lambda x, tensor1, tensor2, *, value=1: x + tensor1 * tensor2 * value)
kernel("addcdiv")(lambda x, tensor1, tensor2, *, value=1: x + tensor1 / tensor2 * value)
kernel("masked_fill")(lambda x, mask, value: x.masked_fill(mask, value))


@kernel("add")
def _add(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return x + y if alpha == 1 else x + _times(x, y, alpha)


@kernel("sub")
def _sub(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return x - y if alpha == 1 else x - _times(x, y, alpha)


def _times(x: Any, y: Any, alpha: float) -> Any:
    """``y * alpha`` in the dtype of the sum, so that booleans stay booleans."""
    dtype = promoted(x, y)
    if isinstance(y, Tensor):
        return ops.cast(ops.cast(y, dtype) * alpha, dtype)
    return bool(y * alpha) if dtype == mindspore.bool_ else y * alpha


@kernel("div", off_graph=lambda kwargs: kwargs.get("rounding_mode") is not None)
def _div(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return x / y if promoted(x, y) not in _COMPLEX else ops.RealDiv()(x, y)
    x, y = _as_tensors(x, y)
    return ops.stop_gradient(mint.div(ops.stop_gradient(x), ops.stop_gradient(y), rounding_mode=rounding_mode))


def _as_tensors(x: Any, y: Any) -> tuple[Any, Any]:
    """Return both as tensors: kernels for a tensor and a number have no gradients and support few dtypes."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x, y
    dtype = promoted(x, y)
    return tuple(ops.cast(each, dtype) if isinstance(each, Tensor) else Tensor(each, dtype) for each in (x, y))


@kernel("floor_divide", off_graph=True)
def _floor_divide(x: Any, y: Any) -> Tensor:
    # The kernels for a tensor and a number are missing on CPU, but the operator // works.
    if not isinstance(y, Tensor):
        return ops.stop_gradient(x // y)
    return ops.stop_gradient(mint.floor_divide(x, y))


@kernel("fmax")
def _fmax(x: Any, y: Any) -> Tensor:
    # MindSpore computes the gradient of its own function in float32.
    x, y = _as_tensors(x, y)
    return mint.where(mint.logical_or(x >= y, mint.isnan(single_precision(y))), x, y)


@kernel("xlogy")
def _xlogy(x: Any, y: Any) -> Any:
    return mint.xlogy(x, y)


@kernel("copysign", no_gradient=(1,))
def _copysign(x: Tensor, y: Any) -> Tensor:
    return mint.where(_signbit(y + x * 0), -mint.abs(x), mint.abs(x))


@kernel("logaddexp2")
def _logaddexp2(x: Tensor, y: Tensor) -> Tensor:
    scale = math.log(2)
    return ops.logaddexp(x * scale, y * scale) / scale


@kernel("clamp")
def _clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    return mint.clamp(x, min, max)


@kernel("prelu")
def _prelu(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply negative elements by a weight that broadcasts; MindSpore's kernel takes one per channel only."""
    return mint.where(x > 0, x, x * weight)


# -- kernels: dtypes, copies and constants -----------------------------------------------------------------------------

_converted = empty_safe("convert", lambda x, dtype: ops.cast(x, dtype))

kernel("clone")(copied)
kernel("detach", reliable_on_empty=True)(lambda x: ops.stop_gradient(x))
kernel("copy")(lambda x, y, non_blocking=False: ops.zeros_like(x) + ops.cast(y, x.dtype))
kernel("fill")(lambda x, value: _full_like(x, value) if not isinstance(value, Tensor) else ops.zeros_like(x) + value)


@kernel("cast", reliable_on_empty=True)
def _cast(x: Tensor, dtype: Any = None, device: Any = None, *, copy: bool = False, **_: Any) -> Tensor:
    """Return the operand itself if it already has the dtype and no copy was requested."""
    del device
    if dtype is None or dtype == x.dtype:
        return copied(x) if copy else x
    return _converted(x, dtype)


@kernel("contiguous", reliable_on_empty=True)
def _contiguous(x: Tensor, memory_format: Any = None) -> Tensor:
    del memory_format  # MindSpore has only one
    return x if 0 in x.shape else x.contiguous()


def _like(value: float) -> Callable[..., Tensor]:
    def compute(x: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
        return filled(tuple(x.shape), value, dtype or x.dtype)

    return compute


def _new(value: float) -> Callable[..., Tensor]:
    def compute(x: Tensor, size: Any, dtype: Any = None, **_: Any) -> Tensor:
        return filled(tuple(size), value, dtype or x.dtype)

    return compute


for _name, _value in {"zeros": 0, "ones": 1, "empty": 0}.items():
    kernel(f"{_name}_like", reliable_on_empty=True)(_like(_value))
    kernel(f"new_{_name}", reliable_on_empty=True)(_new(_value))
kernel("zero", off_graph=True)(_like(0))


@kernel("full_like", reliable_on_empty=True)
def _full_like(x: Tensor, fill_value: float, *, dtype: Any = None, **_: Any) -> Tensor:
    return filled(tuple(x.shape), fill_value, dtype or x.dtype)


@kernel("new_full", reliable_on_empty=True)
def _new_full(x: Tensor, size: Any, fill_value: float, *, dtype: Any = None, **_: Any) -> Tensor:
    return filled(tuple(size), fill_value, dtype or x.dtype)


# -- decompositions ----------------------------------------------------------------------------------------------------

_COMPLEX = (mindspore.complex64, mindspore.complex128)  # not supported by the kernel of Div
ROUNDING = {0: None, 1: "trunc", 2: "floor"}


@decomposition("DivMod", "DivMods")
def _rounded_quotient(ops: Any, _: Any, x: Any, y: Any, rounding_mode: Any = None) -> Any:
    """Divide; the rounding mode may be a number, as MindSpore's Python layer passes it."""
    return ops.div(x, y, rounding_mode=ROUNDING.get(rounding_mode, rounding_mode))


@decomposition("TruncateDiv")
def _truncated_quotient(ops: Any, _: Any, x: Any, y: Any) -> Any:
    return ops.div(x, y, rounding_mode="trunc")


@decomposition("RealDiv")
def _quotient_of_one_dtype(ops: Any, _: Any, x: Any, y: Any) -> Any:
    """Divide; unlike ``Div``, integers divided by integers are rounded towards zero."""
    whole = all(_is_integral(operand) for operand in (x, y))
    return ops.div(x, y, rounding_mode="trunc") if whole else ops.div(x, y)


@decomposition("Inv")
def _inverse(ops: Any, _: Any, x: Any) -> Any:
    """Return the reciprocal of floating-point or complex numbers; that of integers has no rule.

    Raises:
        UnsupportedOperatorError: ``x`` is not floating-point or complex.
    """
    if not (x.is_floating_point() or x.is_complex()):
        msg = f"operator Inv has no sharding rule for {x.dtype}; cast to a floating-point dtype first"
        raise UnsupportedOperatorError(msg)
    return ops.reciprocal(x)


def _is_integral(operand: Any) -> bool:
    if not isinstance(operand, Tensor):
        return isinstance(operand, int)
    return not (operand.is_floating_point() or operand.is_complex())


@decomposition("TruncateMod")
def _truncated_remainder(ops: Any, _: Any, x: Any, y: Any) -> Any:
    return ops.fmod(x, y)


def _alike(ops: Any, x: Any, y: Any) -> list[Any]:
    """Return both operands as tensors of their common dtype."""
    dtype = promoted(x, y)
    like = x if isinstance(x, DTensor) else y
    tensors = (each if isinstance(each, Tensor) else ops.full_like(like, each, dtype=dtype) for each in (x, y))
    return [each if each.dtype == dtype else ops.cast(each, dtype=dtype) for each in tensors]


@decomposition("Xdivy")
def _xdivy(ops: Any, _: Any, x: Any, y: Any) -> Any:
    """Return ``x / y``, but 0 where ``x`` is 0; a Python number gets the dtype of the tensor."""
    x, y = _alike(ops, x, y)
    return _safe_quotient(ops, x, y, ops.eq(x, 0))


@decomposition("DivNoNan")
def _div_no_nan(ops: Any, _: Any, x: Any, y: Any) -> Any:
    x, y = _alike(ops, x, y)
    return _safe_quotient(ops, x, y, ops.eq(y, 0))


def _safe_quotient(ops: Any, x: Any, y: Any, zero: Any) -> Any:
    """Return a quotient that is zero where ``zero`` is true."""
    return ops.mul(ops.div(x, ops.masked_fill(y, zero, 1)), ops.cast(ops.logical_not(zero), dtype=y.dtype))


@decomposition("MulNoNan")
def _safe_product(ops: Any, _: Any, x: Any, y: Any) -> Any:
    """Return a product that is zero wherever the second factor is zero."""
    x, y = _alike(ops, x, y)
    zero = ops.eq(y, 0)
    return ops.mul(ops.where(zero, ops.zeros_like(x), x), y)


@decomposition(METHOD + "Select")
def _where(ops: Any, _: Any, x: Any, condition: Any, y: Any) -> Any:
    """``x.where(condition, y)``: the method's first operand is ``x``, that of the function is the condition."""
    return ops.where(condition, x, y)


@decomposition("SquaredDifference")
def _squared_difference(ops: Any, _: Any, x: Any, y: Any) -> Any:
    return ops.square(ops.sub(x, y))


@decomposition("ApproximateEqual")
def _approximate_equal(ops: Any, primitive: Any, x: Any, y: Any) -> Any:
    return ops.lt(ops.abs(ops.sub(x, y)), primitive.init_attrs["tolerance"])


@decomposition("DeprecatedAllclose", METHOD + "AllClose")
def _allclose(
    ops: Any, _: Any, x: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    return bool(ops.all(ops.isclose(x, other, rtol, atol, equal_nan)).item())


@decomposition("Addcmul")
def addcmul(ops: Any, _: Any, x: Any, first: Any, second: Any, value: Any = 1) -> Any:
    """Return ``x + first * second * value`` in the dtype of the tensors; ``value`` may be a tensor."""
    return ops.add(x, _whole_as(ops, x, ops.mul(ops.mul(first, second), value)))


@decomposition("Addcdiv")
def addcdiv(ops: Any, _: Any, x: Any, first: Any, second: Any, value: Any = 1) -> Any:
    """Return ``x + first / second * value`` in the dtype of the tensors; ``value`` may be a tensor."""
    return ops.add(x, _whole_as(ops, x, ops.mul(ops.div(first, second), value)))


def _whole_as(ops: Any, x: Any, term: Any) -> Any:
    """Return ``term``, cast to the dtype of ``x`` if ``x`` is integral."""
    return ops.cast(term, dtype=x.dtype) if _is_integral(x) else term


@decomposition("AddN", "IdentityN")
def _add_n(ops: Any, primitive: Any, tensors: Any, *__: Any) -> Any:
    if primitive.name == "IdentityN":
        return tuple(tensors)
    total = tensors[0]
    for term in tensors[1:]:
        total = ops.add(total, term)
    return total


@decomposition("Polygamma")
def _polygamma(ops: Any, _: Any, order: Any, x: Any) -> Any:
    """Return the polygamma function of ``x``; ``order`` is a tensor of one element."""
    whole = order.full_tensor() if isinstance(order, DTensor) else order
    expect("Polygamma", "the number of orders", whole.size, 1)
    return ops.polygamma(x, int(whole.asnumpy().item()))


@decomposition("Logit")
def _logit_of(ops: Any, primitive: Any, x: Any, eps: float | None = None) -> Any:
    """Return the logit of ``x``; a negative ``eps`` means no clamping."""
    eps = primitive.init_attrs["eps"] if eps is None and primitive is not None else eps
    return ops.logit(x, None if eps is not None and eps < 0 else eps)


@decomposition("LogSigmoid")
def _log_sigmoid(ops: Any, _: Any, x: Any) -> Any:
    """Return the log-sigmoid; None for the buffer that MindSpore saves for backward."""
    return ops.logsigmoid(x), None


@decomposition("Rint")
def _rint(ops: Any, _: Any, x: Any) -> Any:
    return ops.round(x)


@decomposition("Identity", "copied")
def _identity(ops: Any, _: Any, x: Any) -> Any:
    return ops.clone(x)


@decomposition("Softsign")
def _softsign(ops: Any, _: Any, x: Any) -> Any:
    return ops.div(x, ops.add(ops.abs(x), 1))


@decomposition("FastGeLU", "FastGelu")
def _fast_gelu(ops: Any, _: Any, x: Any) -> Any:
    return ops.mul(x, ops.sigmoid(ops.mul(x, 1.702)))


@decomposition("NpuGelu")
def _npu_gelu(ops: Any, _: Any, x: Any, approximate: str = "none") -> Any:
    return ops.gelu(x, approximate)


@decomposition("Swiglu")
def _swiglu(ops: Any, _: Any, x: Any, dim: int = -1) -> Any:
    """Return SwiGLU: the SiLU of the first half of ``dim`` times the second half."""
    expect("Swiglu", f"size {x.shape[dim]} modulo 2", x.shape[dim] % 2, 0)
    gate, value = ops.chunk(x, 2, dim)
    return ops.mul(ops.silu(gate), value)


@decomposition("PReLU")
def _prelu_per_channel(ops: Any, _: Any, x: Any, weight: Any) -> Any:
    """Return PReLU, with one weight, or one weight per channel (the second dim)."""
    channels = x.shape[1] if len(x.shape) > 1 else 1
    count = math.prod(weight.shape)
    if count not in (1, channels):
        msg = f"operator PReLU: {count} weights for {list(x.shape)}; expected 1, or {channels}, one per channel"
        raise LayoutError(msg)
    inner = (1,) * max(len(x.shape) - 2, 0) if count > 1 else ()
    return ops.prelu(x, ops.view(weight, (-1, *inner)))


@decomposition("TypeAs")
def _type_as(ops: Any, _: Any, x: Any, other: Any) -> Any:
    return x if x.dtype == other.dtype else ops.cast(x, dtype=other.dtype)


@decomposition("ToDevice")
def _to_device(ops: Any, _: Any, x: Any, *__: Any, **___: Any) -> Any:
    """Return ``x``: local tensors stay on the device of the mesh."""
    del ops
    return x


# -- writing -----------------------------------------------------------------------------------------------------------


def into(x: Any, result: Any) -> Any:
    """Write ``result`` into ``x`` and return ``x``."""
    if not isinstance(x, DTensor):  # a local tensor, where dispatch is skipped
        return write_over(x, result)
    written: Any = x
    written.copy_(result)
    return x


@decomposition("Assign", "AssignAdd", "AssignSub")
def _assign(ops: Any, primitive: Any, x: Any, value: Any) -> Any:
    """Write into ``x`` off the graph, as MindSpore does: correct for parameters and buffers, wrong for results.

    Raises:
        UnsupportedOperatorError: gradients flow through ``x``.
    """
    local = x._local if isinstance(x, DTensor) else x
    if requires_grad(local) and not is_leaf(local):
        msg = f"operator {primitive.name}: MindSpore does not differentiate it; use the in-place methods of tensors"
        raise UnsupportedOperatorError(msg)
    with no_grad():
        result = {
            "Assign": lambda: value,
            "AssignAdd": lambda: ops.add(x, value),
            "AssignSub": lambda: ops.sub(x, value),
        }
        return into(x, result[primitive.name]())
