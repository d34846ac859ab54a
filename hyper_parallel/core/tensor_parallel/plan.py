"""Plans: which modules a mapping of paths to styles selects, and all problems of a plan. Nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel._text import an_object, shortened
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.parameter_paths import (
    describe_nearest,
    owners_by_parameter,
    path_matches,
    untying_problems,
)
from hyper_parallel.core.dtensor.placements import Placement, Shard
from hyper_parallel.core.tensor_parallel.plan_names import resolve_plan
from hyper_parallel.core.tensor_parallel.styles.base import LayerStyle, ParallelStyle, ReplicatedStyle
from hyper_parallel.core.tensor_parallel.styles.boundary import on_axis, parallel_axis
from hyper_parallel.core.tensor_parallel.styles.heads import KV_HEAD_ATTRIBUTES, named_counts
from hyper_parallel.core.tensor_parallel.styles.kv_heads import ReplicateKV, output_features
from hyper_parallel.errors import ArgumentTypeError, PlanError, UnsupportedModuleError
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform

__all__ = [
    "Match", "PlanReport", "check_plan", "flat_plan", "layouts_by_parameter", "matched_modules", "misfits", "parents",
    "uneven_outputs",
]  # fmt: skip


@dataclass(frozen=True)
class Match:
    """One module that a pattern of the plan selects.

    Attributes:
        pattern: the plan's path.
        path: path of the module.
        module: the module.
        style: the style that the plan gives it.
        ancestors: the modules that contain it, from its parent to the root of the plan.
    """

    pattern: str
    path: str
    module: Any
    style: ParallelStyle
    ancestors: tuple[Any, ...] = ()

    @property
    def owner(self) -> Any:
        """The ancestor that the style reads, or None."""
        return self.style.owner_among(self.ancestors)


@dataclass(frozen=True)
class PlanReport:
    """Result of checking a plan.

    Attributes:
        problems: errors in the plan.
        notes: valid, but probably unintended.
        unsupported: whether a style does not apply to its module.
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
        head = f"the plan does not match the module ({counted}); no parameter was changed:"
        raise (UnsupportedModuleError if self.unsupported else PlanError)("\n  - ".join([head, *lines]))


def check_plan(module: Any, device_mesh: DeviceMesh, plan: ParallelStyle | Mapping[str, Any] | str) -> PlanReport:
    """Check ``plan`` for ``module`` on ``device_mesh`` without changing anything.

    Problems: a pattern that matches nothing; a style on a module that it does not support; a number of attention heads
    that is not divisible by the size of the parallel axis; a tied weight that a second style or an earlier call lays
    out differently.
    Notes: linear layers that stay unsharded although sibling layers are sharded.

    Raises:
        TypeError: a plan that is neither a style nor a mapping to styles.
        PlanError: (a ValueError) a style's name that does not exist.
    """
    styles = resolve_plan(module, plan)
    platform = platform_of(module)
    size = device_mesh.shape[parallel_axis(device_mesh)] if styles else 1  # without styles there is no parallel axis
    matched = matched_modules(module, styles)
    unsupported = _unsupported_modules(matched)
    fitting = [match for match in matched if match.style.unsupported_reason(match.module) is None]
    placed, unfit = layouts_by_parameter(fitting), list(_unfit_owners(fitting, size))
    problems = [
        *_unmatched(platform, module, styles, matched),
        *unsupported,
        *_styled_twice(fitting),
        *(unfit or _whole_queries(platform, placed)),
        *_indivisible_heads(platform, module, placed, size),
        *_conflicts(platform, module, placed),
        *untying_problems(platform, module, _replaced(platform, module, placed, device_mesh)),
    ]
    return PlanReport(
        tuple(problems), tuple(_unsharded_siblings(platform, module, matched, placed, device_mesh)), bool(unsupported)
    )


def matched_modules(module: Any, plan: ParallelStyle | Mapping[str, Any]) -> list[Match]:
    """Return the modules that the plan selects with their styles, in the plan's order.

    Raises:
        TypeError: a plan that is neither a style nor a mapping to styles.
    """
    modules = dict(platform_of(module).get_cells_and_names(module))
    return [
        Match(pattern, path, child, style, tuple(modules[name] for name in parents(path) if name in modules))
        for pattern, style in flat_plan(plan)
        for path, child in modules.items()
        if path_matches(pattern, path)
    ]


def flat_plan(plan: Any, prefix: str = "") -> Iterator[tuple[str, ParallelStyle]]:
    """Return pairs of full pattern and style; keys of nested mappings continue the path.

    Raises:
        TypeError: a path is not a str, or its value is neither a style nor a mapping.
    """
    if isinstance(plan, ParallelStyle):
        yield prefix, plan
    elif isinstance(plan, Mapping):
        for key, inner in plan.items():
            if not isinstance(key, str):
                msg = f"parallelize_plan: a path must be a string such as 'layers.0', got {key!r}"
                raise ArgumentTypeError(msg)
            yield from flat_plan(inner, f"{prefix}.{key}" if prefix and key else prefix or key)
    else:
        where = f" under {prefix!r}" if prefix else ""
        kind = plan if isinstance(plan, type) else type(plan)
        theirs = kind.__module__.startswith("torch.")
        owner = "PyTorch's" if theirs else "the"
        if kind is plan:
            got = f"{owner} class {kind.__name__}"
        else:
            got = f"{owner} {kind.__name__}" if theirs else an_object(plan)
        msg = f"parallelize_plan must be a ParallelStyle or a mapping of paths to styles, got {got}{where}"
        if theirs:
            msg = f"{msg}; import the styles from hyper_parallel"
        elif isinstance(plan, type) and issubclass(plan, ParallelStyle):
            msg = f"{msg}; pass an instance: {plan.__name__}()"
        raise ArgumentTypeError(msg)


def misfits(platform: Platform, module: Any, plan: Any, matched: list[Match]) -> list[str]:
    """Describe patterns of a plan that match nothing, and styles that do not apply to their modules."""
    return [*_unmatched(platform, module, plan, matched), *_unsupported_modules(matched)]


# -- problems ------------------------------------------------------------------------------------------------------


def _unmatched(platform: Platform, module: Any, plan: Any, matched: list[Match]) -> Iterator[str]:
    used = {match.pattern for match in matched}
    paths = [path for path, _ in platform.get_cells_and_names(module)]
    for pattern, style in flat_plan(plan):
        if pattern not in used:
            nearest = describe_nearest(pattern, paths)
            if any(path_matches(pattern, path) for path in platform.parameters_dict(module)):
                nearest = f"it is a parameter; name its module, {pattern.rpartition('.')[0]!r}"
            yield f"{pattern!r} ({type(style).__name__}) matches no module; {nearest}"


def _unsupported_modules(matched: list[Match]) -> list[str]:
    reasons = [(match.path, match.style.unsupported_reason(match.module)) for match in matched]
    return [f"{path or 'the module'}: {reason}" for path, reason in reasons if reason is not None]


def _styled_twice(matched: list[Match]) -> Iterator[str]:
    """Layers to which two entries give the same layout; applying the second one would fail after the first."""
    first: dict[str, Match] = {}
    for match in matched:
        other = first.setdefault(match.path, match) if isinstance(match.style, LayerStyle) else match
        if other is not match and other.style.placements_for(match.module) == match.style.placements_for(match.module):
            yield (
                f"{match.path}: {other.pattern!r} and {match.pattern!r} both match it; a layer can have only one style"
            )


def layouts_by_parameter(matched: list[Match]) -> dict[str, list[tuple[Placement, Match]]]:
    """Return placements on the parallel axis by path of the parameter, from every style that lays it out."""
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


def _replaced(
    platform: Platform, module: Any, placed: dict[str, list[tuple[Placement, Match]]], mesh: DeviceMesh
) -> Iterator[tuple[str, Any]]:
    """The parameters that applying the plan replaces, by path."""
    for path, parameter in platform.parameters_dict(module).items():
        if not isinstance(parameter, DTensor):
            if mesh.ndim > 1 or path in placed:
                yield path, parameter
            continue
        for placement, match in placed.get(path, ()):
            wanted = Layout.place(mesh, on_axis(mesh, placement), tuple(parameter.shape))
            if not isinstance(match.style, ReplicatedStyle) and parameter.layout is not wanted:
                yield path, parameter


def _indivisible_heads(
    platform: Platform, module: Any, layouts: dict[str, list[tuple[Placement, Match]]], size: int
) -> Iterator[str]:
    """Problems with the number of heads: features are sharded by heads, so every rank must have complete heads."""
    split = _local_outputs(platform, layouts)
    own_heads = {id(match.owner) for match in _kv_layers(layouts)}  # these styles check the heads themselves
    for path, owner in platform.get_cells_and_names(module):
        if id(owner) in own_heads or not any(owner is match.ancestors[0] for match in split if match.ancestors):
            continue
        counts = dict(named_counts(owner))
        fits = not any(count % size for name, count in counts.items() if name not in KV_HEAD_ATTRIBUTES)
        for name, heads in counts.items():
            if heads % size:
                repeated = " ReplicateKV() for its key and value layers gives each rank the heads that it needs;"
                yield (
                    f"{path or 'the module'}: {name}={heads} is not divisible by the {size} ranks of the parallel "
                    f"axis;{repeated if fits else ''} with use_local_output=False the outputs of its linear layers "
                    "stay DTensors, whose heads need not be"
                )


def _unfit_owners(matched: list[Match], size: int) -> Iterator[str]:
    for match in matched:
        reason = match.style.problem_within(match.owner, match.module, size)
        if reason is not None:
            yield f"{match.path or 'the module'}: {reason}"


def _kv_layers(layouts: dict[str, list[tuple[Placement, Match]]]) -> dict[Match, ReplicateKV]:
    """Key and value layers whose heads are repeated, with their styles, in the plan's order."""
    matches = [match for placements in layouts.values() for _, match in placements]
    return {match: match.style for match in matches if isinstance(match.style, ReplicateKV)}


def _whole_queries(platform: Platform, layouts: dict[str, list[tuple[Placement, Match]]]) -> Iterator[str]:
    """Problems with the queries of repeated heads: replicated queries would attend to a part of the heads."""
    sharded = [
        match
        for placements in layouts.values()
        for placement, match in placements
        if placement == Shard(0)
        and platform.is_linear_module(match.module)
        and not isinstance(match.style, ReplicateKV)
    ]
    for match, style in _kv_layers(layouts).items():
        counts = style.counts(match.owner)
        if match.owner is None or counts is None:
            continue
        queries = output_features(match.module) * counts.heads // counts.kv_heads
        siblings = [other for other in sharded if any(owner is match.owner for owner in other.ancestors)]
        if not any(output_features(other.module) % queries == 0 for other in siblings):
            yield (
                f"{match.path}: ReplicateKV, but no layer next to it with the {queries} features of {counts.heads} "
                "query heads is ColwiseParallel"
            )


def _local_outputs(platform: Platform, layouts: dict[str, list[tuple[Placement, Match]]]) -> list[Match]:
    """Linear layers whose output features are sharded and leave the layer as a local tensor, heads or not."""
    return [
        match
        for placements in layouts.values()
        for placement, match in placements
        if placement == Shard(0) and platform.is_linear_module(match.module) and _returns_local_shards(match.style)
    ]


def _returns_local_shards(style: ParallelStyle) -> bool:
    """Whether a style returns local shards of features. Users' styles are assumed to; repeated heads are complete."""
    if isinstance(style, ReplicateKV):
        return False
    outputs = getattr(style, "output_layouts", None) or (Shard(-1),)
    return bool(getattr(style, "use_local_output", True)) and isinstance(outputs[0], Shard)


def uneven_outputs(module: Any, device_mesh: DeviceMesh, plan: ParallelStyle | Mapping[str, Any] | str) -> list[str]:
    """Describe linear layers whose local outputs have unequal sizes, in one line for each number of features.

    Args:
        module: the module before it is parallelized.
        device_mesh: its mesh.
        plan: styles by path.
    """
    platform, size = platform_of(module), device_mesh.shape[parallel_axis(device_mesh)]
    layouts = layouts_by_parameter(matched_modules(module, resolve_plan(module, plan)))
    paths: dict[int, list[str]] = {}
    for match in dict.fromkeys(_local_outputs(platform, layouts)):
        weight, _ = platform.layer_parameters(match.module)
        features = platform.direct_parameters(match.module)[weight].shape[0]
        if features % size:
            paths.setdefault(features, []).append(match.path)
    return [
        f"local tensors of unequal sizes on {size} ranks: the {features} features of {shortened(names, 4)}; with "
        "use_local_output=False an output stays a DTensor, which can be reshaped into heads on any number of ranks, "
        "with output_layouts=Replicate() every rank gets all features"
        for features, names in paths.items()
    ]


# -- notes ---------------------------------------------------------------------------------------------------------


def _unsharded_siblings(
    platform: Platform,
    module: Any,
    matched: list[Match],
    layouts: dict[str, list[tuple[Placement, Match]]],
    mesh: DeviceMesh,
) -> Iterator[str]:
    """Notes on linear layers next to sharded ones that the plan leaves replicated and no earlier call has placed."""
    sharded = {path: match for path, pairs in layouts.items() for each, match in pairs if isinstance(each, Shard)}
    has_all_ranks = len(mesh.ranks) >= platform.get_world_size()
    telling = (match for match in sharded.values() if has_all_ranks or _is_named_linear(platform, match))
    above = {_parent(match.path) for match in telling if not match.style.has_whole_siblings}
    covered = {match.path for match in matched}
    tied = owners_by_parameter(platform, module).items()
    placed = {number for number, slots in tied if any(path in sharded for path, _, _ in slots)}
    for path, child in platform.get_cells_and_names(module):
        below = path in covered or any(path.startswith(f"{parent}.") for parent in covered)
        if below or _parent(path) not in above or not platform.is_linear_module(child):
            continue
        own = platform.direct_parameters(child).values()
        if not any(isinstance(value, DTensor) or id(value) in placed for value in own):
            yield f"linear layer {path} is not sharded, although its sibling layers are"


def _is_named_linear(platform: Platform, match: Match) -> bool:
    """Whether siblings of a sharded layer should be sharded too, even if the mesh is only one stage of a pipeline.

    Embeddings are excluded, because the head is a sibling of theirs. Numbered layers are excluded, because their
    siblings may belong to other stages.
    """
    return platform.is_linear_module(match.module) and not match.path.rpartition(".")[2].isdecimal()


def parents(path: str) -> Iterator[str]:
    """Yield the paths above ``path``, from the nearest to the root."""
    while path:
        path = _parent(path)
        yield path


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
