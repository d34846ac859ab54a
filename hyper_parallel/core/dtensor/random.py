"""Random numbers that do not depend on the layout: ``value = f(seed, call index, global element index)``.

The generator is Philox 4x32-10, a counter-based one: element ``i`` of call ``c`` is the block of counter ``(i, c)``
under the key ``seed``, so any rank computes exactly the elements that it holds, and no rank needs another's state.
Seed and call index are equal on all ranks as long as all ranks run the same program.

A rank has one stream, whichever thread asks. Two threads that draw from it in turn would do so in an order that differs
between ranks, so one thread at a time may: the one that drew first since seeding, until it ends. Another thread says
``with named("its name"):`` and draws from a stream of its own, made from seed and name.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.transport.base import active_transport

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Box, Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.transport.base import Transport

__all__ = ["RandomState", "bits", "get_state", "integers", "keep", "manual_seed", "named", "normal", "preserved",
           "refuse_while", "replaying", "set_state", "uniform"]  # fmt: skip

ROUNDS = 10
_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW, _WORD = np.uint64(0xFFFFFFFF), np.uint64(32)
_SEEDS = 0xFFFFFFFFFFFFFFFF


@dataclass
class RandomState:
    """Where a stream is.

    Attributes:
        seed: 64 bits.
        calls: number of random calls so far; the next one's index.
    """

    seed: int = 0
    calls: int = 0


@dataclass(eq=False)
class _Streams:
    """What one rank draws from: its own stream, the thread that may, and streams by name."""

    own: RandomState = field(default_factory=RandomState)
    owner: threading.Thread | None = None
    named: dict[str, RandomState] = field(default_factory=dict)

    def current(self) -> RandomState:
        """The stream of the ``named`` block that surrounds this code, or the rank's own."""
        name = _NAME.get()
        if name is None:
            return self.own
        if name not in self.named:
            self.named[name] = RandomState(_derived(self.own.seed, name))
        return self.named[name]

    def start(self, state: RandomState) -> None:
        """Put ``state`` in the place of the current stream; streams by name follow the rank's own seed."""
        name = _NAME.get()
        if name is not None:
            self.named[name] = state
            return
        self.own, self.owner = state, None
        self.named.clear()

    def claim(self) -> None:
        """Let this thread draw from the rank's own stream, unless another one does."""
        thread = threading.current_thread()
        if self.owner is not None and self.owner is not thread and self.owner.is_alive():
            msg = (
                f"thread {thread.name!r} draws random numbers of DTensors, which thread {self.owner.name!r} does, too: "
                "in which order would differ between ranks, and so would the numbers; give this thread a stream of its "
                "own by `with hyper_parallel.core.dtensor.random.named(name):`, where the name is the same on all ranks"
            )
            raise UnsupportedOperatorError(msg)
        self.owner = thread


@dataclass
class _Aside:
    """A stream of this thread alone, in a block after which the rank's goes on as it was.

    Attributes:
        state: where it is.
        replays: whether it repeats what a forward drew.
    """

    state: RandomState
    replays: bool


_PROCESS = _Streams()
_RANKS: WeakKeyDictionary[Transport, _Streams] = WeakKeyDictionary()  # of simulated ranks: many are in one process
_LOCK = threading.RLock()
_ASIDE: ContextVar[_Aside | None] = ContextVar("hyper_parallel_random_aside", default=None)
_NAME: ContextVar[str | None] = ContextVar("hyper_parallel_random_name", default=None)
_REFUSING: list[Callable[[], bool]] = []


def _streams() -> _Streams:
    transport = active_transport()
    return _PROCESS if transport is None else _RANKS.setdefault(transport, _Streams())


def _derived(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def manual_seed(seed: int, mesh: DeviceMesh | None = None) -> None:
    """Start the stream of every DTensor over from ``seed``; call it on all ranks with the same number.

    All threads of the rank draw from it; see the module's text. Inside ``named`` it starts that stream alone. The
    frameworks' own seeds (``torch.manual_seed``, ``mindspore.set_seed``) do not move it: ranks may seed those apart.

    Args:
        seed: any int; its low 64 bits count.
        mesh: accepted for PyTorch's signature; the stream is the same on every mesh.
    """
    del mesh
    set_state((seed & _SEEDS, 0))


def get_state() -> tuple[int, int]:
    """Seed and call index: what a checkpoint keeps, and what a recomputed forward starts from."""
    with _LOCK:
        aside = _ASIDE.get()
        state = _streams().current() if aside is None else aside.state
        return state.seed, state.calls


def set_state(state: tuple[int, int]) -> None:
    """Go back to what :func:`get_state` returned."""
    with _LOCK:
        aside = _ASIDE.get()
        if aside is None:
            _streams().start(RandomState(*state))
        else:
            aside.state = RandomState(*state)


@contextmanager
def preserved() -> Iterator[None]:
    """Whatever this thread draws inside leaves the stream as it was."""
    outer = _ASIDE.get()
    with _aside(get_state(), replays=outer is not None and outer.replays):
        yield


@contextmanager
def replaying(state: tuple[int, int]) -> Iterator[None]:
    """What this thread draws inside starts from ``state``, for what runs again, and leaves the stream as it was."""
    with _aside(state, replays=True):
        yield


@contextmanager
def _aside(state: tuple[int, int], *, replays: bool) -> Iterator[None]:
    token = _ASIDE.set(_Aside(RandomState(*state), replays))
    try:
        yield
    finally:
        _ASIDE.reset(token)


@contextmanager
def named(name: str) -> Iterator[None]:
    """What this thread draws inside comes from a stream of its own, made from the rank's seed and ``name``.

    It goes on where it was when it is entered again. One thread at a time may be inside the same name.

    Args:
        name: the same on all ranks.

    Raises:
        UnsupportedOperatorError: inside a recomputed or ``preserved`` function, whose one stream alone is kept.
    """
    if _ASIDE.get() is not None:
        msg = f"named({name!r}): a recomputed or preserved function draws from one stream; enter the name around it"
        raise UnsupportedOperatorError(msg)
    token = _NAME.set(name)
    try:
        yield
    finally:
        _NAME.reset(token)


def refuse_while(reruns: Callable[[], bool]) -> None:
    """Raise instead of drawing anew while ``reruns()``: a forward runs again and is not replayed."""
    with _LOCK:
        _REFUSING.append(reruns)


def next_call() -> tuple[int, int]:
    """Seed and index of the call about to be made; counts it, also on a rank that holds nothing.

    Raises:
        UnsupportedOperatorError: a forward runs again without replaying, or another thread draws from this stream.
    """
    aside = _ASIDE.get()
    if (aside is None or not aside.replays) and any(reruns() for reruns in _REFUSING):
        raise UnsupportedOperatorError(_RERUN)
    with _LOCK:
        streams = _streams()
        if aside is None and _NAME.get() is None:
            streams.claim()
        state = streams.current() if aside is None else aside.state
        state.calls += 1
        return state.seed, state.calls - 1


_RERUN = (
    "backward runs a forward again that draws random numbers of DTensors: what recomputes it does not know their "
    "stream, so they would differ from the first ones, and the gradients be wrong; recompute by "
    "torch.utils.checkpoint.checkpoint, or take state = hyper_parallel.core.dtensor.random.get_state() before the "
    "first run and run again `with hyper_parallel.core.dtensor.random.replaying(state):`"
)


# -- the generator -----------------------------------------------------------------------------------------------------


def bits(seed: int, call: int, indices: Any) -> tuple[Any, Any, Any, Any]:
    """Four words of 32 random bits (in uint64) for each global element index.

    Args:
        seed: key.
        call: call index, the counter's upper half.
        indices: uint64 array, the counter's lower half.
    """
    indices = np.asarray(indices, np.uint64)
    counter = [indices & _LOW, indices >> _WORD, *(np.full_like(indices, word) for word in _words(call))]
    key = list(_words(seed))
    for _ in range(ROUNDS):
        first, second = _MULTIPLY[0] * counter[0], _MULTIPLY[1] * counter[2]
        counter = [
            (second >> _WORD) ^ counter[1] ^ np.uint64(key[0]),
            second & _LOW,
            (first >> _WORD) ^ counter[3] ^ np.uint64(key[1]),
            first & _LOW,
        ]
        key = [(word + step) & 0xFFFFFFFF for word, step in zip(key, _WEYL, strict=True)]
    return counter[0], counter[1], counter[2], counter[3]


def _words(value: int) -> tuple[int, int]:
    return value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF


def element_indices(shape: Sequence[int], box: Box) -> Any:
    """Row-major global indices of the elements of ``box``, in its shape."""
    found = np.zeros((), np.uint64)
    for size, (start, stop) in zip(shape, box, strict=True):
        found = found[..., None] * np.uint64(size) + np.arange(start, stop, dtype=np.uint64)
    return found


# -- distributions -----------------------------------------------------------------------------------------------------


def uniform(layout: Layout, digits: int = 53) -> Any:
    """This rank's float64 values in ``[0, 1)``; advances the stream by one call.

    Args:
        layout: global shape and placement.
        digits: random bits; as many as the final dtype's significand, so that rounding never arrives at 1.
    """
    return np.floor(_unit(*_draw(layout)[:2]) * 2.0**digits) * 2.0**-digits


def normal(layout: Layout) -> Any:
    """This rank's float64 values of the standard normal distribution (Box-Muller); advances the stream by one call."""
    first, second, third, fourth = _draw(layout)
    radius = np.sqrt(-2.0 * np.log1p(-_unit(first, second)))
    return radius * np.cos(2.0 * np.pi * _unit(third, fourth))


def integers(layout: Layout, low: int, high: int) -> Any:
    """This rank's int64 values in ``[low, high)``; advances the stream by one call."""
    first, second, _, _ = _draw(layout)
    return low + ((first << _WORD | second) % np.uint64(high - low)).astype(np.int64)


def keep(layout: Layout, probability: float) -> Any:
    """This rank's truths, each with ``probability``; advances the stream by one call."""
    return uniform(layout) < probability


def _draw(layout: Layout) -> tuple[Any, Any, Any, Any]:
    seed, call = next_call()
    return bits(seed, call, element_indices(layout.shape, layout.local_box()))  # type: ignore[arg-type] # placed


def _unit(high: Any, low: Any) -> Any:
    return ((high << np.uint64(21)) ^ (low >> np.uint64(11))).astype(np.float64) * 2.0**-53
