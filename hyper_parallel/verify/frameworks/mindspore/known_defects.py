"""Known defects of MindSpore on the CPU: calls with silently wrong results, reported with the program's line.

To add a defect, add an entry to :data:`DEFECTS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mindspore
from mindspore import Tensor, mint, ops

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.verify.frameworks.contract.record_log import RecordLog, user_site

__all__ = ["DEFECTS", "Defect", "reporting"]

_FRAMEWORK = str(Path(str(mindspore.__file__)).parent)
_LIBRARIES = (_FRAMEWORK, str(Path(__file__).parents[3]))


class Defect(NamedTuple):
    """A call that MindSpore computes wrongly.

    Attributes:
        owner: module or class that has the function.
        name: name of the function there.
        label: qualified name of the function.
        meets: returns whether a call with the given arguments has a wrong result.
        words: description of the error, and the function to call instead.
    """

    owner: Any
    name: str
    label: str
    meets: Callable[..., bool]
    words: str


def _plain(*args: Any, **_: Any) -> bool:
    return not isinstance(args[0], DTensor)


def _into_view(target: Any, *_: Any, **__: Any) -> bool:
    size = target.numel() * target.itemsize
    return _plain(target) and not (target.is_contiguous() and size == target.untyped_storage().size())


def _broadcast(x: Any, other: Any = None, *_: Any, **__: Any) -> bool:
    return _plain(x) and isinstance(other, Tensor) and tuple(x.shape) != tuple(other.shape)


def _all_elements(x: Any, index: Any, value: Any, *_: Any, **__: Any) -> bool:
    return _plain(x) and index is Ellipsis and isinstance(value, Tensor) and value.dtype == x.dtype


_CROSS = "it leaves elements unwritten where an operand is broadcast; call broadcast_to first"
_SPLIT = "its gradient is wrong where one of several pieces is transposed; call mint.narrow for each piece"
_INDEX_ADD = "it adds to its first operand, too; pass a copy where that is used again"
_SHARED = "x and y share storage afterwards, so that a later write to x changes y; write x[:] = y"
_UNWRITTEN = "it returns the right values and leaves the tensor as it was; assign the result"

DEFECTS = (
    Defect(mint, "split", "mint.split", _plain, _SPLIT),
    Defect(
        Tensor,
        "copy_",
        "Tensor.copy_",
        _into_view,
        "it writes nothing into a transposed or sliced tensor; write view[:] = values",
    ),
    *(
        Defect(owner, "cross", f"{label}.cross", _broadcast, _CROSS)
        for owner, label in ((mint, "mint"), (ops, "ops"), (Tensor, "Tensor"))
    ),
    Defect(mint, "index_add", "mint.index_add", _plain, _INDEX_ADD),
    Defect(Tensor, "index_add", "Tensor.index_add", _plain, _INDEX_ADD),
    Defect(Tensor, "__setitem__", "x[...] = y", _all_elements, _SHARED),
    *(Defect(Tensor, name, f"Tensor.{name}", _plain, _UNWRITTEN) for name in ("add_", "sub_", "mul_", "div_", "exp_")),
)
"""Defects found in MindSpore 2.10. Only calls by programs are affected; the library avoids these functions."""


def reporting(log: RecordLog, defect: Defect, own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function ``own`` to record in ``log`` each call by the program whose result is wrong, with its site."""

    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename  # noqa: SLF001 - calls by the framework itself are not reported
        by_program = not caller.startswith(_LIBRARIES)
        if by_program and args and isinstance(args[0], Tensor) and defect.meets(*args, **kwargs):
            found = log.notes.setdefault("defects of the framework", {})
            if defect.label not in found:
                found[defect.label] = f"{defect.label} at {user_site(_FRAMEWORK)}: {defect.words}"
        return own(*args, **kwargs)

    return call
