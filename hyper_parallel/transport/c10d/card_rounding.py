"""Switches that let a card round the operands of float32 products: TF32 on NVIDIA's cards, HF32 on Ascend's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["exact_products", "put_rounding", "rounding"]

_CUDNN: Any = torch.backends.cudnn
_PLACES: tuple[Any, ...] = tuple(
    place
    for place in (torch.backends.cuda.matmul, getattr(_CUDNN, "conv", None), getattr(_CUDNN, "rnn", None))
    if getattr(place, "fp32_precision", None) is not None
)
"""Where PyTorch 2.9 and later keep them, beside the older switches, which raise once these have other values."""


def rounding() -> tuple[Any, ...]:
    """The switches now; :func:`put_rounding` takes them."""
    return (
        _unless_mixed(torch.get_float32_matmul_precision),
        _unless_mixed(_cudnn_rounds),
        tuple([place.fp32_precision for place in _PLACES]),
        tuple([place.allow_hf32 for place in _ascend()]),
    )


def put_rounding(state: tuple[Any, ...]) -> None:
    """Put back what :func:`rounding` returned; what has not changed is left alone."""
    now = rounding()
    precision, cudnn, places, ascend = state
    if precision is not None and precision != now[0]:
        torch.set_float32_matmul_precision(precision)
    if cudnn is not None and cudnn != now[1]:
        _CUDNN.allow_tf32 = cudnn
    for place, value in zip(_PLACES, places, strict=True):
        if place.fp32_precision != value:
            place.fp32_precision = value
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
        _CUDNN.allow_tf32 = False
    for place in _PLACES:
        if place.fp32_precision == "tf32":
            place.fp32_precision = "ieee"
    for place in _ascend():
        place.allow_hf32 = False
    try:
        yield
    finally:
        put_rounding(state)


def _unless_mixed(read: Callable[[], Any]) -> Any:
    """Return an older switch, None where the program has set the newer ones to something that it cannot say."""
    try:
        return read()
    except RuntimeError:
        return None


def _cudnn_rounds() -> bool:
    rounds: bool = _CUDNN.allow_tf32
    return rounds


def _ascend() -> tuple[Any, ...]:
    """The switches of torch_npu, once it is imported."""
    npu = getattr(torch, "npu", None)
    if npu is None:
        return ()
    return tuple([place for name in ("matmul", "conv") if hasattr(place := getattr(npu, name, None), "allow_hf32")])
