"""The committed baseline: what each file reached, and which files may still be below their floor, with the reason."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workshop.coverage.gates import exceptions_over, percent
from workshop.coverage.settings import Settings
from workshop.coverage.store import Store

__all__ = ["Baseline", "read_baseline", "write_baseline"]

_KEYS = {"exceptions", "files"}


@dataclass(frozen=True)
class Baseline:
    """The baseline of one environment.

    Attributes:
        files: file to the percentage that it reached, below which it may not fall.
        exceptions: file to the reason why it may be below its floor.
    """

    files: dict[str, float] = field(default_factory=dict)
    exceptions: dict[str, str] = field(default_factory=dict)


def read_baseline(path: Path, environment: str) -> Baseline:
    """Return the baseline of an environment; empty if there is none.

    Raises:
        ValueError: the file is no baseline, or an exception has no reason.
    """
    entry: Any = _read(path).get(environment, {})
    if not isinstance(entry, dict) or not set(entry) <= _KEYS:
        msg = f"{path}: {environment} must have `files` and `exceptions` only"
        raise ValueError(msg)
    reasons = entry.get("exceptions", {})
    for name, reason in reasons.items():
        if not str(reason or "").strip():
            msg = f"{path}: {environment}: the exception of {name} has no reason"
            raise ValueError(msg)
    return Baseline(entry.get("files", {}), reasons)


def write_baseline(store: Store, settings: Settings, environment: str, *, lower: bool = False) -> list[str]:
    """Raise the baseline of ``environment`` to its report.

    Exceptions are only dropped: with their files, or when they reach their floor. New ones, with reasons, are written
    by hand.

    Args:
        store: has the report.
        settings: name the file of the baseline.
        environment: of the report.
        lower: write lower numbers too; without it, no file that exists is lowered.

    Returns:
        one line per file that was lowered.
    """
    path = store.root / settings.baseline
    before = read_baseline(path, environment)
    report = store.report(environment)
    now = {name: math.floor(100 * percent(entry["summary"])) / 100 for name, entry in report["files"].items()}
    kept = {name: value for name, value in before.files.items() if (store.root / name).exists()}
    files = now if lower else {name: max(kept.get(name, 0.0), now.get(name, 0.0)) for name in {*kept, *now}}
    over = exceptions_over(report, settings.environment(environment), before.exceptions)
    exceptions = {
        name: why for name, why in before.exceptions.items() if (store.root / name).exists() and name not in over
    }
    whole = {**_read(path), environment: {"exceptions": exceptions, "files": files}}
    path.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    fallen = sorted(name for name, value in kept.items() if files.get(name, 0.0) < value)
    return [f"{name}: lowered from {kept[name]:.2f} % to {files.get(name, 0.0):.2f} %" for name in fallen]


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        whole: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        msg = f"{path} is not JSON: {error}"
        raise ValueError(msg) from error
    return whole
