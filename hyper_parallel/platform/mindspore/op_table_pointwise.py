"""MindSpore's names: one element at a time."""

from __future__ import annotations

__all__ = ["IN_PLACE", "REORDERED", "SAME"]

SAME = """
Abs abs  Neg neg  Exp exp  Exp2 exp2  Expm1 expm1  Log log  Log2 log2  Log10 log10  Log1p log1p  Sqrt sqrt
Rsqrt rsqrt  Square square  Sin sin  Cos cos  Tan tan  AsinExt asin  Asin asin  AcosExt acos  ACos acos  AtanExt atan
Atan atan  Sinh sinh  Cosh cosh  Tanh tanh  AsinhExt asinh  Asinh asinh  AcoshExt acosh  Acosh acosh  Atanh atanh
Erf erf  Erfc erfc  Erfinv erfinv  Sigmoid sigmoid  Sign sign  Ceil ceil  Floor floor  Round round  Trunc trunc
Frac frac  Reciprocal reciprocal  Sinc sinc  NanToNum nan_to_num
IsFinite isfinite  IsInf isinf  IsNegInf isneginf
IsNan isnan  LogicalNot logical_not  BitwiseNot bitwise_not  Invert bitwise_not
Inv reciprocal  Lgamma lgamma  Digamma digamma
ReLU relu  ReLU6 relu6  SiLU silu  GeluExt gelu  HSwish hardswish  HSigmoid hardsigmoid  MishExt mish  Mish mish
SoftShrink softshrink  HShrink hardshrink  SeLUExt selu  SeLU selu  LeakyReLUExt leaky_relu
LeakyReLU leaky_relu  EluExt elu  Elu elu
CeLU celu  SoftplusExt softplus  Softplus softplus  Hardtanh hardtanh  Threshold threshold
AddExt add  AddScalar add  Add add  SubExt sub  SubScalar sub  Sub sub  Mul mul  Muls mul
Div div  Divs div  RealDiv div  Pow pow  PowTensorScalar pow  PowScalarTensor pow  Maximum maximum  Minimum minimum
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
LeftShift bitwise_left_shift
RightShift bitwise_right_shift  Mvlgamma mvlgamma  LogAddExp2 logaddexp2  Renorm renorm
IsClose isclose  Lerp lerp  LerpScalar lerp  ClampScalar clamp  ClampTensor clamp  AddcmulExt addcmul
AddcdivExt addcdiv  Select where  MaskedFill masked_fill  MaskedFillScalar masked_fill  MaskedFillScalars masked_fill
Clone clone  StopGradient detach  Contiguous contiguous  Cast cast  ToDtype cast
ZerosLike zeros_like  OnesLike ones_like
"""
REORDERED = {
    "ZerosLikeExt": ("zeros_like", "x, dtype=None, device=None"),
    "OnesLikeExt": ("ones_like", "x, dtype=None, device=None"),
    "FullLike": ("full_like", "x, fill_value, dtype=None, device=None"),
    "EmptyLike": ("empty_like", "x, dtype=None, device=None, pin_memory=None"),
    "NewFull": ("new_full", "x, size, fill_value, dtype=None"),
    "NewEmpty": ("new_empty", "x, size, dtype=None, device=None"),
    "NewZeros": ("new_zeros", "x, size, dtype=None"),
    "NewOnes": ("new_ones", "x, size, dtype=None"),
    "GeLU": ("gelu", "x, approximate='tanh'"),  # what ops.gelu and nn.GELU make of that approximation
}
IN_PLACE = """
InplaceAddExt add  InplaceAddsExt add  InplaceSubExt sub  InplaceSubScalar sub  InplaceMul mul  InplaceMuls mul
InplaceDiv div  InplaceDivs div  InplaceCopy copy  InplaceZero zero  InplaceFillScalar fill  InplaceFillTensor fill
InplaceExp exp  InplaceReLU relu  InplaceTanh tanh  InplaceSigmoid sigmoid  InplaceFloor floor  InplaceLog log
InplaceClampScalar clamp  InplaceClampTensor clamp  InplaceMaskedFillScalar masked_fill
InplaceMaskedFillTensor masked_fill  InplaceFloorDivide floor_divide  InplaceFloorDivides floor_divide
InplaceElu elu  InplaceHardtanh hardtanh  InplaceThreshold threshold  InplaceErfinv erfinv  InplaceSign sign
InplaceRemainderTensorScalar remainder  InplaceRemainderTensorTensor remainder
"""
