"""Two reports of one command side by side: what got worse, what got better, and what only one of them has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.verify.report_files import read_json, reading

__all__ = ["Change", "Comparison", "compare_reports"]

_SLOWER = 1.25
"""Ratio from which a measured time is called worse; less is the machine's own noise."""

_NOISE = "noise"

_COMMAND = "hyper-parallel ... --report FILE.json"


@dataclass(frozen=True)
class Change:
    """One value that differs between two reports.

    Attributes:
        what: such as ``add on torch: checks``.
        before: value of the first report, or ``absent``.
        after: that of the second.
        verdict: ``worse``, ``better``, or ``other`` for what only the second report has.
    """

    what: str
    before: str
    after: str
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """What differs between two reports.

    Attributes:
        headers: of both, where they have one.
        equal: number of values that are the same.
        changes: what is worse comes first.
    """

    headers: tuple[dict[str, Any], dict[str, Any]]
    equal: int
    changes: tuple[Change, ...]

    @property
    def worse(self) -> tuple[Change, ...]:
        """What got worse."""
        return tuple(change for change in self.changes if change.verdict == "worse")

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing got worse."""
        return not self.worse and self.equal + len(self.changes) > 0

    def json(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        changes = [asdict(change) for change in self.changes]
        return {"ok": self.ok, "headers": list(self.headers), "equal": self.equal, "changes": changes}

    def text(self) -> str:
        """Return the comparison for a terminal."""
        lines = [f"{change.verdict:6}  {change.what}: {change.before} -> {change.after}" for change in self.changes]
        return "\n".join([*lines, f"{len(self.worse)} worse, {len(self.changes)} changed, {self.equal} equal"])


def compare_reports(before: Path, after: Path) -> Comparison:
    """Compare two reports of ``verify ops``, ``verify model``, ``verify mutants``, ``bench`` or ``coverage gate``.

    Args:
        before: JSON of the first run.
        after: JSON of the second one.

    Raises:
        ValueError: a file is no such report, or they are of different commands.
    """
    documents = [read_json(path, (), _COMMAND) for path in (before, after)]
    with reading(before, after):
        (first_kind, first), (second_kind, second) = map(_values, documents)
    for path, kind in ((before, first_kind), (after, second_kind)):
        if not kind:
            msg = f"{path} is no report that can be compared: those of verify ops, verify model, verify mutants, bench"
            raise ValueError(f"{msg} and coverage gate can")
    if first_kind != second_kind:
        msg = f"{before} is a report of {first_kind}, {after} one of {second_kind}: compare two of one command"
        raise ValueError(msg)
    names = list(dict.fromkeys([*first, *second]))
    differing = [name for name in names if first.get(name) != second.get(name)]
    with reading(before, after):
        compared = [_change(name, first.get(name), second.get(name)) for name in differing]
    changes = [change for change in compared if change.verdict != _NOISE]
    changes.sort(key=lambda change: ("worse", "better", "other").index(change.verdict))
    headers = tuple(dict(document.get("header", {})) for document in documents)
    return Comparison((headers[0], headers[1]), len(names) - len(changes), tuple(changes))


@dataclass(frozen=True)
class _Value:
    """A value with what is good: ``more``, ``less``, a ``time``, or one of an order of words, best first."""

    value: Any
    good: str | tuple[str, ...]


def _values(document: Mapping[str, Any]) -> tuple[str, dict[str, _Value]]:
    """Return the command of a report, and its values by name."""
    for kind, (needed, values) in _KINDS.items():
        if needed <= set(document):
            return kind, dict(values(document))
    return "", {}


def _operators(document: Mapping[str, Any]) -> Iterator[tuple[str, _Value]]:
    for operator in document["operators"]:
        name = f"{operator['op']} on {operator['platform']}"
        yield (
            f"{name}: outcome",
            _Value(operator["outcome"], ("ok", "exempt", "absent", "unexercised", "crash", "wrong")),
        )
        yield f"{name}: checks", _Value(operator["checks"], "more")
        for column, content in operator["coverage"].items():
            state = _Value(content["state"], ("checked", "not applicable", "not exercised"))
            yield f"{name}: {column}", state


def _models(document: Mapping[str, Any]) -> Iterator[tuple[str, _Value]]:
    for run in document["runs"]:
        name = f"{run['name']} on {run['platform']} ({run['launch']})"
        yield f"{name}: equal", _Value("yes" if run["ok"] else "no", ("yes", "no"))


def _mutants(document: Mapping[str, Any]) -> Iterator[tuple[str, _Value]]:
    yield "score", _Value(document["score"], "more")
    yield "survived", _Value(document["survived"], "less")


def _rows(document: Mapping[str, Any]) -> Iterator[tuple[str, _Value]]:
    for row in document["rows"]:
        yield f"{row['name']}: in budget", _Value("yes" if row["ok"] else "no", ("yes", "no"))
        yield row["name"], _Value(row["ratio"] if "ratio" in row else row["seconds"], "time")


def _gate(document: Mapping[str, Any]) -> Iterator[tuple[str, _Value]]:
    name = document["name"]
    yield f"{name}: covered", _Value(document["total"], "more")
    yield f"{name}: ranks", _Value(document["ranks"], "more")
    yield f"{name}: gates", _Value("held" if document["ok"] else "failed", ("held", "failed"))


_KINDS = {
    "verify ops": ({"columns", "operators"}, _operators),
    "verify model": ({"runs"}, _models),
    "verify mutants": ({"survivors", "score"}, _mutants),
    "bench": ({"rows"}, _rows),
    "coverage gate": ({"total", "failures", "ranks"}, _gate),
}
"""Commands by the keys of their reports, and what is compared of each."""


def _change(what: str, before: _Value | None, after: _Value | None) -> Change:
    if before is None or after is None:
        # What is no longer reported is no longer checked.
        return Change(what, _shown(before), _shown(after), "worse" if after is None else "other")
    if isinstance(before.good, tuple):
        ranks = [before.good.index(value.value) for value in (before, after)]
        got_worse = ranks[1] > ranks[0]
    elif before.good == "more":
        got_worse = after.value < before.value
    else:
        got_worse = after.value > before.value
    return Change(what, _shown(before), _shown(after), _verdict(before, after, got_worse=got_worse))


def _verdict(before: _Value, after: _Value, *, got_worse: bool) -> str:
    if before.good == "time" and max(before.value, after.value) < _SLOWER * min(before.value, after.value):
        return _NOISE
    return "worse" if got_worse else "better"


def _shown(value: _Value | None) -> str:
    if value is None:
        return "absent"
    return f"{value.value:.4g}" if isinstance(value.value, float) else str(value.value)
