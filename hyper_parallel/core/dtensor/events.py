"""The event log: which collectives ran, for which operator and why; ``strict()`` and ``implicit_budget()``.

State is in context variables, so each rank and thread has its own. Without a watcher, a redistribution that
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
    from collections.abc import Callable, Iterator

    from hyper_parallel.core.dtensor.transition import Transition

__all__ = [
    "Cause",
    "Event",
    "EventLog",
    "PendingRedistribution",
    "Watcher",
    "implicit_budget",
    "module_path",
    "module_scope",
    "notify",
    "record_events",
    "set_module_path",
    "strict",
    "watchers",
    "watching",
]  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """Why a redistribution runs.

    Attributes:
        op: the operator that needs it.
        argument: name of the operator's argument.
        implicit: True if the library decided on it, False if the program requested it.
    """

    op: str
    argument: str
    implicit: bool = False


_EXPLICIT = Cause("redistribute", "self")


@dataclass(frozen=True)
class Event:
    """One collective of a redistribution.

    Attributes:
        step: training step, as counted by :meth:`EventLog.next_step`.
        module: path of the module whose forward needed it; its backward events carry the same path.
        op: the operator that needed it.
        argument: name of the operator's argument.
        source: layout before, such as ``f32[7, 5@tp]``.
        target: layout after.
        collective: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``exchange`` or
            ``reduce_exchange``.
        bytes: bytes that the worst rank receives.
        axes: names of the mesh axes that it runs over.
        phase: ``forward`` or ``backward``.
        implicit: True if the library decided on it, False if the program requested it.
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
        """Return the event in one line."""
        implicit = " implicit" if self.implicit else ""
        return (
            f"{self.phase} {self.op}({self.argument}): {self.collective} over {', '.join(self.axes)}, "
            f"{self.bytes} bytes{implicit}: {self.source} -> {self.target}"
        )


@dataclass(frozen=True)
class PendingRedistribution:
    """A redistribution that is about to communicate.

    Attributes:
        transition: steps of the redistribution.
        dtype: dtype of the local tensor.
        itemsize: bytes per element.
        cause: the reason why it runs; None for an explicit ``redistribute``.
        module: path of the module that runs, or ``""``.
        phase: ``forward`` or ``backward``.
    """

    transition: Transition
    dtype: object
    itemsize: int
    cause: Cause | None
    module: str
    phase: str

    @property
    def is_implicit(self) -> bool:
        """True if the library decided on it in forward; what backward communicates follows from the forward."""
        return self.cause is not None and self.cause.implicit and self.phase == "forward"

    def describe(self) -> str:
        """Return one line, such as ``matmul(other): f32[7, 5@tp] -> f32[7, 5], 70 bytes (all_gather over tp)``."""
        cause = self.cause or _EXPLICIT
        steps = "; ".join(
            f"{step.collective} over {', '.join(_names(self.transition, step.axes))}"
            for step in self.transition.steps
            if step.received
        )
        where = f"{self.module}: " if self.module else ""
        source, target = self.transition.source, self.transition.target
        return (
            f"{where}{cause.op}({cause.argument}): {source.notation(self.dtype)} -> {target.notation(self.dtype)}, "
            f"{self.transition.cost(self.itemsize).bytes} bytes ({steps})"
        )

    def fix(self) -> str:
        """Return the line of code that makes it explicit."""
        name = (self.cause or _EXPLICIT).argument
        return f"{name} = {name}.redistribute(placements={list(self.transition.target.placements)})"


class Watcher(Protocol):
    """Is notified of every redistribution that communicates, before it runs."""

    def on_redistribution(self, redistribution: PendingRedistribution) -> None:
        """Take note of ``redistribution``, or raise to prevent it."""


class EventLog:
    """The collectives in the order in which they ran; ``print`` shows them by module.

    Attributes:
        step: training step of new events.
    """

    def __init__(self) -> None:
        self.step = 0
        self._events: list[Event] = []

    def next_step(self) -> None:
        """Start the next training step; later events belong to it."""
        self.step += 1

    def on_redistribution(self, redistribution: PendingRedistribution) -> None:
        """Add one event per collective of ``redistribution``."""
        self._events.extend(_events(redistribution, self.step))

    def __iter__(self) -> Iterator[Event]:
        """Iterate over the events, oldest first."""
        return iter(tuple(self._events))

    def __len__(self) -> int:
        """Number of events."""
        return len(self._events)

    def __getitem__(self, index: int) -> Event:
        """Return the event of that index."""
        return self._events[index]

    def collectives(self, phase: str | None = None) -> list[str]:
        """Return the names of the collectives in order, of one phase or of both."""
        return [event.collective for event in self._events if phase in (None, event.phase)]

    def total_bytes(self, phase: str | None = None) -> int:
        """Return the sum of the bytes of the events, of one phase or of both."""
        return sum(event.bytes for event in self._events if phase in (None, event.phase))

    def __str__(self) -> str:
        """Return the events as a tree by module path, with a line of totals."""
        lines: list[str] = []
        shown: tuple[str, ...] = ()
        # Stable sort: events of one module stay in the order in which they ran.
        for event in sorted(self._events, key=lambda event: event.module.split(".")):
            path = tuple(event.module.split(".")) if event.module else ()
            lines.extend("  " * depth + path[depth] for depth in range(_common_prefix_length(path, shown), len(path)))
            lines.append("  " * len(path) + str(event))
            shown = path
        return "\n".join([*lines, f"{len(self)} collectives, {self.total_bytes()} bytes"])


class _Strict:
    """Forbids implicit redistributions."""

    def on_redistribution(self, redistribution: PendingRedistribution) -> None:
        """Raise on an implicit redistribution."""
        if redistribution.is_implicit:
            msg = (
                f"strict(): implicit redistribution in {redistribution.describe()}; make it explicit: "
                f"{redistribution.fix()}"
            )
            raise StrictModeError(msg)


class _Budget:
    """Forbids implicit redistributions once they add up to more than ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.spent = limit, 0

    def on_redistribution(self, redistribution: PendingRedistribution) -> None:
        """Add the bytes of an implicit redistribution; raise beyond the limit."""
        if not redistribution.is_implicit:
            return
        self.spent += redistribution.transition.cost(redistribution.itemsize).bytes
        if self.spent > self.limit:
            msg = (
                f"implicit_budget({self.limit}): {self.spent} bytes with the implicit redistribution in "
                f"{redistribution.describe()}; make it explicit: {redistribution.fix()}"
            )
            raise StrictModeError(msg)


_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("hyper_parallel_watchers", default=())
_MODULE: ContextVar[str] = ContextVar("hyper_parallel_module", default="")


@contextmanager
def record_events() -> Iterator[EventLog]:
    """Log every collective of redistributions inside the block, forward and backward.

    The log stays readable after the block. A redistribution that :func:`strict` or :func:`implicit_budget` forbids is
    not logged, whichever block is the outer one.
    """
    log = EventLog()
    with watching(log):
        yield log


@contextmanager
def strict() -> Iterator[None]:
    """Raise StrictModeError on any implicit redistribution that communicates inside the block.

    Communication in backward follows from the forward and is not forbidden.
    """
    with watching(_Strict()):
        yield


@contextmanager
def implicit_budget(limit: int) -> Iterator[None]:
    """Raise StrictModeError once a rank has received more than ``limit`` bytes in implicit redistributions.

    Args:
        limit: bytes per rank inside the block.
    """
    with watching(_Budget(limit)):
        yield


@contextmanager
def module_scope(path: str) -> Iterator[None]:
    """Make ``path`` the path of the module that runs inside the block; an inner block replaces an outer one."""
    token = _MODULE.set(path)
    try:
        yield
    finally:
        _MODULE.reset(token)


def set_module_path(path: str) -> None:
    """Make ``path`` the path of the module that runs from now on; for hooks, which cannot keep a block open."""
    _MODULE.set(path)


# Bound methods of the context variables instead of functions, because every operation calls them.
module_path: Callable[[], str] = _MODULE.get
"""Return the path of the module that runs, or ``""``."""
watchers: Callable[[], tuple[Watcher, ...]] = _WATCHERS.get
"""Return the watchers of this context, usually none."""


def notify(notified: tuple[Watcher, ...], redistribution: PendingRedistribution) -> None:
    """Notify watchers of a redistribution; event logs come last, after watchers that may forbid it.

    Raises:
        StrictModeError: a watcher forbids it.
    """
    for watcher in sorted(notified, key=lambda watcher: isinstance(watcher, EventLog)):
        watcher.on_redistribution(redistribution)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Notify ``watcher`` of every redistribution that communicates inside the block."""
    token = _WATCHERS.set((*_WATCHERS.get(), watcher))
    try:
        yield
    finally:
        _WATCHERS.reset(token)


def _events(redistribution: PendingRedistribution, training_step: int) -> Iterator[Event]:
    cause = redistribution.cause or _EXPLICIT
    for step in redistribution.transition.steps:
        if step.received:
            yield Event(
                step=training_step,
                module=redistribution.module,
                op=cause.op,
                argument=cause.argument,
                source=step.source.notation(redistribution.dtype),
                target=step.target.notation(redistribution.dtype),
                collective=step.collective,
                bytes=step.received * redistribution.itemsize,
                axes=_names(redistribution.transition, step.axes),
                phase=redistribution.phase,
                implicit=cause.implicit,
            )


def _common_prefix_length(path: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Return the length of the common prefix."""
    equal = itertools.takewhile(lambda names: names[0] == names[1], zip(path, other, strict=False))
    return len(list(equal))


def _names(transition: Transition, axes: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(transition.source.mesh.names[axis] for axis in axes)
