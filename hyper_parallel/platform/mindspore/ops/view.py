"""Views of MindSpore that merge or split dims, and facts about shapes."""

from __future__ import annotations

import math
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.ops.empty_shards import COMPUTED
from hyper_parallel.platform.mindspore.ops.registry import decomposition, kernel, replicated, spellings

__all__: list[str] = []

spellings("Reshape view  View view  FlattenExt flatten")

kernel("view", empty_shape=COMPUTED)(lambda x, shape: x.reshape(tuple(shape)))
kernel("view_as_real")(lambda x: mint.cat([ops.real(x)[..., None], ops.imag(x)[..., None]], -1))


@decomposition("Flatten")
def _flatten(ops: Any, _: Any, x: Any, *__: Any) -> Any:
    return ops.view(x, (x.shape[0], -1))


@decomposition("ReshapeAs", "ViewAs")
def _view_as(ops: Any, _: Any, x: Any, other: Any) -> Any:
    return ops.view(x, tuple(other.shape))


@decomposition("Size")
def _size(ops: Any, _: Any, x: Any) -> Any:
    del ops
    return math.prod(x.shape)


@decomposition("TensorShape", "DynamicShape")
def _shape(ops: Any, _: Any, x: Any) -> Any:
    """The global sizes, as a tensor that every rank has."""
    del ops
    return replicated(Tensor(list(x.shape), mindspore.int64), x)
