"""Host operations on PyTorch tensors: description, copies, reductions and conversion to numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hyper_parallel.transport.base import Shape, check_reduction
from hyper_parallel.transport.host.numpy_ops import BFLOAT16
from hyper_parallel.transport.host.torch.process_state import (
    DeviceGenerators,
    GeneratorStates,
    ProcessState,
    restore_device_generators,
    restore_generators,
    restore_process,
    save_device_generators,
    save_generators,
    save_process,
)

__all__ = [
    "TorchOps",
    "bytes_of",
    "from_bytes",
    "from_host",
    "materialized",
    "reduce_in_order",
    "seed_rank",
    "to_host",
]

_State = tuple[torch.Tensor, DeviceGenerators, torch.dtype, GeneratorStates, ProcessState]
_ACCUMULATE = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "all": torch.logical_and,
    "any": torch.logical_or,
}


def to_host(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the values of ``x`` as a numpy array (:data:`BFLOAT16` for bfloat16); it may share memory with ``x``."""
    plain = materialized(x.detach()).cpu()
    if plain.dtype is torch.bfloat16:
        return plain.contiguous().view(torch.int16).numpy().view(BFLOAT16)
    return plain.numpy()


def from_host(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a CPU tensor that shares the memory of ``array``."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def materialized(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with its values in memory: conjugation, negation and some zero gradients are only flags."""
    if x._is_zerotensor():  # noqa: SLF001 - PyTorch has no public function for it
        return x.clone()
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as flat bytes, which share memory if ``x`` is contiguous."""
    plain = materialized(x.detach()).contiguous()
    # By strides: a single element is contiguous with any stride, and reshape() does not change the stride.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def from_bytes(carried: torch.Tensor, size: int, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """Return the first ``size`` bytes as a tensor, with its own memory if ``carried`` is longer."""
    exact = carried if carried.numel() == size else carried[:size].clone()
    return exact.view(dtype).reshape(tuple(shape))


class TorchOps:
    """:class:`HostOps` for tensors of PyTorch, on any device."""

    framework = "torch"

    def shape(self, x: torch.Tensor) -> Shape:
        """Shape of ``x``."""
        return tuple(x.shape)

    def dtype(self, x: torch.Tensor) -> str:
        """Name of the dtype, such as ``torch.float32``."""
        return str(x.dtype)

    def inexact(self, x: torch.Tensor) -> bool:
        """Whether ``x`` is floating-point or complex."""
        return x.is_floating_point() or x.is_complex()

    def device(self, x: torch.Tensor) -> str:
        """Type of the device of ``x``; empty for the CPU."""
        return "" if x.is_cpu else x.device.type

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Return a contiguous detached copy."""
        return x.detach().clone(memory_format=torch.contiguous_format)

    def stack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Stack ``parts`` as rows of a new tensor."""
        return torch.stack([part.detach() for part in parts])

    def split(self, x: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Split a copy of ``x`` into flat chunks, each with its own storage."""
        return [part.clone() for part in torch.split(materialized(x.detach()).reshape(-1), list(sizes))]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Concatenate flat ``parts``."""
        filled = [part for part in parts if part.numel()]
        return filled[0] if len(filled) == 1 else torch.cat(list(parts))

    def reduce(self, parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
        """Fold ``parts`` from the left with ``op``; ``avg`` divides the sum once, at the end."""
        return reduce_in_order(parts, op)

    def save_state(self) -> _State:
        """Return states of generators (PyTorch, Python, NumPy, devices), default dtype, switches and environment."""
        host = torch.default_generator.get_state()
        return host, save_device_generators(), torch.get_default_dtype(), save_generators(), save_process()

    def restore_state(self, state: _State, now: _State | None = None) -> None:
        """Restore the state that :meth:`save_state` returned."""
        host, devices, dtype, others, process = state
        torch.default_generator.set_state(host)
        if now is None:
            now = (host, save_device_generators(), torch.get_default_dtype(), save_generators(), save_process())
        if devices is not None or now[1] is not None:
            restore_device_generators(devices)
        if dtype is not now[2]:
            torch.set_default_dtype(dtype)
        if others is not now[3]:
            restore_generators(others)
        if process is not now[4]:
            restore_process(process)


def reduce_in_order(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Fold equal-shaped ``parts`` from the left with ``op`` of ``REDUCTIONS``; a new tensor of their dtype.

    Raises:
        ReductionError: ``op`` is unknown, or ``avg`` of integers.
    """
    first = parts[0]
    check_reduction(op, inexact=first.is_floating_point() or first.is_complex())
    accumulate: Any = _ACCUMULATE[op]
    total = first.detach().clone(memory_format=torch.contiguous_format)
    for part in parts[1:]:
        accumulate(total, part.detach(), out=total)
    if op in ("all", "any") and len(parts) == 1:
        return total.to(torch.bool).to(first.dtype)
    return total.div_(len(parts)) if op == "avg" else total


def seed_rank() -> None:
    """Set a fixed seed and the standard default dtype, since the process may have served another run."""
    torch.manual_seed(0)
    if torch.get_default_dtype() is not torch.float32:
        torch.set_default_dtype(torch.float32)
