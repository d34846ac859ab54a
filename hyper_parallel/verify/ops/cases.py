"""A sample that has sizes, values and a plain result, and what the operator's rule claims of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyper_parallel.core.shard.rule import Rule, Strategies, replicated_row
from hyper_parallel.core.shard.sample import Sample
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.verify.ops.reference import Reference
from hyper_parallel.verify.ops.rows import Problem, mesh_of, problem_of
from hyper_parallel.verify.ops.values import Filled

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["Case", "claimed", "closed"]


@dataclass(frozen=True)
class Case:
    """A filled sample with its plain result."""

    number: int
    sample: Sample
    filled: Filled
    reference: Reference
    seed: int
    first: bool

    @property
    def name(self) -> str:
        """How reports call it."""
        return f"sample {self.number}"


def claimed(platform: Platform, rule: object, case: Case, shape: tuple[int, ...]) -> tuple[Problem, Strategies] | None:
    """What ``rule`` claims of the case on a mesh of ``shape``, its operands whole.

    None where it is no rule, answers with whole layouts or a decomposition, or refuses the call.
    """
    if not isinstance(rule, Rule):
        return None
    problem = problem_of(platform, rule, case.filled, mesh_of(shape), case.reference.tensors)
    try:
        found = rule.strategies(problem.call)
    except (ValueError, HyperParallelError):
        return None
    return (problem, found) if isinstance(found, Strategies) else None


def closed(strategies: Strategies, case: Case) -> Strategies:
    """What an operator claims whose results only its values tell: as many as the plain call returned, all whole."""
    if not strategies.open:
        return strategies
    outputs = case.reference.outputs
    return Strategies((replicated_row(len(case.filled.arrays), len(outputs)),), tuple(one.shape for one in outputs))
