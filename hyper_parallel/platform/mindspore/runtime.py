"""Facet *runtime* on MindSpore."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mindspore

from hyper_parallel.platform.contract.runtime import HostEvent, HostStream, RuntimeFacet, host_stream_context
from hyper_parallel.platform.mindspore import imperative
from hyper_parallel.platform.mindspore.versions import no_grad
from hyper_parallel.transport.frontends.mindspore_comm.host import on_accelerator

__all__ = ["MindSporeRuntime", "device_type"]


def device_type() -> str:
    """``npu`` where this process computes on Ascend, else ``cpu``."""
    return "npu" if on_accelerator() else "cpu"


class MindSporeRuntime(RuntimeFacet):
    """Streams, events and profiling of MindSpore."""

    def device_type(self) -> str:
        """Return the device type of new tensors."""
        return device_type()

    def new_stream(self) -> Any:
        """``mindspore.runtime.Stream``; on CPU, where its methods log errors, one that orders nothing."""
        return HostStream() if device_type() == "cpu" else mindspore.runtime.Stream()

    def get_stream_context(self) -> Callable[[Any], AbstractContextManager[Any]]:
        """``mindspore.runtime.StreamCtx``."""
        return host_stream_context if device_type() == "cpu" else mindspore.runtime.StreamCtx

    def get_current_stream(self) -> Any:
        """``mindspore.runtime.current_stream()``."""
        return _HOST if device_type() == "cpu" else mindspore.runtime.current_stream()

    def new_event(self) -> Any:
        """``mindspore.runtime.Event``."""
        return HostEvent() if device_type() == "cpu" else mindspore.runtime.Event()

    def no_grad(self) -> AbstractContextManager[Any]:
        """``_no_grad``, which has no public name."""
        return no_grad()

    def enable_imperative_gradients(self) -> None:
        """Enable ``backward()`` through a private function of MindSpore's gradient engine; see :mod:`.imperative`."""
        imperative.enable()

    def profiler_record(self, name: str) -> AbstractContextManager[Any]:
        """A range of ``mindspore.profiler.mstx``, which its profiler shows on Ascend."""
        return _range(name)

    def use_deterministic(self) -> None:
        """Call ``mindspore.set_deterministic``, unless it was called; set ``HCCL_DETERMINISTIC``, unless it is set."""
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
        if mindspore.get_context("deterministic") != "ON":
            mindspore.set_deterministic(deterministic=True)

    def seed(self, seed: int) -> None:
        """``mindspore.set_seed`` and ``mindspore.manual_seed``."""
        mindspore.set_seed(seed % 2**32)
        mindspore.manual_seed(seed)

    def get_symmetric_memory_handler(self) -> Any:
        """Raise the error from the gap ledger."""
        raise self.unsupported("get_symmetric_memory_handler")


_HOST = HostStream()


@contextmanager
def _range(name: str) -> Iterator[None]:
    mstx = mindspore.profiler.mstx
    number = mstx.range_start(name) if device_type() != "cpu" else None
    try:
        yield
    finally:
        if number is not None:
            mstx.range_end(number)
