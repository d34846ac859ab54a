"""Writing over tensors that may be parts of others.

On CPU ``copy_`` leaves a part of a tensor as it is, or fails in its kernel; assigning to its elements works.
"""

from __future__ import annotations

from typing import Any

import mindspore

from hyper_parallel.errors import UnsupportedOperatorError

__all__ = ["write_over"]


def write_over(target: Any, values: Any) -> Any:
    """Give ``target`` these ``values``, of its own shape and dtype; it shows in what ``target`` is a part of.

    Raises:
        UnsupportedOperatorError: gradients would have to flow through the write, and MindSpore's do not.
    """
    if 0 in target.shape or _whole(target):
        return target.copy_(values)
    written = target
    if not written.shape:  # MindSpore assigns neither to a scalar nor to bfloat16
        written, values = written.view(1), values.view(1)
    if written.dtype == mindspore.bfloat16:
        if target._requires_grad or values._requires_grad:  # noqa: SLF001 - no public spelling
            msg = "a part of a bfloat16 tensor cannot be written where gradients flow; use the out-of-place form"
            raise UnsupportedOperatorError(msg)
        written, values = written.view(mindspore.int16), values.view(mindspore.int16)
    written[:] = values
    return target


def _whole(tensor: Any) -> bool:
    return tensor.numel() * tensor.itemsize == tensor.untyped_storage().size() and tensor.is_contiguous()
