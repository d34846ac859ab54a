"""Plans by name, in the convention of Transformers: ``{"layers.*.mlp.up_proj": "colwise"}``, and a model's own plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hyper_parallel._text import near_names
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.head_norm import HeadNorm
from hyper_parallel.core.tensor_parallel.styles.kv_heads import ReplicateKV
from hyper_parallel.core.tensor_parallel.styles.no_parallel import NoParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
from hyper_parallel.core.tensor_parallel.styles.sequence import SequenceParallel
from hyper_parallel.errors import PlanError

__all__ = ["STYLE_NAMES", "entries_of", "left_alone", "own_plan", "resolve_plan"]

OWN = "auto"
"""In the place of a plan: the model's own."""

STYLE_NAMES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel,
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    "replicate": NoParallel,
    "replicate_kv": ReplicateKV,
    "replicated_with_grad_allreduce": HeadNorm,
    # Elsewhere, parameters of these are no DTensors, and "gather" sums what "local_rowwise" leaves partial. Here the
    # layer itself sums, so that its output is right wherever it goes, and nothing is left to gather.
    "local_colwise": ColwiseParallel,
    "local_rowwise": RowwiseParallel,
}
_NOTHING = ("local", "gather")
_PACKED = (
    "packed_colwise", "packed_rowwise", "local_packed_rowwise", "local_packed_colwise",
)  # fmt: skip


def resolve_plan(module: Any, plan: Any) -> Any:
    """Return ``plan`` with styles in the place of names; ``"auto"`` is the plan of ``module`` itself.

    The styles ``"local"`` and ``"gather"`` have nothing to do, and their entries are left out.

    Raises:
        PlanError: (a ValueError) names that do not exist, all in one message, or a model without a plan of its own.
    """
    if isinstance(plan, str):
        plan = entries_of(module, plan)
    problems: list[str] = []
    resolved = _resolved(plan, "", problems)
    if problems:
        msg = f"parallelize_plan: {'; '.join(problems)}; styles by name: {', '.join([*STYLE_NAMES, *_NOTHING])}"
        raise PlanError(msg)
    return resolved


def entries_of(module: Any, plan: Any) -> dict[Any, Any]:
    """Return the entries of ``plan`` as they were written; ``"auto"`` is the plan of ``module`` itself.

    Raises:
        PlanError: (a ValueError) ``module`` has no plan of its own.
    """
    if isinstance(plan, str) and plan == OWN:
        return dict(own_plan(module))
    return dict(plan) if isinstance(plan, Mapping) else {"": plan}


def left_alone(plan: Any, prefix: str = "") -> Iterator[str]:
    """Yield the paths of a plan with a style, ``"local"`` or ``"gather"``, that has nothing to do."""
    if isinstance(plan, Mapping):
        for key, inner in plan.items():
            yield from left_alone(inner, f"{prefix}.{key}" if prefix and key else prefix or key)
    elif plan in _NOTHING:
        yield prefix


def own_plan(module: Any) -> dict[str, str]:
    """Return the plan that a model of Transformers has, with paths from ``module`` on.

    That is its ``tp_plan`` (or ``_tp_plan``), and the ``base_model_tp_plan`` of its configuration, whose paths begin at
    the base model.

    Raises:
        PlanError: (a ValueError) it has none.
    """
    plan: dict[str, str] = {}
    base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    if isinstance(base, Mapping):
        prefix = getattr(module, "base_model_prefix", "")
        start = f"{prefix}." if prefix and hasattr(module, prefix) else ""
        plan.update({f"{start}{path}": name for path, name in base.items()})
    for attribute in ("_tp_plan", "tp_plan"):
        own = getattr(module, attribute, None)
        if isinstance(own, Mapping):
            plan.update(own)
    if not plan:
        msg = (
            f"parallelize_plan: {type(module).__name__} has no plan of its own (tp_plan, or base_model_tp_plan of its "
            "config); pass styles by path"
        )
        raise PlanError(msg)
    return plan


def _resolved(plan: Any, path: str, problems: list[str]) -> Any:
    if isinstance(plan, Mapping):
        inner = {
            key: _resolved(value, f"{path}.{key}" if path and key else f"{path}{key}", problems)
            for key, value in plan.items()
        }
        return {key: value for key, value in inner.items() if value is not None}
    if not isinstance(plan, str):
        return plan
    if plan in _NOTHING:
        return None
    if plan in STYLE_NAMES:
        return STYLE_NAMES[plan]()
    if plan in _PACKED:
        problems.append(
            f"{path!r}: {plan!r} is not supported: shards of a packed weight would mix its blocks; use one layer per "
            "block (a checkpoint with the packed weight loads into them with Block)"
        )
        return None
    close = near_names(plan, [*STYLE_NAMES, *_NOTHING], 2)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    problems.append(f"{path!r}: there is no style {plan!r}{hint}")
    return None
