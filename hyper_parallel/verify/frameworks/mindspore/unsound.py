"""Lists the calls that random programs skip because MindSpore's own result is wrong or undefined, with reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["LEFT_OUT", "unsound"]

_NOT_WRITTEN = "on CPU MindSpore computes it and leaves the tensor as it was"
_NO_KERNEL = "MindSpore has no kernel of it for CPU, or no such method"
LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(("write add", "write add scaled", "write multiply"), _NOT_WRITTEN),
    **dict.fromkeys(("write increment", "write scale", "write subtract number"), _NOT_WRITTEN),
    **dict.fromkeys(("write relu", "write clamp", "write zero", "write fill", "write negate"), _NO_KERNEL),
    "write copy": "on CPU copy_ leaves some views as they were",
    **dict.fromkeys(("arithmetic clone", "arithmetic detach"), _NO_KERNEL),
}
"""Idioms that are skipped, with the reason."""

_WITH_EMPTY = """
abs neg negative square sqrt exp expm1 log log1p sin cos tan sinh cosh tanh sigmoid sign floor ceil reciprocal relu erf
rsqrt add sub mul div divide maximum minimum equal not_equal less greater eq ne lt gt ge le logical_not logical_and
logical_or where cat concat stack reshape view permute transpose swapaxes flatten unsqueeze squeeze broadcast_to expand
narrow split getitem setitem
"""
_SERVE_EMPTY = frozenset(_WITH_EMPTY.split())
"""Functions that random programs call with empty operands. Many other kernels of MindSpore 2.10 then end the process or
return uninitialized memory. Shards of nonempty operands may still be empty."""

_IN_FLOAT32 = "it computes in float32"
_UNSOUND_IN_FLOAT64 = {
    "log2": "it rounds the logarithm of 2 to float32",
    "log10": "it rounds the logarithm of 10 to float32",
    "logaddexp2": "it rounds the logarithm of 2 to float32",
    **dict.fromkeys(("LayerNorm", "layer_norm", "L1Loss", "l1_loss", "MSELoss", "mse_loss"), _IN_FLOAT32),
    **dict.fromkeys(("NLLLoss", "nll_loss", "softplus", "matrix_power", ".ger", ".var", ".std"), _IN_FLOAT32),
    **dict.fromkeys((".fmax", ".fmin", "celu", ".sort", "huber_loss"), _IN_FLOAT32),
    **dict.fromkeys(("ops.masked_fill", "addcmul", "addcdiv", "hypot"), "it, or its gradient, is rounded to float32"),
}
"""Calls whose results are wrong in float64."""

_UNSOUND_IN_FLOAT16 = {"lerp": "its gradient is float32"}
"""Calls whose results are wrong in float16."""

_OF_ONE = "of an axis of one element its gradient is that of rounding"
_UNSOUND_OF_ONE = {
    "oftmax": "after a gradient of an axis of one element, gradients of other softmaxes in the process are wrong",
    "cross_entropy": "it is a softmax",
    "CrossEntropy": "it is a softmax",
    "LayerNorm": _OF_ONE,
    "GroupNorm": _OF_ONE,
    "layer_norm": _OF_ONE,
    **dict.fromkeys(("std_mean", "var_mean"), "the gradient of one element is NaN, also where only the mean is used"),
}
"""Calls whose results are wrong with a dim of one element."""

_UNSOUND_BROADCAST = {"cross": "it leaves elements unwritten"}
"""Calls whose results are wrong if the shapes of operands differ."""

_UNSOUND = {
    "msort": "it sorts float64 as float32",
    ".scatter": "its kernel takes the reduction of an earlier call",
    ".real": "the gradient of a real operand is complex",
    "topk": "of equal values it takes any, and the rule takes the first",
    "hfft": "its kernel is right in every other call",
    "polar": "it reads past the end of the smaller of two operands",
    "mint.split": "its gradient is wrong where one of several pieces is transposed",
    "selu": "its gradient is wrong for negative values",
    "mish": "its gradient is made of a tanh that is off by 1e-4 in float32",
}
"""Calls whose results are wrong in every dtype."""


def unsound(name: str, shapes: Sequence[Sequence[int]], dtype: str) -> str:
    """Return why MindSpore's own result of a call is not a valid reference; empty if it is valid.

    Args:
        name: name of the call.
        shapes: shapes of the operands.
        dtype: dtype of the program.
    """
    sizes = {size for shape in shapes for size in shape}
    if 0 in sizes and name.rpartition(".")[2] not in _SERVE_EMPTY:
        return "its kernel is not known to serve empty operands"
    tables = [_UNSOUND, *([_UNSOUND_OF_ONE] if 1 in sizes else [])]
    tables += [_UNSOUND_BROADCAST] if len(set(map(tuple, shapes))) > 1 else []
    tables.append({"float64": _UNSOUND_IN_FLOAT64, "float16": _UNSOUND_IN_FLOAT16}.get(dtype, {}))
    return next((reason for table in tables for part, reason in table.items() if part in name), "")
