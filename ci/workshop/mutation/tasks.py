"""Tasks of the sweep's workers that run mutants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.shard.rule import Rule, find_rule
from hyper_parallel.verify.ops.selection import Effort
from hyper_parallel.verify.ops.tasks import BATCH, in_batches, task_of
from workshop.mutation import source_runner
from workshop.mutation.proof_runner import run_proof_mutant
from workshop.mutation.report import MutantResult
from workshop.mutation.rule_runner import run_rule_mutant
from workshop.mutation.suite.checks import MODULE_CHECKS

__all__ = ["mutant_tasks", "run_mutant", "source_tasks"]

_SECONDS = 600.0
_BATCH = 30


def mutant_tasks(
    platform: str, ops: Sequence[str], each: int, seed: int, *, proofs: bool = False
) -> list[dict[str, Any]]:
    """Return tasks for ``each`` mutants of every operator that has a rule; those of one operator share a worker.

    Args:
        platform: the framework.
        ops: names of operators.
        each: mutants per operator.
        seed: of their order.
        proofs: whether to prove them instead of running the quick sweep.
    """
    with_rows = [op for op in ops if isinstance(find_rule(op), Rule)]
    return [
        _task(platform, [f"{op}#{number}" for op in batch for number in range(each)], seed) | {"proofs": proofs}
        for batch in in_batches(with_rows, BATCH)
    ]


def source_tasks(modules: Sequence[str], each: int, seed: int) -> list[dict[str, Any]]:
    """Return tasks for ``each`` mutants of every module, on PyTorch; a worker forks one process per mutant."""
    batches = [range(start, min(start + _BATCH, each)) for start in range(0, each, _BATCH)]
    return [
        {**_task("torch", [f"{module}#{number}" for number in batch], seed), "seconds": _SECONDS}
        for module in modules
        for batch in batches
    ]


def _task(platform: str, mutants: list[str], seed: int) -> dict[str, Any]:
    return {**task_of(platform, mutants, Effort()), "seed": seed, "function": f"{__name__}:run_mutant"}


def run_mutant(task: dict[str, Any], op: str) -> MutantResult:
    """Run one mutant in a worker."""
    run = source_runner.run_source_mutant if op.partition("#")[0] in MODULE_CHECKS else run_rule_mutant
    run = run_proof_mutant if task.get("proofs") else run
    return run(task["platform"], op, task["seed"])
