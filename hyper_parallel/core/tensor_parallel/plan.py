"""Plans: which modules a mapping of paths to styles selects, and all problems of a plan. Nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.parameter_paths import describe_nearest, owners_by_parameter, path_matches
from hyper_parallel.core.dtensor.placements import Placement, Shard
from hyper_parallel.core.tensor_parallel.plan_names import resolve_plan
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.boundary import parallel_axis
from hyper_parallel.errors import PlanError, UnsupportedModuleError
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform

__all__ = [
    "HEAD_COUNT_ATTRIBUTES",
    "Match",
    "PlanReport",
    "check_plan",
    "flat_plan",
    "matched_modules",
    "uneven_outputs",
]

HEAD_COUNT_ATTRIBUTES = (
    "n_heads", "num_heads", "n_head", "num_attention_heads",
    "n_kv_heads", "num_kv_heads", "num_key_value_heads",
)  # fmt: skip


@dataclass(frozen=True)
class Match:
    """One module that a pattern of the plan selects."""

    pattern: str
    path: str
    module: Any
    style: ParallelStyle


@dataclass(frozen=True)
class PlanReport:
    """Result of checking a plan.

    Attributes:
        problems: errors in the plan.
        notes: valid, but probably unintended.
        unsupported: whether a problem is a module that its style does not apply to.
    """

    problems: tuple[str, ...]
    notes: tuple[str, ...]
    unsupported: bool = False

    def raise_problems(self) -> None:
        """Raise one PlanError with all problems and notes, if there are problems."""
        if not self.problems:
            return
        lines = [*self.problems, *(f"note: {note}" for note in self.notes)]
        count = len(self.problems)
        counted = f"{count} problem{'s' if count > 1 else ''}"
        head = f"the plan does not fit the module ({counted}); no parameter was changed:"
        raise (UnsupportedModuleError if self.unsupported else PlanError)("\n  - ".join([head, *lines]))


def check_plan(module: Any, device_mesh: DeviceMesh, plan: ParallelStyle | Mapping[str, Any] | str) -> PlanReport:
    """Check ``plan`` for ``module`` on ``device_mesh`` without changing anything.

    Problems: a pattern that matches nothing, a style on a module that it does not support, a number of attention heads
    that the parallel axis does not divide, a tied weight that two styles would lay out differently. Notes: linear
    layers that stay unsharded although sibling layers are sharded.

    Raises:
        TypeError: a plan that is neither a style nor a mapping to styles.
        PlanError: (a ValueError) a style's name that does not exist.
    """
    styles = resolve_plan(module, plan)
    platform = platform_of(module)
    size = device_mesh.shape[parallel_axis(device_mesh)] if styles else 1  # without styles no axis is meant
    matched = matched_modules(module, styles)
    misfits = _unsupported_modules(matched)
    fitting = [match for match in matched if match.style.unsupported_reason(match.module) is None]
    placed = _layouts_by_parameter(fitting)
    problems = [
        *_unmatched(platform, module, styles, matched),
        *misfits,
        *_indivisible_heads(platform, module, placed, size),
        *_conflicts(platform, module, placed),
    ]
    return PlanReport(tuple(problems), tuple(_unsharded_siblings(platform, module, matched, placed)), bool(misfits))


def matched_modules(module: Any, plan: ParallelStyle | Mapping[str, Any]) -> list[Match]:
    """Return the modules that the plan selects with their styles, in the plan's order.

    Raises:
        TypeError: a plan that is neither a style nor a mapping to styles.
    """
    modules = list(platform_of(module).get_cells_and_names(module))
    return [
        Match(pattern, path, child, style)
        for pattern, style in flat_plan(plan)
        for path, child in modules
        if path_matches(pattern, path)
    ]


def flat_plan(plan: Any, prefix: str = "") -> Iterator[tuple[str, ParallelStyle]]:
    """Return pairs of full pattern and style; keys of nested mappings continue the path.

    Raises:
        TypeError: a path is no text, or what it leads to is neither a style nor a mapping.
    """
    if isinstance(plan, ParallelStyle):
        yield prefix, plan
    elif isinstance(plan, Mapping):
        for key, inner in plan.items():
            if not isinstance(key, str):
                msg = f"parallelize_plan: a path must be a str such as 'layers.0', got {key!r}"
                raise TypeError(msg)
            yield from flat_plan(inner, f"{prefix}.{key}" if prefix and key else prefix or key)
    else:
        where = f" under {prefix!r}" if prefix else ""
        got = f"the class {plan.__name__}" if isinstance(plan, type) else type(plan).__name__
        msg = f"parallelize_plan must be a ParallelStyle or a mapping of paths to them, got {got}{where}"
        if isinstance(plan, type) and issubclass(plan, ParallelStyle):
            msg = f"{msg}; pass an instance: {plan.__name__}()"
        raise TypeError(msg)


# -- problems ------------------------------------------------------------------------------------------------------


def _unmatched(platform: Platform, module: Any, plan: Any, matched: list[Match]) -> Iterator[str]:
    used = {match.pattern for match in matched}
    paths = [path for path, _ in platform.get_cells_and_names(module)]
    for pattern, style in flat_plan(plan):
        if pattern not in used:
            yield f"{pattern!r} ({type(style).__name__}) matches no module; {describe_nearest(pattern, paths)}"


def _unsupported_modules(matched: list[Match]) -> list[str]:
    reasons = [(match.path, match.style.unsupported_reason(match.module)) for match in matched]
    return [f"{path or 'the module'}: {reason}" for path, reason in reasons if reason is not None]


def _layouts_by_parameter(matched: list[Match]) -> dict[str, list[tuple[Placement, Match]]]:
    """Placements on the parallel axis by path of the parameter, from every style that lays it out."""
    layouts: dict[str, list[tuple[Placement, Match]]] = {}
    for match in matched:
        for name, placement in match.style.placements_for(match.module).items():
            path = f"{match.path}.{name}" if match.path else name
            layouts.setdefault(path, []).append((placement, match))
    return layouts


def _conflicts(platform: Platform, module: Any, placed: dict[str, list[tuple[Placement, Match]]]) -> Iterator[str]:
    for slots in owners_by_parameter(platform, module).values():
        wanted = [(path, placement, match.style) for path, _, _ in slots for placement, match in placed.get(path, [])]
        if len({placement for _, placement, _ in wanted}) > 1:
            facts = ", ".join(f"{path} -> {placement!r} by {type(style).__name__}" for path, placement, style in wanted)
            role = "tied weight" if len(slots) > 1 else "parameter"
            yield f"{role} with conflicting layouts: {facts}"


def _indivisible_heads(
    platform: Platform, module: Any, layouts: dict[str, list[tuple[Placement, Match]]], size: int
) -> Iterator[str]:
    """Problems with the number of heads: features are sharded by heads, so every rank must have complete heads."""
    split = [match.path for match in _local_outputs(platform, layouts)]
    for path, owner in platform.get_cells_and_names(module):
        start = f"{path}." if path else ""
        if not any(linear.startswith(start) and "." not in linear[len(start) :] for linear in split):
            continue
        for name in HEAD_COUNT_ATTRIBUTES:
            heads = getattr(owner, name, None)
            if isinstance(heads, int) and heads % size:
                owner_name = path or "the module"
                yield (
                    f"{owner_name}: {name}={heads} is not divisible by the {size} ranks of the parallel axis; with "
                    "use_local_output=False the outputs of its linear layers stay DTensors, whose heads need not be"
                )


def _local_outputs(platform: Platform, layouts: dict[str, list[tuple[Placement, Match]]]) -> list[Match]:
    """Linear layers whose output features are sharded and leave the layer as a local tensor."""
    return [
        match
        for placements in layouts.values()
        for placement, match in placements
        if placement == Shard(0) and platform.is_linear_module(match.module) and _returns_local_shards(match.style)
    ]


def _returns_local_shards(style: ParallelStyle) -> bool:
    """Whether a style returns a rank's part as a local tensor; styles of users are taken to."""
    outputs = getattr(style, "output_layouts", None) or (Shard(-1),)
    return bool(getattr(style, "use_local_output", True)) and isinstance(outputs[0], Shard)


def uneven_outputs(module: Any, device_mesh: DeviceMesh, plan: ParallelStyle | Mapping[str, Any] | str) -> list[str]:
    """Return, in words, linear layers whose local outputs have unequal sizes: hints for a model that fails.

    Args:
        module: before it is parallelized.
        device_mesh: its mesh.
        plan: styles by path.
    """
    platform, size = platform_of(module), device_mesh.shape[parallel_axis(device_mesh)]
    layouts = _layouts_by_parameter(matched_modules(module, resolve_plan(module, plan)))
    notes = []
    for match in dict.fromkeys(_local_outputs(platform, layouts)):
        weight, _ = platform.layer_parameters(match.module)
        features = platform.direct_parameters(match.module)[weight].shape[0]
        if features % size:
            notes.append(
                f"{match.path} returns {features} features as local tensors of unequal sizes on {size} ranks; with "
                "use_local_output=False its output stays a DTensor, which can be reshaped into heads on any number of "
                "ranks, with output_layouts=Replicate() every rank gets all features"
            )
    return notes


# -- notes ---------------------------------------------------------------------------------------------------------


def _unsharded_siblings(
    platform: Platform, module: Any, matched: list[Match], layouts: dict[str, list[tuple[Placement, Match]]]
) -> Iterator[str]:
    sharded = {match.path for pairs in layouts.values() for placement, match in pairs if isinstance(placement, Shard)}
    parents = {_parent(path) for path in sharded}
    covered = {match.path for match in matched}
    for path, child in platform.get_cells_and_names(module):
        below = path in covered or any(path.startswith(f"{parent}.") for parent in covered)
        if platform.is_linear_module(child) and not below and _parent(path) in parents:
            yield f"linear layer {path} is not sharded, although its sibling layers are"


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
