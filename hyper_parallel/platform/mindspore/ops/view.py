"""Views of MindSpore that merge or split dims, concatenation and splits, and facts about shapes."""

from __future__ import annotations

import math
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.ops.dims import MATRIX, select, unsqueeze
from hyper_parallel.platform.mindspore.ops.empty_shards import COMPUTED
from hyper_parallel.platform.mindspore.ops.registry import METHOD, decomposition, expect, kernel, replicated, spellings

__all__: list[str] = []

spellings("Reshape view  View view  FlattenExt flatten")

kernel("view", empty_shape=COMPUTED)(lambda x, shape: x.reshape(tuple(shape)))
kernel("view_as_real")(lambda x: mint.cat([ops.real(x)[..., None], ops.imag(x)[..., None]], -1))


@decomposition("Flatten")
def _flatten(ops: Any, _: Any, x: Any, *__: Any) -> Any:
    """Return a flattened copy; MindSpore's own operator copies too."""
    return ops.clone(ops.view(x, (x.shape[0], -1)))


@decomposition("ReshapeAs", "ViewAs")
def _view_as(ops: Any, _: Any, x: Any, other: Any) -> Any:
    return ops.view(x, tuple(other.shape))


@decomposition("Size")
def _size(ops: Any, _: Any, x: Any) -> Any:
    del ops
    return math.prod(x.shape)


@decomposition("TensorShape", "DynamicShape")
def _shape(ops: Any, _: Any, x: Any) -> Any:
    """Return the global shape as a replicated tensor."""
    del ops
    return replicated(Tensor(list(x.shape), mindspore.int64), x)


spellings("""
Concat cat  StackExt stack  SplitTensor split  SplitTensorView split  SplitWithSize split  SplitWithSizeView split
Chunk chunk  ChunkView chunk  UnstackExt unbind  UnstackExtView unbind
""")

# -- kernels -----------------------------------------------------------------------------------------------------------

kernel("cat", reliable_on_empty=True)(lambda tensors, dim=0: mint.cat(list(tensors), dim))
kernel("stack")(lambda tensors, dim=0: mint.cat([unsqueeze(tensor, dim) for tensor in tensors], dim))


@kernel("unbind", empty_shape=COMPUTED)
def _unbind(x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(select(x, dim, index) for index in range(x.shape[dim]))


# With narrow: on local tensors of a transformer's encoder layer, MindSpore's own split gives different gradients.
@kernel("split", empty_shape=COMPUTED)
def _split(x: Tensor, split_size_or_sections: Any, dim: int = 0) -> tuple[Tensor, ...]:
    total = x.shape[dim]
    if isinstance(split_size_or_sections, int):
        step = split_size_or_sections
        sizes = [min(step, total - start) for start in range(0, total, step)] or [0]
    else:
        sizes = list(split_size_or_sections)
    parts, start = [], 0
    for size in sizes:
        parts.append(mint.narrow(x, dim, start, size))
        start += size
    return tuple(parts)


@kernel("chunk", empty_shape=COMPUTED)
def _chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Return views of equal size, except the last; an empty dim gives ``chunks`` empty views."""
    size = x.shape[dim]
    return _split(x, -(-size // chunks) if size else [0] * chunks, dim)


# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("Stack", "Pack")
def _stack(ops: Any, primitive: Any, tensors: Any, *__: Any) -> Any:
    return ops.stack(list(tensors), primitive.axis)


@decomposition("Split")
def _split_equally(ops: Any, primitive: Any, x: Any, *args: Any) -> Any:
    """Split into equal parts; reject sizes that are not divisible, as ``ops.Split(axis, output_num)`` does."""
    axis, count = args if len(args) == MATRIX else (primitive.axis, primitive.output_num)
    expect("Split", f"size {x.shape[axis]} modulo {count}", x.shape[axis] % count, 0)
    return ops.split(x, x.shape[axis] // count, axis)


@decomposition(METHOD + "Chunk")
def _method_chunk(ops: Any, _: Any, x: Any, chunks: int, dim: int = 0) -> Any:
    """Return chunks; unlike for the function, an empty dim gives one chunk."""
    return ops.chunk(x, chunks if x.shape[dim] or chunks < 1 else 1, dim)


@decomposition("Unstack")
def _unstack(ops: Any, primitive: Any, x: Any, *args: Any) -> Any:
    return ops.unbind(x, args[0] if args else primitive.axis)
