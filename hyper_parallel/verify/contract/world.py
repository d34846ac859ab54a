"""What a check has at hand: its platform, its rank, and everybody's data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.platform.contract.platform import Platform

__all__ = ["Contract", "ContractCheck", "World", "covers", "noted", "raises"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ContractCheck:
    """One check and the members that it stands for."""

    members: tuple[str, ...]
    run: Callable[[World], None]


Contract = list[ContractCheck]


def covers(table: Contract, *members: str) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    """Enter a check of ``members`` into ``table``."""

    def enter(run: Callable[[World], None]) -> Callable[[World], None]:
        table.append(ContractCheck(members, run))
        return run

    return enter


@contextlib.contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], *parts: str) -> Iterator[None]:
    """The body must raise ``kind``, with every one of ``parts`` in its words."""
    words = None
    try:
        yield
    except kind as error:
        words = str(error)
    assert words is not None, f"nothing raised {kind}"
    missing = [part for part in parts if part not in words]
    assert not missing, f"{missing} not in {words}"


def noted(log: list[Any], what: Any, result: Any = None) -> Any:
    """Write ``what`` down; ``result``."""
    log.append(what)
    return result


class World:
    """One rank's view of the run."""

    def __init__(self, platform: Platform, seed: int = 0) -> None:
        self.platform = platform
        self.rank, self.size = platform.get_rank(), platform.get_world_size()
        self.ranks = tuple(range(self.size))
        self._seed = seed

    def draw(self, shape: tuple[int, ...], rank: int | None = None, turn: int = 0, dtype: str = "float64") -> Array:
        """Data of ``rank`` (default: this one), the same wherever it is drawn; quarters, so that sums are exact."""
        random = np.random.default_rng([self._seed, self.rank if rank is None else rank, turn, *shape])
        return np.asarray(random.integers(-9, 10, shape) / 4 + 0.125).astype(dtype)

    def everyone(self, shape: tuple[int, ...], turn: int = 0, dtype: str = "float64") -> list[Array]:
        """Data of all ranks."""
        return [self.draw(shape, rank, turn, dtype) for rank in self.ranks]

    def tensor(self, array: Any) -> Any:
        """A plain tensor."""
        return self.platform.from_numpy(np.asarray(array))

    def array(self, tensor: Any) -> Array:
        """Its values."""
        return np.asarray(self.platform.tensor_to_numpy(tensor))

    def same(self, tensor: Any, wanted: Any, tolerance: float = 0.0) -> None:
        """Equal in shape and (to ``tolerance``) in values."""
        found, want = self.array(tensor), np.asarray(wanted)
        assert found.shape == want.shape, f"shape {found.shape}, wanted {want.shape}"
        close = np.array_equal(found, want) if not tolerance else np.allclose(found, want, tolerance, tolerance)
        assert close, f"{found}, wanted {want}"

    def gradient(self, fn: Callable[[Any], Any], array: Array, seed: Array) -> tuple[Any, Any]:
        """``fn`` of one tensor, and what it pulls ``seed`` back to."""
        outs, grads = self.platform.vjp(lambda x: [fn(x)], [self.tensor(array)], [self.tensor(seed)], [True])
        return outs[0], grads[0]
