"""Switches that let a card round the operands of float32 products: TF32 on NVIDIA's cards, HF32 on Ascend's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hyper_parallel.platform.torch.versions import get_precision, set_cudnn_tf32, set_precision

__all__ = ["exact_products", "put_rounding", "rounding"]

_CUDNN: Any = torch.backends.cudnn
_OPERATIONS = ("matmul", "conv", "rnn")
"""What has a switch of its own since PyTorch 2.9; the older ones raise once these have other values."""


def rounding() -> tuple[Any, ...]:
    """The switches now; :func:`put_rounding` takes them. Simulated ranks call this whenever they take turns."""
    try:
        precision: Any = torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has set the newer switches to what the older one cannot say
        precision = None
    try:
        cudnn: Any = _CUDNN.allow_tf32
    except RuntimeError:
        cudnn = None
    operations = tuple([get_precision("cuda", operation) for operation in _OPERATIONS])
    return precision, cudnn, operations, tuple([place.allow_hf32 for place in _ascend()])


def put_rounding(state: tuple[Any, ...]) -> None:
    """Put back what :func:`rounding` returned; what has not changed is left alone."""
    now = rounding()
    if now == state:
        return
    precision, cudnn, operations, ascend = state
    if precision is not None and precision != now[0]:
        torch.set_float32_matmul_precision(precision)
    if cudnn is not None and cudnn != now[1]:
        set_cudnn_tf32(cudnn)
    for operation, value in zip(_OPERATIONS, operations, strict=True):
        if get_precision("cuda", operation) != value:
            set_precision("cuda", operation, value)
    for place, allowed in zip(_ascend(), ascend, strict=True):
        if place.allow_hf32 != allowed:
            place.allow_hf32 = allowed


@contextmanager
def exact_products() -> Iterator[None]:
    """Products of float32 are computed in float32 inside; each simulated rank has switches of its own."""
    state = rounding()
    if state[0] is not None:
        torch.set_float32_matmul_precision("highest")
    if state[1] is not None:
        set_cudnn_tf32(False)
    for operation in _OPERATIONS:
        if get_precision("cuda", operation) == "tf32":
            set_precision("cuda", operation, "ieee")
    for place in _ascend():
        place.allow_hf32 = False
    try:
        yield
    finally:
        put_rounding(state)


def _ascend() -> tuple[Any, ...]:
    """The switches of torch_npu, once it is imported."""
    npu = torch.__dict__.get("npu")  # getattr takes a microsecond to find nothing
    if npu is None:
        return ()
    return tuple([place for name in ("matmul", "conv") if hasattr(place := getattr(npu, name, None), "allow_hf32")])
