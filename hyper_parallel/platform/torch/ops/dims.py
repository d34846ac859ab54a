"""PyTorch's operators that transpose, add, slice and repeat dims."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.torch.ops.registry import aten, decomposition, kernel, spelling

# -- order and number of dims ------------------------------------------------------------------------------------------

spelling("transpose", "transpose", "swapaxes", "swapdims", aten.transpose.int)
spelling("permute", "permute", aten.permute.default)
spelling("movedim", "movedim", "moveaxis")
spelling("t", "t", aten.t.default)
spelling("reversed_dims", Tensor.T.__get__)  # type: ignore[attr-defined]
spelling("matrix_transpose", Tensor.mT.__get__, Tensor.adjoint, torch.adjoint)  # type: ignore[attr-defined]
spelling("squeeze", "squeeze", aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, canonical=True)
spelling("unsqueeze", "unsqueeze", aten.unsqueeze.default)
spelling("expand", "expand", "broadcast_to", canonical=True)
spelling("expand", aten.expand.default, signature="x, shape, *, implicit=False", canonical=True)
spelling("expand_as", Tensor.expand_as)


@kernel("squeeze")
def _squeeze(x: Tensor, dim: Any = None) -> Tensor:
    return x.squeeze() if dim is None else x.squeeze(dim)


@kernel("reversed_dims")
def _reversed_dims(x: Tensor) -> Tensor:
    return x.permute(tuple(range(x.ndim))[::-1])


@kernel("matrix_transpose")
def _matrix_transpose(x: Tensor) -> Tensor:
    return x.mT


@kernel("expand")
def _expand(x: Tensor, shape: Any, **_: Any) -> Tensor:
    return x.expand(shape)


@decomposition(torch.meshgrid, signature="*tensors, indexing=None")
def _meshgrid(ops: Any, tensors: Any, indexing: str | None) -> Any:
    """Return one grid per vector, each vector expanded along the dims of the others."""
    vectors = [ops.view(tensor, (-1,)) for tensor in tensors]
    swapped = indexing == "xy" and len(vectors) > 1
    order = [1, 0, *range(2, len(vectors))] if swapped else list(range(len(vectors)))
    shape = tuple(vectors[index].shape[0] for index in order)
    grids = []
    for index, vector in enumerate(vectors):
        alone = [1] * len(vectors)
        alone[order.index(index)] = -1
        grids.append(ops.expand(ops.view(vector, tuple(alone)), shape))
    return tuple(grids)


# -- parts of dims -----------------------------------------------------------------------------------------------------

spelling("select", "select", aten.select.int)
spelling("slice", aten.slice.Tensor)
spelling("diagonal", "diagonal", aten.diagonal.default)
spelling("unfold", Tensor.unfold, aten.unfold.default)
spelling("diag")
spelling("diag_embed", "diag_embed", aten.diag_embed.default)
spelling("diagflat")
spelling("tril", "tril", aten.tril.default, copies_back=True)
spelling("triu", "triu", aten.triu.default, copies_back=True)


@kernel("narrow")
def _narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    return x.narrow(dim, start, length)


@decomposition("narrow", signature="x, dim, start, length")
def _narrow_from(ops: Any, x: Any, dim: int, start: Any, length: int) -> Any:
    """Narrow from ``start``, which may be a tensor."""
    return ops.narrow(x, dim, int(start) if isinstance(start, Tensor) else start, length)


@decomposition(Tensor.fill_diagonal_, signature="x, fill_value, wrap=False")
def _fill_diagonal(ops: Any, x: Any, fill_value: Any, wrap: bool) -> Any:
    """Write the main diagonal of a matrix in place."""
    if x.ndim != 2 or (wrap and x.shape[0] > x.shape[1]):
        msg = f"fill_diagonal_: only one diagonal of a matrix can be filled, x has shape {list(x.shape)}"
        raise UnsupportedOperatorError(msg)
    return x.masked_fill_(ops.tril(ops.triu(torch.ones_like(x, dtype=torch.bool))), fill_value)


# -- repetition and rotation -------------------------------------------------------------------------------------------

spelling("repeat", "repeat", aten.repeat.default)
spelling("tile")
spelling("repeat_each", "repeat_interleave")
spelling("roll", "roll", aten.roll.default)
spelling("rot90")
spelling("flip", "flip", aten.flip.default)


@kernel("repeat")
def _repeat(x: Tensor, repeats: Any) -> Tensor:
    return x.repeat(repeats)


@kernel("repeat_interleave")
def _repeat_interleave(x: Tensor, repeats: int, dim: int | None = None, output_size: int | None = None) -> Tensor:
    return x.repeat_interleave(repeats, dim, output_size=output_size)


@kernel("roll")
def _roll(x: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    return x.roll(shifts) if dims is None else x.roll(shifts, dims)
