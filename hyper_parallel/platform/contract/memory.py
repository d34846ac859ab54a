"""Activation memory: recompute activations, keep some, or move them to slower memory until backward needs them."""

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

__all__ = [
    "ForwardWrapper",
    "MemoryFacet",
    "Offloaded",
    "SpillFile",
    "SpilledArray",
    "replayable",
    "replayable_constructor",
    "replayable_from_current_state",
]

_SMALL = 4096


class Offloaded(abc.ABC):
    """The form in which a saved tensor is kept until backward needs it, such as its values in slower memory."""

    @abc.abstractmethod
    def restore(self) -> Any:
        """Return the tensor, on the device where it was."""


class ForwardWrapper:
    """Mixin for the class of a wrapped module, whose forward goes through ``_around``."""

    _around: Callable[..., Any]


class MemoryFacet(LedgerFacet):
    """Facet *memory*.

    A wrapped module is another object with the same parameters, submodules and buffers: the same paths, the same
    state-dict keys, the same type for ``isinstance``. The original module is unchanged.
    """

    @property
    @abc.abstractmethod
    def checkpoint(self) -> Callable[..., Any]:
        """The function ``checkpoint(fn, *args, **kwargs)``, which recomputes activations in backward.

        The second run samples the same random numbers of DTensors. Keyword options are the framework's own.
        """

    def ckpt_wrapper(
        self, module: Any, checkpoint_fn: Callable[..., Any] | None = None, **checkpoint_fn_kwargs: Any
    ) -> Any:
        """Return a module like ``module`` whose forward runs under ``checkpoint_fn``.

        Args:
            module: the original, which is left unchanged.
            checkpoint_fn: ``(fn, *args, **kwargs)``; :attr:`checkpoint` by default.
            checkpoint_fn_kwargs: further keyword arguments of ``checkpoint_fn``, for example ``context_fn``.
        """
        run = self.checkpoint if checkpoint_fn is None else checkpoint_fn

        def around(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return run(forward, *args, **checkpoint_fn_kwargs, **kwargs)

        return self._wrapped(module, around)

    @property
    @abc.abstractmethod
    def noop_context_fn(self) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
        """The default ``context_fn`` of :attr:`checkpoint`, which returns two contexts that do nothing."""

    @abc.abstractmethod
    def create_selective_checkpoint_contexts(
        self, policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return contexts for forward and recomputation; outputs of the chosen operators are kept in between.

        Args:
            policy_fn_or_list: operators whose outputs are kept, or ``(ctx, op, *args, **kwargs)`` that returns a bool
                or PyTorch's ``CheckpointPolicy``. An operator is an overload on PyTorch (``torch.ops.aten.mm.default``)
                and a name on MindSpore (``"MatMulExt"``).
            allow_cache_entry_mutation: do not raise if kept outputs were written to.
        """

    def swap_wrapper(self, module: Any, policy_fn: Callable[[Any], Any] | None = None) -> Any:
        """Return a module like ``module`` that offloads its saved activations; see :meth:`async_save_on_cpu`."""

        def around(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kept = self._storages_of(module)

            def should_offload(tensor: Any) -> bool:
                return self._storage_of(tensor) not in kept and _to_offload(policy_fn, tensor, self._bytes_of(tensor))

            with self._offloading(should_offload):
                return forward(*args, **kwargs)

        return self._wrapped(module, around)

    def async_save_on_cpu(self, policy_fn: Callable[[Any], Any] | None = None) -> AbstractContextManager[Any]:
        """Offload tensors that operations inside save for backward to the next slower memory, until needed.

        A device tensor moves to pinned host memory, over a separate stream; a host tensor to an unnamed temporary file.
        Parameters are not moved.

        Args:
            policy_fn: returns True for a tensor to offload; by default tensors of at least 4096 bytes are offloaded.
        """

        def should_offload(tensor: Any) -> bool:
            return not self._is_leaf(tensor) and _to_offload(policy_fn, tensor, self._bytes_of(tensor))

        return self._offloading(should_offload)

    def _offloading(self, should_offload: Callable[[Any], bool]) -> AbstractContextManager[Any]:
        offload = self._offloader()
        return self.replace_saved(lambda tensor: offload(tensor) if should_offload(tensor) else None)

    # -- implemented per framework ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def _wrapped(self, module: Any, around: Callable[..., Any]) -> Any:
        """Return another module with the same contents whose forward is ``around(forward, args, kwargs)``."""

    @abc.abstractmethod
    def replace_saved(self, replace: Callable[[Any], Offloaded | None]) -> AbstractContextManager[Any]:
        """Replace the tensors that operations inside save for backward.

        Args:
            replace: returns the object to keep instead of a tensor, or None, which leaves the decision to outer hooks.
        """

    @abc.abstractmethod
    def storage_key(self, tensor: Any) -> tuple[Any, ...] | None:
        """Return a key of the elements of ``tensor``: place in memory and dtype; None if they are not densely stored.

        Two views of the same elements have the same key. A key is unique while the storage lives.
        """

    @abc.abstractmethod
    def _offloader(self) -> Callable[[Any], Offloaded]:
        """Return a function that moves a tensor to slower memory."""

    @abc.abstractmethod
    def _storages_of(self, module: Any) -> frozenset[int]:
        """Return the identities of the storages of parameters and buffers."""

    @abc.abstractmethod
    def _storage_of(self, tensor: Any) -> int:
        """Return the identity of the storage of ``tensor``, unique while it lives."""

    @abc.abstractmethod
    def _bytes_of(self, tensor: Any) -> int:
        """Return the number of bytes of the values."""

    @abc.abstractmethod
    def _is_leaf(self, tensor: Any) -> bool:
        """Return True for leaves, such as parameters and inputs, and for their views."""


def _to_offload(policy_fn: Callable[[Any], Any] | None, tensor: Any, size: int) -> bool:
    return size >= _SMALL if policy_fn is None else bool(policy_fn(tensor))


def replayable(
    fn: Callable[..., Any],
    get_state: Callable[[], Any],
    replay: Callable[[Any], AbstractContextManager[Any]],
) -> Callable[..., Any]:
    """Return ``fn`` such that later runs sample the same random numbers as the first run.

    Args:
        fn: the checkpointed function.
        get_state: returns the state of the random generators that the framework does not know.
        replay: returns a context in which these generators start from a state, and which restores them.
    """
    again, lock, runs = replayable_from_current_state(fn, get_state, replay), threading.Lock(), [0]

    def run(*args: Any, **kwargs: Any) -> Any:
        with lock:
            runs[0] += 1
            first = runs[0] == 1
        return fn(*args, **kwargs) if first else again(*args, **kwargs)

    return run


def replayable_from_current_state(
    fn: Callable[..., Any],
    get_state: Callable[[], Any],
    replay: Callable[[Any], AbstractContextManager[Any]],
) -> Callable[..., Any]:
    """Return ``fn`` such that every run samples from the current state. Arguments as for :func:`replayable`."""
    state = get_state()

    def run(*args: Any, **kwargs: Any) -> Any:
        with replay(state):
            return fn(*args, **kwargs)

    return run


def replayable_constructor(
    init: Callable[..., None],
    get_state: Callable[[], Any],
    replay: Callable[[Any], AbstractContextManager[Any]],
) -> Callable[..., None]:
    """Return the constructor ``init`` such that the function it receives samples from the state at construction.

    Args:
        init: constructor of a framework's class, called before a forward runs; its first argument is the function that
            runs again.
        get_state: as for :func:`replayable`.
        replay: as for :func:`replayable`.
    """

    @wraps(init)
    def construct(self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        init(self, replayable_from_current_state(function, get_state, replay), *args, **kwargs)

    return construct


class SpillFile:
    """An unnamed temporary file of arrays, which is deleted with the last reference to it or to one of its arrays."""

    def __init__(self) -> None:
        # It is closed with its last reference. It has no name, so nothing is left behind however the process ends.
        self._file = tempfile.TemporaryFile(prefix="hyper_parallel_swap_", buffering=0)  # noqa: SIM115
        self._end = 0
        self._lock = threading.Lock()

    def write(self, array: np.ndarray[Any, Any]) -> SpilledArray:
        """Append the values of a contiguous array; return their position.

        Raises:
            OSError: the disk is full.
        """
        import numpy as np

        view = memoryview(array.reshape(-1).view(np.uint8).data)
        with self._lock:
            start, self._end = self._end, self._end + len(view)
        written = 0
        while written < len(view):
            written += os.pwrite(self._file.fileno(), view[written:], start + written)
        return SpilledArray(self, start, len(view), tuple(array.shape), array.dtype)

    def read(self, start: int, target: np.ndarray[Any, Any]) -> None:
        """Fill ``target``, an array of bytes, with the bytes from ``start`` on."""
        view, count = memoryview(target.data), 0
        while count < len(view):
            count += os.preadv(self._file.fileno(), [view[count:]], start + count)


class SpilledArray:
    """An array in a :class:`SpillFile`."""

    def __init__(self, file: SpillFile, start: int, size: int, shape: tuple[int, ...], dtype: Any) -> None:
        self._file, self._start, self._size, self._shape, self._dtype = file, start, size, shape, dtype

    def array(self) -> np.ndarray[Any, Any]:
        """Return the values, in memory of their own."""
        import numpy as np

        target = np.empty(self._size, np.uint8)
        self._file.read(self._start, target)
        values: np.ndarray[Any, Any] = target.view(self._dtype).reshape(self._shape)
        return values
