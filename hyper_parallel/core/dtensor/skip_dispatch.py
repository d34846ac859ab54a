"""Operations on this rank's pieces: dispatch is left out, except for operators that are named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["SkipDTensorDispatch", "any_block", "local_operands", "outside_blocks", "skipped"]

# Per context: the surrounding blocks, the innermost last.
_OPEN: ContextVar[tuple[SkipDTensorDispatch, ...]] = ContextVar("hyper_parallel_skip", default=())
any_block = _OPEN.get


class SkipDTensorDispatch(ContextDecorator):
    """Inside, operations on DTensors act on their local tensors and return plain ones.

    No layout is checked and nothing is communicated. What is written in place is written to the local tensor, and
    the DTensor is returned. Blocks may be nested, and the innermost one counts; they hold for the current thread and
    task only. It is a decorator too.

    Args:
        no_skip: operators that are dispatched as always: functions, methods or operator overloads, their names, or
            canonical names.
    """

    def __init__(self, no_skip: Collection[Any] = ()) -> None:
        self.no_skip = frozenset((no_skip,) if isinstance(no_skip, str) else no_skip)

    def __enter__(self) -> SkipDTensorDispatch:  # noqa: PYI034 - nobody subclasses it
        """Open a block."""
        _OPEN.set((*_OPEN.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the innermost block."""
        del kind, error, trace
        _OPEN.set(_OPEN.get()[:-1])


def skipped(func: Callable[..., Any] | None, *names: str) -> bool:
    """Whether a call of ``func``, known under ``names``, acts on local tensors here."""
    blocks = _OPEN.get()
    if not blocks:
        return False
    kept = blocks[-1].no_skip
    if not kept:
        return True
    own = getattr(func, "__name__", "")
    return func not in kept and own not in kept and not any(name in kept for name in names)


@contextmanager
def outside_blocks() -> Iterator[None]:
    """As if no block surrounded this: an operator that was named is dispatched with all that it is made of."""
    token = _OPEN.set(())
    try:
        yield
    finally:
        _OPEN.reset(token)


def local_operands(value: Any) -> Any:
    """``value`` with the local tensor in place of each DTensor, in nested sequences and mappings."""
    if isinstance(value, DTensor):
        return value._local
    if isinstance(value, (list, tuple)) and any(True for _ in _dtensors(value)):
        items = [local_operands(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: local_operands(item) for name, item in value.items()}
    return value


def _dtensors(values: Any) -> Iterator[DTensor]:
    for one in values:
        if isinstance(one, DTensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _dtensors(one)
