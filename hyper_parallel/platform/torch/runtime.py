"""Facet *runtime* on PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from hyper_parallel.platform.contract.runtime import HostEvent, HostStream, RuntimeFacet, host_stream_context

__all__ = ["TorchRuntime", "device_type"]


def device_type() -> str:
    """``npu`` or ``cuda`` where PyTorch sees one, else ``cpu``."""
    npu = getattr(torch, "npu", None)  # exists once torch_npu is imported
    if npu is not None and npu.is_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


class TorchRuntime(RuntimeFacet):
    """Streams, events and profiling of PyTorch."""

    def device_type(self) -> str:
        """See :func:`device_type`."""
        return device_type()

    def new_stream(self) -> Any:
        """``torch.cuda.Stream`` and its like."""
        return HostStream() if device_type() == "cpu" else _engine().Stream()

    def get_stream_context(self) -> Callable[[Any], AbstractContextManager[Any]]:
        """``torch.cuda.stream`` and its like."""
        return host_stream_context if device_type() == "cpu" else _engine().stream

    def get_current_stream(self) -> Any:
        """``torch.cuda.current_stream()`` and its like."""
        return _HOST if device_type() == "cpu" else _engine().current_stream()

    def new_event(self) -> Any:
        """``torch.cuda.Event`` and its like."""
        return HostEvent() if device_type() == "cpu" else _engine().Event()

    def no_grad(self) -> AbstractContextManager[Any]:
        """``torch.no_grad()``."""
        return torch.no_grad()

    def profiler_record(self, name: str) -> AbstractContextManager[Any]:
        """``torch.profiler.record_function``."""
        return torch.profiler.record_function(name)

    def use_deterministic(self) -> None:
        """``torch.use_deterministic_algorithms`` and cuDNN's switches; the variables of cuBLAS and HCCL if unset."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
        torch.use_deterministic_algorithms(mode=True)
        # Attributes of torch.backends.cudnn may not be assigned once PyTorch's test utilities are imported.
        torch.backends.cudnn.set_flags(_benchmark=False, _deterministic=True)

    def seed(self, seed: int) -> None:
        """``torch.manual_seed``."""
        torch.manual_seed(seed)

    def get_symmetric_memory_handler(self) -> Any:
        """``torch.distributed._symmetric_memory``."""
        if self.gap("get_symmetric_memory_handler") is not None:
            raise self.unsupported("get_symmetric_memory_handler")
        from hyper_parallel.platform.torch.versions import symmetric_memory

        return symmetric_memory


_HOST = HostStream()


def _engine() -> Any:
    """``torch.cuda`` or ``torch.npu``."""
    return getattr(torch, device_type())
