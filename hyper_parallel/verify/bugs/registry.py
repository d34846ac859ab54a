"""Finds the programs of the corpus and reads their facts from the source, without importing a framework."""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hyper_parallel._text import near_hint
from hyper_parallel.verify.engine.causes import CAUSES
from hyper_parallel.verify.frameworks.contract.records import KINDS

__all__ = ["CALLS", "Bug", "bugs_named", "find_bugs"]

CALLS = "calls"
"""Kind of a difference that is no value: ranks call different collectives, or one that another has not joined."""

_FOLDER = Path(__file__).parent
_FIRST = re.compile(r"(?P<sentence>.+\.) Reported in (?P<source>.+)\.", re.DOTALL)
_FACTS = ("MESH", "DIFFERS", "CAUSE")


@dataclass(frozen=True)
class Bug:
    """A program with a documented bug that can be switched on.

    Attributes:
        framework: ``torch`` or ``mindspore``.
        name: of its module.
        sentence: what goes wrong.
        source: repository and number of the public report.
        mesh: sizes by name of axis; their product is the number of ranks.
        kind: of the first wrong value, one of ``KINDS``, or :data:`CALLS`.
        tensor: pattern that the name of the first wrong value matches, as in ``fnmatch``: ``*`` where all values of the
            kind are wrong at once.
        cause: class of the error, one of ``CAUSES``.
        declared: placements that cannot be read or inferred, by pattern of names.
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

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh.values())

    def load(self) -> ModuleType:
        """Import the program, and its framework with it."""
        return importlib.import_module(f"{__package__}.{self.framework}.{self.name}")

    def program(self, *, broken: bool) -> Callable[[], None]:
        """Return the training function of one form, which every rank calls without arguments."""
        train: Callable[[bool], None] = self.load().train

        def run() -> None:
            train(broken)

        run.__qualname__ = self.name  # what reports call the program
        return run

    def reference(self, *, broken: bool) -> Callable[[], None]:
        """Return what the world of one runs beside a form: ``single`` if the file has it, else the same form."""
        single: Callable[[], None] | None = getattr(self.load(), "single", None)
        return single or self.program(broken=broken)


def find_bugs(framework: str) -> list[Bug]:
    """Return the bugs of a framework's folder, by name.

    Raises:
        ValueError: a program lacks a fact, or has one that does not exist.
    """
    files = sorted((_FOLDER / framework).glob("*.py"))
    return [read_facts(path, framework) for path in files if path.stem != "__init__"]


def bugs_named(frameworks: Sequence[str], names: Sequence[str] | None = None) -> list[Bug]:
    """Return the bugs of these names in all frameworks that have them, or all bugs without names.

    Raises:
        ValueError: there is none of a name.
    """
    bugs = [bug for framework in frameworks for bug in find_bugs(framework)]
    known = sorted({bug.name for bug in bugs})
    for name in names or ():
        if name not in known:
            msg = f"no bug of {' or '.join(frameworks)} is called {name!r}{near_hint(name, known, 0.4)}"
            raise ValueError(msg)
    return [bug for bug in bugs if not names or bug.name in names]


def read_facts(path: Path, framework: str) -> Bug:
    """Return the bug in a file.

    Raises:
        ValueError: the file lacks a fact, or has one that does not exist.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), path.name)
    first = _FIRST.fullmatch((ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " "))
    facts = _literals(tree)
    missing = [name for name in _FACTS if name not in facts]
    if first is None or missing:
        lacks = ", ".join(missing) or "a docstring like 'What goes wrong. Reported in REPOSITORY NUMBER.'"
        raise ValueError(f"{path}: the program has no {lacks}")
    (kind, tensor), cause = facts["DIFFERS"], facts["CAUSE"]
    if kind not in (*KINDS, CALLS):
        raise ValueError(f"{path}: DIFFERS has the kind {kind!r}; there are {', '.join((*KINDS, CALLS))}")
    if cause not in CAUSES:
        raise ValueError(f"{path}: CAUSE is {cause!r}; there are {', '.join(CAUSES)}")
    return Bug(framework, path.stem, first["sentence"], first["source"], facts["MESH"], kind, tensor or "*", cause,
               facts.get("DECLARED", {}))  # fmt: skip


def _literals(tree: ast.Module) -> dict[str, Any]:
    """Return the facts that the module assigns, by name."""
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in (*_FACTS, "DECLARED")
    }
