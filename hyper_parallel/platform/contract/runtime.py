"""Streams, events, pending gradient reductions, grad mode, profiling."""

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
    """A stream of a device without streams: everything is complete when the call that asked for it returns."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        """``event``, or a new one, recorded now."""
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Everything is complete."""
        return True


class HostEvent:
    """An event of a device without streams: it happens when it is recorded."""

    def __init__(self) -> None:
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        """It happens now."""
        del stream
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has happened, or was never recorded."""
        return True

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to ``end_event``.

        Raises:
            ValueError: one of them was not recorded.
        """
        if self._time is None or end_event._time is None:
            msg = "elapsed_time: both events must be recorded first"
            raise ValueError(msg)
        return (end_event._time - self._time) * 1000.0


@contextmanager
def host_stream_context(stream: Any) -> Iterator[Any]:
    """What selects a stream where there are none."""
    yield stream


class GradHandles:
    """Gradient reductions in flight, of one rank: each is waited for once, and then its post-process runs once."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Any, Callable[[], Any] | None]] = deque()
        self._lock = threading.Lock()

    def add(self, handle: Any, post_process: Callable[[], Any] | None) -> None:
        """Keep one."""
        with self._lock:
            self._pending.append((handle, post_process))

    def process_oldest(self) -> bool:
        """Wait for the oldest and run its post-process; False when there is none. It is gone whatever happens."""
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
        """All of them, also when one fails; the first error is raised at the end."""
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

    On CPU, streams and events have the same interface and order nothing, because nothing is asynchronous. The paths
    of CUDA and NPU are written against the frameworks' documented interfaces and have not run on a device.
    """

    @abc.abstractmethod
    def new_stream(self) -> Any:
        """A stream of this process's device."""

    @abc.abstractmethod
    def get_stream_context(self) -> Callable[[Any], AbstractContextManager[Any]]:
        """The function that makes a stream current: ``with platform.get_stream_context()(stream):``."""

    @abc.abstractmethod
    def get_current_stream(self) -> Any:
        """The stream on which operations of this thread are launched."""

    @abc.abstractmethod
    def new_event(self) -> Any:
        """An event of this process's device."""

    def set_grad_reduce_handle(self, handle: Any, post_process: Callable[[], Any] | None = None) -> None:
        """Keep a gradient reduction in flight.

        Args:
            handle: what ``wait()`` is called on; None has nothing to wait for.
            post_process: called once after that, for example to put the reduced gradient in its place.

        Raises:
            HandleError: (a RuntimeError) the handle has no ``wait()``.
        """
        if handle is not None and not callable(getattr(handle, "wait", None)):
            msg = f"set_grad_reduce_handle: {handle!r} is no handle; it has no wait()"
            raise HandleError(msg)
        self._grad_handles().add(handle, post_process)

    def wait_grad_handle(self) -> None:
        """Wait for every reduction that is kept, oldest first, each once; also what a failed backward left behind.

        Raises:
            Exception: the first error of a handle or post-process, after all others have been served.
        """
        self._grad_handles().process_all()

    def _process_current_handle(self) -> None:
        """Wait for the oldest reduction that is kept, if there is one."""
        self._grad_handles().process_oldest()

    def _grad_handles(self) -> GradHandles:
        """Those of this rank: by transport, since backward may run on another thread than forward."""
        transport = self.transport()
        with _LOCK:
            return _HANDLES.setdefault(transport, GradHandles())

    @abc.abstractmethod
    def no_grad(self) -> AbstractContextManager[Any]:
        """Operations inside are not recorded for backward."""

    @abc.abstractmethod
    def profiler_record(self, name: str) -> AbstractContextManager[Any]:
        """A named range in the framework's profiler."""

    @abc.abstractmethod
    def get_symmetric_memory_handler(self) -> Any:
        """The framework's symmetric memory, where the device has it."""
