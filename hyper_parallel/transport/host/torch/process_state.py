"""State that PyTorch and Python keep per process, of which each simulated rank has its own.

It is saved and put back whenever the baton passes from rank to rank, so both must be cheap: an environment that has not
changed is the same object as the one that was last put back, and the changes between two such objects are kept.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch.nn.utils import parametrize
from torch.utils import deterministic

from hyper_parallel.platform.torch.versions import get_isolation, set_isolation
from hyper_parallel.transport.host.torch.device_rounding import put_rounding, rounding

__all__ = ["ProcessState", "forget_environments", "restore_process", "save_process"]

_Environment = dict[bytes, bytes]
_Changes = list[tuple[bytes, bytes | None]]

_ENVIRONMENT: _Environment = os.environ._data  # type: ignore[attr-defined]  # noqa: SLF001 - copied 100 times faster
_FILLS: Any = deterministic
_PARAMETRIZED: Any = parametrize
_MOST_CHANGES = 1024  # pairs of environments whose changes are kept


class ProcessState(NamedTuple):
    """The environment, PyTorch's switches, and what is kept while inside ``parametrize.cached()``, else None."""

    environment: _Environment
    switches: tuple[Any, ...]
    cached: dict[Any, Any] | None


class _Known:
    """The environment that was last saved or put back, the state with it, and the changes between environments."""

    def __init__(self) -> None:
        self.last: _Environment = {}
        self.state: ProcessState | None = None
        self.changes: dict[tuple[int, int], tuple[_Environment, _Environment, _Changes]] = {}

    def between(self, before: _Environment, after: _Environment) -> _Changes:
        """What to set, or to remove, so that ``before`` becomes ``after``."""
        key = (id(before), id(after))
        known = self.changes.get(key)
        if known is None:
            if len(self.changes) >= _MOST_CHANGES:
                self.changes.clear()
            changes: _Changes = [(name, None) for name in before.keys() - after.keys()]
            changes += [(name, value) for name, value in after.items() if before.get(name) != value]
            known = self.changes[key] = (before, after, changes)  # keeps both alive, so that no other has their id
        return known[2]


_KNOWN = _Known()  # one thread at a time holds the baton


def save_process() -> ProcessState:
    """The state now: the same object as the last one, if nothing has changed and nothing is kept by ``cached()``."""
    if _KNOWN.last != _ENVIRONMENT:
        _KNOWN.last = _ENVIRONMENT.copy()
    switches, state = _switches(), _KNOWN.state
    if _PARAMETRIZED._cache_enabled:  # noqa: SLF001 - no public spelling
        return ProcessState(_KNOWN.last, switches, _PARAMETRIZED._cache)  # noqa: SLF001 - as above
    if state is None or state.environment is not _KNOWN.last or state.switches != switches:
        state = _KNOWN.state = ProcessState(_KNOWN.last, switches, None)
    return state


def restore_process(state: ProcessState) -> None:
    """Put back what :func:`save_process` returned; what has not changed is left alone."""
    before = save_process()
    if before.environment is not state.environment:
        for name, value in _KNOWN.between(before.environment, state.environment):
            if value is None:
                os.unsetenv(name)
                del _ENVIRONMENT[name]
            else:
                os.putenv(name, value)
                _ENVIRONMENT[name] = value
        _KNOWN.last = state.environment
    if before.switches != state.switches:
        _switch(state.switches)
    _PARAMETRIZED._cache = {} if state.cached is None else state.cached  # noqa: SLF001


def forget_environments() -> None:
    """Drop what was kept of the environments of a run."""
    _KNOWN.changes.clear()


def _switches() -> tuple[Any, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        _FILLS.fill_uninitialized_memory,
        rounding(),
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        get_isolation(),
        _PARAMETRIZED._cache_enabled,  # noqa: SLF001 - depth of cached()
    )


def _switch(switches: tuple[Any, ...]) -> None:
    enabled, warn_only, fill, rounds, anomaly, check_nan, compiled, depth = switches
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    _FILLS.fill_uninitialized_memory = fill
    put_rounding(rounds)
    torch.autograd.set_detect_anomaly(anomaly, check_nan=check_nan)
    set_isolation(compiled)
    _PARAMETRIZED._cache_enabled = depth  # noqa: SLF001
