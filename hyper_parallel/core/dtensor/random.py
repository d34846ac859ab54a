"""Random numbers that do not depend on the layout: ``value = f(seed, call index, global element index)``.

The generator is Philox 4x64-10, a counter-based one: block ``b`` of call ``c`` has eight words of 32 bits under the key
``seed``, element ``i`` has its own word (or two, in float64) in a block that its index tells, so any rank computes the
elements that it holds, and no rank needs another's state.
Seed and call index are equal on all ranks as long as all ranks run the same program.

A rank has one stream, whichever thread asks. Two threads that draw from it in turn would do so in an order that differs
between ranks, so one thread at a time may: the one that drew first since seeding, until it ends. Another thread says
``with named("its name"):`` and draws from a stream of its own, made from seed and name.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hyper_parallel.core.dtensor import sampling
from hyper_parallel.core.dtensor.sampling import IndexRuns, LocalSample
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.transport.base import active_transport

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.dtensor.sampling import Distribution
    from hyper_parallel.transport.base import Transport

__all__ = [
    "RandomState",
    "bernoulli",
    "forbid_sampling_while",
    "get_state",
    "integers",
    "manual_seed",
    "named",
    "normal",
    "preserved",
    "replaying",
    "sample",
    "set_state",
    "uniform",
]  # fmt: skip

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


def forbid_sampling_while(reruns: Callable[[], bool]) -> None:
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


# -- distributions -----------------------------------------------------------------------------------------------------


def sample(layout: Layout, distribution: Distribution) -> LocalSample:
    """This rank's numbers, computed when they are asked for; advances the stream by one call.

    Args:
        layout: global shape and placement.
        distribution: how words of random bits become numbers.
    """
    seed, call = next_call()
    return LocalSample(layout.local_shape, IndexRuns.of(layout.shape, layout.local_box()), seed, call, distribution)  # type: ignore[arg-type] # placed


def uniform(layout: Layout, digits: int = 53) -> Any:
    """This rank's values in ``[0, 1)``, float32 where that holds the digits; advances the stream by one call.

    Args:
        layout: global shape and placement.
        digits: random bits; as many as the final dtype's significand, so that rounding never arrives at 1.
    """
    return sample(layout, sampling.uniform(digits)).array()


def normal(layout: Layout, digits: int = 53) -> Any:
    """This rank's values of the standard normal distribution; advances the stream by one call.

    Float32 where that holds the digits.
    """
    return sample(layout, sampling.normal(digits)).array()


def integers(layout: Layout, low: int, high: int) -> Any:
    """This rank's int64 values in ``[low, high)``; advances the stream by one call."""
    return sample(layout, sampling.integers(low, high)).array()


def bernoulli(layout: Layout, probability: float) -> Any:
    """This rank's truths, each with ``probability``; advances the stream by one call."""
    return sample(layout, sampling.bernoulli(probability)).array()
