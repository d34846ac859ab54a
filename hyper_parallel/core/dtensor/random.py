"""Random numbers that do not depend on the layout: ``value = f(seed, call index, global element index)``.

The generator is Philox 4x32-10, a counter-based one: block ``b`` of call ``c`` has four words of 32 bits under the key
``seed``, element ``i`` has its own word (or two, in float64) in a block that its index tells, so any rank computes the
elements that it holds, and no rank needs another's state.
Seed and call index are equal on all ranks as long as all ranks run the same program.

A rank has one stream, whichever thread asks. Two threads that draw from it in turn would do so in an order that differs
between ranks, so one thread at a time may: the one that drew first since seeding, until it ends. Another thread says
``with named("its name"):`` and draws from a stream of its own, made from seed and name.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from hyper_parallel.core.dtensor.philox import pieces
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.transport.base import active_transport

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Box, Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.transport.base import Transport

__all__ = ["RandomState", "bits", "get_state", "integers", "keep", "manual_seed", "named", "normal", "preserved",
           "refuse_while", "replaying", "set_state", "uniform"]  # fmt: skip

_LOW, _WORD = np.uint64(0xFFFFFFFF), np.uint64(32)
_SEEDS = 0xFFFFFFFFFFFFFFFF
_KINDS = {1: "<u4", 2: "<u8"}
_SHORT = 24
"""Digits of float32: a value that needs no more is made of one word of 32 bits."""


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
    """Four words of 32 random bits (in uint64) for each counter.

    Args:
        seed: key.
        call: call index, the counter's upper half.
        indices: uint64 array, the counter's lower half.
    """
    indices = np.asarray(indices, np.uint64)
    found = np.concatenate([one.copy() for one in pieces(seed, call, indices.reshape(-1))])
    found = found.reshape(*indices.shape, 2)
    first, second = found[..., 0], found[..., 1]
    return first >> _WORD, first & _LOW, second >> _WORD, second & _LOW


@dataclass(frozen=True)
class Runs:
    """The elements of a box as runs of consecutive global indices, all of one length.

    Attributes:
        starts: global index of each run's first element.
        length: elements in a run.
    """

    starts: Any
    length: int

    @classmethod
    def of(cls, shape: Sequence[int], box: Box) -> Runs:
        """Those of ``box`` in a tensor of ``shape``, as long as they are."""
        length, starts, step = 1, np.zeros(1, np.uint64), 1
        joined = True
        for size, (start, stop) in zip(reversed(shape), reversed(box), strict=True):
            if joined:
                starts = starts + np.uint64(start * step)
                length *= stop - start
                joined = stop - start == size
            else:
                outer = np.arange(start, stop, dtype=np.uint64) * np.uint64(step)
                starts = (outer[:, None] + starts).reshape(-1)
            step *= size
        return cls(starts, length)

    def values(self, seed: int, call: int, each: int, value: Callable[[Any], Any]) -> tuple[Any, Any]:
        """``value`` of the words of every run's elements, and where in its row the run begins.

        Args:
            seed: key.
            call: call index.
            each: 32-bit words per element, 1 or 2; element ``i`` has words ``i * each`` and on of the whole sequence.
            value: from an array with a row of words per block to one of the same shape.

        Returns:
            An array with a row per run, of whole blocks, and the number of elements in front of each run in its row.
        """
        per_block = 4 // each
        skipped = (self.starts % np.uint64(per_block)).astype(np.intp)
        # Enough blocks for the run wherever in its first block it begins.
        spread = per_block - 1 if len(self.starts) > 1 else int(skipped[0])
        blocks = -(-(self.length + spread) // per_block)
        first = self.starts // np.uint64(per_block)
        counters: Any = range(int(first[0]), int(first[0]) + blocks)
        if len(first) > 1:
            counters = (first[:, None] + np.arange(blocks, dtype=np.uint64)).reshape(-1)
        found: Any = None
        done = 0
        for piece in pieces(seed, call, counters):
            part = value(piece.astype("<u8", copy=False).view(_KINDS[each]))
            if found is None:
                found = np.empty((len(counters), per_block), part.dtype)
            found[done : done + len(part)] = part
            done += len(part)
        return found.reshape(len(first), -1), skipped

    def taken(self, rows: Any, skipped: Any, shape: Sequence[int]) -> Any:
        """Of each row the run's own elements, in ``shape``."""
        if (skipped == skipped[0]).all():
            found = rows[:, skipped[0] : skipped[0] + self.length]
        else:
            found = np.take_along_axis(rows, skipped[:, None] + np.arange(self.length), 1)
        return found.reshape(shape)


# -- distributions -----------------------------------------------------------------------------------------------------


def uniform(layout: Layout, digits: int = 53) -> Any:
    """This rank's values in ``[0, 1)``, float32 where that holds the digits; advances the stream by one call.

    Args:
        layout: global shape and placement.
        digits: random bits; as many as the final dtype's significand, so that rounding never arrives at 1.
    """
    if digits > _SHORT:
        return _drawn(layout, 2, lambda words: (words >> np.uint64(64 - digits)) * 2.0**-digits)
    return _drawn(
        layout, 1, lambda words: (words >> np.uint32(32 - digits)).astype(np.float32) * np.float32(2.0**-digits)
    )


def normal(layout: Layout, digits: int = 53) -> Any:
    """This rank's values of the standard normal distribution (Box-Muller); advances the stream by one call.

    Two neighbours share a radius and an angle. Float32 where that holds the digits.
    """
    return _drawn(layout, 1 if digits <= _SHORT else 2, _gaussian)


def integers(layout: Layout, low: int, high: int) -> Any:
    """This rank's int64 values in ``[low, high)``; advances the stream by one call."""
    return _drawn(layout, 2, lambda words: low + (words % np.uint64(high - low)).astype(np.int64))


def keep(layout: Layout, probability: float) -> Any:
    """This rank's truths, each with ``probability``; advances the stream by one call."""
    bound = math.ceil(probability * 2.0**32)
    return _drawn(layout, 1, lambda words: words < bound if bound < 2**32 else np.ones(words.shape, bool))


def _drawn(layout: Layout, each: int, value: Callable[[Any], Any]) -> Any:
    """``value`` of the words of this rank's elements, ``each`` of 32 bits per element."""
    seed, call = next_call()
    shape = layout.local_shape
    if 0 in shape:
        return value(np.zeros((0, 4 // each), _KINDS[each])).reshape(shape)
    runs = Runs.of(layout.shape, layout.local_box())  # type: ignore[arg-type] # placed
    return runs.taken(*runs.values(seed, call, each, value), shape)


def _gaussian(words: Any) -> Any:
    """Pairs of uniform words to pairs of normal values."""
    found = np.empty(words.shape, f"f{words.dtype.itemsize}")
    scale = found.dtype.type(2.0 ** -(8 * words.dtype.itemsize))
    # The offset of half a step keeps the logarithm finite.
    radius = words[:, ::2].astype(found.dtype) * scale + scale / 2
    np.log(radius, out=radius)
    np.sqrt(np.multiply(radius, -2, out=radius), out=radius)
    angle = words[:, 1::2].astype(found.dtype) * (scale * found.dtype.type(2.0 * np.pi))
    np.multiply(radius, np.cos(angle), out=found[:, ::2])
    np.multiply(radius, np.sin(angle), out=found[:, 1::2])
    return found
