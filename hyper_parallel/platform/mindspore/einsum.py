"""``einsum`` by permutations and one batched matmul per pair of operands; MindSpore's own has no CPU kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mindspore import Tensor, mint

from hyper_parallel.errors import LayoutError
from hyper_parallel.platform.mindspore.empty import tolerant

__all__ = ["einsum_by"]

_total = tolerant("sum", mint.sum)


def einsum_by(product: Callable[[Tensor, Tensor], Tensor], equation: str, operands: Sequence[Tensor]) -> Tensor:
    """``einsum`` with ``product`` for its matrix products; letters only.

    Raises:
        LayoutError: (a ValueError) an ellipsis, a repeated label, or labels that do not fit the operands.
    """
    given, arrow, wanted = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if not arrow:
        wanted = "".join(sorted(one for one in set(given) - {","} if given.count(one) == 1))
    if "." in equation or len(terms) != len(operands) or any(len(set(term)) != len(term) for term in [*terms, wanted]):
        msg = f"einsum: {equation!r} with {len(operands)} operands; write every dim as a letter, each once per operand"
        raise LayoutError(msg)
    labels, found = terms[0], operands[0]
    for index, (term, operand) in enumerate(zip(terms[1:], operands[1:], strict=True)):
        later = set(wanted).union(*terms[index + 2 :])
        labels, found = _pair(product, (labels, found), (term, operand), later)
    labels, found = _summed(labels, found, set(wanted))
    return mint.permute(found, tuple(labels.index(one) for one in wanted)) if labels != wanted else found


def _summed(labels: str, x: Tensor, kept: set[str]) -> tuple[str, Tensor]:
    dims = tuple(index for index, one in enumerate(labels) if one not in kept)
    return ("".join(one for one in labels if one in kept), _total(x, dims)) if dims else (labels, x)


def _pair(
    product: Callable[[Tensor, Tensor], Tensor], one: tuple[str, Tensor], other: tuple[str, Tensor], later: set[str]
) -> tuple[str, Tensor]:
    left, x = _summed(*one, later | set(other[0]))
    right, y = _summed(*other, later | set(left))
    sizes = dict(zip(left, x.shape, strict=True)) | dict(zip(right, y.shape, strict=True))
    batch = [one for one in left if one in right and one in later]
    inner = [one for one in left if one in right and one not in later]
    rows = [one for one in left if one not in right]
    columns = [one for one in right if one not in left]
    made = product(_matrix(left, x, (batch, rows, inner), sizes), _matrix(right, y, (batch, inner, columns), sizes))
    labels = [*batch, *rows, *columns]
    return "".join(labels), made.reshape(tuple(sizes[one] for one in labels))


def _matrix(labels: str, x: Tensor, groups: Sequence[Sequence[str]], sizes: dict[str, int]) -> Tensor:
    order = [labels.index(one) for group in groups for one in group]
    return mint.permute(x, tuple(order)).reshape(tuple(math.prod(sizes[one] for one in group) for group in groups))
