"""Facet *memory* on MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common import saved_tensors_hooks

from hyper_parallel.core.dtensor import random
from hyper_parallel.errors import UnsupportedOnBackend, UnsupportedOperatorError
from hyper_parallel.platform.contract.memory import ForwardWrapper, MemoryFacet, Offloaded, SpillFile, replayable
from hyper_parallel.platform.mindspore import selective
from hyper_parallel.platform.mindspore.ops.kernels import is_leaf
from hyper_parallel.platform.mindspore.runtime import device_type
from hyper_parallel.platform.mindspore.selective import fingerprint
from hyper_parallel.platform.mindspore.versions import cell_base
from hyper_parallel.platform.mindspore.versions.older import recompute_to_the_end
from hyper_parallel.transport.real.mindspore.transport import from_host, to_host

__all__ = ["MindSporeMemory"]


class MindSporeMemory(MemoryFacet):
    """Checkpointing and offloading on MindSpore."""

    @property
    def checkpoint(self) -> Callable[..., Any]:
        """``mindspore.recompute``, non-reentrant by default."""
        return _checkpoint

    @property
    def noop_context_fn(self) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
        """Two contexts that do nothing."""
        return _noop_contexts

    def create_selective_checkpoint_contexts(
        self, policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return contexts based on ``MsDispatchMode``; operators have its names, for example ``MatMulExt``."""
        return selective.contexts(policy_fn_or_list, mutation=allow_cache_entry_mutation)

    def _wrapped(self, module: Any, around: Callable[..., Any]) -> Any:
        return _wrapper(module, around)

    def replace_saved(self, replace: Callable[[Any], Offloaded | None]) -> AbstractContextManager[Any]:
        """``mindspore.common.saved_tensors_hooks``, of which only the innermost are called."""

        def pack(tensor: Tensor) -> Any:
            kept = replace(tensor)
            return tensor if kept is None else kept

        def unpack(packed: Any) -> Tensor:
            return packed.restore() if isinstance(packed, Offloaded) else packed

        return saved_tensors_hooks(pack, unpack)

    def storage_key(self, tensor: Any) -> tuple[Any, ...] | None:
        """Refused.

        Raises:
            UnsupportedOnBackend: (a NotImplementedError) always.
        """
        del tensor
        raise UnsupportedOnBackend(
            "input_reshard: not supported on MindSpore; recompute the module, or offload its saved tensors"
        )

    def _offloader(self) -> Callable[[Any], Offloaded]:
        return _Offloader().offload

    def _storages_of(self, module: Any) -> frozenset[int]:
        tensors = [*module.get_parameters(), *module.buffers()]
        return frozenset(self._storage_of(getattr(tensor, "_local", tensor)) for tensor in tensors)

    def _storage_of(self, tensor: Any) -> int:
        return int(tensor.untyped_storage().data_ptr())

    def _bytes_of(self, tensor: Any) -> int:
        return int(tensor.size * tensor.itemsize)

    def _is_leaf(self, tensor: Any) -> bool:
        return is_leaf(tensor)


class _Wrapped(ForwardWrapper, nn.Cell):
    """A cell whose construct goes through ``_around``."""

    def update_parameters_name(self, prefix: str = "", recurse: bool = True) -> None:
        """Prefix the names of parameters, as every cell does, unless the original cell's network has prefixed them."""
        named = self.parameters_and_names(expand=recurse)
        if not any(parameter.name.endswith(f".{name}") for name, parameter in named):
            super().update_parameters_name(prefix, recurse)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``_around`` with the construct of the class."""
        return self._around(super().construct, args, kwargs)


def _wrapper(module: Any, around: Callable[..., Any]) -> Any:
    """Return a second object over the same parameters, buffers and cells, whose construct runs under ``around``."""
    cls = type(module)
    subclass: Any = type(cls.__name__, (_Wrapped, cls), {"__module__": cls.__module__})
    wrapper = subclass.__new__(subclass)
    cell_base.__init__(wrapper, cls.__name__)  # the C++ base of nn.Cell
    wrapper.__dict__.update(module.__dict__)  # the dictionaries of parameters, buffers and cells are shared
    wrapper.__dict__["_around"] = around
    return wrapper


def _noop_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), nullcontext()


def _checkpoint(fn: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any) -> Any:
    """``mindspore.recompute`` with the same random numbers in both runs; raises where that is impossible.

    MindSpore's generator is reseeded for each run, because its state on CPU cannot be saved and restored. The results
    of the two runs are compared on CPU, because ``nn.Dropout`` of plain tensors draws new numbers.
    """
    if use_reentrant:
        return mindspore.recompute(_replaying(fn), *args, use_reentrant=True, **options)
    replay = replayable(_compared(fn) if device_type() == "cpu" else fn, _state, _restored)
    # Stopping early leaves the gradient engine unbalanced where the last operator is a legacy primitive.
    return recompute_to_the_end(replay, *args, **options)


def _replaying(cell: Any) -> Any:
    """Return a second object for ``cell`` that replays random numbers; MindSpore accepts only cells here."""
    if not isinstance(cell, nn.Cell):
        return cell

    def construct(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    replay = replayable(_compared(construct) if device_type() == "cpu" else construct, _state, _restored)
    return _wrapper(cell, lambda forward, args, kwargs: replay(forward, *args, **kwargs))


def _compared(fn: Callable[..., Any]) -> Callable[..., Any]:
    first: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        checksum = fingerprint(result)
        if first and first[0] != checksum:
            msg = (
                "checkpoint: running again gave a different result, so its gradients would be wrong; on CPU MindSpore "
                "cannot sample the numbers of nn.Dropout again: leave it out of the checkpoint, or use ops.dropout"
            )
            raise UnsupportedOperatorError(msg)
        first.append(checksum)
        return result

    return run


def _state() -> tuple[tuple[int, int], int]:
    """Reseed MindSpore's generator; return the state of the DTensors' generator, and MindSpore's new seed."""
    seed = int(np.random.randint(1, 2**31 - 1))
    _reseed(seed)
    return random.get_rng_state(), seed


def _reseed(seed: int) -> None:
    before = np.random.get_state()
    mindspore.set_seed(seed)
    np.random.set_state(before)


@contextmanager
def _restored(state: tuple[tuple[int, int], int]) -> Iterator[None]:
    with random.replay(state[0]):
        _reseed(state[1])
        try:
            yield
        finally:
            _reseed(int(np.random.randint(1, 2**31 - 1)))


class _Offloader:
    """Moves saved tensors to the next slower memory; one temporary file per context."""

    def __init__(self) -> None:
        self._file: SpillFile | None = None

    def offload(self, tensor: Tensor) -> Offloaded:
        """Move the tensor."""
        if device_type() != "cpu":
            return _OnHost(tensor)
        if self._file is None:
            self._file = SpillFile()
        array = to_host(ops.stop_gradient(tensor))
        return _OnDisk(self._file.write(np.ascontiguousarray(array).reshape(array.shape)))


class _OnDisk(Offloaded):
    """A host tensor in a file."""

    def __init__(self, record: Any) -> None:
        self._record = record

    def restore(self) -> Tensor:
        """Read the tensor."""
        return from_host(self._record.array())


class _OnHost(Offloaded):
    """A device tensor in host memory; MindSpore orders the copies with the computation."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = ops.stop_gradient(tensor).to("CPU", non_blocking=True)

    def restore(self) -> Tensor:
        """Copy the tensor back."""
        return self._host.to("Ascend", non_blocking=True)
