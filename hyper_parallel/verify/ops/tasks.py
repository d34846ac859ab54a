"""Makes and runs tasks: a task is a list of operators that one worker process checks, with the effort for each."""

from __future__ import annotations

import faulthandler
import gc
import pkgutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hyper_parallel._text import near_hint
from hyper_parallel.core.shard.rule import Rule, find_rule, rule_names
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.ops.audit_operator import audit_operator
from hyper_parallel.verify.ops.report import OperatorReport
from hyper_parallel.verify.ops.selection import Effort
from hyper_parallel.verify.ops.sweep import sweep_operator, sweep_user_operator
from hyper_parallel.verify.ops.user_operators import load_user_file, user_rules

__all__ = ["BATCH", "audit_tasks", "in_batches", "library_tasks", "run", "task_of"]

_SHARES = 2
_PARTS = {"torch": 1.0, "mindspore": 1.5}  # shares of the remaining time, per operator
_NESTED = "view"  # some of its rows are valid only if several axes shard the same dim
_AUDIT_SECONDS = 600.0  # limit for an operator that hangs; a busy machine stays below it
BATCH = 12
"""Operators per task: a quick operator takes less time than a worker needs to start and load its kernels."""

Send = Callable[[dict[str, Any]], None]


def task_of(
    platform: str,
    ops: list[str],
    effort: Effort,
    *,
    file: str | None = None,
    seconds: float = 120.0,
    share: float = 0.0,
) -> dict[str, Any]:
    """Return a task: operators that one worker sweeps one after the other.

    Args:
        platform: the framework.
        ops: canonical names, or names of the file's functions.
        effort: amount of checks.
        file: a user's file.
        seconds: time limit of one operator.
        share: weight of each operator in the division of the remaining time (:class:`TimeBudget`); 0 for operators
            whose time limit is ``effort.seconds``.
    """
    return {
        "platform": platform,
        "ops": ops,
        "effort": _effort_json(effort),
        "file": file,
        "seconds": seconds,
        "share": share,
    }


def library_tasks(platform: str, ops: Sequence[str], effort: Effort) -> list[dict[str, Any]]:
    """Return the tasks for the library's own operators.

    MindSpore's simulated ranks are processes that take seconds to start. Therefore one worker runs many operators on
    DTensors. An operator that kills a rank loses only its own results. With more than one choice of sizes, every
    operator is checked with as many choices as its share of the time allows.
    """
    full = effort.choices > 1
    each, share = (1, _PARTS[platform]) if full else (BATCH, 0.0)
    if platform != "mindspore":
        return [task_of(platform, batch, effort, share=share) for batch in in_batches(ops, each)]
    # A gradient costs ten times as much on MindSpore as on PyTorch. Rows that are missing from rules are searched on
    # PyTorch only: the rules are the same, and wrong candidates make kernels of MindSpore end the process.
    meshes = effort.meshes if full else effort.meshes[:1]
    slower = replace(effort, public=False, meshes=meshes, splits=1, missing=0)
    with_rows = [op for op in ops if isinstance(find_rule(op), Rule)]  # decompositions run on DTensors only
    by_rule = with_rows if effort.public else ops
    batches = in_batches([op for op in by_rule if op != _NESTED], each)
    tasks = [task_of(platform, batch, slower, share=share) for batch in batches]
    if _NESTED in by_rule:
        tasks.append(task_of(platform, [_NESTED], replace(slower, meshes=effort.meshes), share=share))
    if effort.public:
        alone = replace(effort, rule_level=False, choices=1, missing=0, separate=full)
        tasks = [task_of(platform, list(ops[start::_SHARES]), alone) for start in range(_SHARES)] + tasks
    return tasks


def audit_tasks(target: str, framework: str, ops: Sequence[str]) -> list[dict[str, Any]]:
    """Return tasks that audit ``ops`` of another library; see :mod:`hyper_parallel.verify.ops.audit`."""
    batches = in_batches(ops, BATCH)
    return [{**task_of(framework, batch, Effort(), seconds=_AUDIT_SECONDS), "target": target} for batch in batches]


def in_batches(ops: Sequence[str], each: int) -> list[list[str]]:
    """Return batches of operators; alphabetical neighbours, which have similar costs, are in different batches."""
    count = -(-len(ops) // each)
    return [list(ops[start::count]) for start in range(count)]


def _effort_json(effort: Effort) -> dict[str, Any]:
    """Return the effort as a JSON object; tuples become lists."""
    return dict(effort.__dict__)


def _effort(data: dict[str, Any]) -> Effort:
    """Rebuild the effort from the object that :func:`_effort_json` returned."""
    meshes = {
        name: None if data[name] is None else tuple(map(tuple, data[name])) for name in ("meshes", "public_meshes")
    }
    return Effort(**{**data, **meshes})


def run(task: dict[str, Any], send: Send) -> None:
    """Run a task: send one event when an operator starts, and one with its report."""
    warnings.simplefilter("ignore")
    gc.disable()  # a worker is short-lived, and its many small objects stay reachable
    effort = _effort(task["effort"])
    user_operators, ops = {}, task["ops"]
    faulthandler.dump_traceback_later(task["seconds"], exit=True)
    if task["file"] is not None:
        try:
            user_operators = load_user_file(task["platform"], task["file"])
        except InputError as error:
            send({"event": "refused", "why": str(error)})
            return
        declared = [*user_operators, *user_rules(task["platform"], task["file"])]
        ops = declared if ops == ["*"] else ops
        if why := _unknown(ops, declared, task):
            send({"event": "refused", "why": why})
            return
    for op in ops:
        send({"event": "start", "op": op})
        faulthandler.dump_traceback_later(task["seconds"], exit=True)
        report = _run_operator(task, op, effort, user_operators)
        send({"event": "report", "report": report.json()})
    faulthandler.cancel_dump_traceback_later()


def _unknown(ops: Sequence[str], declared: Sequence[str], task: dict[str, Any]) -> str:
    """Return an error message about operators that neither the user's file nor the library has, or an empty text."""
    unknown = [op for op in ops if op not in declared and op not in rule_names()]
    if not unknown:
        return ""
    names, hint = ", ".join(map(repr, unknown)), near_hint(unknown[0], [*declared, *rule_names()])
    has = f"it declares {', '.join(declared)}" if declared else "it declares no operator"
    where = f"{task['file']} on {task['platform']}"
    return f"--op: {where} has no {names}; {has}{hint}"


def _run_operator(task: dict[str, Any], op: str, effort: Effort, user_operators: dict[str, Any]) -> Any:
    """Return the report of one operator, of the kind that the task requests."""
    if "target" in task:
        return audit_operator(task["target"], op)
    if "function" in task:  # function that runs an operator, as ``package.module:name``
        return pkgutil.resolve_name(task["function"])(task, op)
    return _sweep(task, op, effort, user_operators)


def _sweep(task: dict[str, Any], op: str, effort: Effort, user_operators: dict[str, Any]) -> OperatorReport:
    platform = task["platform"]
    if op in user_operators:
        return sweep_user_operator(platform, user_operators[op], effort)
    return sweep_operator(platform, op, effort)
