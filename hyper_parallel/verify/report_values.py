"""The values of a command's report by name, with their preferred direction: for comparisons and for trends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["COMMANDS", "Measured", "report_totals", "report_values"]


COMMANDS = "verify ops, verify model, mutants, bench, fuzz, seeded and coverage gate"
"""Commands whose reports have values, for messages."""


@dataclass(frozen=True)
class Measured:
    """A value of a report.

    Attributes:
        value: a number or a word.
        good: ``more``, ``less``, ``time`` (less, with noise), or an order of words, best first.
    """

    value: Any
    good: str | tuple[str, ...]


def report_values(document: Mapping[str, Any]) -> tuple[str, dict[str, Measured]]:
    """Return the command that wrote a report, and its values by name; ``""`` for none of :data:`COMMANDS`."""
    kind = _kind(document)
    return kind, dict(_KINDS[kind][1](document)) if kind else {}


def report_totals(document: Mapping[str, Any]) -> dict[str, Measured]:
    """Return the main values of a report, whose trend is followed over many runs; empty for other commands."""
    kind = _kind(document)
    return dict(_KINDS[kind][2](document)) if kind else {}


def _kind(document: Mapping[str, Any]) -> str:
    return next((kind for kind, (needed, _, _) in _KINDS.items() if needed <= set(document)), "")


def _operators(document: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    for operator in document["operators"]:
        name = f"{operator['op']} on {operator['platform']}"
        yield (
            f"{name}: outcome",
            Measured(operator["outcome"], ("ok", "exempt", "absent", "unexercised", "crash", "wrong")),
        )
        yield f"{name}: checks", Measured(operator["checks"], "more")
        for column, content in operator["coverage"].items():
            state = Measured(content["state"], ("checked", "not applicable", "not exercised"))
            yield f"{name}: {column}", state


def _models(document: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    for run in document["runs"]:
        name = f"{run['name']} on {run['platform']} ({run['launch']})"
        yield f"{name}: equal", Measured("yes" if run["ok"] else "no", ("yes", "no"))


def _mutants(document: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    yield "score", Measured(document["score"], "more")
    yield "survived", Measured(document["survived"], "less")


def _rows(document: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    for row in document["rows"]:
        yield f"{row['name']}: in budget", Measured("yes" if row["ok"] else "no", ("yes", "no"))
        yield row["name"], Measured(row["ratio"] if "ratio" in row else row["seconds"], "time")


def _fuzz(document: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    for framework, counts in document["outcomes"].items():
        yield f"random programs on {framework}", Measured(sum(counts.values()), "more")
        for outcome in ("wrong", "internal error", "hang"):
            yield f"random programs on {framework}: {outcome}", Measured(counts[outcome], "less")


def _seeded(document: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    for size, count in document["found"].items():
        yield f"seeded bugs found in {size} models", Measured(count, "more")
    yield "seeded bugs found in full models only", Measured(len(document["missed"]), "less")


def _gate(document: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    name = document["name"]
    yield f"{name}: covered", Measured(document["total"], "more")
    yield f"{name}: ranks", Measured(document["ranks"], "more")
    yield f"{name}: gates", Measured("held" if document["ok"] else "failed", ("held", "failed"))


def _operator_totals(document: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    for platform in sorted({operator["platform"] for operator in document["operators"]}):
        here = [operator for operator in document["operators"] if operator["platform"] == platform]
        yield f"operators on {platform}: checks", Measured(sum(operator["checks"] for operator in here), "more")
        for outcome, good in (("ok", "more"), ("wrong", "less"), ("crash", "less"), ("unexercised", "less")):
            count = sum(operator["outcome"] == outcome for operator in here)
            yield f"operators on {platform}: {outcome}", Measured(count, good)


def _model_totals(document: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    for platform in sorted({run["platform"] for run in document["runs"]}):
        here = [run for run in document["runs"] if run["platform"] == platform]
        yield f"models on {platform}: equal", Measured(sum(bool(run["ok"]) for run in here), "more")
        yield f"models on {platform}: not equal", Measured(sum(not run["ok"] for run in here), "less")


_KINDS = {
    "verify ops": ({"columns", "operators"}, _operators, _operator_totals),
    "verify model": ({"runs"}, _models, _model_totals),
    "mutants": ({"survivors", "score"}, _mutants, _mutants),
    "bench": ({"rows"}, _rows, _rows),
    "fuzz": ({"programs", "outcomes", "steps"}, _fuzz, _fuzz),
    "seeded": ({"seeded", "missed", "outcomes"}, _seeded, _seeded),
    "coverage gate": ({"total", "failures", "ranks"}, _gate, _gate),
}
"""Commands by the keys of their reports, with the values that are compared and those that are followed over many
runs.
"""
