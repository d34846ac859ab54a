"""``torch.npu`` on the rehearsal device: what torch_npu offers of it, over the compiled extension beside this file.

PyTorch imports this module by itself where its folder is on the path: the folder holds a package's metadata with an
entry point of the group ``torch.backends``, as torch_npu's does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_rng_state",
    "get_rng_state_all",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "reset_peak_memory_stats",
    "seed_all",
    "set_device",
    "set_memory_limit",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "start",
    "stream",
    "synchronize",
]

_UNLIMITED = 64 << 30


def _index(index: Any = None) -> int:
    """The number of a device given as a number, a name or a ``torch.device``."""
    if isinstance(index, int) and not isinstance(index, bool):
        return index if index >= 0 else current_device()
    place = torch.device("npu" if index is None else index)
    if place.type != "npu":
        msg = f"expected a device of npu, got {place}"
        raise ValueError(msg)
    return current_device() if place.index is None else place.index


class Stream(torch.Stream):
    """A queue of a device; work is complete when its call returns."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:  # noqa: PYI034 - Self is newer than Python 3.10
        """Make a stream of the current device, or of ``device``."""
        return super().__new__(cls, device=torch.device("npu", _index(device)), priority=priority)


class Event(torch.Event):
    """A mark in a stream."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:  # noqa: PYI034 - as above
        """Make an event; recorded on the current stream unless ``record`` names one."""
        return super().__new__(
            cls, device=torch.device("npu"), enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


class device:  # noqa: N801 - PyTorch's name
    """Within it new tensors are made on a device."""

    def __init__(self, index: Any) -> None:
        self._index_of_device = _index(index)
        self._before = -1

    def __enter__(self) -> None:
        """Choose the device."""
        self._before = current_device()
        set_device(self._index_of_device)

    def __exit__(self, *exception: object) -> None:
        """Choose the device of before."""
        set_device(self._before)


def is_available() -> bool:
    """Whether this process has a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Whether the device is ready: always."""
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """The number of devices of this process."""
    return torch._C._accelerator_hooks_device_count()


def current_device() -> int:
    """The device of new tensors."""
    return torch._C._accelerator_getDeviceIndex()


def set_device(index: Any) -> None:
    """Choose the device of new tensors."""
    torch._C._accelerator_setDeviceIndex(_index(index))


def get_device_name(index: Any = None) -> str:
    """A name for reports."""
    return f"rehearsal device {_index(index)} (computes on the CPU)"


def synchronize(index: Any = None) -> None:
    """Wait for a device: its work is complete."""
    torch._C._accelerator_synchronizeDevice(_index(index))


def current_stream(index: Any = None) -> torch.Stream:
    """The stream of this thread on a device."""
    return torch._C._accelerator_getStream(_index(index))


def default_stream(index: Any = None) -> torch.Stream:
    """The stream that every device has from the beginning."""
    return torch.Stream(stream_id=0, device_index=_index(index), device_type=20)


def set_stream(chosen: torch.Stream) -> None:
    """Make a stream the one of this thread."""
    torch._C._accelerator_setStream(chosen)


@contextmanager
def stream(chosen: torch.Stream | None) -> Iterator[torch.Stream | None]:
    """Make a stream the one of this thread, within it."""
    if chosen is None:
        yield None
        return
    before, index = current_stream(chosen.device), current_device()
    set_stream(chosen)
    try:
        yield chosen
    finally:
        set_stream(before)
        set_device(index)


def _generator(index: Any) -> torch.Generator:
    return torch.ops.rehearsal.default_generator(_index(index))


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(device_count()):
        _generator(index).manual_seed(int(seed))


def seed_all() -> None:
    """Seed the generators of all devices with a random number."""
    manual_seed_all(torch.Generator().seed())


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    """The state of a device's generator, on the host."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    """Put back the state of a device's generator."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices' generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Put back the states of all devices' generators."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def memory_allocated(device: Any = None) -> int:
    """The bytes in use on a device."""
    return torch.ops.rehearsal.memory(_index(device), False)


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that were in use on a device."""
    return torch.ops.rehearsal.memory(_index(device), True)


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    """Begin to look for the most bytes anew."""
    torch.ops.rehearsal.reset_peak(_index(device))


def set_memory_limit(size: int, device: Any = None) -> None:
    """Let a device run out of memory at so many bytes; 0 takes the limit away. Only the rehearsal device has it."""
    torch.ops.rehearsal.limit_memory(_index(device), size)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """The free bytes and all bytes of a device."""
    return _UNLIMITED - memory_allocated(device), _UNLIMITED


def empty_cache() -> None:
    """Return unused memory: none is kept."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that autocast casts to: none, so that it warns and stays off; PyTorch's recomputation asks."""
    return []


def is_bf16_supported() -> bool:
    """Whether a device computes in bfloat16: yes."""
    return True


def start() -> None:
    """Register the device: PyTorch calls it, as an entry point, at the end of ``import torch``."""
    torch.ops.load_library(str(Path(__file__).with_name("rehearsal_device.so")))
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
