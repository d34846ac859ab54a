"""Facet *runtime*: streams, events, gradient reductions in flight, grad mode, profiling."""

from __future__ import annotations

import abc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from hyper_parallel.errors import HandleError
from hyper_parallel.platform.contract.identity import IdentityFacet
from hyper_parallel.platform.contract.ledger import LedgerFacet
from hyper_parallel.transport.base import Transport

__all__ = ["GradHandles", "HostEvent", "HostStream", "RuntimeFacet", "host_stream_context"]


class HostStream:
    """A stream of a device without streams, where every call is complete when it returns."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: everything is complete."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: everything is complete."""

    def record_event(self, event: Any = None) -> Any:
        """Record ``event``, or a new one, and return it."""
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Do nothing: everything is complete."""

    def query(self) -> bool:
        """Return True: everything is complete."""
        return True


class HostEvent:
    """An event of a device without streams; it has happened once it is recorded."""

    def __init__(self) -> None:
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        """Record the present time."""
        del stream
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Do nothing: everything is complete."""

    def synchronize(self) -> None:
        """Do nothing: everything is complete."""

    def query(self) -> bool:
        """Return True: the event has happened, or was never recorded."""
        return True

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Return the milliseconds from this event to ``end_event``.

        Raises:
            ValueError: one of them was not recorded.
        """
        if self._time is None or end_event._time is None:
            msg = "elapsed_time: both events must be recorded first"
            raise ValueError(msg)
        return (end_event._time - self._time) * 1000.0


@contextmanager
def host_stream_context(stream: Any) -> Iterator[Any]:
    """Select a stream, on a device without streams."""
    yield stream


class GradHandles:
    """The gradient reductions in flight of one rank; each is waited for once, then its post-process runs once."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Any, Callable[[], Any] | None]] = deque()
        self._lock = threading.Lock()

    def add(self, handle: Any, post_process: Callable[[], Any] | None) -> None:
        """Add a reduction in flight."""
        with self._lock:
            self._pending.append((handle, post_process))

    def process_oldest(self) -> bool:
        """Remove the oldest, wait for it and run its post-process; return False if there is none."""
        with self._lock:
            if not self._pending:
                return False
            handle, post_process = self._pending.popleft()
        if handle is not None:
            handle.wait()
        if post_process is not None:
            post_process()
        return True

    def process_all(self) -> None:
        """Process all, even if one fails; the first error is raised at the end."""
        failure: Exception | None = None
        more = True
        while more:
            try:
                more = self.process_oldest()
            except Exception as error:  # noqa: BLE001, PERF203 - others must still be waited for; raised below
                failure = failure or error
        if failure is not None:
            raise failure


_HANDLES: WeakKeyDictionary[Transport, GradHandles] = WeakKeyDictionary()
_LOCK = threading.Lock()


class RuntimeFacet(IdentityFacet, LedgerFacet):
    """Facet *runtime*.

    On CPU, streams and events have the same interface and order nothing, because nothing is asynchronous. The code for
    CUDA and NPU follows the frameworks' documented interfaces and has not run on a device.
    """

    @abc.abstractmethod
    def new_stream(self) -> Any:
        """Return a new stream of this process's device."""

    @abc.abstractmethod
    def get_stream_context(self) -> Callable[[Any], AbstractContextManager[Any]]:
        """Return the function that makes a stream current: ``with platform.get_stream_context()(stream):``."""

    @abc.abstractmethod
    def get_current_stream(self) -> Any:
        """Return the stream on which operations of this thread are launched."""

    @abc.abstractmethod
    def new_event(self) -> Any:
        """Return a new event of this process's device."""

    def set_grad_reduce_handle(self, handle: Any, post_process: Callable[[], Any] | None = None) -> None:
        """Register a gradient reduction in flight, for :meth:`wait_grad_handle`.

        Args:
            handle: an object with ``wait()``, or None if there is nothing to wait for.
            post_process: called once after the wait, for example to assign the reduced gradient.

        Raises:
            HandleError: (a RuntimeError) the handle has no ``wait()``.
        """
        if handle is not None and not callable(getattr(handle, "wait", None)):
            msg = f"set_grad_reduce_handle: {handle!r} is not a handle: it has no wait()"
            raise HandleError(msg)
        self._grad_handles().add(handle, post_process)

    def wait_grad_handle(self) -> None:
        """Wait for every registered reduction, oldest first, each once; also for those of a backward that failed.

        Raises:
            Exception: the first error of a handle or post-process, after all others were processed.
        """
        self._grad_handles().process_all()

    def _process_current_handle(self) -> None:
        """Wait for the oldest registered reduction, if there is one."""
        self._grad_handles().process_oldest()

    def _grad_handles(self) -> GradHandles:
        """Return the reductions of this rank; they are kept by transport, since backward may run on another thread."""
        transport = self.transport()
        with _LOCK:
            return _HANDLES.setdefault(transport, GradHandles())

    @abc.abstractmethod
    def no_grad(self) -> AbstractContextManager[Any]:
        """Return a context in which operations are not recorded for backward."""

    def enable_imperative_gradients(self) -> None:
        """Let ``loss.backward()`` add gradients to ``grad`` of leaves, where the framework does not by itself."""

    @abc.abstractmethod
    def profiler_record(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that is a named range in the framework's profiler."""

    @abc.abstractmethod
    def use_deterministic(self) -> None:
        """Set the framework's switches for bitwise equal runs, and make reductions add in rank order."""

    @abc.abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the framework's own generators of this rank."""

    @abc.abstractmethod
    def get_symmetric_memory_handler(self) -> Any:
        """Return the framework's symmetric memory, if the device has it."""
