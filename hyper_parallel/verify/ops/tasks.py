"""What a child does: one task, its findings streamed as they come."""

from __future__ import annotations

import difflib
import faulthandler
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hyper_parallel.core.shard.rule import Rule, find_rule, rule_names
from hyper_parallel.verify.model_case import InputError
from hyper_parallel.verify.ops.mutation import source_runner
from hyper_parallel.verify.ops.mutation.report import MutantResult
from hyper_parallel.verify.ops.mutation.rule_runner import run_rule_mutant
from hyper_parallel.verify.ops.mutation.suite.checks import MODULE_CHECKS
from hyper_parallel.verify.ops.report import OperatorReport
from hyper_parallel.verify.ops.selection import Effort
from hyper_parallel.verify.ops.sweep import sweep_operator, sweep_user_operator
from hyper_parallel.verify.ops.user_operators import load_user_file, user_rules

__all__ = ["library_tasks", "mutant_tasks", "run", "source_tasks", "task_of"]

_SHARES = 2
_PARTS = {"torch": 1.0, "mindspore": 1.5}  # of the time left, per operator
_NESTED = "view"  # has rows that only several axes, one after the other on one dim, can meet
_SOURCE_SECONDS = 600.0
_SOURCE_BATCH = 30
_BATCH = 12  # quick operators take less time than a child takes to start and to find its kernels

Say = Callable[[dict[str, Any]], None]


def task_of(
    platform: str,
    ops: list[str],
    effort: Effort,
    *,
    file: str | None = None,
    seconds: float = 120.0,
    share: float = 0.0,
) -> dict[str, Any]:
    """A task: operators to sweep one after the other in one child.

    Args:
        platform: the framework.
        ops: canonical names, or those of a file's functions.
        effort: how much is checked.
        file: a user's file.
        seconds: after which an operator is given up.
        share: parts of the time left that each operator gets (see :class:`TimeBudget`); 0 for what ``effort`` says.
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
    """Tasks for the library's own operators.

    MindSpore's simulated ranks are processes that cost seconds to start: there the public path of many operators shares
    one child, and an operator that kills a rank costs itself only. Of more than one choice of sizes every operator
    checks as many as it is given time for.
    """
    full = effort.choices > 1
    each, share = (1, _PARTS[platform]) if full else (_BATCH, 0.0)
    if platform != "mindspore":
        return [task_of(platform, some, effort, share=share) for some in _batches(ops, each)]
    # A gradient costs ten times what it costs on PyTorch; the rules are the same. So are the rows that they lack, and
    # kernels that are given the nonsense of a wrong candidate end the process.
    meshes = effort.meshes if full else effort.meshes[:1]
    slower = replace(effort, public=False, meshes=meshes, splits=1, missing=0)
    with_rows = [op for op in ops if isinstance(find_rule(op), Rule)]  # decompositions run on DTensors only
    by_rule = with_rows if effort.public else ops
    batches = _batches([one for one in by_rule if one != _NESTED], each)
    found = [task_of(platform, some, slower, share=share) for some in batches]
    if _NESTED in by_rule:
        found.append(task_of(platform, [_NESTED], replace(slower, meshes=effort.meshes), share=share))
    if effort.public:
        alone = replace(effort, rule_level=False, choices=1, missing=0, separate=full)
        found = [task_of(platform, list(ops[start::_SHARES]), alone) for start in range(_SHARES)] + found
    return found


def mutant_tasks(platform: str, ops: Sequence[str], each: int, seed: int) -> list[dict[str, Any]]:
    """``each`` mutants of every operator that has a rule; those of one operator share a child."""
    with_rows = [op for op in ops if isinstance(find_rule(op), Rule)]
    return [
        {**task_of(platform, [f"{op}#{number}" for op in some for number in range(each)], Effort()), "seed": seed}
        for some in _batches(with_rows, _BATCH)
    ]


def source_tasks(modules: Sequence[str], each: int, seed: int) -> list[dict[str, Any]]:
    """``each`` mutants of every module, on PyTorch; some of one module share a child, which forks one for each."""
    return [
        {**task_of("torch", [f"{module}#{number}" for number in some], Effort(), seconds=_SOURCE_SECONDS), "seed": seed}
        for module in modules
        for some in _batched(range(each))
    ]


def _batched(numbers: range) -> list[range]:
    return [numbers[start : start + _SOURCE_BATCH] for start in range(0, len(numbers), _SOURCE_BATCH)]


def _batches(ops: Sequence[str], each: int) -> list[list[str]]:
    """Neighbours in the alphabet cost alike: they go to different children."""
    count = -(-len(ops) // each)
    return [list(ops[start::count]) for start in range(count)]


def _effort_json(effort: Effort) -> dict[str, Any]:
    """As JSON knows it: tuples become lists."""
    return dict(effort.__dict__)


def _effort(data: dict[str, Any]) -> Effort:
    """What :func:`_effort_json` wrote, after its way through JSON."""
    meshes = {
        name: None if data[name] is None else tuple(map(tuple, data[name])) for name in ("meshes", "public_meshes")
    }
    return Effort(**{**data, **meshes})


def run(task: dict[str, Any], say: Say) -> None:
    """Sweep the task's operators; one event when each begins, one with its report."""
    warnings.simplefilter("ignore")
    gc.disable()  # the child is short-lived, and its many small objects are all alive
    effort = _effort(task["effort"])
    users, ops = {}, task["ops"]
    faulthandler.dump_traceback_later(task["seconds"], exit=True)
    if task["file"] is not None:
        try:
            users = load_user_file(task["platform"], task["file"])
        except InputError as error:
            say({"event": "refused", "why": str(error)})
            return
        own = [*users, *user_rules(task["platform"], task["file"])]
        ops = own if ops == ["*"] else ops
        if why := _unknown(ops, own, task):
            say({"event": "refused", "why": why})
            return
    for op in ops:
        say({"event": "start", "op": op})
        faulthandler.dump_traceback_later(task["seconds"], exit=True)
        found = _run_mutant(task, op) if "seed" in task else _sweep(task, op, effort, users)
        say({"event": "report", "report": found.json()})
    faulthandler.cancel_dump_traceback_later()


def _unknown(ops: Sequence[str], own: Sequence[str], task: dict[str, Any]) -> str:
    """Which of ``ops`` neither the user's file nor the library has, or nothing."""
    unknown = [op for op in ops if op not in own and op not in rule_names()]
    if not unknown:
        return ""
    names, near = ", ".join(map(repr, unknown)), difflib.get_close_matches(unknown[0], [*own, *rule_names()], 3)
    declared = f"it declares {', '.join(own)}" if own else "it declares no operator"
    where = f"{task['file']} on {task['platform']}"
    return f"--op: {where} has no {names}; {declared}" + (f"; near: {', '.join(near)}" if near else "")


def _run_mutant(task: dict[str, Any], op: str) -> MutantResult:
    judge = source_runner.run_source_mutant if op.partition("#")[0] in MODULE_CHECKS else run_rule_mutant
    return judge(task["platform"], op, task["seed"])


def _sweep(task: dict[str, Any], op: str, effort: Effort, users: dict[str, Any]) -> OperatorReport:
    platform = task["platform"]
    if op in users:
        return sweep_user_operator(platform, users[op], effort)
    return sweep_operator(platform, op, effort)
