"""MindSpore's pointwise operators that are several canonical ones."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform.mindspore.primitives import composed, expect

__all__: list[str] = []

ROUNDING = {0: None, 1: "trunc", 2: "floor"}


@composed("DivMod", "DivMods")
def _divided(ops: Any, _: Any, x: Any, y: Any, rounding_mode: Any = None) -> Any:
    """The rounding comes as a number from MindSpore's Python layer."""
    return ops.div(x, y, rounding_mode=ROUNDING.get(rounding_mode, rounding_mode))


@composed("TruncateDiv")
def _truncated(ops: Any, _: Any, x: Any, y: Any) -> Any:
    return ops.div(x, y, rounding_mode="trunc")


@composed("TruncateMod")
def _rest(ops: Any, _: Any, x: Any, y: Any) -> Any:
    return ops.fmod(x, y)


@composed("Xdivy")
def _xdivy(ops: Any, _: Any, x: Any, y: Any) -> Any:
    return _safe_quotient(ops, x, y, ops.eq(x, 0))


@composed("DivNoNan")
def _div_no_nan(ops: Any, _: Any, x: Any, y: Any) -> Any:
    return _safe_quotient(ops, x, y, ops.eq(y, 0))


def _safe_quotient(ops: Any, x: Any, y: Any, zero: Any) -> Any:
    """A quotient that is zero where ``zero``."""
    return ops.mul(ops.div(x, ops.masked_fill(y, zero, 1)), ops.cast(ops.logical_not(zero), dtype=y.dtype))


@composed("SquaredDifference")
def _squared_difference(ops: Any, _: Any, x: Any, y: Any) -> Any:
    return ops.square(ops.sub(x, y))


@composed("ApproximateEqual")
def _nearly(ops: Any, primitive: Any, x: Any, y: Any) -> Any:
    return ops.lt(ops.abs(ops.sub(x, y)), primitive.init_attrs["tolerance"])


@composed("Addcmul")
def _addcmul(ops: Any, _: Any, x: Any, first: Any, second: Any, value: Any = 1) -> Any:
    """The factor may be a tensor."""
    return ops.add(x, ops.mul(ops.mul(first, second), value))


@composed("Addcdiv")
def _addcdiv(ops: Any, _: Any, x: Any, first: Any, second: Any, value: Any = 1) -> Any:
    """The factor may be a tensor."""
    return ops.add(x, ops.mul(ops.div(first, second), value))


@composed("Polygamma")
def _polygamma(ops: Any, _: Any, order: Any, x: Any) -> Any:
    """The order comes as a tensor, and is one number."""
    whole = order.full_tensor() if isinstance(order, DTensor) else order
    expect("Polygamma", "the number of orders", whole.size, 1)
    return ops.polygamma(x, int(whole.asnumpy().item()))


@composed("Logit")
def _logit(ops: Any, primitive: Any, x: Any, eps: float | None = None) -> Any:
    """A negative bound means none."""
    eps = primitive.init_attrs["eps"] if eps is None and primitive is not None else eps
    return ops.logit(x, None if eps is not None and eps < 0 else eps)


@composed("MulNoNan")
def _safe_product(ops: Any, _: Any, x: Any, y: Any) -> Any:
    """Zero where the second factor is, whatever the first."""
    zero = ops.eq(y, 0)
    return ops.mul(ops.where(zero, ops.zeros_like(x), x), y)


@composed("Rint")
def _rint(ops: Any, _: Any, x: Any) -> Any:
    return ops.round(x)


@composed("Identity")
def _identity(ops: Any, _: Any, x: Any) -> Any:
    return ops.clone(x)


@composed("Softsign")
def _softsign(ops: Any, _: Any, x: Any) -> Any:
    return ops.div(x, ops.add(ops.abs(x), 1))


@composed("FastGeLU", "FastGelu")
def _fast_gelu(ops: Any, _: Any, x: Any) -> Any:
    return ops.mul(x, ops.sigmoid(ops.mul(x, 1.702)))


@composed("NpuGelu")
def _npu_gelu(ops: Any, _: Any, x: Any, approximate: str = "none") -> Any:
    return ops.gelu(x, approximate)


@composed("Swiglu")
def _swiglu(ops: Any, _: Any, x: Any, dim: int = -1) -> Any:
    """Half of the dim gates the other half."""
    expect("Swiglu", f"the rest of size {x.shape[dim]} in halves", x.shape[dim] % 2, 0)
    gate, value = ops.chunk(x, 2, dim)
    return ops.mul(ops.silu(gate), value)


@composed("Softmax")
def _softmax(ops: Any, _: Any, x: Any, dim: Any = -1) -> Any:
    return ops.softmax(x, _only("Softmax", dim))


@composed("LogSoftmax")
def _log_softmax(ops: Any, _: Any, x: Any, dim: Any = -1) -> Any:
    return ops.log_softmax(x, _only("LogSoftmax", dim))


def _only(name: str, dim: Any) -> Any:
    """The dim, which may come as a sequence of one."""
    if not isinstance(dim, (list, tuple)):
        return dim
    expect(name, "the number of dims", len(dim), 1)
    return dim[0]
