"""Matrix products of MindSpore, and ``einsum``, for which MindSpore itself has no CPU kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint
from mindspore.mint.nn import functional as F

from hyper_parallel.errors import LayoutError
from hyper_parallel.platform.mindspore.ops.dims import MATRIX
from hyper_parallel.platform.mindspore.ops.empty_shards import OnEmpty, empty_safe, no_elements
from hyper_parallel.platform.mindspore.ops.pointwise import into
from hyper_parallel.platform.mindspore.ops.registry import decomposition, expect, kernel, spellings

__all__ = ["matmul"]

spellings("""
Dense linear  MatMulExt matmul  BatchMatMulExt bmm  Mm mm  Mv mv  Dot dot  Outer outer  Addmm addmm  Baddbmm baddbmm
Addmv addmv  Addbmm addbmm  Ger outer  Vdot dot
""")

# -- kernels -----------------------------------------------------------------------------------------------------------

_CONTRACTION = OnEmpty(value=0)
_plain_linear = empty_safe("linear", lambda x, weight, bias: F.linear(x, weight, bias), _CONTRACTION)
_matrices = empty_safe("matmul", mint.matmul, _CONTRACTION)
_batches = empty_safe("matmul", mint.bmm, _CONTRACTION)
_sum = empty_safe("sum", mint.sum, OnEmpty(value=0))
_plus = empty_safe("add", mint.add)  # the gradient of a broadcast operand sums over no element where the other is empty


def _linear_on_elements(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # MindSpore returns the gradient of a bias of one element in a wrong shape.
    if bias is not None and bias.shape != weight.shape[:1]:
        return mint.add(F.linear(x, weight), bias)
    return F.linear(x, weight, bias)


@kernel("linear", reliable_on_empty=True, on_elements=_linear_on_elements)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # An empty contraction has a gradient for the bias, and a bias of one element gets a gradient of a wrong shape.
    if bias is not None and (x.shape[-1] == 0 or bias.shape != weight.shape[:1]):
        return _plus(_plain_linear(x, weight, None), bias)
    return _plain_linear(x, weight, bias)


def _matmul_on_elements(x: Tensor, y: Tensor) -> Tensor:
    return mint.matmul(x, y) if x.ndim == 2 and y.ndim == 2 else matmul(x, y)


@kernel("matmul", "mm", "bmm", "mv", reliable_on_empty=True, on_elements=_matmul_on_elements)
def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Return matrix products, with kernels for 2 or 3 dims: the general one fails in backward on batches of one."""
    if x.ndim == 1:
        return matmul(x.reshape((1, -1)), y).reshape((*y.shape[:-2], *y.shape[-1:] * (y.ndim > 1)))
    if y.ndim == 1:
        return matmul(x, y.reshape((-1, 1))).reshape(x.shape[:-1])
    if x.ndim == 2 and y.ndim == 2:
        return _matrices(x, y)
    if y.ndim == 2:
        rows = x.reshape((math.prod(x.shape[:-1]), x.shape[-1]))
        return _matrices(rows, y).reshape((*x.shape[:-1], y.shape[-1]))
    batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    left, right = (_one_batch_dim(operand, batch) for operand in (x, y))
    return _batches(left, right).reshape((*batch, x.shape[-2], y.shape[-1]))


def _one_batch_dim(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    shape = (*batch, *x.shape[-2:])
    if tuple(x.shape) != shape and 0 in batch:
        return no_elements((0, *x.shape[-2:]), x)
    wide = x if tuple(x.shape) == shape else mint.broadcast_to(x, shape)
    return wide.reshape((math.prod(batch), *x.shape[-2:]))


@kernel("addmm", "baddbmm", "addmv", reliable_on_empty=True)
def _biased(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = matmul(x, y)
    return _plus(bias if beta == 1 else bias * beta, product if alpha == 1 else product * alpha)


@kernel("addbmm", reliable_on_empty=True)
def _addbmm(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if not (x.is_floating_point() or x.is_complex()):  # products in the operands' dtype are added up in int64
        return _plus(bias * beta, mint.sum(matmul(x, y), 0) * alpha)
    rows = mint.permute(x, (1, 0, 2)).reshape((x.shape[1], x.shape[0] * x.shape[2]))
    return _biased(bias, rows, y.reshape((y.shape[0] * y.shape[1], y.shape[2])), beta=beta, alpha=alpha)


kernel("dot", empty=0)(lambda x, y: mint.sum(x * y))
kernel("addr")(lambda bias, x, y, *, beta=1, alpha=1: bias * beta + x.reshape((-1, 1)) * y.reshape((1, -1)) * alpha)
kernel("einsum", reliable_on_empty=True)(lambda equation, operands: _einsum(equation, operands))


@kernel("outer")
def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x.reshape((-1, 1)) * y.reshape((1, -1))


@kernel("block_diag")
def _block_diag(tensors: Sequence[Tensor]) -> Tensor:
    blocks = [tensor.reshape((1,) * (2 - tensor.ndim) + tuple(tensor.shape)) for tensor in tensors]
    width, start, rows = sum(block.shape[1] for block in blocks), 0, []
    for block in blocks:
        count, own = block.shape
        sides = [mint.zeros((count, start), dtype=block.dtype), block]
        sides.append(mint.zeros((count, width - start - own), dtype=block.dtype))
        rows.append(mint.cat([side for side in sides if side.shape[1]] or [block], 1))
        start += own
    return mint.cat(rows, 0)


# -- einsum: permutations and one batched matmul per pair of operands --------------------------------------------------


def _einsum(equation: str, operands: Sequence[Tensor]) -> Tensor:
    """Return the sum of products; each dim must be a letter.

    Raises:
        LayoutError: (a ValueError) an ellipsis, a repeated label, or labels that do not match the operands.
    """
    inputs, arrow, wanted = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        wanted = "".join(sorted(label for label in set(inputs) - {","} if inputs.count(label) == 1))
    if "." in equation or len(terms) != len(operands) or any(len(set(term)) != len(term) for term in [*terms, wanted]):
        msg = f"einsum: {equation!r} with {len(operands)} operands; write every dim as a letter, each once per operand"
        raise LayoutError(msg)
    labels, product = terms[0], operands[0]
    for index, (term, operand) in enumerate(zip(terms[1:], operands[1:], strict=True)):
        later = set(wanted).union(*terms[index + 2 :])
        labels, product = _pair_product((labels, product), (term, operand), later)
    labels, product = _summed_to(labels, product, set(wanted))
    return mint.permute(product, tuple(labels.index(label) for label in wanted)) if labels != wanted else product


def _summed_to(labels: str, x: Tensor, kept: set[str]) -> tuple[str, Tensor]:
    dims = tuple(index for index, label in enumerate(labels) if label not in kept)
    return ("".join(label for label in labels if label in kept), _sum(x, dims)) if dims else (labels, x)


def _pair_product(first: tuple[str, Tensor], second: tuple[str, Tensor], later: set[str]) -> tuple[str, Tensor]:
    left, x = _summed_to(*first, later | set(second[0]))
    right, y = _summed_to(*second, later | set(left))
    sizes = dict(zip(left, x.shape, strict=True)) | dict(zip(right, y.shape, strict=True))
    batch = [label for label in left if label in right and label in later]
    inner = [label for label in left if label in right and label not in later]
    rows = [label for label in left if label not in right]
    columns = [label for label in right if label not in left]
    product = matmul(_matrix(left, x, (batch, rows, inner), sizes), _matrix(right, y, (batch, inner, columns), sizes))
    labels = [*batch, *rows, *columns]
    return "".join(labels), product.reshape(tuple(sizes[label] for label in labels))


def _matrix(labels: str, x: Tensor, groups: Sequence[Sequence[str]], sizes: dict[str, int]) -> Tensor:
    order = [labels.index(label) for group in groups for label in group]
    return mint.permute(x, tuple(order)).reshape(tuple(math.prod(sizes[label] for label in group) for group in groups))


# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("MatMul", "BatchMatMul")
def _legacy_matmul(ops: Any, _: Any, x: Any, y: Any, transpose_x: bool = False, transpose_y: bool = False) -> Any:
    """Multiply matrices; with ``transpose_y``, as in ``nn.Dense``, this is ``linear``."""
    if transpose_y and not transpose_x and len(y.shape) == MATRIX:
        return ops.linear(x, y)
    x = ops.matrix_transpose(x) if transpose_x else x
    y = ops.matrix_transpose(y) if transpose_y else y
    return ops.matmul(x, y)


@decomposition("BiasAdd")
def _bias_add(ops: Any, primitive: Any, x: Any, bias: Any, *__: Any) -> Any:
    """Add a bias per channel, as ``nn.Dense`` does; the channel is dim 1."""
    expect("BiasAdd", "data_format", primitive.init_attrs["data_format"], "NCHW")
    if len(x.shape) != MATRIX:
        bias = ops.view(bias, (-1, *(1,) * (len(x.shape) - MATRIX)))
    return ops.add(x, bias)


@decomposition("InplaceAddmm")
def _addmm_in_place(ops: Any, _: Any, x: Any, left: Any, right: Any, beta: float = 1, alpha: float = 1) -> Any:
    return into(x, ops.addmm(x, left, right, beta=beta, alpha=alpha))


@decomposition("InplaceAddr")
def _addr_in_place(ops: Any, _: Any, x: Any, left: Any, right: Any, beta: float = 1, alpha: float = 1) -> Any:
    outer = ops.outer(left, right)
    return into(x, ops.add(ops.mul(x, beta), ops.mul(outer, alpha)))
