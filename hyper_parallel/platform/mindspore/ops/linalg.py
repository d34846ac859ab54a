"""Linear algebra of MindSpore."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.ops.kernels import copied
from hyper_parallel.platform.mindspore.ops.registry import decomposition, expect, kernel, spelling, spellings

__all__: list[str] = []

spellings("MatrixInverseExt inv  MatrixDeterminant det  Cholesky cholesky")
spelling("cdist", "Cdist", signature="x, y, p=2.0")

# -- kernels -----------------------------------------------------------------------------------------------------------

kernel("inv")(lambda x: ops.inverse(x))
kernel("cholesky")(lambda x, upper=False: ops.cholesky(x, upper))
kernel("det")(lambda x: ops.det(x))
kernel("slogdet")(lambda x: tuple(ops.slogdet(x)))
kernel("cdist")(lambda x, y, p=2.0, compute_mode=None: ops.cdist(x, y, float(p)))


@kernel("cross")
def _cross(x: Tensor, y: Tensor, dim: int = -1) -> Tensor:
    """Return the cross product, composed: MindSpore's kernel reads uninitialised memory. The dtype is that of ``x``."""
    y = ops.cast(y, x.dtype)

    def rotated(operand: Tensor, by: int) -> Tensor:
        return mint.cat([mint.narrow(operand, dim, by, 3 - by), mint.narrow(operand, dim, 0, by)], dim)

    if x is y:  # the gradients of the two factors cancel once each is added up, so they are kept apart
        x, y = copied(x), copied(x)
    return rotated(x, 1) * rotated(y, 2) - rotated(x, 2) * rotated(y, 1)


@kernel("matrix_power")
def _matrix_power(x: Tensor, n: int) -> Tensor:
    """Return the matrix power, computed by squaring, because the gradient of MindSpore's kernel is wrong in float64."""
    if n < 0:
        return _matrix_power(ops.inverse(x), -n)
    power, square = None, x
    while n:
        if n % 2:
            power = square if power is None else mint.matmul(power, square)
        n //= 2
        square = mint.matmul(square, square) if n else square
    if power is not None:
        return power if power is not x else x * 1
    identity = Tensor(np.eye(x.shape[-1])).astype(x.dtype)
    return x * 0 + identity


# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("Cross")
def _cross_along(ops: Any, _: Any, x: Any, y: Any, dim: int = -65530) -> Any:
    """Return the cross product along ``dim``, by default the first dim of size 3."""
    return ops.cross(x, y, next(axis for axis, size in enumerate(x.shape) if size == 3) if dim == -65530 else dim)


@decomposition("MatrixPower")
def _power(ops: Any, primitive: Any, x: Any, n: int | None = None) -> Any:
    return ops.matrix_power(x, primitive.n if n is None else n)


@decomposition("LogMatrixDeterminant")
def _log_determinant(ops: Any, _: Any, x: Any) -> Any:
    return tuple(ops.slogdet(x))


@decomposition("MatrixInverse")
def _inverse(ops: Any, primitive: Any, x: Any) -> Any:
    expect("MatrixInverse", "adjoint", primitive.init_attrs["adjoint"], False)
    return ops.inv(x)
