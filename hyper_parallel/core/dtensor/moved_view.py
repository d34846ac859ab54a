"""Views of redistributed operands: they are copies, and become stale once the operand is written.

If one device returns a view and this rank holds its values, the DTensor is a view of the local tensor, and sees every
write. Values fetched from other ranks are a copy, which would keep the old values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import UnsupportedOperatorError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.dtensor import DTensor

__all__ = ["MovedView", "follow"]

Count = Callable[[], Any]
"""Returns a value that changes with every write to a tensor."""


class MovedView:
    """Mixin for a framework's DTensor class: DTensors that are copies although one device would return views.

    Layout and local tensor are properties here, so that every access is checked, at no cost for other tensors.
    """

    _followed: tuple[tuple[Count, Any], ...]
    _readonly: str | None
    _unchecked_local: Callable[[Any], Any]
    _unchecked_layout: Callable[[Any], Any]

    def _check_fresh(self) -> None:
        for count, before in self._followed:
            if count() != before:
                msg = (
                    f"a view of a tensor that was written since is stale: {self._readonly}; take the view again after "
                    "the write, or clone() it before"
                )
                raise UnsupportedOperatorError(msg)

    @property
    def _local(self) -> Any:  # read-only here
        self._check_fresh()
        return self._unchecked_local(self)

    @property
    def _layout(self) -> Any:  # read-only here
        self._check_fresh()
        return self._unchecked_layout(self)


def follow(copy: DTensor, kind: type[Any], bases: Sequence[DTensor], counting: Callable[[Any], Count]) -> None:
    """Make ``copy`` stale when one of ``bases`` is written; for a base that is such a copy, its own bases count.

    Args:
        copy: a DTensor with storage of its own.
        kind: the framework's subclass of :class:`MovedView`, which becomes its class.
        bases: the DTensors whose values it has.
        counting: returns the function that counts the writes to a base.
    """
    followed: list[tuple[Count, Any]] = []
    for base in bases:
        if isinstance(base, MovedView):
            followed += base._followed  # noqa: SLF001 - of its own module
        else:
            count = counting(base)
            followed.append((count, count()))
    copy.__class__ = kind
    copy.__dict__["_followed"] = tuple(followed)
