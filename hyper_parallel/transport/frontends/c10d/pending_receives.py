"""Detects that a tensor is read, or written, between an ``irecv`` and its wait.

Such a read gets old or new values, depending on when the message arrives. On simulated ranks it always gets the old
values, so the program would be silently wrong. While a receive is pending, each operator of its thread is checked:
views and factories read no values; any other use of the memory of the receive is an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from hyper_parallel.errors import HandleError
from hyper_parallel.platform.torch.versions import (
    TorchDispatchMode,
    dispatch_mode_stack,
    pop_dispatch_mode,
    push_dispatch_mode,
    schema_arguments,
)
from hyper_parallel.transport.checks.fingerprint import Site

__all__ = ["watch_receive"]

_FACTORIES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_")
"""Beginnings of the names of operators that read the shape of a tensor, not its values."""

_OF_THREAD = threading.local()


class _Pending(NamedTuple):
    begin: int
    end: int
    site: Site


class _Watch(TorchDispatchMode):  # type: ignore[misc]  # the border to PyTorch hands it out as Any
    """Checks every operator of one thread while receives are pending."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: dict[object, _Pending] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator, unless it touches what is being received."""
        kwargs = kwargs or {}
        if self.pending and not (func.is_view or func.__name__.startswith(_FACTORIES)):
            arguments = schema_arguments(func)
            written = {each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write}
            names = [each.name for each in arguments]
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                for tensor in _tensors(value):
                    self._require_apart(tensor, "written" if name in written else "read")
        return func(*args, **kwargs)

    def _require_apart(self, tensor: torch.Tensor, verb: str) -> None:
        for pending in self.pending.values():
            if _touches(tensor, pending.begin, pending.end):
                raise HandleError(
                    f"the tensor of the irecv at {pending.site} was {verb} before its wait: it may hold the old "
                    "values, the received ones or some of both; wait for the receive first"
                )

    def enter(self) -> None:
        """Start to check this thread's operators."""
        if self not in dispatch_mode_stack():
            push_dispatch_mode(self)

    def leave(self) -> None:
        """Stop checking; modes that the program entered meanwhile stay."""
        if self not in dispatch_mode_stack():
            return  # another thread waited: the mode is idle until the next receive
        above = []
        while (mode := pop_dispatch_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            push_dispatch_mode(mode)


def watch_receive(x: torch.Tensor, site: Site) -> Callable[[], None]:
    """Raise a HandleError in operators of this thread that use a tensor, until the returned function is called.

    Args:
        x: the tensor that is received into; a subclass or a non-contiguous tensor is not watched.
        site: site of the receive.
    """
    if type(x.detach()) is not torch.Tensor or not x.numel() or not x.is_contiguous():
        return lambda: None
    watch = getattr(_OF_THREAD, "watch", None)
    if watch is None:
        watch = _OF_THREAD.watch = _Watch()
    begin, ticket = x.data_ptr(), object()
    watch.enter()
    watch.pending[ticket] = _Pending(begin, begin + x.numel() * x.element_size(), site)

    def end() -> None:
        watch.pending.pop(ticket, None)
        if not watch.pending:
            watch.leave()

    return end


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of an argument."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _touches(tensor: torch.Tensor, begin: int, end: int) -> bool:
    """Return whether an element of a tensor lies in a range of memory."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    try:
        first, width = tensor.data_ptr(), tensor.element_size()
    except RuntimeError:  # a wrapper of a function transform
        return False
    steps = list(zip(tensor.shape, tensor.stride(), strict=True))
    last = first + width * (1 + sum((size - 1) * stride for size, stride in steps))
    if last <= begin or first >= end:
        return False
    if tensor.is_contiguous():
        return True
    places = np.zeros((), dtype=np.int64)
    for size, stride in steps:
        places = np.add.outer(places, np.arange(size) * stride)
    addresses = first + width * places
    return bool(((addresses >= begin) & (addresses < end)).any())
