"""Replaces functions of ``torch.cuda``, ``torch.npu`` and ``torch.accelerator`` if the CPU stands in for a device."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from hyper_parallel.errors import UnsupportedOnBackend

__all__ = ["ASKED", "PARTS", "Event", "Lacked", "PretendedDevice", "Stream", "answer_for", "lacking"]

ASKED: Counter[str] = Counter()
"""Number of a program's requests to the device, by kind."""

_CAPABILITY = (8, 0)  # a capability with bfloat16
_NCCL = (2, 27, 3)  # a version that reduces bfloat16
_MOST = 1024
"""Number of entries in the tuple of the devices' default generators; all are the host's generator."""

PARTS = ("graphs", "memory", "random", "streams")
"""Submodules of a device's module, such as ``torch.cuda.memory``; their functions are replaced too."""

_LACKED = {
    "CUDAGraph": "run without graphs of the device",
    "graph": "run without graphs of the device",
    "make_graphed_callables": "run without graphs of the device",
    "graph_pool_handle": "run without graphs of the device",
    "cudart": "profile on the device itself",
    "MemPool": "allocate with torch.empty",
    "use_mem_pool": "allocate with torch.empty",
    "caching_allocator_alloc": "allocate with torch.empty",
    "current_blas_handle": "multiply with torch.matmul",
}
"""Names in device modules for which there is no CPU replacement, with the alternative for programs."""


def lacking(what: str, instead: str) -> UnsupportedOnBackend:
    """Return the error for a call of a function that only the device supports."""
    msg = f"{what} was called, which does not exist when the CPU replaces the device: {instead} (docs/stacks.md)"
    return UnsupportedOnBackend(msg)


class Stream:
    """A stream of the device; work in it is complete when the call returns.

    Args:
        device: ignored, like all other arguments.
    """

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        ASKED["streams"] += 1
        self.device, self.priority = torch.device("cpu") if device is None else device, priority
        self.device_index, self.stream_id, self.cuda_stream = 0, 0, 0

    def synchronize(self) -> None:
        """Return at once: the work is complete."""

    def query(self) -> bool:
        """Return True: the work is complete."""
        return True

    def is_capturing(self) -> bool:
        """Return False: no graph is captured."""
        return False

    def wait_event(self, event: Any) -> None:
        """Wait for an event."""

    def wait_stream(self, stream: Any) -> None:
        """Wait for a stream; its work is already complete."""

    def record_event(self, event: Any = None) -> Event:
        """Record an event in the stream."""
        return Event() if event is None else event

    def __enter__(self) -> Stream:  # noqa: PYI034 - Self is in typing from Python 3.11 on
        """Make this stream the current one."""
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous stream."""


class Event:
    """An event in a stream; all work before it is complete."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Count the event as a request."""
        ASKED["events"] += 1

    def record(self, stream: Any = None) -> None:
        """Record the event."""

    def wait(self, stream: Any = None) -> None:
        """Let a stream wait for the event."""

    def query(self) -> bool:
        """Return True: the event has been reached."""
        return True

    def synchronize(self) -> None:
        """Wait for the event."""

    def elapsed_time(self, other: Any) -> float:
        """Return zero: no time is measured."""
        del other
        return 0.0


class _Zeros(dict[str, int]):
    """Statistics of memory, all 0; also for missing keys."""

    def __missing__(self, key: str) -> int:
        return 0


class Lacked:
    """Placeholder for a class or function of a device module; calling it is an error.

    Args:
        what: name of the class or function.
        instead: the alternative that the error names.
    """

    def __init__(self, what: str, instead: str) -> None:
        self._what, self._instead = what, instead

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise the error."""
        raise lacking(self._what, self._instead)

    def __or__(self, other: Any) -> Any:
        """Support type annotations such as ``CUDAGraph | None``."""
        return object | other

    def __instancecheck__(self, value: Any) -> bool:
        """Return False: no object is an instance."""
        return False


class PretendedDevice:
    """A device that the CPU stands in for; the methods and attributes of this class replace those of its module.

    Args:
        name: ``cuda`` or ``npu``.
    """

    Stream, Event, ExternalStream = Stream, Event, Stream

    def __init__(self, name: str) -> None:
        self.name = name
        self.default_generators = (torch.default_generator,) * _MOST
        self._current = 0
        self._stream: Any = None
        self._synchronization = 0
        self.device = _context_of(self)

    # -- the device ----------------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        """Return True: the device is available."""
        ASKED["questions about the device"] += 1
        return True

    def is_initialized(self) -> bool:
        """Return whether the device counts as initialised."""
        return False

    def init(self) -> None:
        """Do nothing: there is no driver."""

    def _lazy_init(self) -> None:
        """Do nothing: there is no driver."""

    def _lazy_call(self, call: Callable[[], Any], **_: Any) -> None:
        """Call a function that waits for the driver."""
        call()

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Return the number of devices: one per rank, as on one machine."""
        ASKED["questions about the device"] += 1
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def current_device(self) -> int:
        """Return the number of the rank's device."""
        return self._current

    def set_device(self, device: Any) -> None:
        """Make a device the rank's current device.

        Raises:
            ValueError: there is no such device.
        """
        index = self.index(device)
        if index >= self.device_count():
            msg = f"{self.name} device {index} of {self.device_count()} does not exist; every rank has one, LOCAL_RANK"
            raise ValueError(msg)
        self.choose(max(index, 0))

    def choose(self, index: int) -> None:
        """Make the device with this number the rank's current device."""
        self._current = index

    def index(self, device: Any) -> int:
        """Return the number of a device given as number, name or ``torch.device``; None is the current device."""
        if device is None:
            return self._current
        if isinstance(device, int):
            return device
        found: int | None = torch.device(device).index
        return self._current if found is None else found

    @contextmanager
    def device_of(self, value: Any) -> Iterator[None]:
        """Context in which the device of a tensor is the rank's current device."""
        del value
        yield

    def get_device_name(self, device: Any = None) -> str:
        """Return a name for reports."""
        del device
        return f"CPU that stands in for {self.name}"

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Return the compute capability."""
        del device
        return _CAPABILITY

    def get_device_properties(self, device: Any = None) -> Any:
        """Return the properties of the device."""
        major, minor = _CAPABILITY
        return SimpleNamespace(
            name=self.get_device_name(device), major=major, minor=minor, total_memory=_memory(), warp_size=32,
            multi_processor_count=1, max_threads_per_multi_processor=1, L2_cache_size=1 << 20, gcnArchName="",
        )  # fmt: skip

    def get_arch_list(self) -> list[str]:
        """Return an empty list: no kernels were compiled for any architecture."""
        return []

    def is_bf16_supported(self, *_: Any, **__: Any) -> bool:
        """Whether the device supports bfloat16."""
        return True

    def synchronize(self, device: Any = None) -> None:
        """Return at once: the device's work is complete."""

    def ipc_collect(self) -> None:
        """Do nothing: no memory of other processes exists."""

    def is_current_stream_capturing(self) -> bool:
        """Return False: no graph is captured."""
        return False

    def can_device_access_peer(self, *_: Any) -> bool:
        """Whether devices can access each other's memory."""
        return True

    def set_sync_debug_mode(self, mode: int | str) -> None:
        """Store the mode: no call waits for the device, so there is nothing to report."""
        self._synchronization = ("default", "warn", "error").index(mode) if isinstance(mode, str) else mode

    def get_sync_debug_mode(self) -> int:
        """Return the stored mode."""
        return self._synchronization

    def list_gpu_processes(self, device: Any = None) -> str:
        """Return a text without processes."""
        return f"no processes are running on the {self.get_device_name(device)}"

    def get_allocator_backend(self) -> str:
        """Return the name of PyTorch's own allocator."""
        return "native"

    # -- streams -------------------------------------------------------------------------------------------------------

    def current_stream(self, device: Any = None) -> Any:
        """Return the stream of this thread."""
        return self._stream or self.default_stream(device)

    def default_stream(self, device: Any = None) -> Any:
        """Return the default stream."""
        return Stream(device)

    def set_stream(self, stream: Any) -> None:
        """Set the current stream."""
        self._stream = stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[Any]:
        """Context in which a stream is the current one."""
        before, self._stream = self._stream, stream
        try:
            yield stream
        finally:
            self._stream = before

    # -- generators: the host's is the device's as well ----------------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        """Seed the generator."""
        ASKED["calls of generators"] += 1
        torch.default_generator.manual_seed(int(seed))

    manual_seed_all = manual_seed

    def seed(self) -> None:
        """Seed the generator at random."""
        torch.default_generator.seed()

    seed_all = seed

    def initial_seed(self) -> int:
        """Return the seed."""
        return torch.initial_seed()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return the generator's state."""
        del device
        ASKED["calls of generators"] += 1
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Restore the generator's state."""
        del device
        ASKED["calls of generators"] += 1
        torch.set_rng_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """Return the states of all devices' generators."""
        return [self.get_rng_state() for _ in range(self.device_count())]

    def set_rng_state_all(self, states: Any) -> None:
        """Restore the states of all devices' generators."""
        self.set_rng_state(list(states)[self._current])

    # -- memory --------------------------------------------------------------------------------------------------------

    def memory_allocated(self, device: Any = None) -> int:
        """Return 0: bytes in use are not counted."""
        del device
        ASKED["questions about memory"] += 1
        return 0

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated
    memory_cached = max_memory_cached = memory_allocated

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Return statistics, all 0."""
        del device
        ASKED["questions about memory"] += 1
        return _Zeros()

    memory_stats_as_nested_dict = host_memory_stats = memory_stats

    def memory_snapshot(self, *_: Any, **__: Any) -> list[Any]:
        """Return an empty list: no segments are allocated."""
        ASKED["questions about memory"] += 1
        return []

    def _record_memory_history(self, *_: Any, **__: Any) -> None:
        """Do nothing: allocations are not recorded."""

    def _snapshot(self, device: Any = None) -> dict[str, list[Any]]:
        """Return a snapshot without allocations."""
        del device
        return {"segments": self.memory_snapshot(), "device_traces": []}

    def _dump_snapshot(self, filename: str = "dump_snapshot.pickle") -> None:
        """Write a snapshot without allocations to a file."""
        Path(filename).write_bytes(pickle.dumps(self._snapshot()))

    def memory_summary(self, *_: Any, **__: Any) -> str:
        """Return an empty summary."""
        return f"memory of {self.get_device_name()} is the host's"

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return the number of free bytes and of all bytes."""
        del device
        return _memory(), _memory()

    def utilization(self, device: Any = None) -> int:
        """Return 0: utilization, temperature, power, clock rate and memory of the device are not measured."""
        del device
        return 0

    temperature = power_draw = clock_rate = device_memory_used = memory_usage = utilization

    def empty_cache(self) -> None:
        """Do nothing: no unused memory is cached."""

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Restart the measurement."""

    reset_max_memory_allocated = reset_max_memory_cached = reset_accumulated_memory_stats = reset_peak_memory_stats
    reset_peak_host_memory_stats = reset_accumulated_host_memory_stats = reset_peak_memory_stats

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """Do nothing: memory is not limited."""


def _context_of(pretended: PretendedDevice) -> type:
    """Return a class in place of ``torch.cuda.device``: contexts in which a given device is the rank's current one."""

    class device:  # noqa: N801 - PyTorch's name
        """Context in which a given device is the rank's current device.

        Args:
            device: number, name or ``torch.device``.
        """

        def __init__(self, device: Any) -> None:
            self.idx = pretended.index(device)
            self.prev_idx = -1

        def __enter__(self) -> None:
            """Make the device the current one."""
            self.prev_idx = pretended.current_device()
            pretended.choose(self.idx)

        def __exit__(self, *_: object) -> None:
            """Make the previous device the current one."""
            pretended.choose(self.prev_idx)

    return device


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _nothing(*_: Any, **__: Any) -> int:
    """Do nothing; return 0, the status of success."""
    return 0


def answer_for(device: PretendedDevice, module: ModuleType) -> None:
    """Install ``device`` as the implementation of its module and of ``torch.accelerator``."""
    answered = [name for name in dir(PretendedDevice) if not name.startswith("__")]
    for name in (*answered, "default_generators", "device"):
        setattr(module, name, getattr(device, name))
    for part in PARTS:
        inner = getattr(module, part, None)
        for name in answered:
            if hasattr(inner, name):
                setattr(inner, name, getattr(device, name))
    for name, instead in _LACKED.items():
        setattr(module, name, Lacked(f"torch.{device.name}.{name}", instead))
    for dtype in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"):
        setattr(module, f"{dtype}Tensor", getattr(torch, f"{dtype}Tensor"))
    marks: Any = getattr(module, "nvtx", None) or SimpleNamespace()
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(marks, name, _nothing)
    module_of: Any = module
    if module is torch.cuda:
        module_of.nccl.version = lambda: _NCCL
        module_of.profiler.start = module_of.profiler.stop = _nothing
    else:
        module_of.mstx, module_of.OutOfMemoryError = marks, torch.OutOfMemoryError
    _answer_for_accelerator(device, torch.accelerator)


def _answer_for_accelerator(device: PretendedDevice, module: Any) -> None:
    names = {name: name for name in dir(module) if not name.startswith("_") and hasattr(PretendedDevice, name)}
    for own in ("current_device_index", "current_device_idx"):
        names[own] = "current_device"
    for own in ("set_device_index", "set_device_idx"):
        names[own] = "set_device"
    names |= {"device_index": "device", "get_memory_info": "mem_get_info"}
    for own, name in names.items():
        setattr(module, own, getattr(device, name))
    module.current_accelerator = lambda check_available=False: torch.device(device.name)  # noqa: ARG005 - PyTorch's name
