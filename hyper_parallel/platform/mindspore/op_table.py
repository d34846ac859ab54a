"""MindSpore's names: which operator is which canonical one.

Operators arrive as strings. A spelling is one line: the name, the canonical operator, and its parameters in canonical
names where they differ from the rule's own order. What needs more than a line is in ``primitives.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from hyper_parallel.platform.mindspore.losses import COMPOSED
from hyper_parallel.platform.mindspore.op_line import Line

__all__ = ["lines"]

# MindSpore's operator name -> canonical operator, with the rule's own parameters.
SAME = """
Abs abs  Neg neg  Exp exp  Exp2 exp2  Expm1 expm1  Log log  Log2 log2  Log10 log10  Log1p log1p  Sqrt sqrt
Rsqrt rsqrt  Square square  Sin sin  Cos cos  Tan tan  AsinExt asin  Asin asin  AcosExt acos  ACos acos  AtanExt atan
Atan atan  Sinh sinh  Cosh cosh  Tanh tanh  AsinhExt asinh  Asinh asinh  AcoshExt acosh  Acosh acosh  Atanh atanh
Erf erf  Erfc erfc  Erfinv erfinv  Sigmoid sigmoid  Sign sign  Ceil ceil  Floor floor  Round round  Trunc trunc
Frac frac  Reciprocal reciprocal  Sinc sinc  NanToNum nan_to_num  IsFinite isfinite  IsInf isinf  IsNegInf isneginf
LogicalNot logical_not  BitwiseNot bitwise_not  Lgamma lgamma  Digamma digamma
ReLU relu  ReLU6 relu6  SiLU silu  GeluExt gelu  HSwish hardswish  HSigmoid hardsigmoid  MishExt mish  Mish mish
SoftShrink softshrink  HShrink hardshrink  SeLUExt selu  SeLU selu  LeakyReLUExt leaky_relu
LeakyReLU leaky_relu  EluExt elu  SoftplusExt softplus  Hardtanh hardtanh  Threshold threshold
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
IsClose isclose  Lerp lerp  LerpScalar lerp  ClampScalar clamp  ClampTensor clamp  AddcmulExt addcmul
AddcdivExt addcdiv  Select where  MaskedFill masked_fill  MaskedFillScalar masked_fill  MaskedFillScalars masked_fill
Clone clone  StopGradient detach  Contiguous contiguous  Cast cast  ToDtype cast
ZerosLike zeros_like  OnesLike ones_like
SumExt sum  Dense linear
MatMulExt matmul  BatchMatMulExt bmm  Mm mm  Mv mv  Dot dot  Outer outer  Addmm addmm  Baddbmm baddbmm  Addmv addmv
Reshape view  View view  TransposeExtView transpose  TransposeExt transpose  TransposeView permute  TExt t
ExpandDims unsqueeze  ExpandDimsView unsqueeze  Squeeze squeeze  BroadcastTo expand  BroadcastToView expand
FlattenExt flatten  Tile tile  Repeat repeat  RepeatInterleaveInt repeat_interleave
Concat cat  StackExt stack  SplitTensor split  SplitTensorView split  SplitWithSize split  SplitWithSizeView split
Chunk chunk  ChunkView chunk  UnstackExt unbind  UnstackExtView unbind  NarrowView narrow  Narrow narrow
SelectExt select  SelectExtView select  ReverseV2 flip  Roll roll  TrilExt tril  Triu triu  Tril tril
GatherD gather  IndexSelect index_select  ScatterAddExt scatter_add  IndexAddExt index_add
Addbmm addbmm
MeanExt mean  ProdExt prod  Nansum nansum  CountNonZero count_nonzero  Any any  AnyExt any  ReduceAny any  All all
ReduceAll all  ReduceMax amax  ReduceMin amin  AMax amax  AMin amin  ArgMaxExt argmax  ArgMinExt argmin  Max max
Min min
MaxDim max_along  MinDim min_along  LogSumExp logsumexp  LogSumExpExt logsumexp  CumsumExt cumsum
LogCumsumExp logcumsumexp  LinalgVectorNorm vector_norm  MedianDim median_along
"""

# Name -> canonical operator and parameters in canonical names, in MindSpore's order.
REORDERED = {
    "DivMod": ("div", "x, y, rounding_mode=None"),
    "DivMods": ("div", "x, y, rounding_mode=None"),
    "DeprecatedSum": ("sum", "x, dim=None, dtype=None, keepdim=False"),
    "ZerosLikeExt": ("zeros_like", "x, dtype=None, device=None"),
    "OnesLikeExt": ("ones_like", "x, dtype=None, device=None"),
    "FullLike": ("full_like", "x, fill_value, dtype=None, device=None"),
    "NewZeros": ("new_zeros", "x, size, dtype=None"),
    "NewOnes": ("new_ones", "x, size, dtype=None"),
    "Embedding": ("embedding", "x, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False"),
    "DeprecatedMean": ("mean", "x, dim=None, keepdim=False"),
    "DeprecatedProd": ("prod", "x, dim=None, keepdim=False, dtype=None"),
    "DeprecatedVar": ("var", "x, dim=None, correction=0, keepdim=False"),
    "DeprecatedArgmax": ("argmax", "x, dim=None, keepdim=False"),
    "DeprecatedArgmin": ("argmin", "x, dim=None, keepdim=False"),
    "DeprecatedMax": ("amax", "x, dim=None, keepdim=False, initial=None, where=True, return_indices=False"),
    "DeprecatedMin": ("amin", "x, dim=None, keepdim=False, initial=None, where=True, return_indices=False"),
    "DeprecatedAny": ("any", "x, dim=None, keepdim=False"),
    "DeprecatedAll": ("all", "x, dim=None, keepdim=False"),
    "GeLU": ("gelu", "x, approximate='tanh'"),  # what ops.gelu and nn.GELU make of that approximation
    "CumProd": ("cumprod", "x, dim, exclusive=False, reverse=False"),
    "Scatter": ("scatter", "x, dim, index, src, reduction=0"),
    "CumSum": ("cumsum", "x, dim, exclusive=False, reverse=False"),
    "Softmax": ("softmax", "x, dim=-1"),
    "LogSoftmax": ("log_softmax", "x, dim=-1"),
    "LogSoftmaxExt": ("log_softmax", "x, dim=-1, dtype=None"),
    "Var": ("var", "x, dim=None, correction=1, keepdim=False"),
    "Std": ("std", "x, dim=None, correction=1, keepdim=False"),
    "VarMean": ("var_mean", "x, dim=None, correction=1, keepdim=False"),
    "StdMean": ("std_mean", "x, dim=None, correction=1, keepdim=False"),
    "RandLikeExt": ("rand_like", "x, seed=None, offset=None, dtype=None, device=None"),
    "RandnLike": ("randn_like", "x, seed=None, offset=None, dtype=None, device=None"),
    "BernoulliExt": ("bernoulli", "x, seed=None, offset=None"),
    "rand_like": ("rand_like", "x, seed=None, dtype=None"),
    "randn_like": ("randn_like", "x, seed=None, dtype=None"),
    "OneHotExt": ("one_hot", "x, num_classes=-1"),
}

# In-place name -> canonical operator. CPU kernels compute these and leave the tensor as it was: results are written.
IN_PLACE = """
InplaceAddExt add  InplaceAddsExt add  InplaceSubExt sub  InplaceSubScalar sub  InplaceMul mul  InplaceMuls mul
InplaceDiv div  InplaceDivs div  InplaceCopy copy  InplaceZero zero  InplaceFillScalar fill  InplaceFillTensor fill
InplaceExp exp  InplaceReLU relu  InplaceTanh tanh  InplaceSigmoid sigmoid  InplaceFloor floor  InplaceLog log
InplaceClampScalar clamp  InplaceClampTensor clamp  InplaceMaskedFillScalar masked_fill
InplaceMaskedFillTensor masked_fill  InplaceFloorDivide floor_divide  InplaceFloorDivides floor_divide
InplaceRemainderTensorScalar remainder  InplaceRemainderTensorTensor remainder  InplaceScatterAdd scatter_add
InplaceIndexAddExt index_add
"""

# In-place names likewise, in MindSpore's order.
IN_PLACE_REORDERED = {
    "InplaceUniform": ("uniform", "x, low=0.0, high=1.0, seed=None, offset=None"),
    "InplaceNormal": ("normal", "x, mean=0.0, std=1.0, seed=None, offset=None"),
    "InplaceBernoulliScalar": ("bernoulli_fill", "x, p=0.5, seed=None, offset=None"),
}


@cache
def lines() -> dict[str, Any]:
    """What to call per MindSpore operator name: ``line(dispatcher, primitive, args, kwargs)``."""
    table: dict[str, Callable[..., Any]] = {name: Line(name, op) for name, op in _pairs(SAME)}
    table.update({name: Line(name, op, signature) for name, (op, signature) in REORDERED.items()})
    table.update({name: Line(name, op, in_place=True) for name, op in _pairs(IN_PLACE)})
    table.update(
        {name: Line(name, op, signature, in_place=True) for name, (op, signature) in IN_PLACE_REORDERED.items()}
    )
    table.update(COMPOSED)
    return table


def _pairs(text: str) -> list[tuple[str, str]]:
    words = text.split()
    return list(zip(words[::2], words[1::2], strict=True))
