"""Canonical operators on plain MindSpore tensors: all families, right also where a piece is empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore import (
    local_bins,
    local_index,
    local_loss,
    local_nn,
    local_order,
    local_pointwise,
    local_reduce,
    local_shape,
    local_spatial,
    local_special,
)
from hyper_parallel.platform.mindspore.empty import tolerant
from hyper_parallel.platform.mindspore.local_pointwise import clone
from hyper_parallel.platform.mindspore.writing import write_over

if TYPE_CHECKING:
    from mindspore import Tensor

__all__ = ["LOCAL", "WRITING", "write_back"]


def write_back(compute: Callable[..., Any]) -> Callable[..., Any]:
    """``compute``, its result written into its first argument: MindSpore's in-place kernels on CPU leave that out.

    Empty pieces are written, too: what is written has a gradient, whose collectives every rank must run.
    """

    def write(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Backward may need the values from before the write; of the tensor itself it would find the new ones.
        result = compute(clone(x) if x._requires_grad else x, *args, **kwargs)  # noqa: SLF001 - no public spelling
        if result.dtype != x.dtype:
            msg = f"a result of {result.dtype} cannot be written into a tensor of {x.dtype}; use the out-of-place form"
            raise UnsupportedOperatorError(msg)
        write_over(x, result)
        return x

    return write


def drawn_by_rule(*_: Any, **__: Any) -> Any:
    """Stands for random operators, whose numbers are drawn by the plan."""
    msg = "random operators are drawn by their rule, which needs a DTensor"
    raise UnsupportedOperatorError(msg)


DRAWN = [
    "dropout",
    "uniform",
    "normal",
    "bernoulli_fill",
    "random_fill",
    "rand_like",
    "randn_like",
    "multinomial",
    "randint_like",
    "bernoulli",
]
_FAMILIES = (
    local_pointwise.LOCAL,
    local_shape.LOCAL,
    local_reduce.LOCAL,
    local_index.LOCAL,
    local_nn.LOCAL,
    local_loss.LOCAL,
    local_special.LOCAL,
    local_bins.LOCAL,
    local_spatial.LOCAL,
    local_order.LOCAL,
)
# The matmul family sees to empty pieces itself, writing by index has no result, makers reduce nothing.
_OWN = frozenset(
    {
        "linear",
        "matmul",
        "mm",
        "bmm",
        "mv",
        "addmm",
        "baddbmm",
        "addbmm",
        "addmv",
        "einsum",
        "setitem",
        "detach",
        "write",
    }
)
_OWN |= local_loss.REDUCING
_OWN |= {f"{kind}_like" for kind in ("zeros", "ones", "empty", "full")} | {
    f"new_{kind}" for kind in ("zeros", "ones", "empty", "full")
}

LOCAL: dict[str, Callable[..., Any]] = {
    op: compute if op in _OWN else tolerant(op, compute) for family in _FAMILIES for op, compute in family.items()
}
# Out-of-place operators as writers into their first argument; what writes already stays as it is.
WRITING: dict[str, Callable[..., Any]] = {
    op: compute if op in ("setitem", "write") else write_back(compute) for op, compute in LOCAL.items()
}
# These are drawn by the rule itself, through "cast_as", "write" and "make_like".
LOCAL |= dict.fromkeys(DRAWN, drawn_by_rule)
WRITING |= dict.fromkeys(DRAWN, drawn_by_rule)
