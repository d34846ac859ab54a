"""Lets the CPU stand in for Ascend devices: replaces MindSpore functions that have no CPU kernel."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mindspore import Tensor, mint, nn, ops
from mindspore.ops.auto_generate import FlashAttentionScore, GroupedMatmul

from hyper_parallel.platform.mindspore.intercept import holds_dtensor
from hyper_parallel.transport.frames import hide_file
from hyper_parallel.verify.frameworks.mindspore import npu_functions, npu_kernels

__all__ = ["pretended_npu"]

hide_file(__file__)


@contextmanager
def pretended_npu() -> Iterator[Counter[str]]:
    """Inside this context, programs for Ascend devices run on the CPU; it yields the calls of replacements by name.

    Enter it before the program is imported, because a module that imports a function by name keeps that function.
    """
    counts: Counter[str] = Counter()
    places = list(_stand_ins())
    owns = [vars(owner).get(name, _INHERITED) for owner, name, _, _ in places]
    try:
        for owner, name, label, stand_in in places:
            setattr(owner, name, _counted(getattr(owner, name, None), stand_in, label, counts))
        yield counts
    finally:
        for (owner, name, _, _), own in zip(places, owns, strict=True):
            if own is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


_INHERITED = object()


def _stand_ins() -> Iterator[tuple[Any, str, str, Callable[..., Any]]]:
    """Yield for each function its owner, its name there, its qualified name, and its replacement."""
    for path, function in npu_functions.FUNCTIONS.items():
        home, _, name = path.rpartition(".")
        yield operator.attrgetter(home)(mint) if home else mint, name, f"mint.{path}", function
    for name in npu_functions.METHODS:
        yield Tensor, name, f"Tensor.{name}", npu_functions.written(name)
    for name in ("swiglu", "rms_norm", "moe_token_permute", "moe_token_unpermute"):
        yield ops, name, f"ops.{name}", getattr(npu_kernels, name)
    yield GroupedMatmul, "__call__", "GroupedMatmul", npu_kernels.grouped_matmul
    yield FlashAttentionScore, "__call__", "FlashAttentionScore", npu_kernels.attention
    if hasattr(nn.Cell, "to_empty"):
        yield nn.Cell, "to_empty", "Cell.to_empty", npu_functions.to_empty


def _counted(own: Any, stand_in: Callable[..., Any], label: str, counts: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(stand_in)
    def call(*args: Any, **kwargs: Any) -> Any:
        if own is not None and (holds_dtensor(args) or holds_dtensor(tuple(kwargs.values()))):
            return own(*args, **kwargs)
        counts[label] += 1
        return stand_in(*args, **kwargs)

    return call
