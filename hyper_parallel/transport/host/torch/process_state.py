"""Process-wide state of PyTorch and Python, which is kept separately for each simulated rank.

The state is saved and restored at every switch from rank to rank, so both must be cheap. An environment that has not
changed is saved as the same object again, and the differences between two such objects are cached.
"""

from __future__ import annotations

import _random
import ctypes
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils import parametrize
from torch.utils import deterministic

from hyper_parallel.platform.torch.versions import (
    get_isolation,
    get_precision,
    set_cudnn_tf32,
    set_isolation,
    set_precision,
)

__all__ = [
    "DeviceGenerators",
    "GeneratorStates",
    "ProcessState",
    "exact_products",
    "forget_environments",
    "put_rounding",
    "restore_device_generators",
    "restore_generators",
    "restore_process",
    "rounding",
    "save_device_generators",
    "save_generators",
    "save_process",
]


_CUDNN: Any = torch.backends.cudnn
_OPERATIONS = ("matmul", "conv", "rnn")
"""Operations whose float32 precision has its own switch since PyTorch 2.9; with different values, the older switch
raises."""


def rounding() -> tuple[Any, ...]:
    """Return the current switches for :func:`put_rounding`. It is called at every switch between simulated ranks."""
    try:
        precision: Any = torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has set the newer switches to values that the older one cannot express
        precision = None
    try:
        cudnn: Any = _CUDNN.allow_tf32
    except RuntimeError:
        cudnn = None
    operations = tuple([get_precision("cuda", operation) for operation in _OPERATIONS])
    return precision, cudnn, operations, tuple([place.allow_hf32 for place in _ascend()])


def put_rounding(state: tuple[Any, ...]) -> None:
    """Restore the switches that :func:`rounding` returned; unchanged ones are not written."""
    now = rounding()
    if now == state:
        return
    precision, cudnn, operations, ascend = state
    if precision is not None and precision != now[0]:
        torch.set_float32_matmul_precision(precision)
    if cudnn is not None and cudnn != now[1]:
        set_cudnn_tf32(cudnn)
    for operation, value in zip(_OPERATIONS, operations, strict=True):
        if get_precision("cuda", operation) != value:
            set_precision("cuda", operation, value)
    for place, allowed in zip(_ascend(), ascend, strict=True):
        if place.allow_hf32 != allowed:
            place.allow_hf32 = allowed


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute products of float32 in float32 inside this context; each simulated rank has its own switches."""
    state = rounding()
    if state[0] is not None:
        torch.set_float32_matmul_precision("highest")
    if state[1] is not None:
        set_cudnn_tf32(False)
    for operation in _OPERATIONS:
        if get_precision("cuda", operation) == "tf32":
            set_precision("cuda", operation, "ieee")
    for place in _ascend():
        place.allow_hf32 = False
    try:
        yield
    finally:
        put_rounding(state)


def _ascend() -> tuple[Any, ...]:
    """Return the switches of torch_npu, once it is imported."""
    npu = torch.__dict__.get("npu")  # a failing getattr takes a microsecond
    if npu is None:
        return ()
    return tuple([place for name in ("matmul", "conv") if hasattr(place := getattr(npu, name, None), "allow_hf32")])


_TWISTER_BYTES = 625 * 4  # NumPy's Mersenne twister: 624 words and a position
_HEADER = object.__basicsize__


@dataclass(frozen=True)
class _State:
    """One generator's state and its mark: bytes of memory that change when it advances, or None without such bytes."""

    mark: Any
    value: Any


@dataclass(frozen=True)
class GeneratorStates:
    """The states of Python's and NumPy's global generators."""

    python: _State
    numpy: _State


def save_generators() -> GeneratorStates:
    """Return the current states of both generators: the same object as before if neither has advanced since."""
    last, python, numpy = _KNOWN.generators, _python_mark(), _numpy_mark()
    if python == last.python.mark and numpy is not None and numpy == last.numpy.mark:
        return last
    states = GeneratorStates(
        last.python if python == last.python.mark else _State(python, random.getstate()),
        last.numpy if numpy is not None and numpy == last.numpy.mark else _read_numpy(numpy),
    )
    _KNOWN.generators = states
    return states


def restore_generators(states: GeneratorStates) -> None:
    """Restore the states that :func:`save_generators` returned."""
    if _python_mark() != states.python.mark:
        random.setstate(states.python.value)
    # Equal marks do not prove that two states are equal, but they prove that one state has not advanced.
    if states.numpy is not _KNOWN.generators.numpy or states.numpy.mark is None or _numpy_mark() != states.numpy.mark:
        np.random.set_state(states.numpy.value)
    _KNOWN.generators = states


def _python_mark() -> Any:
    """Return the memory of Python's generator without its object header, which contains the reference count."""
    generator: Any = random.random.__self__  # type: ignore[attr-defined] # a bound method
    size = _random.Random.__basicsize__ - _HEADER
    return ctypes.string_at(id(generator) + _HEADER, size), generator.gauss_next


def _numpy_mark() -> Any:
    """Return the words and position of the Mersenne twister; None for another generator."""
    twister = np.random.get_bit_generator()
    if type(twister) is not np.random.MT19937:
        return None
    return ctypes.string_at(twister.ctypes.state_address, _TWISTER_BYTES)


def _read_numpy(mark: Any) -> _State:
    """Return NumPy's state; without a mark if a normal number is cached, since the twister does not contain it."""
    value: Any = np.random.get_state(legacy=False)
    return _State(None if value.get("has_gauss") else mark, value)


DeviceGenerators = list[torch.Tensor] | None


def save_device_generators() -> DeviceGenerators:
    """Return the states of the generators of all devices that PyTorch sees, in device order.

    Returns None while no device is in use, so that a simulation of CPU tensors does not start the driver.
    """
    module = _module_in_use()
    return None if module is None else module.get_rng_state_all()


def restore_device_generators(states: DeviceGenerators) -> None:
    """Restore the states that :func:`save_device_generators` returned.

    ``states`` is None if no rank had used the devices when the state was saved. If a rank has used them since, their
    generators get the seed of the CPU's generator, as PyTorch does at the first use. The CPU's generator is restored
    before.
    """
    module = _module_in_use()
    if module is None:
        return
    if states is None:
        module.manual_seed_all(torch.initial_seed())
    else:
        module.set_rng_state_all(states)


def _module_in_use() -> Any:
    """Return ``torch.cuda``, ``torch.npu`` or similar; None without a device, or if the process has not used one."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator.type)
    return module if module is not None and module.is_initialized() else None


_Environment = dict[bytes, bytes]
_Changes = list[tuple[bytes, bytes | None]]

_ENVIRONMENT: _Environment = os.environ._data  # type: ignore[attr-defined]  # noqa: SLF001 - copied 100 times faster
_FILLS: Any = deterministic
_PARAMETRIZED: Any = parametrize
_MOST_CHANGES = 1024  # maximum number of cached pairs of environments


class ProcessState(NamedTuple):
    """The environment, PyTorch's switches, and the cache inside ``parametrize.cached()`` or None."""

    environment: _Environment
    switches: tuple[Any, ...]
    cached: dict[Any, Any] | None


class _Known:
    """Cache of the last saved or restored states of generators and environment, and of differences of environments."""

    def __init__(self) -> None:
        self.generators = GeneratorStates(_State(None, None), _State(None, None))  # replaced as one object
        self.last: _Environment = {}
        self.state: ProcessState | None = None
        self.changes: dict[tuple[int, int], tuple[_Environment, _Environment, _Changes]] = {}

    def between(self, before: _Environment, after: _Environment) -> _Changes:
        """Return the variables to set and to remove so that ``before`` becomes ``after``."""
        key = (id(before), id(after))
        known = self.changes.get(key)
        if known is None:
            if len(self.changes) >= _MOST_CHANGES:
                self.changes.clear()
            changes: _Changes = [(name, None) for name in before.keys() - after.keys()]
            changes += [(name, value) for name, value in after.items() if before.get(name) != value]
            known = self.changes[key] = (before, after, changes)  # keeps both alive, so that their ids stay unique
        return known[2]


_KNOWN = _Known()  # only one thread at a time has the baton


def save_process() -> ProcessState:
    """Return the current state: the same object as before if nothing has changed and ``cached()`` is not active."""
    if _KNOWN.last != _ENVIRONMENT:
        _KNOWN.last = _ENVIRONMENT.copy()
    switches, state = _switches(), _KNOWN.state
    if _PARAMETRIZED._cache_enabled:  # noqa: SLF001 - no public spelling
        return ProcessState(_KNOWN.last, switches, _PARAMETRIZED._cache)  # noqa: SLF001 - as above
    if state is None or state.environment is not _KNOWN.last or state.switches != switches:
        state = _KNOWN.state = ProcessState(_KNOWN.last, switches, None)
    return state


def restore_process(state: ProcessState) -> None:
    """Restore the state that :func:`save_process` returned; unchanged parts are not written."""
    before = save_process()
    if before.environment is not state.environment:
        for name, value in _KNOWN.between(before.environment, state.environment):
            if value is None:
                os.unsetenv(name)
                del _ENVIRONMENT[name]
            else:
                os.putenv(name, value)
                _ENVIRONMENT[name] = value
        _KNOWN.last = state.environment
    if before.switches != state.switches:
        _switch(state.switches)
    _PARAMETRIZED._cache = {} if state.cached is None else state.cached  # noqa: SLF001


def forget_environments() -> None:
    """Discard the cached environments of a run."""
    _KNOWN.changes.clear()


def _switches() -> tuple[Any, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        _FILLS.fill_uninitialized_memory,
        rounding(),
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        get_isolation(),
        _PARAMETRIZED._cache_enabled,  # noqa: SLF001 - depth of cached()
    )


def _switch(switches: tuple[Any, ...]) -> None:
    enabled, warn_only, fill, rounds, anomaly, check_nan, compiled, depth = switches
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    _FILLS.fill_uninitialized_memory = fill
    put_rounding(rounds)
    torch.autograd.set_detect_anomaly(anomaly, check_nan=check_nan)
    set_isolation(compiled)
    _PARAMETRIZED._cache_enabled = depth  # noqa: SLF001
