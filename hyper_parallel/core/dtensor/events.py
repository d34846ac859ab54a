"""The event log: which collectives ran, for whom and why; and the two ways to forbid the unasked ones.

Everything lives in context variables, so ranks and threads do not see each other. With no watcher active a plan that
communicates costs one look-up.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hyper_parallel.errors import StrictModeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hyper_parallel.core.dtensor.transition import Transition

__all__ = ["Cause", "Event", "EventLog", "Occurrence", "Watcher", "announce", "enter_module", "implicit_budget",
           "module_path", "module_scope", "record_events", "strict", "watchers", "watching"]  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """Who asked for a redistribution.

    Args:
        op: operator.
        argument: name of its argument.
        implicit: True when the library decided, False when the program said so.
    """

    op: str
    argument: str
    implicit: bool = False


_EXPLICIT = Cause("redistribute", "self")


@dataclass(frozen=True)
class Event:
    """One collective.

    Attributes:
        step: training step, as counted by :meth:`EventLog.next_step`.
        module: path of the module whose forward asked for it; its backward events carry the same path.
        op: operator.
        argument: its argument.
        source: layout before, in the one notation.
        target: layout after.
        collective: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``exchange`` or
            ``reduce_exchange``.
        bytes: what the worst rank receives.
        axes: names of the mesh axes that it runs over.
        phase: ``forward`` or ``backward``.
        implicit: True when the library decided on it.
    """

    step: int
    module: str
    op: str
    argument: str
    source: str
    target: str
    collective: str
    bytes: int
    axes: tuple[str, ...]
    phase: str
    implicit: bool

    def __str__(self) -> str:
        """One line."""
        asked = " implicit" if self.implicit else ""
        return (
            f"{self.phase} {self.op}({self.argument}): {self.collective} over {', '.join(self.axes)}, "
            f"{self.bytes} bytes{asked}: {self.source} -> {self.target}"
        )


@dataclass(frozen=True)
class Occurrence:
    """A plan about to communicate."""

    plan: Transition
    dtype: object
    itemsize: int
    cause: Cause | None
    module: str
    phase: str

    @property
    def unasked(self) -> bool:
        """True when the library decided on it in forward; backward only repays what forward did."""
        return self.cause is not None and self.cause.implicit and self.phase == "forward"

    def describe(self) -> str:
        """``matmul(other): f32[7, 5@tp] -> f32[7, 5], 70 bytes (all_gather over tp)``, with the module in front."""
        cause = self.cause or _EXPLICIT
        moves = [(step.collective, _names(self.plan, step.axes)) for step in self.plan.steps if step.received]
        steps = "; ".join(f"{collective} over {', '.join(axes)}" for collective, axes in moves)
        where = f"{self.module}: " if self.module else ""
        return (
            f"{where}{cause.op}({cause.argument}): {self.plan.source.notation(self.dtype)} -> "
            f"{self.plan.target.notation(self.dtype)}, {self.plan.cost(self.itemsize).bytes} bytes ({steps})"
        )

    def fix(self) -> str:
        """The line that makes it explicit."""
        name = (self.cause or _EXPLICIT).argument
        return f"{name} = {name}.redistribute(placements={list(self.plan.target.placements)})"


class Watcher(Protocol):
    """Hears of every plan that communicates, before it does."""

    def hear(self, occurrence: Occurrence) -> None:
        """Take note, or raise to prevent it."""


class EventLog:
    """Collectives in the order in which they ran; printing it shows them by module.

    Attributes:
        step: number that new events carry.
    """

    def __init__(self) -> None:
        self.step = 0
        self._events: list[Event] = []

    def next_step(self) -> None:
        """From here on events belong to the next training step."""
        self.step += 1

    def hear(self, occurrence: Occurrence) -> None:
        """Add one event per collective of the plan."""
        self._events.extend(_events(occurrence, self.step))

    def __iter__(self) -> Iterator[Event]:
        """Events, oldest first."""
        return iter(tuple(self._events))

    def __len__(self) -> int:
        """Number of events."""
        return len(self._events)

    def __getitem__(self, index: int) -> Event:
        """One event."""
        return self._events[index]

    def collectives(self, phase: str | None = None) -> list[str]:
        """Names of the collectives in order, of one phase or of both."""
        return [event.collective for event in self._events if phase in (None, event.phase)]

    def total_bytes(self, phase: str | None = None) -> int:
        """Sum of the events' bytes, of one phase or of both."""
        return sum(event.bytes for event in self._events if phase in (None, event.phase))

    def __str__(self) -> str:
        """A tree by module path."""
        lines: list[str] = []
        shown: tuple[str, ...] = ()
        # Stable sort: within one module the order is the order of running.
        for event in sorted(self._events, key=lambda one: one.module.split(".")):
            path = tuple(event.module.split(".")) if event.module else ()
            lines.extend("  " * depth + path[depth] for depth in range(_common(path, shown), len(path)))
            lines.append("  " * len(path) + str(event))
            shown = path
        return "\n".join([*lines, f"{len(self)} collectives, {self.total_bytes()} bytes"])


class _Strict:
    """Forbids what nobody asked for."""

    def hear(self, occurrence: Occurrence) -> None:
        """Raise on an implicit redistribution."""
        if occurrence.unasked:
            msg = f"strict(): implicit redistribution in {occurrence.describe()}; make it explicit: {occurrence.fix()}"
            raise StrictModeError(msg)


class _Budget:
    """Forbids what nobody asked for once it adds up to more than ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.spent = limit, 0

    def hear(self, occurrence: Occurrence) -> None:
        """Count, and raise beyond the limit."""
        if not occurrence.unasked:
            return
        self.spent += occurrence.plan.cost(occurrence.itemsize).bytes
        if self.spent > self.limit:
            msg = (
                f"implicit_budget({self.limit}): {self.spent} bytes with the implicit redistribution in "
                f"{occurrence.describe()}; make it explicit: {occurrence.fix()}"
            )
            raise StrictModeError(msg)


_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("hyper_parallel_watchers", default=())
_MODULE: ContextVar[str] = ContextVar("hyper_parallel_module", default="")


@contextmanager
def record_events() -> Iterator[EventLog]:
    """Log every collective of redistributions inside, forward and backward; the log stays readable afterwards.

    The log tells what happened: a redistribution that :func:`strict` or :func:`implicit_budget` forbids is shown in
    their message, and not here, wherever the blocks are opened.
    """
    log = EventLog()
    with watching(log):
        yield log


@contextmanager
def strict() -> Iterator[None]:
    """Raise StrictModeError on any implicit redistribution that communicates.

    What an operation's backward must communicate follows from its forward and is not forbidden.
    """
    with watching(_Strict()):
        yield


@contextmanager
def implicit_budget(limit: int) -> Iterator[None]:
    """Raise StrictModeError once implicit redistributions have received more than ``limit`` bytes per rank."""
    with watching(_Budget(limit)):
        yield


@contextmanager
def module_scope(path: str) -> Iterator[None]:
    """Name the module that runs; an inner scope replaces the outer one."""
    token = _MODULE.set(path)
    try:
        yield
    finally:
        _MODULE.reset(token)


def enter_module(path: str) -> None:
    """From here on in this context the module ``path`` runs; for hooks, which cannot hold a ``with`` block open."""
    _MODULE.set(path)


def module_path() -> str:
    """Path of the module that runs, or ``""``."""
    return _MODULE.get()


def watchers() -> tuple[Watcher, ...]:
    """Who listens here; nearly always nobody."""
    return _WATCHERS.get()


def announce(listening: tuple[Watcher, ...], occurrence: Occurrence) -> None:
    """Tell the watchers; those that may forbid it are asked first.

    Raises:
        StrictModeError: a watcher forbids it.
    """
    for watcher in sorted(listening, key=lambda one: isinstance(one, EventLog)):
        watcher.hear(occurrence)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Let ``watcher`` hear of every plan that communicates inside."""
    token = _WATCHERS.set((*_WATCHERS.get(), watcher))
    try:
        yield
    finally:
        _WATCHERS.reset(token)


def _events(occurrence: Occurrence, step: int) -> Iterator[Event]:
    cause = occurrence.cause or _EXPLICIT
    for move in occurrence.plan.steps:
        if move.received:
            yield Event(
                step=step,
                module=occurrence.module,
                op=cause.op,
                argument=cause.argument,
                source=move.source.notation(occurrence.dtype),
                target=move.target.notation(occurrence.dtype),
                collective=move.collective,
                bytes=move.received * occurrence.itemsize,
                axes=_names(occurrence.plan, move.axes),
                phase=occurrence.phase,
                implicit=cause.implicit,
            )


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Length of the common beginning."""
    return sum(all_equal for all_equal in itertools.accumulate(map(str.__eq__, one, other), bool.__and__))


def _names(plan: Transition, axes: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(plan.source.mesh.names[axis] for axis in axes)
