"""Random numbers that do not depend on the layout: ``value = f(seed, call index, global element index)``.

The generator is Philox 4x64-10, a counter-based one. Block ``b`` of call ``c`` has eight 32-bit words under the key
``seed``, and an element's index determines its word (or two words for float64). So every rank computes the elements
that it holds, and needs no other rank's state. Seed and call index are equal on all ranks as long as all ranks run the
same program.

A rank has one stream for all its threads. If two threads sampled from it in turn, their order would differ between
ranks. So only one thread may: the first to sample after seeding, until it ends. Another thread enters ``with
named_stream("its name"):`` and samples from a stream of its own, derived from the seed and the name.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from hyper_parallel.core.dtensor import sampling
from hyper_parallel.core.dtensor.boxes import whole_box
from hyper_parallel.core.dtensor.sampling import IndexRuns, LocalRandomNumbers
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import get_platform
from hyper_parallel.transport.base import active_transport

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.dtensor.sampling import Distribution
    from hyper_parallel.transport.base import Transport

__all__ = [
    "SEEDS",
    "RandomState",
    "bernoulli",
    "forbid_sampling_while",
    "get_rng_state",
    "integers",
    "manual_seed",
    "named_stream",
    "normal",
    "preserve_state",
    "record_sampling",
    "replay",
    "sample",
    "set_rng_state",
    "take_calls",
    "uniform",
    "use_deterministic",
]


_SEED_MASK = 0xFFFFFFFFFFFFFFFF


@dataclass
class RandomState:
    """The state of a stream.

    Attributes:
        seed: 64 bits.
        calls: number of random calls so far, the index of the next call.
    """

    seed: int = 0
    calls: int = 0


@dataclass(eq=False)
class _Streams:
    """The streams of one rank: its own, the thread that may sample from it, and streams by name."""

    own: RandomState = field(default_factory=RandomState)
    owner: threading.Thread | None = None
    named: dict[str, RandomState] = field(default_factory=dict)

    def current(self) -> RandomState:
        """Return the stream of the surrounding ``named_stream`` block, or the rank's own."""
        name = _NAME.get()
        if name is None:
            return self.own
        if name not in self.named:
            self.named[name] = RandomState(_derived(self.own.seed, name))
        return self.named[name]

    def start(self, state: RandomState) -> None:
        """Set the state of the current stream; setting the rank's own stream resets the named streams."""
        name = _NAME.get()
        if name is not None:
            self.named[name] = state
            return
        self.own, self.owner = state, None
        self.named.clear()

    def claim(self) -> None:
        """Claim the rank's own stream for this thread; raise if another running thread has it."""
        thread = threading.current_thread()
        if self.owner is not None and self.owner is not thread and self.owner.is_alive():
            msg = (
                f"thread {thread.name!r} samples random numbers of DTensors, and so does thread {self.owner.name!r}; "
                "their order, and so the numbers, would differ between ranks; give this thread a stream of its own: "
                "`with hyper_parallel.core.dtensor.random.named_stream(name):`, with the same name on all ranks"
            )
            raise UnsupportedOperatorError(msg)
        self.owner = thread


@dataclass
class _TemporaryStream:
    """A stream that replaces the rank's inside a block, for this thread only.

    Attributes:
        state: its state.
        replays: True if it repeats the numbers of an earlier forward.
    """

    state: RandomState
    replays: bool


_PROCESS = _Streams()
# By transport, because one process may have many simulated ranks.
_RANKS: WeakKeyDictionary[Transport, _Streams] = WeakKeyDictionary()
_LOCK = threading.RLock()
_TEMPORARY: ContextVar[_TemporaryStream | None] = ContextVar("hyper_parallel_temporary_stream", default=None)
_NAME: ContextVar[str | None] = ContextVar("hyper_parallel_random_name", default=None)
_RECOMPUTE_CHECKS: list[Callable[[], bool]] = []
_RECORDER: ContextVar[Callable[[LocalRandomNumbers], LocalRandomNumbers] | None] = ContextVar(
    "hyper_parallel_random_recorder", default=None
)


def _streams() -> _Streams:
    transport = active_transport()
    return _PROCESS if transport is None else _RANKS.setdefault(transport, _Streams())


def _derived(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def manual_seed(seed: int, mesh: DeviceMesh | None = None) -> None:
    """Start the random stream of DTensors from ``seed``; call it on all ranks with the same number.

    The stream belongs to the rank; the module's documentation says which thread may sample from it. Inside
    ``named_stream`` only the named stream is started. The frameworks' own seeds (``torch.manual_seed``,
    ``mindspore.set_seed``) do not affect it, so ranks may set those differently.

    Args:
        seed: any int; only its low 64 bits are used.
        mesh: accepted as in PyTorch's signature; the stream is the same on every mesh.
    """
    del mesh
    set_rng_state((seed & _SEED_MASK, 0))


def get_rng_state() -> tuple[int, int]:
    """Return the state of the random stream of DTensors: seed and index of the next call, two ints.

    It is the same on every rank and does not depend on the mesh: saved in a checkpoint, it can be resumed on any mesh.
    """
    with _LOCK:
        temporary = _TEMPORARY.get()
        state = _streams().current() if temporary is None else temporary.state
        return state.seed, state.calls


def set_rng_state(state: tuple[int, int]) -> None:
    """Continue the random stream of DTensors from what :func:`get_rng_state` returned; call it on all ranks.

    Raises:
        ValueError: ``state`` is not a seed and a call index.
    """
    pair: Any = state
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(type(x) is int and x >= 0 for x in pair):
        msg = f"set_rng_state: state is {state!r}; it must be what get_rng_state() returned, a seed and a call index"
        raise ValueError(msg)
    with _LOCK:
        temporary = _TEMPORARY.get()
        if temporary is None:
            _streams().start(RandomState(*state))
        else:
            temporary.state = RandomState(*state)


@contextmanager
def preserve_state() -> Iterator[None]:
    """Restore the stream after the block, whatever this thread samples inside."""
    outer = _TEMPORARY.get()
    with _temporary_stream(get_rng_state(), replays=outer is not None and outer.replays):
        yield


@contextmanager
def replay(state: tuple[int, int]) -> Iterator[None]:
    """Start the stream at ``state`` inside the block, in which a forward runs again; it is restored afterwards."""
    with _temporary_stream(state, replays=True):
        yield


@contextmanager
def _temporary_stream(state: tuple[int, int], *, replays: bool) -> Iterator[None]:
    token = _TEMPORARY.set(_TemporaryStream(RandomState(*state), replays))
    try:
        yield
    finally:
        _TEMPORARY.reset(token)


@contextmanager
def named_stream(name: str) -> Iterator[None]:
    """Sample inside the block from a stream of its own, derived from the rank's seed and ``name``.

    A block of the same name continues the stream. Only one thread at a time may be in blocks of one name.

    Args:
        name: the same on all ranks.

    Raises:
        UnsupportedOperatorError: the block is in a recomputed function or a ``preserve_state`` block.
    """
    if _TEMPORARY.get() is not None:
        msg = (
            f"named_stream({name!r}): a recomputed function, or one in preserve_state(), samples from one stream; "
            "enter the named stream around it"
        )
        raise UnsupportedOperatorError(msg)
    token = _NAME.set(name)
    try:
        yield
    finally:
        _NAME.reset(token)


@contextmanager
def record_sampling(record: Callable[[LocalRandomNumbers], LocalRandomNumbers]) -> Iterator[Callable[[], int]]:
    """Sample nothing inside the block, which a compiler traces: ``record`` is called instead of sampling.

    Calls are counted from 0, and the rank's stream stays where it is.

    Yields:
        the function that returns the number of calls.

    Raises:
        UnsupportedOperatorError: the block seeds the stream.
    """
    recorder = _RECORDER.set(record)
    try:
        with _temporary_stream((0, 0), replays=False):
            temporary = _TEMPORARY.get()
            start = temporary.state  # type: ignore[union-attr] # it was set
            yield lambda: start.calls
            if temporary.state is not start:  # type: ignore[union-attr] # as above
                msg = "compile: forward of the compiled module seeds the random numbers of DTensors; seed them outside"
                raise UnsupportedOperatorError(msg)
    finally:
        _RECORDER.reset(recorder)


def forbid_sampling_while(recomputes: Callable[[], bool]) -> None:
    """Make sampling an error while ``recomputes()`` is True and the stream of the first forward is not replayed."""
    with _LOCK:
        _RECOMPUTE_CHECKS.append(recomputes)


def next_call() -> tuple[int, int]:
    """Return seed and index of the next random call and count it; ranks with empty shards count it too."""
    return take_calls(1)


def take_calls(count: int) -> tuple[int, int]:
    """Return seed and index of the next random call, and count ``count`` of them.

    Raises:
        UnsupportedOperatorError: a forward is recomputed without replaying its stream, or another thread samples from
            this stream.
    """
    temporary = _TEMPORARY.get()
    if (temporary is None or not temporary.replays) and any(recomputes() for recomputes in _RECOMPUTE_CHECKS):
        raise UnsupportedOperatorError(_RECOMPUTED_WITHOUT_STATE)
    with _LOCK:
        streams = _streams()
        if temporary is None and _NAME.get() is None:
            streams.claim()
        state = streams.current() if temporary is None else temporary.state
        first, state.calls = state.calls, state.calls + count
        return state.seed, first


_RECOMPUTED_WITHOUT_STATE = (
    "backward recomputes a forward that samples random numbers of DTensors, without restoring their stream; the "
    "numbers would differ from those of the forward, and the gradients would be wrong; recompute by "
    "torch.utils.checkpoint.checkpoint, or take state = hyper_parallel.core.dtensor.random.get_rng_state() before the "
    "first run and run again `with hyper_parallel.core.dtensor.random.replay(state):`"
)


# -- distributions -----------------------------------------------------------------------------------------------------


def sample(layout: Layout, distribution: Distribution) -> LocalRandomNumbers:
    """Return this rank's random numbers, which are computed on demand; counts one random call.

    Args:
        layout: global shape and placements.
        distribution: the distribution, which converts random words to numbers.
    """
    seed, call = next_call()
    if layout.mesh.coordinate is None:
        # A rank outside of the mesh draws nothing, but counts the call: the next one may be on a mesh of all ranks.
        runs = IndexRuns.of(layout.local_shape, whole_box(layout.local_shape))
    else:
        runs = IndexRuns.of(layout.shape, layout.local_box())  # type: ignore[arg-type] # placed
    numbers, record = LocalRandomNumbers(layout.local_shape, runs, seed, call, distribution), _RECORDER.get()
    return numbers if record is None else record(numbers)


def uniform(layout: Layout, bits: int = 53) -> Any:
    """Return this rank's values uniform in ``[0, 1)``, as a NumPy array; counts one random call.

    Args:
        layout: global shape and placements.
        bits: random bits per value, as many as the final dtype's significand has, so that no value is rounded to 1.

    Returns:
        float32 for up to 24 bits, else float64.
    """
    return sample(layout, sampling.uniform(bits)).array()


def normal(layout: Layout, bits: int = 53) -> Any:
    """Return this rank's standard normal values, with the dtypes of :func:`uniform`; counts one random call."""
    return sample(layout, sampling.normal(bits)).array()


def integers(layout: Layout, low: int, high: int) -> Any:
    """Return this rank's int64 values in ``[low, high)``, as a NumPy array; counts one random call."""
    return sample(layout, sampling.integers(low, high)).array()


def bernoulli(layout: Layout, probability: float) -> Any:
    """Return this rank's booleans, each True with ``probability``, as a NumPy array; counts one random call."""
    return sample(layout, sampling.bernoulli(probability)).array()


SEEDS = 2**32
"""Seeds are below this number: those that NumPy's generator takes."""


def use_deterministic(seed: int = 0) -> None:
    """Make this rank's program give the same bits in every run; call it first, on every rank, with the same number.

    It sets the framework's own switches (``torch.use_deterministic_algorithms`` and cuDNN's, or
    ``mindspore.set_deterministic``), with the environment variables that cuBLAS and HCCL read when they start; makes
    reductions of DTensors on accelerators add in the order of the ranks, as they always do on CPU; and starts the
    generators of DTensors, the framework, Python and NumPy. An operator of PyTorch that has no deterministic form then
    raises PyTorch's error. It cannot be undone in the process.

    The number of threads, the number of ranks and the machine must be the same in both runs. The order in which
    PyTorch's own engines add is not set either: Gloo's differs between DDP's buckets;
    ``hyper_parallel.platform.torch.pytorch_data_parallel.rank_order_hook`` has DDP average in the order of the ranks.

    Args:
        seed: seed of all generators, from 0 up to 2**32 - 1. Ranks that need different plain tensors, such as the
            dropout of their own samples, call the framework's own seed function afterwards; DTensors need equal seeds.

    Raises:
        ValueError: the seed is negative or too large.
        TypeError: the seed is not an int.
    """
    _check_seed(seed)
    platform = get_platform()
    platform.use_deterministic()
    platform.seed(seed)
    manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global generator, which programs draw from


def _check_seed(seed: Any) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int):
        msg = f"use_deterministic: seed must be an int, got {type(seed).__name__}"
        raise TypeError(msg)
    if not 0 <= seed < SEEDS:
        msg = f"use_deterministic: seed is {seed}; it must be from 0 to {SEEDS - 1}"
        raise ValueError(msg)
