"""Plans by name, in the convention of Transformers: ``{"layers.*.mlp.up_proj": "colwise"}``, and a model's own plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hyper_parallel._text import near_names
from hyper_parallel.core.dtensor.parameter_paths import path_matches
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.experts import ExpertParallel
from hyper_parallel.core.tensor_parallel.styles.head_norm import HeadNorm
from hyper_parallel.core.tensor_parallel.styles.kv_heads import ReplicateKV
from hyper_parallel.core.tensor_parallel.styles.latent_kv import LatentKV
from hyper_parallel.core.tensor_parallel.styles.no_parallel import NoParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
from hyper_parallel.core.tensor_parallel.styles.sequence import SequenceParallel
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.select import platform_of

__all__ = ["STYLE_NAMES", "entries_of", "left_alone", "own_plan", "resolve_plan"]

OWN = "auto"
"""Value that stands for the model's own plan."""

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
    "mla_kv_a_proj": LatentKV,
    # In Transformers, these layers' parameters are not DTensors, and "gather" sums the output of "local_rowwise".
    # Here the layer sums its own output, so "gather" has nothing to do.
    "local_colwise": ColwiseParallel,
    "local_rowwise": RowwiseParallel,
    # Both shard the experts here. In Transformers, the first one shards the features of every expert.
    "moe_tp_experts": ExpertParallel,
    "ep_dispatch_experts": ExpertParallel,
}
_EXPERTS = tuple(name for name, style in STYLE_NAMES.items() if style is ExpertParallel)
_OF_EXPERTS = ("grouped_gemm", "packed_colwise", "packed_rowwise", "colwise", "rowwise")
"""Names that plans give the parameters of a module of experts; its own style lays them out."""
_NOTHING = ("local", "gather", "ep_router")
_PACKED = (
    "shards of a packed weight would mix its blocks; use one layer per block (to load a checkpoint that has the "
    "packed weight, map the name of each layer's weight to a Block of it)"
)
_REFUSED = {
    **dict.fromkeys(("packed_colwise", "packed_rowwise", "local_packed_rowwise", "local_packed_colwise"), _PACKED),
    "grouped_gemm": (
        "styles are for modules, not for parameters; give the module the style 'ep_dispatch_experts', in the same "
        "mapping"
    ),
    "moe_identity_expert": "such experts are not stacked; leave the module with these experts out of the plan",
    "local_params": "styles lay out layers; leave this parameter, and the layers that compute with it, out of the plan",
    "all_reduce": (
        "row-wise layers already sum their output over the ranks; if another layer returns a partial sum, use "
        "PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate())"
    ),
}
"""Names in Transformers without a style here, each with the alternative."""


def resolve_plan(module: Any, plan: Any) -> Any:
    """Return ``plan`` with styles instead of names; ``"auto"`` is the plan of ``module`` itself.

    The styles ``"local"``, ``"gather"`` and ``"ep_router"`` have nothing to do, and their entries are left out. The
    entries of experts' parameters are left out too if the same mapping gives their module the style
    ``"moe_tp_experts"`` or ``"ep_dispatch_experts"``.

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
    """Yield the paths of a plan with a style that has nothing to do: ``"local"``, ``"gather"``, ``"ep_router"``."""
    if isinstance(plan, Mapping):
        for key, inner in plan.items():
            yield from left_alone(inner, f"{prefix}.{key}" if prefix and key else prefix or key)
    elif plan in _NOTHING:
        yield prefix


def own_plan(module: Any) -> dict[str, str]:
    """Return the plan that a model of Transformers has, with paths relative to ``module``.

    That is its ``tp_plan`` (or ``_tp_plan``), and the ``base_model_tp_plan`` of its configuration, whose paths begin at
    the base model. Such a plan is for all models of a kind: entries without a match in this model are dropped, unless
    no entry has a match.

    Raises:
        PlanError: (a ValueError) ``module`` has no plan.
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
    platform = platform_of(module)
    paths = [*(path for path, _ in platform.get_cells_and_names(module)), *platform.parameters_dict(module)]
    own = {pattern: name for pattern, name in plan.items() if any(path_matches(pattern, path) for path in paths)}
    return own or plan


def _resolved(plan: Any, path: str, problems: list[str]) -> Any:
    if isinstance(plan, Mapping):
        inner = {
            key: _resolved(value, f"{path}.{key}" if path and key else f"{path}{key}", problems)
            for key, value in plan.items()
            if not _is_of_experts(plan, key)
        }
        return {key: value for key, value in inner.items() if value is not None}
    if not isinstance(plan, str):
        return plan
    if plan in _NOTHING:
        return None
    if plan in STYLE_NAMES:
        return STYLE_NAMES[plan]()
    if plan in _REFUSED:
        problems.append(f"{path!r}: {plan!r} is not supported: {_REFUSED[plan]}")
        return None
    close = near_names(plan, [*STYLE_NAMES, *_NOTHING], 2)
    hint = f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
    problems.append(f"{path!r}: there is no style {plan!r}{hint}")
    return None


def _is_of_experts(plan: Mapping[Any, Any], key: Any) -> bool:
    """Whether the path ``key`` is that of a parameter of experts whose module has its style in the same mapping."""
    if not isinstance(key, str) or plan[key] not in _OF_EXPERTS:
        return False
    return bool(key) and plan.get(key.rpartition(".")[0]) in _EXPERTS
