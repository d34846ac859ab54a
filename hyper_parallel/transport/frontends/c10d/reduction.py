"""Reductions of ``torch.distributed``, computed on the host in the order of the members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.host.torch.ops import reduce_in_order

__all__ = ["premultiplied", "reduce_parts", "reduction_name"]

_FOLDS = {"SUM": "sum", "AVG": "avg", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "PREMUL_SUM": "sum"}
_BITWISE: dict[str, Callable[..., Any]] = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def reduction_name(op: Any) -> str:
    """``SUM``, ``AVG`` and so on, of a ``ReduceOp`` or of its kind."""
    return str(getattr(op, "op", op)).rpartition(".")[2].upper()


def premultiplied(x: torch.Tensor, op: Any) -> torch.Tensor:
    """A member's operand ``x``, multiplied by the factor of a PREMUL_SUM."""
    return x.mul(op.__getstate__()[1]) if reduction_name(op) == "PREMUL_SUM" else x


def reduce_parts(parts: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """Fold equal-shaped ``parts`` from the left; a new tensor of their dtype.

    Args:
        parts: parts of the members, in their order; dense, or all sparse.
        name: name of the reduction, as :func:`reduction_name` gives it.

    Raises:
        CollectiveMismatchError: the dtype or the layout has no such reduction.
    """
    first = parts[0]
    if first.layout is not torch.strided:
        return _reduce_sparse(parts, name)
    if name in _BITWISE:
        if first.is_floating_point() or first.is_complex():
            msg = f"{name} of {first.dtype}: bitwise reductions need integers or bool"
            raise CollectiveMismatchError(msg)
        total = first.clone()
        for part in parts[1:]:
            _BITWISE[name](total, part, out=total)
        return total
    if name == "AVG" and not (first.is_floating_point() or first.is_complex()):
        msg = f"AVG of {first.dtype}: an average needs floating numbers; sum and divide instead"
        raise CollectiveMismatchError(msg)
    return reduce_in_order(parts, _FOLDS[name])


def _reduce_sparse(parts: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    if name != "SUM":
        msg = f"{name} of a sparse tensor: only SUM reduces sparse tensors"
        raise CollectiveMismatchError(msg)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.coalesce()
