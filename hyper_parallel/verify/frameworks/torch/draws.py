"""Records the samples that a PyTorch program's data loaders draw, by the indices that their samplers return."""

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

    A pass belongs to training or evaluation, according to the first model call after its start.

    Args:
        log: log of the rank, which gets a note of the passes.
        framework: folder of PyTorch, whose stack frames are skipped.
    """

    def __init__(self, log: RecordLog, framework: str) -> None:
        self._log, self._framework = log, framework
        self._loaders: list[DataLoader[Any]] = []
        self._current: LoaderPass | None = None
        self._passes: weakref.WeakKeyDictionary[Any, LoaderPass] = weakref.WeakKeyDictionary()
        self._unused: list[LoaderPass] = []

    def begin(self, loader: DataLoader[Any]) -> LoaderPass:
        """Start a pass over a loader; samples drawn before :meth:`iterates` belong to it too."""
        if not any(loader is each for each in self._loaders):
            self._loaders.append(loader)  # kept alive, so that no other loader gets its number
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
        """Assign an iterator to the pass whose samples it draws."""
        self._passes[iterator] = made
        self._current = None

    def drawn(self, iterator: Any, indices: Any) -> None:
        """Add the indices of one batch; None ends the pass."""
        made = self._current or self._passes.get(iterator)  # persistent workers draw while a pass starts
        if made is None:
            return
        if indices is None:
            made.complete = True
            return
        batch = list(indices) if isinstance(indices, (list, tuple)) else [indices]
        made.indexed &= None not in batch  # samplers of datasets without indices return this
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
