"""Saves and restores Python's and NumPy's global generators for each simulated rank.

Reading the states costs more than handing the baton from rank to rank, and ranks seldom sample from these generators.
So the memory of each generator is compared first, and its state is read or set only after a change.
"""

from __future__ import annotations

import _random
import ctypes
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["GeneratorStates", "restore_generators", "save_generators"]

_TWISTER_BYTES = 625 * 4  # NumPy's Mersenne twister: 624 words and a position
_HEADER = object.__basicsize__


@dataclass(frozen=True)
class _State:
    """One generator's state, and its mark: bytes of memory that change when it advances, or None if no bytes do."""

    mark: Any
    value: Any


@dataclass(frozen=True)
class GeneratorStates:
    """The states of both generators."""

    python: _State
    numpy: _State


_LAST = GeneratorStates(_State(None, None), _State(None, None))  # what was last saved or put back; replaced whole


def save_generators() -> GeneratorStates:
    """The states of both generators now: the same object as the last one, if neither has advanced since."""
    global _LAST  # noqa: PLW0603 - see above
    last, python, numpy = _LAST, _python_mark(), _numpy_mark()
    if python == last.python.mark and numpy is not None and numpy == last.numpy.mark:
        return last
    states = GeneratorStates(
        last.python if python == last.python.mark else _State(python, random.getstate()),
        last.numpy if numpy is not None and numpy == last.numpy.mark else _read_numpy(numpy),
    )
    _LAST = states
    return states


def restore_generators(states: GeneratorStates) -> None:
    """Put back what :func:`save_generators` returned."""
    global _LAST  # noqa: PLW0603 - see above
    if _python_mark() != states.python.mark:
        random.setstate(states.python.value)
    # Equal marks of two states do not make them equal; a state's own mark is lost when it advances.
    if states.numpy is not _LAST.numpy or states.numpy.mark is None or _numpy_mark() != states.numpy.mark:
        np.random.set_state(states.numpy.value)  # noqa: NPY002 - the stream that a process has
    _LAST = states


def _python_mark() -> Any:
    """The memory of Python's generator, without its object's header, which counts references."""
    generator: Any = random.random.__self__  # type: ignore[attr-defined] # a bound method
    size = _random.Random.__basicsize__ - _HEADER
    return ctypes.string_at(id(generator) + _HEADER, size), generator.gauss_next


def _numpy_mark() -> Any:
    """The twister's words and position; None where the generator is another."""
    twister = np.random.get_bit_generator()
    if type(twister) is not np.random.MT19937:
        return None
    return ctypes.string_at(twister.ctypes.state_address, _TWISTER_BYTES)


def _read_numpy(mark: Any) -> _State:
    """NumPy's state; without a mark if a normal number is kept for the next call, which the twister does not show."""
    value: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - as above
    return _State(None if value.get("has_gauss") else mark, value)
