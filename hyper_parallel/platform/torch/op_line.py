"""One line of PyTorch's table: spellings of a canonical operator that take the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Line", "both", "method"]


@dataclass(frozen=True)
class Line:
    """Spellings of one operator.

    Attributes:
        op: canonical name.
        funcs: functions, methods or operator overloads.
        signature: their parameters in canonical names; None where they are the rule's own.
        canonical: the canonical implementation runs on locals, not the spelling.
        in_place: the first operand is written and returned.
    """

    op: str
    funcs: tuple[Callable[..., Any], ...]
    signature: str | None = None
    canonical: bool = False
    in_place: bool = False


def both(op: str, *names: str, signature: str | None = None, canonical: bool = False) -> Line:
    """``torch.<name>`` and ``Tensor.<name>``, each where it exists; the operator's own name by default."""
    found = [getattr(owner, name) for name in names or (op,) for owner in (torch, Tensor) if hasattr(owner, name)]
    return Line(op, tuple(dict.fromkeys(found)), signature, canonical)


def method(op: str, *names: str, signature: str | None = None, in_place: bool = False) -> Line:
    """``Tensor.<name>``."""
    return Line(op, tuple(getattr(Tensor, name) for name in names), signature, in_place=in_place)
