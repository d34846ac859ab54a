"""Random numbers that do not depend on the layout: ``value = f(seed, call index, global element index)``.

The generator is Philox 4x32-10, a counter-based one: element ``i`` of call ``c`` is the block of counter ``(i, c)``
under the key ``seed``, so any rank computes exactly the elements that it holds, and no rank needs another's state.
Seed and call index are equal on all ranks as long as all ranks run the same program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Box, Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = ["RandomState", "bits", "get_state", "integers", "keep", "manual_seed", "normal", "preserved", "replaying",
           "set_state", "uniform"]  # fmt: skip

ROUNDS = 10
_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW, _WORD = np.uint64(0xFFFFFFFF), np.uint64(32)


@dataclass
class RandomState:
    """Where the stream of one rank is.

    Attributes:
        seed: 64 bits.
        calls: number of random calls so far; the next one's index.
    """

    seed: int = 0
    calls: int = 0


_STATE: ContextVar[RandomState | None] = ContextVar("hyper_parallel_random", default=None)


def _state() -> RandomState:
    found = _STATE.get()
    if found is None:
        found = RandomState()
        _STATE.set(found)
    return found


def manual_seed(seed: int, mesh: DeviceMesh | None = None) -> None:
    """Start the stream of every DTensor over from ``seed``; call it on all ranks with the same number.

    Args:
        seed: any int; its low 64 bits count.
        mesh: accepted for PyTorch's signature; the stream is the same on every mesh.
    """
    del mesh
    _STATE.set(RandomState(seed & 0xFFFFFFFFFFFFFFFF))


def get_state() -> tuple[int, int]:
    """Seed and call index: what a checkpoint keeps, and what a recomputed forward starts from."""
    state = _state()
    return state.seed, state.calls


def set_state(state: tuple[int, int]) -> None:
    """Go back to what :func:`get_state` returned."""
    _STATE.set(RandomState(*state))


@contextmanager
def preserved() -> Iterator[None]:
    """Whatever is drawn inside leaves the stream as it was."""
    before = get_state()
    try:
        yield
    finally:
        set_state(before)


@contextmanager
def replaying(state: tuple[int, int]) -> Iterator[None]:
    """What is drawn inside starts from ``state``, for a function that runs again, and leaves the stream as it was."""
    with preserved():
        set_state(state)
        yield


def next_call() -> tuple[int, int]:
    """Seed and index of the call about to be made; counts it, also on a rank that holds nothing."""
    state = _state()
    state.calls += 1
    return state.seed, state.calls - 1


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
