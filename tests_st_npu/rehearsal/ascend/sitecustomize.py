"""MindSpore as if it computed on Ascend: every process that has this folder on its path computes on the CPU instead.

Python imports this module when it starts. It waits for MindSpore and for the two modules of this library that ask
whether a process computes on a device. Kernels are those of the CPU. What surrounds them is the device's: which device
a process takes and when, where tensors are, that the array of a tensor is a copy of its memory, what is asked of
``mindspore.runtime`` and of ``device_context.ascend``. Every call must fit the signature of MindSpore's own function.
"""

from __future__ import annotations

import importlib.abc
import inspect
import os
import sys
from types import SimpleNamespace

_DEVICES = "HP_REHEARSAL_ASCEND_DEVICES"
_PEAK = 4096  # bytes, which the memory pool of a device would count


class _Process:
    """What MindSpore keeps of the device of this process: nothing is chosen until somebody does, then it stays."""

    target, device, chosen = "Ascend", 0, False

    def choose(self, device_target, device_id=None):
        device = device_id or 0
        if self.chosen and (device_target, device) != (self.target, self.device):
            raise RuntimeError("The 'mindspore.set_device' can not be modified.")
        if device_target == "Ascend" and device >= int(os.environ[_DEVICES]):
            raise RuntimeError(f"device_id {device}: there are {os.environ[_DEVICES]} devices")
        self.target, self.device, self.chosen = device_target, device, True


_PROCESS = _Process()


class _Stream:
    """A queue whose work is complete when its call returns."""

    def __init__(self, priority=0):
        pass

    def record_event(self, event=None):
        return event or _Event()

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


class _Event:
    """A mark in a stream."""

    def __init__(self, enable_timing=False, blocking=False):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


class _StreamCtx:
    """Within it a stream is the current one."""

    def __init__(self, ctx_stream):
        pass

    def __enter__(self):
        return self

    def __exit__(self, exc_type, exc_val, exc_tb):
        return None


def _like(real, stand_in):
    """``stand_in`` with the signature of ``real``, which each call must fit."""
    signature = inspect.signature(real)

    def call(*args, **kwargs):
        signature.bind(*args, **kwargs)
        return stand_in(*args, **kwargs)

    return call


def _mindspore(mindspore):
    """Replace what chooses the device, asks for it, and works with it; and what tensors tell of it."""
    runtime, ascend = mindspore.runtime, mindspore.device_context.ascend
    info = type(mindspore.get_current_device())
    mindspore.set_device = _like(mindspore.set_device, _PROCESS.choose)
    mindspore.get_current_device = lambda: info(_PROCESS.target, _PROCESS.device)
    ascend.device_count = lambda: int(os.environ[_DEVICES])
    for name in ("matmul_allow_hf32", "conv_allow_hf32"):
        setattr(ascend.op_precision, name, _like(getattr(ascend.op_precision, name), lambda _: None))
    done = {"synchronize": None, "reset_peak_memory_stats": None, "max_memory_allocated": _PEAK, "set_memory": None}
    for name, result in done.items():
        setattr(runtime, name, _like(getattr(runtime, name), lambda *_, result=result, **__: result))
    stream = _Stream()
    runtime.Stream, runtime.Event, runtime.StreamCtx = _Stream, _Event, _StreamCtx
    runtime.current_stream = runtime.default_stream = lambda: stream
    plain_empty = mindspore.mint.empty

    def empty(*size, device=None, pin_memory=False, **kwargs):
        return plain_empty(*size, device=None if device == "Ascend" else device, **kwargs)

    mindspore.mint.empty = empty
    _tensors(mindspore.Tensor)


def _tensors(tensor):
    """Let tensors say where they are, and arrays of those of a device be copies."""
    plain_array, plain_from, plain_to = tensor.asnumpy, tensor.from_numpy, tensor.to

    def asnumpy(self):
        array = plain_array(self)
        return array if _PROCESS.target == "CPU" or _on_host(self) else array.copy()

    def from_numpy(array):
        made = plain_from(array)
        made._rehearsed_host = True
        return made

    def to(self, *args, **kwargs):
        place = kwargs.pop("device", args[0] if args and args[0] in ("CPU", "Ascend") else None)
        if place is None:
            return plain_to(self, *args, **kwargs)
        moved = plain_from(plain_array(self).copy())
        if place == "CPU":
            moved._rehearsed_host = True
        elif place != "Ascend" or _PROCESS.target != "Ascend":
            raise RuntimeError(f"Create device context failed, please make sure target device:{place} is available")
        return moved

    def device(self):
        return "CPU" if _PROCESS.target == "CPU" or _on_host(self) else f"Ascend:{_PROCESS.device}"

    tensor.asnumpy, tensor.from_numpy, tensor.to = asnumpy, staticmethod(from_numpy), to
    tensor.device = property(device)


def _on_host(tensor):
    """Whether the tensor was made of an array, which MindSpore moves to the device when an operator needs it."""
    return getattr(tensor, "_rehearsed_host", False)


def _host(host):
    """The library asks MindSpore's context, of which it keeps the object."""
    host._CONTEXT = SimpleNamespace(get_param=lambda _: _PROCESS.target)


def _devices(devices):
    """The library asks what became of the plugin, and joins HCCL: here MCCL, with values that travel over gloo."""
    context = SimpleNamespace(is_pkg_support_device=lambda name: name == "Ascend", load_plugin_error=lambda: "")
    devices.MSContext = SimpleNamespace(get_instance=lambda: context)
    plain = devices.start_world

    def start_world(device, rank, world_size, port, store):
        if device == "cpu":
            return plain(device, rank, world_size, port, store)
        _PROCESS.target = "CPU"
        world = plain("cpu", rank, world_size, port, store)
        _PROCESS.target = "Ascend"
        _PROCESS.choose("Ascend", rank)
        return world

    devices.start_world = start_world


_CHANGES = {
    "mindspore": _mindspore,
    "hyper_parallel.transport.frontends.mindspore_comm.host": _host,
    "hyper_parallel.transport.real.mindspore.devices": _devices,
}


class _Loader:
    """A module's loader, which changes the module right after its execution."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def exec_module(self, module):
        self._loader.exec_module(module)
        _CHANGES.pop(module.__name__)(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds each of the modules as others do, with another loader."""

    def find_spec(self, name, path, target=None):
        if name not in _CHANGES:
            return None
        spec = next(
            (found for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")
             and (found := finder.find_spec(name, path, target)) is not None),
            None,
        )  # fmt: skip
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


_FINDER = _Finder()


def come_first():
    """Ask this module's finder before any other."""
    sys.meta_path[:] = [_FINDER, *(finder for finder in sys.meta_path if finder is not _FINDER)]


if _DEVICES in os.environ:
    come_first()
