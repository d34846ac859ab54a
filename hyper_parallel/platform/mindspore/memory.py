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
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.contract.memory import MemoryFacet, Offloaded, SpillFile, Wrapped, replayed
from hyper_parallel.platform.mindspore import selective
from hyper_parallel.platform.mindspore.runtime import device_type
from hyper_parallel.platform.mindspore.selective import fingerprint
from hyper_parallel.transport.mindspore import from_host, to_host

__all__ = ["MindSporeMemory"]


class MindSporeMemory(MemoryFacet):
    """Activations of MindSpore."""

    @property
    def checkpoint(self) -> Callable[..., Any]:
        """``mindspore.recompute``, not reentrant unless asked for."""
        return _checkpoint

    @property
    def noop_context_fn(self) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
        """Two contexts that do nothing."""
        return _noop_contexts

    def create_selective_checkpoint_contexts(
        self, policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """By ``MsDispatchMode``; operators are told by the names that it gives, for example ``MatMulExt``."""
        return selective.contexts(policy_fn_or_list, mutation=allow_cache_entry_mutation)

    def _wrapped(self, module: Any, around: Callable[..., Any]) -> Any:
        return _second(module, around)

    def _saving_away(self, moves: Callable[[Any], bool]) -> AbstractContextManager[Any]:
        keeper = _Keeper()

        def pack(tensor: Tensor) -> Any:
            return keeper.take(tensor) if moves(tensor) else tensor

        def unpack(packed: Any) -> Tensor:
            return packed.restore() if isinstance(packed, Offloaded) else packed

        return saved_tensors_hooks(pack, unpack)

    def _storages_of(self, module: Any) -> frozenset[int]:
        held = [*module.get_parameters(), *module.buffers()]
        return frozenset(self._storage_of(getattr(one, "_local", one)) for one in held)

    def _storage_of(self, tensor: Any) -> int:
        return int(tensor.untyped_storage().data_ptr())

    def _bytes_of(self, tensor: Any) -> int:
        return int(tensor.size * tensor.itemsize)

    def _is_leaf(self, tensor: Any) -> bool:
        return bool(tensor._is_leaf)  # noqa: SLF001 - no public spelling


class _Wrapped(Wrapped, nn.Cell):
    """A cell whose construct goes through ``_around``."""

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Around the construct of the class."""
        return self._around(super().construct, args, kwargs)


def _second(module: Any, around: Callable[..., Any]) -> Any:
    kind = type(module)
    wrapped: Any = type(kind.__name__, (_Wrapped, kind), {"__module__": kind.__module__})
    made = wrapped.__new__(wrapped)
    mindspore._c_expression.Cell_.__init__(made, kind.__name__)  # noqa: SLF001 - the base behind nn.Cell
    made.__dict__.update(module.__dict__)  # the dictionaries of parameters, buffers and cells are shared
    made.__dict__["_around"] = around
    return made


def _noop_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), nullcontext()


def _checkpoint(fn: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any) -> Any:
    """MindSpore's, with random numbers drawn again as they were, and an error where they cannot be.

    On CPU what ``ops`` draws inside comes from a stream of its own, since MindSpore's has no state to return to, and
    the second run's results are compared with the first's: ``nn.Dropout`` of plain tensors draws anew.
    """
    if use_reentrant:
        return mindspore.recompute(_replaying(fn), *args, use_reentrant=True, **options)
    again = replayed(_compared(fn) if device_type() == "cpu" else fn, _state, _again_from)
    # Stopping early leaves the gradient engine unbalanced where the last operator is a legacy primitive.
    return mindspore.recompute(again, *args, use_reentrant=False, early_stop=False, **options)


def _replaying(cell: Any) -> Any:
    """``cell`` as a second object that runs again as it ran; reentrant recomputation takes cells only, and says so."""
    if not isinstance(cell, nn.Cell):
        return cell

    def construct(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    again = replayed(_compared(construct) if device_type() == "cpu" else construct, _state, _again_from)
    return _second(cell, lambda forward, args, kwargs: again(forward, *args, **kwargs))


def _compared(fn: Callable[..., Any]) -> Callable[..., Any]:
    first: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        print_ = fingerprint(result)
        if first and first[0] != print_:
            msg = (
                "checkpoint: running again gave another result, so its gradients would be wrong; on CPU MindSpore "
                "cannot draw the random numbers of nn.Dropout again: leave it out of the checkpoint, or use ops.dropout"
            )
            raise UnsupportedOperatorError(msg)
        first.append(print_)
        return result

    return run


def _state() -> tuple[tuple[int, int], int]:
    """State of the DTensors' generator, and the seed of what follows."""
    seed = int(np.random.randint(1, 2**31 - 1))  # noqa: NPY002 - the stream that MindSpore's seed starts
    _reseed(seed)
    return random.get_state(), seed


def _reseed(seed: int) -> None:
    before = np.random.get_state()  # noqa: NPY002 - which set_seed would start over
    mindspore.set_seed(seed)
    np.random.set_state(before)  # noqa: NPY002


@contextmanager
def _again_from(state: tuple[tuple[int, int], int]) -> Iterator[None]:
    with random.replaying(state[0]):
        _reseed(state[1])
        try:
            yield
        finally:
            _reseed(int(np.random.randint(1, 2**31 - 1)))  # noqa: NPY002


class _Keeper:
    """Takes saved tensors to the next slower memory; one temporary file for what one context saves."""

    def __init__(self) -> None:
        self._file: SpillFile | None = None

    def take(self, tensor: Tensor) -> Offloaded:
        """The tensor, somewhere else."""
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
        """Read."""
        return from_host(self._record.array())


class _OnHost(Offloaded):
    """A device tensor in host memory; MindSpore orders the copies with the computation."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = ops.stop_gradient(tensor).to("CPU", non_blocking=True)

    def restore(self) -> Tensor:
        """Copy back."""
        return self._host.to("Ascend", non_blocking=True)
