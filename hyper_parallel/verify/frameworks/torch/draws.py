"""Functions of PyTorch by which a module draws random numbers, which can be replaced by the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["DRAWS", "drawn"]

_IN_PLACE = ("uniform_", "normal_", "bernoulli_", "exponential_", "log_normal_", "cauchy_")
_FUNCTIONS = ("rand", "randn", "rand_like", "randn_like", "normal", "bernoulli")

DRAWS = (
    *((torch.Tensor, name) for name in (*_IN_PLACE, "bernoulli")),
    *((torch, name) for name in _FUNCTIONS),
)
"""Where the functions stand, and their names."""


def drawn(result: Any, name: str, record: Callable[[str, Any], Any | None]) -> Any:
    """Record what a function drew, and return it; with other numbers, if ``record`` returns some.

    Args:
        result: of the function.
        name: of ``DRAWS``.
        record: gets the name and the numbers.
    """
    if type(result) is not torch.Tensor or result.is_meta or not result.is_floating_point() or not result.numel():
        return result
    other = record(name, result)
    if other is None:
        return result
    numbers = torch.from_numpy(other).to(device=result.device, dtype=result.dtype)
    if name in _IN_PLACE:
        with torch.no_grad():
            return result.copy_(numbers)
    return numbers.requires_grad_(result.requires_grad)
