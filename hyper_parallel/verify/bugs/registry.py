"""Runnable programs with the bugs of the corpus; a framework is imported only when one of its programs is loaded."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from hyper_parallel._text import near_hint
from hyper_parallel.verify.bugs.facts import FACTS

__all__ = ["CALLS", "Bug", "bugs_named", "find_bugs"]

CALLS = "calls"
"""Kind of a difference in calls: ranks call different collectives, or a rank does not join one that others call."""


@dataclass(frozen=True)
class Bug:
    """A program with a documented bug that can be switched on.

    Attributes:
        framework: ``torch`` or ``mindspore``.
        name: name of its function.
        sentence: description of the error.
        source: repository and number of the public report.
        mesh: sizes by name of axis; their product is the number of ranks.
        kind: kind of the first wrong value, one of ``KINDS``, or :data:`CALLS`.
        tensor: pattern that the name of the first wrong value matches, as in ``fnmatch``: ``*`` if all values of the
            kind are wrong at once.
        cause: class of the error, one of ``CAUSES``.
        declared: placements that cannot be read or inferred, by pattern of names.
        module: module with the function, in the framework's folder.
        single_device_has_it: whether the broken form is also wrong on a single device, so that both forms are compared
            with the fixed form.
    """

    framework: str
    name: str
    sentence: str
    source: str
    mesh: Mapping[str, int]
    kind: str
    tensor: str
    cause: str
    declared: Mapping[str, str] = field(default_factory=dict)
    module: str = ""
    single_device_has_it: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh.values())

    def load(self) -> ModuleType:
        """Import the module of the program, and with it its framework."""
        return importlib.import_module(f"{__package__}.{self.framework}.{self.module}")

    def program(self, *, broken: bool) -> Callable[[], None]:
        """Return the training function of one form, which every rank calls without arguments."""
        train: Callable[[bool], None] = getattr(self.load(), self.name)

        def run() -> None:
            train(broken)

        run.__qualname__ = self.name  # the program's name in reports
        return run

    def reference(self, *, broken: bool) -> Callable[[], None]:
        """Return the function of the reference: the same form, or the fixed one if a single device also has the bug."""
        return self.program(broken=broken and not self.single_device_has_it)


def find_bugs(framework: str) -> list[Bug]:
    """Return the bugs that have a program in a framework, by name."""
    bugs = [
        Bug(
            framework, facts.name, facts.sentence, facts.source, facts.mesh, facts.kind,
            facts.other_tensors.get(framework, facts.tensor), facts.cause, facts.declared, facts.module,
            facts.single_device_has_it,
        )
        for facts in FACTS
        if framework in facts.frameworks
    ]  # fmt: skip
    return sorted(bugs, key=lambda bug: bug.name)


def bugs_named(frameworks: Sequence[str], names: Sequence[str] | None = None) -> list[Bug]:
    """Return the bugs with these names in all frameworks that have them; with no names, all bugs.

    Raises:
        ValueError: no bug has one of the names.
    """
    bugs = [bug for framework in frameworks for bug in find_bugs(framework)]
    known = sorted({bug.name for bug in bugs})
    for name in names or ():
        if name not in known:
            msg = f"no bug of {' or '.join(frameworks)} is called {name!r}{near_hint(name, known, 0.4)}"
            raise ValueError(msg)
    return [bug for bug in bugs if not names or bug.name in names]
