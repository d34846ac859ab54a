"""Helpers for contract checks: platform, rank, test data, assertions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.platform.contract.platform import Platform
from hyper_parallel.verify.frameworks import harness_of

__all__ = ["Contract", "ContractCheck", "World", "covers", "logged", "raises"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ContractCheck:
    """One check.

    Attributes:
        members: of the contract that it covers.
        run: the check, on one rank.
    """

    members: tuple[str, ...]
    run: Callable[[World], None]


Contract = list[ContractCheck]


def covers(table: Contract, *members: str) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    """Return a decorator that adds a check of ``members`` to ``table``."""

    def add(run: Callable[[World], None]) -> Callable[[World], None]:
        table.append(ContractCheck(members, run))
        return run

    return add


@contextlib.contextmanager
def raises(error_type: type[BaseException] | tuple[type[BaseException], ...], *parts: str) -> Iterator[None]:
    """Assert that the body raises ``error_type`` with all of ``parts`` in its message."""
    message = None
    try:
        yield
    except error_type as error:
        message = str(error)
    assert message is not None, f"nothing raised {error_type}"
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in {message}"


def logged(log: list[Any], entry: Any, result: Any = None) -> Any:
    """Append ``entry`` to ``log``, and return ``result``."""
    log.append(entry)
    return result


class World:
    """The world as one rank sees it: its platform and rank, the data of all ranks, and assertions on tensors.

    Attributes:
        platform: the framework.
        rank: this rank.
        size: number of ranks.
        ranks: all of them.
        seed: of the data.
        device: on which tensors are made.
    """

    def __init__(self, platform: Platform, seed: int = 0, device: str = "cpu") -> None:
        self.platform = platform
        self.rank, self.size = platform.get_rank(), platform.get_world_size()
        self.ranks = tuple(range(self.size))
        self.seed, self.device = seed, device

    @property
    def survives_mismatch(self) -> bool:
        """Whether checks go on after ranks disagreed in a message or an asynchronous collective; see ``Transport``."""
        return self.platform.transport().survives_mismatch

    def sample(self, shape: tuple[int, ...], rank: int | None = None, turn: int = 0, dtype: str = "float64") -> Array:
        """Return the data of ``rank`` (by default this one), equal on every rank; quarters, so that sums are exact."""
        random = np.random.default_rng([self.seed, self.rank if rank is None else rank, turn, *shape])
        return np.asarray(random.integers(-9, 10, shape) / 4 + 0.125).astype(dtype)

    def everyone(self, shape: tuple[int, ...], turn: int = 0, dtype: str = "float64") -> list[Array]:
        """Return the data of all ranks."""
        return [self.sample(shape, rank, turn, dtype) for rank in self.ranks]

    def tensor(self, array: Any) -> Any:
        """Return an array as a plain tensor of the device."""
        return self.platform.to_device(self.platform.from_numpy(np.asarray(array)), self.device)

    def array(self, tensor: Any) -> Array:
        """Return a tensor's values."""
        return np.asarray(self.platform.tensor_to_numpy(tensor))

    def same(self, tensor: Any, expected: Any, tolerance: float = 0.0) -> None:
        """Assert that a tensor equals an array in shape and, within ``tolerance``, in values."""
        actual, expected = self.array(tensor), np.asarray(expected)
        assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
        close = np.allclose(actual, expected, tolerance, tolerance) if tolerance else np.array_equal(actual, expected)
        assert close, f"{actual}, expected {expected}"

    def gradient(self, fn: Callable[[Any], Any], array: Array, cotangent: Array) -> tuple[Any, Any]:
        """Return ``fn`` of one tensor, and the gradient of the tensor for a cotangent of the result."""
        inputs, seeds = [self.tensor(array)], [self.tensor(cotangent)]
        outs, grads = harness_of(self.platform).vjp(lambda x: [fn(x)], inputs, seeds, [True])
        return outs[0], grads[0]
