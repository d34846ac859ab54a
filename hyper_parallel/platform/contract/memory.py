"""Activations: recomputed, kept selectively, or moved away until backward wants them."""

from __future__ import annotations

import abc
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform.contract.ledger import LedgerFacet

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MemoryFacet", "Offloaded", "Record", "SpillFile", "Wrapped", "replayed", "rerun", "rerunning"]

_SMALL = 4096


class Offloaded(abc.ABC):
    """A saved tensor that is somewhere else until backward wants it."""

    @abc.abstractmethod
    def restore(self) -> Any:
        """The tensor, where it was."""


class Wrapped:
    """Mixed into the class of a wrapped module: its forward goes through ``_around``."""

    _around: Callable[..., Any]


class MemoryFacet(LedgerFacet):
    """Facet *memory*.

    A wrapped module is another object with the same parameters, submodules and buffers: the same paths, the same
    state-dict keys, the same type for ``isinstance``. The module that was given is as before.
    """

    @property
    @abc.abstractmethod
    def checkpoint(self) -> Callable[..., Any]:
        """``checkpoint(fn, *args, **kwargs)``: run ``fn`` without keeping its activations; backward runs it again.

        Random numbers of DTensors are drawn again as they were; keyword options are the framework's own.
        """

    def ckpt_wrapper(
        self, module: Any, checkpoint_fn: Callable[..., Any] | None = None, **checkpoint_fn_kwargs: Any
    ) -> Any:
        """``module`` whose forward runs under ``checkpoint_fn``.

        Args:
            module: left as it is.
            checkpoint_fn: ``(fn, *args, **kwargs)``; :attr:`checkpoint` by default.
            checkpoint_fn_kwargs: more keyword arguments for it, for example ``context_fn``.
        """
        run = self.checkpoint if checkpoint_fn is None else checkpoint_fn

        def around(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return run(forward, *args, **checkpoint_fn_kwargs, **kwargs)

        return self._wrapped(module, around)

    @property
    @abc.abstractmethod
    def noop_context_fn(self) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
        """What ``context_fn`` of :attr:`checkpoint` is by default: two contexts that do nothing."""

    @abc.abstractmethod
    def create_selective_checkpoint_contexts(
        self, policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts of forward and recomputation between which the outputs of chosen operators are kept.

        Args:
            policy_fn_or_list: operators to keep, or ``(ctx, op, *args, **kwargs)`` that says so, in a bool or in
                PyTorch's ``CheckpointPolicy``. An operator is an overload on PyTorch (``torch.ops.aten.mm.default``)
                and a name on MindSpore (``"MatMulExt"``).
            allow_cache_entry_mutation: kept outputs may have been written to.
        """

    def swap_wrapper(self, module: Any, policy_fn: Callable[[Any], Any] | None = None) -> Any:
        """``module`` whose saved activations are away between forward and backward; see :meth:`async_save_on_cpu`."""

        def around(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kept = self._storages_of(module)

            def moves(tensor: Any) -> bool:
                return self._storage_of(tensor) not in kept and _wanted(policy_fn, tensor, self._bytes_of(tensor))

            with self._saving_away(moves):
                return forward(*args, **kwargs)

        return self._wrapped(module, around)

    def async_save_on_cpu(self, policy_fn: Callable[[Any], Any] | None = None) -> AbstractContextManager[Any]:
        """What operations inside save for backward goes to the next slower memory until backward wants it.

        From a device that is pinned host memory, over a stream of its own; from host memory it is an unnamed
        temporary file. Parameters stay.

        Args:
            policy_fn: truth for tensors that go; by default those of a page and more.
        """

        def moves(tensor: Any) -> bool:
            return not self._is_leaf(tensor) and _wanted(policy_fn, tensor, self._bytes_of(tensor))

        return self._saving_away(moves)

    # -- what a framework does -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _wrapped(self, module: Any, around: Callable[..., Any]) -> Any:
        """Another module over the same contents whose forward is ``around(forward, args, kwargs)``."""

    @abc.abstractmethod
    def _saving_away(self, moves: Callable[[Any], bool]) -> AbstractContextManager[Any]:
        """The framework's saved-tensor hooks; what ``moves`` is true for goes away."""

    @abc.abstractmethod
    def _storages_of(self, module: Any) -> frozenset[int]:
        """Addresses of the storages of parameters and buffers."""

    @abc.abstractmethod
    def _storage_of(self, tensor: Any) -> int:
        """Address of the storage."""

    @abc.abstractmethod
    def _bytes_of(self, tensor: Any) -> int:
        """Bytes of the values."""

    @abc.abstractmethod
    def _is_leaf(self, tensor: Any) -> bool:
        """True for (views of) what somebody else holds as a leaf: parameters and inputs."""


def _wanted(policy_fn: Callable[[Any], Any] | None, tensor: Any, size: int) -> bool:
    return size >= _SMALL if policy_fn is None else bool(policy_fn(tensor))


def replayed(
    fn: Callable[..., Any],
    get_state: Callable[[], Any],
    again_from: Callable[[Any], AbstractContextManager[Any]],
) -> Callable[..., Any]:
    """``fn``, whose first run is as it is, and whose later ones start from the state that the first one started from.

    Args:
        fn: what is checkpointed.
        get_state: the state of the generators that the framework does not know.
        again_from: a context in which the generators start from a state, and after which they are as before.
    """
    again, lock, runs = rerun(fn, get_state, again_from), threading.Lock(), [0]

    def run(*args: Any, **kwargs: Any) -> Any:
        with lock:
            runs[0] += 1
            first = runs[0] == 1
        return fn(*args, **kwargs) if first else again(*args, **kwargs)

    return run


def rerun(
    fn: Callable[..., Any],
    get_state: Callable[[], Any],
    again_from: Callable[[Any], AbstractContextManager[Any]],
) -> Callable[..., Any]:
    """``fn`` as every run starts from the state of now; for what runs again only. Arguments as :func:`replayed`."""
    start = get_state()

    def run(*args: Any, **kwargs: Any) -> Any:
        with again_from(start):
            return fn(*args, **kwargs)

    return run


def rerunning(
    init: Callable[..., None],
    get_state: Callable[[], Any],
    again_from: Callable[[Any], AbstractContextManager[Any]],
) -> Callable[..., None]:
    """``init`` of a framework's object that is made before forward runs, and given what will run again.

    Args:
        init: its constructor; the first argument is what runs again.
        get_state: as for :func:`replayed`.
        again_from: likewise.
    """

    @wraps(init)
    def made(self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        init(self, rerun(function, get_state, again_from), *args, **kwargs)

    return made


class SpillFile:
    """Appends arrays; room is given back when the file is, that is, with its last record."""

    def __init__(self) -> None:
        # Closed when nothing refers to it any more; it has no name, so nothing is left behind however a process ends.
        self._file = tempfile.TemporaryFile(prefix="hyper_parallel_swap_", buffering=0)  # noqa: SIM115
        self._end = 0
        self._lock = threading.Lock()

    def write(self, array: np.ndarray[Any, Any]) -> Record:
        """Append the values of a contiguous array.

        Raises:
            OSError: the disk is full.
        """
        import numpy as np

        view = memoryview(array.reshape(-1).view(np.uint8).data)
        with self._lock:
            start, self._end = self._end, self._end + len(view)
        done = 0
        while done < len(view):
            done += os.pwrite(self._file.fileno(), view[done:], start + done)
        return Record(self, start, len(view), tuple(array.shape), array.dtype)

    def read(self, start: int, target: np.ndarray[Any, Any]) -> None:
        """Fill an array of bytes."""
        view, done = memoryview(target.data), 0
        while done < len(view):
            done += os.preadv(self._file.fileno(), [view[done:]], start + done)


class Record:
    """Where an array is."""

    def __init__(self, file: SpillFile, start: int, size: int, shape: tuple[int, ...], dtype: Any) -> None:
        self._file, self._start, self._size, self._shape, self._dtype = file, start, size, shape, dtype

    def array(self) -> np.ndarray[Any, Any]:
        """The values, in memory of their own."""
        import numpy as np

        target = np.empty(self._size, np.uint8)
        self._file.read(self._start, target)
        values: np.ndarray[Any, Any] = target.view(self._dtype).reshape(self._shape)
        return values
