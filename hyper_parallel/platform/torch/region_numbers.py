"""Random numbers of DTensors in a traced graph: the graph records calls of a random stream instead of values."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from hyper_parallel.core.dtensor.sampling import LocalRandomNumbers
from hyper_parallel.errors import UnsupportedOperatorError

__all__ = ["NUMBERS", "RecordedArray", "RecordedNumbers", "drawing", "forget_numbers", "recorder"]

_MASK = (1 << 64) - 1
_SAMPLED: dict[str, LocalRandomNumbers] = {}
_COUNT, _PROCESS = itertools.count(), os.urandom(8).hex()


@dataclass(frozen=True)
class RecordedNumbers(LocalRandomNumbers):
    """Random numbers that are drawn when the graph runs.

    Attributes:
        stream: seed and index of the first call when the graph runs; a traced tensor.
    """

    stream: Any = None

    def array(self) -> Any:
        """Zeros that stand for the numbers."""
        array = np.zeros(self.shape, _dtype_of(self)).view(RecordedArray)
        array.numbers = self
        return array

    def blocks(self) -> Any:
        """Refuse: the values are unknown during the trace."""
        raise _unknown_values()

    def tensor(self, device: Any = None) -> torch.Tensor:
        """The numbers, as an operator of the graph."""
        # A backend may store graphs on disk; other processes must not find these names.
        name = f"{_PROCESS}.{os.getpid()}.{next(_COUNT)}"
        _SAMPLED[name] = LocalRandomNumbers(
            **{field.name: getattr(self, field.name) for field in fields(LocalRandomNumbers)}
        )
        drawn: torch.Tensor = NUMBERS(self.stream, name)
        return drawn if device is None else drawn.to(device)


class RecordedArray(np.ndarray[Any, Any]):
    """A placeholder for an array of random numbers during a trace."""

    numbers: RecordedNumbers | None = None

    def tensor(self, device: Any) -> torch.Tensor:
        """The numbers, as an operator of the graph.

        Raises:
            UnsupportedOperatorError: NumPy has computed with them.
        """
        if self.numbers is None:
            raise _unknown_values()
        return self.numbers.tensor(device)


def recorder(stream: Any) -> Callable[[LocalRandomNumbers], RecordedNumbers]:
    """Return the replacement of random numbers in a trace; ``stream`` is the tensor of seed and first call."""

    def record(numbers: LocalRandomNumbers) -> RecordedNumbers:
        return RecordedNumbers(
            **{field.name: getattr(numbers, field.name) for field in fields(LocalRandomNumbers)}, stream=stream
        )

    return record


def drawing(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that draws the numbers registered under ``name``."""
    sampled = _SAMPLED[name]

    def draw(stream: torch.Tensor) -> torch.Tensor:
        seed, first = stream.tolist()
        return torch.from_numpy(replace(sampled, seed=seed & _MASK, call=first + sampled.call).array())

    return draw


def forget_numbers(name: str) -> None:
    """Remove the numbers of a graph that has been lowered."""
    _SAMPLED.pop(name, None)


def _dtype_of(numbers: LocalRandomNumbers) -> Any:
    width = 8 // numbers.distribution.words_per_element
    no_words = np.zeros((0, width), "<u4" if numbers.distribution.words_per_element == 1 else "<u8")
    return numbers.distribution.transform(no_words).dtype


def _unknown_values() -> UnsupportedOperatorError:
    msg = "compile: a compiled region cannot hold this random operator, which computes with its numbers as it draws"
    return UnsupportedOperatorError(msg)


_LIBRARY = torch.library.Library("hyper_parallel", "FRAGMENT")
_LIBRARY.define("numbers(Tensor stream, str sampled) -> Tensor")


def _draw(stream: torch.Tensor, sampled: str) -> torch.Tensor:
    return drawing(sampled)(stream)


def _empty(stream: torch.Tensor, sampled: str) -> torch.Tensor:
    numbers = _SAMPLED[sampled]
    like = torch.from_numpy(np.zeros(0, _dtype_of(numbers)))
    return stream.new_empty(numbers.shape, dtype=like.dtype)


_LIBRARY.impl("numbers", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("hyper_parallel::numbers", _empty, lib=_LIBRARY)
NUMBERS = torch.ops.hyper_parallel.numbers.default
"""``(seed and first call, name of what is sampled) -> tensor``."""
