"""Facet *memory* on PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from hyper_parallel.platform.contract.memory import ForwardWrapper, MemoryFacet, Offloaded, SpillFile
from hyper_parallel.platform.torch.runtime import device_type
from hyper_parallel.platform.torch.versions import storage_number, top_saved_tensors_hooks
from hyper_parallel.transport.real.c10d import from_host, to_host

__all__ = ["TorchMemory"]


class TorchMemory(MemoryFacet):
    """Checkpointing and offloading on PyTorch."""

    @property
    def checkpoint(self) -> Callable[..., Any]:
        """``torch.utils.checkpoint.checkpoint``, not reentrant unless requested."""
        return _checkpoint

    @property
    def noop_context_fn(self) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
        """``torch.utils.checkpoint.noop_context_fn``."""
        return torch_checkpoint.noop_context_fn

    def create_selective_checkpoint_contexts(
        self, policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return PyTorch's own contexts."""
        return torch_checkpoint.create_selective_checkpoint_contexts(policy_fn_or_list, allow_cache_entry_mutation)

    def _wrapped(self, module: Any, around: Callable[..., Any]) -> Any:
        kind = type(module)
        wrapped: Any = object.__new__(type(kind.__name__, (_Wrapped, kind), {"__module__": kind.__module__}))
        wrapped.__dict__.update(module.__dict__)  # the dictionaries of parameters, buffers and submodules are shared
        own = wrapped.__dict__.pop("forward", None)
        wrapped.__dict__.update(_around=around, _own_forward=own)
        return wrapped

    def replace_saved(self, replace: Callable[[Any], Offloaded | None]) -> AbstractContextManager[Any]:
        """``torch.autograd.graph.saved_tensors_hooks``, of which PyTorch calls the innermost only."""
        outer_pack, outer_unpack = top_saved_tensors_hooks(True) or (_identity, _identity)

        def pack(tensor: torch.Tensor) -> Any:
            kept = replace(tensor)
            return outer_pack(tensor) if kept is None else kept

        def unpack(packed: Any) -> torch.Tensor:
            return packed.restore() if isinstance(packed, Offloaded) else outer_unpack(packed)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def storage_key(self, tensor: Any) -> tuple[Any, ...] | None:
        """Storage, offset, size and dtype."""
        if not tensor.is_contiguous():
            return None
        return self._storage_of(tensor), tensor.storage_offset(), self._bytes_of(tensor), tensor.dtype

    def _offloader(self) -> Callable[[Any], Offloaded]:
        return _Offloader().offload

    def _storages_of(self, module: Any) -> frozenset[int]:
        tensors = [*module.parameters(), *module.buffers()]
        return frozenset(self._storage_of(getattr(tensor, "_local", tensor)) for tensor in tensors)

    def _storage_of(self, tensor: Any) -> int:
        return storage_number(tensor)

    def _bytes_of(self, tensor: Any) -> int:
        return tensor.numel() * tensor.element_size()

    def _is_leaf(self, tensor: Any) -> bool:
        origin = tensor if tensor._base is None else tensor._base
        return origin.is_leaf and origin.requires_grad


class _Wrapped(ForwardWrapper, nn.Module):
    """A module whose forward goes through ``_around``."""

    _own_forward: Callable[..., Any] | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``_around`` with the forward of the class, or of the object where it has one of its own."""
        forward = self._own_forward or super().forward
        return self._around(forward, args, kwargs)


def _identity(value: Any) -> Any:
    return value


def _checkpoint(fn: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any) -> Any:
    """PyTorch's own ``checkpoint``, patched to sample the random numbers of DTensors again (``patches.py``)."""
    return torch_checkpoint.checkpoint(fn, *args, use_reentrant=use_reentrant, **options)


class _Offloader:
    """Moves saved tensors to the next slower memory; one temporary file or stream per context."""

    def __init__(self) -> None:
        self._file: SpillFile | None = None
        self._stream: Any = None

    def offload(self, tensor: torch.Tensor) -> Offloaded:
        """Copy a host tensor to the file, a device tensor to the host."""
        if tensor.device.type == "cpu":
            if self._file is None:
                self._file = SpillFile()
            return _OnDisk(self._file.write(to_host(tensor.contiguous())))
        if self._stream is None:
            self._stream = getattr(torch, device_type()).Stream()
        return _OnHost(tensor, self._stream)


class _OnDisk(Offloaded):
    """A host tensor in a file."""

    def __init__(self, record: Any) -> None:
        self._record = record

    def restore(self) -> torch.Tensor:
        """Read the tensor back."""
        return from_host(self._record.array())


class _OnHost(Offloaded):
    """A device tensor in pinned host memory; ``stream`` copies it there while the device continues to compute."""

    def __init__(self, tensor: torch.Tensor, stream: Any) -> None:
        engine = getattr(torch, tensor.device.type)
        self._device, self._event = tensor.device, engine.Event()
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        stream.wait_stream(engine.current_stream())
        with engine.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not reused before the copy is done
        self._event.record(stream)

    def restore(self) -> torch.Tensor:
        """Copy the tensor back, once its copy to the host is done."""
        getattr(torch, self._device.type).current_stream().wait_event(self._event)
        return self._host.to(self._device, non_blocking=True)
