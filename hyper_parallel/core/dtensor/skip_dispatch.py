"""``SkipDTensorDispatch``: operations run on local tensors without dispatch, except those in ``no_skip``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from hyper_parallel._tree import leaves, rebuild
from hyper_parallel.core.dtensor.dtensor import DTensor

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self  # of the standard library from Python 3.11 on

__all__ = ["SkipDTensorDispatch", "local_operands", "open_blocks", "outside_blocks", "skipped"]

# Per context: the surrounding blocks, the innermost last.
_BLOCKS: ContextVar[tuple[SkipDTensorDispatch, ...]] = ContextVar("hyper_parallel_skip", default=())
open_blocks = _BLOCKS.get


class SkipDTensorDispatch(ContextDecorator):
    """Inside the block, operations on DTensors act on their local tensors and return plain tensors.

    No layout is checked and nothing is communicated. An in-place operation writes to the local tensor and returns the
    DTensor. Blocks may be nested; only the innermost applies. They apply to the current thread and task only. The
    class is a decorator too.

    Args:
        no_skip: operators that are dispatched as usual, given as functions, methods, operator overloads, their names or
            canonical names.
    """

    def __init__(self, no_skip: Collection[Any] = ()) -> None:
        self.no_skip = frozenset((no_skip,) if isinstance(no_skip, str) else no_skip)

    def __enter__(self) -> Self:
        """Enter the block."""
        _BLOCKS.set((*_BLOCKS.get(), self))
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the innermost block."""
        del error_type, error, traceback
        _BLOCKS.set(_BLOCKS.get()[:-1])


def skipped(func: Callable[..., Any] | None, *names: str) -> bool:
    """Return True if a call of ``func`` (also known as ``names``) acts on local tensors in the current context."""
    blocks = _BLOCKS.get()
    if not blocks:
        return False
    dispatched = blocks[-1].no_skip
    if not dispatched:
        return True
    own_name = getattr(func, "__name__", "")
    return func not in dispatched and own_name not in dispatched and not any(name in dispatched for name in names)


@contextmanager
def outside_blocks() -> Iterator[None]:
    """Ignore surrounding blocks: an operator in ``no_skip`` is dispatched, and so are those that it decomposes into."""
    token = _BLOCKS.set(())
    try:
        yield
    finally:
        _BLOCKS.reset(token)


def local_operands(value: Any) -> Any:
    """Return ``value`` with local tensors in place of DTensors, in nested sequences and mappings."""
    if isinstance(value, DTensor):
        return value._local
    if isinstance(value, (list, tuple)) and any(isinstance(leaf, DTensor) for leaf in leaves(value)):
        return rebuild(value, [local_operands(item) for item in value])
    if isinstance(value, dict):
        return {name: local_operands(item) for name, item in value.items()}
    return value
