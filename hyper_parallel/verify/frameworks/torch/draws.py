"""Records which samples a PyTorch program's data loaders draw, as the indices that their samplers return."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from hyper_parallel.verify.frameworks.contract.record_log import RecordLog, user_site
from hyper_parallel.verify.frameworks.contract.records import DRAWS, LoaderPass

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["Draws"]


class Draws:
    """The passes of one rank over data loaders.

    The first call of a model after the start of a pass decides whether the pass belongs to training or evaluation.

    Args:
        log: log of the rank; its notes get the passes.
        framework: folder of PyTorch, whose stack frames are skipped.
    """

    def __init__(self, log: RecordLog, framework: str) -> None:
        self._log, self._framework = log, framework
        self._loaders: list[DataLoader[Any]] = []
        self._current: LoaderPass | None = None
        self._passes: weakref.WeakKeyDictionary[Any, LoaderPass] = weakref.WeakKeyDictionary()
        self._unused: list[LoaderPass] = []

    def begin(self, loader: DataLoader[Any]) -> LoaderPass:
        """Start a pass over a loader; samples drawn before :meth:`iterates` is called belong to this pass, too."""
        if not any(loader is each for each in self._loaders):
            self._loaders.append(loader)  # keeps the loader alive; its position in the list is its number
        number = next(index for index, each in enumerate(self._loaders) if each is loader)
        passes: list[LoaderPass] = self._log.notes.setdefault(DRAWS, [])
        samplers = [each for each in (loader.batch_sampler, loader.sampler) if each is not None]
        self._current = LoaderPass(
            number,
            sum(each.loader == number for each in passes),
            type(loader.dataset).__name__,
            type(samplers[-1]).__name__ if samplers else "",
            _size(loader.dataset),
            any(bool(getattr(each, "drop_last", False)) for each in (loader, *samplers)),
            any(getattr(each, "replacement", False) is True for each in samplers),
            any(bool(getattr(each, "shuffle", False)) and hasattr(each, "set_epoch") for each in samplers),
            self._log.step,
            user_site(self._framework),
        )
        passes.append(self._current)
        self._unused.append(self._current)
        return self._current

    def iterates(self, iterator: Any, made: LoaderPass) -> None:
        """Record that ``iterator`` draws the samples of a pass."""
        self._passes[iterator] = made
        self._current = None

    def drawn(self, iterator: Any, indices: Any) -> None:
        """Add the indices of one batch; None ends the pass."""
        made = self._current or self._passes.get(iterator)  # with persistent workers, a starting pass draws already
        if made is None:
            return
        if indices is None:
            made.complete = True
            return
        batch = list(indices) if isinstance(indices, (list, tuple)) else [indices]
        made.indexed &= None not in batch  # for iterable datasets, the sampler returns None
        made.indices += batch
        made.last = len(batch)

    def called(self, *, evaluates: bool) -> None:
        """Record that a model is called with the drawn samples."""
        for made in self._unused:
            made.trains = not evaluates
        self._unused.clear()


def _size(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # an iterable dataset
        return None
