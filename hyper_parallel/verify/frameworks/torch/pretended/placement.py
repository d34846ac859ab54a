"""Keeps a program's device tensors on the CPU: replaces device arguments of PyTorch's functions by ``cpu``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.platform.torch.tensors import TorchTensors
from hyper_parallel.platform.torch.versions import device_constructors, device_context, stand_in
from hyper_parallel.verify.frameworks.torch.pretended.device import ASKED, Event, PretendedDevice, Stream

__all__ = ["Placement", "replace_placement"]

_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_Tensor: Any = torch.Tensor
_Torch: Any = torch


def replace_placement(device: PretendedDevice) -> Placement:
    """Replace PyTorch's functions and methods that take a device, until this process ends."""
    placed = Placement(device.name)
    for plain in device_constructors():  # the factories that set_default_device affects
        owner, name = _place_of(plain)
        if owner is not None:
            _replace_function(owner, name, placed.factory)
    for name in _LIKE:
        _replace_function(_Torch, name, placed.factory)
    for name in _NEW:
        _replace(_Tensor, name, placed.factory)
    _replace(_Tensor, "to", placed.first)
    _replace(_Tensor, "type", placed.type)
    placed.offer(device.name)
    _Tensor.pin_memory, _Tensor.record_stream = _pinned, _nothing
    _Torch.Generator = _generator(placed)
    _Torch.Stream, _Torch.Event = _of_device(placed, torch.Stream, Stream), _of_device(placed, torch.Event, Event)
    _replace(device_context, "__init__", placed.first)
    _replace(torch.autocast, "__init__", placed.autocast)
    _replace(_Torch, "is_autocast_enabled", placed.asked)
    _replace(_Torch, "get_autocast_dtype", placed.asked)
    _replace(_Torch, "load", placed.loaded)
    _replace(DeviceMesh, "__init__", placed.first)
    _replace(TorchTensors, "differing_device", placed.same_device)
    _replace(nn.parallel.DistributedDataParallel, "__init__", _without("device_ids", "output_device"))
    _replace(torch.profiler.profile, "__init__", _profiled)
    _replace(fsdp.FullyShardedDataParallel, "__init__", placed.by_number)
    return placed


class Placement:
    """Makes replacements of functions; one method per way in which functions take a device.

    Args:
        name: name of the device.
    """

    def __init__(self, name: str) -> None:
        self._name, self._names = name, {name}

    def offer(self, name: str) -> None:
        """Treat ``name`` as a name of the device, and offer the methods that move tensors and modules to it."""
        self._names.add(name)
        for owner in (_Tensor, nn.Module, torch.UntypedStorage, torch.TypedStorage):
            setattr(owner, name, _moved)
        if not hasattr(_Tensor, f"is_{name}"):
            setattr(_Tensor, f"is_{name}", False)  # as ``is_cuda`` of tensors in host memory

    def here(self, device: Any, *, numbers: bool = True) -> Any:
        """Return ``cpu`` for the pretended device, and any other argument unchanged."""
        if isinstance(device, torch.device):
            pretended = device.type in self._names
        elif isinstance(device, str):
            pretended = device.partition(":")[0] in self._names
        else:
            pretended = numbers and isinstance(device, int) and not isinstance(device, bool)
        if pretended:
            ASKED["tensors on the device"] += 1
        return "cpu" if pretended else device

    def factory(self, plain: Any) -> Any:
        """Replace a function that creates a tensor on ``device``, optionally pinned."""

        @functools.wraps(plain)
        def make(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                kwargs["device"] = self.here(kwargs["device"])
            if kwargs.pop("pin_memory", False):
                ASKED["pinned tensors"] += 1
            return plain(*args, **kwargs)

        return make

    def type(self, plain: Any) -> Any:
        """Replace ``Tensor.type``, so that type names contain the device, such as ``torch.cuda.FloatTensor``."""

        @functools.wraps(plain)
        def named(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
            if dtype is None:
                name: str = plain(tensor)  # in a torch function mode, this calls the replacement again
                prefix = f"torch.{self._name}."
                return name if name.startswith(prefix) else name.replace("torch.", prefix, 1)
            if isinstance(dtype, str):
                dtype = ".".join(part for part in dtype.split(".") if part not in self._names)
            return plain(tensor, dtype, *args, **kwargs)

        return named

    def first(self, plain: Any) -> Any:
        """Replace a method whose first argument, ``device`` or ``device_type``, may be a device."""

        @functools.wraps(plain)
        def call(self_: Any, *args: Any, **kwargs: Any) -> Any:
            args = (self.here(args[0]), *args[1:]) if args else args
            for name in ("device", "device_type"):
                if name in kwargs:
                    kwargs[name] = self.here(kwargs[name])
            return plain(self_, *args, **kwargs)

        return call

    def autocast(self, plain: Any) -> Any:
        """Replace the constructor of ``autocast``, so that the CPU casts to the device's default dtype."""

        @functools.wraps(plain)
        def __init__(self_: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it stands for that method
            if device_type in self._names:
                ASKED["autocast on the device"] += 1
                device_type, dtype = "cpu", torch.float16 if dtype is None else dtype
            plain(self_, device_type, dtype, *args, **kwargs)

        return __init__

    def asked(self, plain: Any) -> Any:
        """Replace a query about autocast on a device; its default is the pretended device."""

        @functools.wraps(plain)
        def ask(device_type: str = self._name) -> Any:
            return plain("cpu" if device_type in self._names else device_type)

        return ask

    def loaded(self, plain: Any) -> Any:
        """Replace ``torch.load``, so that tensors that were saved on a device are loaded into host memory."""

        @functools.wraps(plain)
        def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            return plain(file, self.location(map_location), *args, **kwargs)

        return load

    def location(self, given: Any) -> Any:
        """Return a ``map_location`` for ``torch.load`` with the host in place of the device; by default, the host."""
        if given is None:
            return "cpu"
        if callable(given):
            return lambda storage, location: storage if (found := given(storage, location)) is None else found
        if isinstance(given, dict):
            places = {source: self.here(target, numbers=False) for source, target in given.items()}
            return "cpu" if {str(target) for target in places.values()} <= {"cpu"} else places
        return self.here(given, numbers=False)

    def same_device(self, plain: Any) -> Any:
        """Replace this library's check whether a tensor is on a mesh's device."""

        @functools.wraps(plain)
        def differing_device(platform: Any, data: Any, device_type: str) -> str:
            found: str = plain(platform, data, "cpu" if device_type in self._names else device_type)
            return found

        return differing_device

    def by_number(self, plain: Any) -> Any:
        """Replace the constructor of FSDP1, whose ``device_id`` is a device or its number."""

        @functools.wraps(plain)
        def __init__(self_: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it stands for that method
            if kwargs.get("device_id") is not None:
                kwargs["device_id"] = torch.device("cpu")
            plain(self_, *args, **kwargs)

        return __init__


def _without(*names: str) -> Callable[[Any], Any]:
    """Return a decorator that lets a constructor ignore these keyword arguments."""

    def replaced(plain: Any) -> Any:
        @functools.wraps(plain)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it stands for that method
            plain(self, *args[:1], **{name: value for name, value in kwargs.items() if name not in names})

        return __init__

    return replaced


def _profiled(plain: Any) -> Any:
    """Replace the profiler's constructor, so that it profiles the CPU, which does the device's work."""

    @functools.wraps(plain)
    def __init__(self: Any, *, activities: Any = None, **kwargs: Any) -> None:  # noqa: N807 - it stands for that method
        plain(self, activities=None if activities is None else [torch.profiler.ProfilerActivity.CPU], **kwargs)

    return __init__


def _generator(placed: Placement) -> Any:
    plain: Any = torch.Generator

    class _Kind(type(plain)):  # type: ignore[misc]  # the metaclass of generators
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, plain)

    class Generator(plain, metaclass=_Kind):  # type: ignore[misc]
        """A generator of random numbers, on the CPU also if it is created for the device."""

        def __new__(cls, device: Any = "cpu") -> Any:
            """Create a CPU generator for the device."""
            return super().__new__(cls, device=placed.here(device))

    return Generator


def _of_device(placed: Placement, plain: Any, substitute: Any) -> Any:
    """Return a class in place of ``torch.Stream`` or ``torch.Event``; for the device it creates a ``substitute``."""

    class _Kind(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, (plain, substitute))

        def __call__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
            here = device is None or placed.here(device) == "cpu"
            return substitute(device, **kwargs) if here else plain(device, *args, **kwargs)

    return _Kind(plain.__name__, (), {"__doc__": substitute.__doc__})


def _moved(value: Any, device: Any = None, **_: Any) -> Any:
    """Replacement of ``Tensor.cuda`` and ``Module.cuda``: return the object without moving it."""
    del device
    ASKED["tensors on the device" if isinstance(value, torch.Tensor) else "modules on the device"] += 1
    return value


def _pinned(tensor: Any, device: Any = None) -> Any:
    """Replacement of ``Tensor.pin_memory``."""
    del device
    ASKED["pinned tensors"] += 1
    return tensor


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _place_of(plain: Any) -> tuple[Any, str]:
    """Return the public owner of a PyTorch function and its name there; None if it has none."""
    name = getattr(plain, "__name__", "")
    for owner, own in ((_Torch, name), (torch.fft, name.removeprefix("fft_")), (torch.nested, name)):
        if getattr(owner, own, None) is plain:
            return owner, own
    return None, ""


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _replace_function(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a PyTorch function; TorchScript treats the replacement as the operator."""
    plain = getattr(owner, name)
    _replace(owner, name, make)
    stand_in(getattr(owner, name), plain)
