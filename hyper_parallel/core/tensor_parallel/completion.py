"""Completes a plan with styles for the modules that it does not cover. Neither module nor plan is changed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import escape
from typing import Any

from hyper_parallel.core.dtensor.parameter_paths import owners_by_parameter, path_matches
from hyper_parallel.core.dtensor.placements import Placement, Replicate, Shard
from hyper_parallel.core.tensor_parallel.plan import Match, misfits, parents
from hyper_parallel.core.tensor_parallel.plan_names import entries_of
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.boundary import is_whole
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.head_norm import HeadNorm
from hyper_parallel.core.tensor_parallel.styles.heads import HeadCounts
from hyper_parallel.core.tensor_parallel.styles.no_parallel import NoParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
from hyper_parallel.core.tensor_parallel.uncovered import Coverage, Unit
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.select import platform_of, platform_of_argument

__all__ = ["complete_plan"]

# Names such as q_norm and k_layernorm; the name decides because such a norm may also have the size of the model.
_QUERIES_OR_KEYS = re.compile(r"(^|_)(q|k|qk|query|key)(_|$)")


def complete_plan(
    module: Any, parallelize_plan: ParallelStyle | Mapping[str, Any] | str, *, plain_output: bool = True
) -> dict[str, Any]:
    """Return a plan that also covers the parameters which ``parallelize_plan`` leaves plain.

    The entries of the plan come first, unchanged. After them, each module with uncovered parameters gets an entry that
    replicates it: ``NoParallel(use_local_output=False)`` if the plan's styles return DTensors, otherwise
    ``NoParallel(use_local_output=None)``, whose output is local if its input is. A layer whose weight is tied to a
    covered one gets the style with the same layout, a norm of the local heads of queries or keys :class:`HeadNorm`.
    Paths that differ in numbers alone become one glob.

    If the plan's styles return local tensors, two kinds of parameters stay plain, because they are used on complete
    plain tensors: those of modules with several inputs, and those that belong directly to a module with layers inside.
    Modules that hold DTensors already, or have the style ``"local"`` or ``"gather"``, get no entry. The result is a
    proposal, to be verified before it is used.

    Args:
        module: the model, before it is parallelized.
        parallelize_plan: a plan as for :func:`parallelize_module`.
        plain_output: whether the output of the model is to be a plain tensor, as for a loss with plain labels; it is
            that of the last linear layer. With False, and styles that return DTensors, it is a DTensor.

    Returns:
        a new plan for :func:`parallelize_module`.

    Raises:
        PlanError: (a ValueError) the plan does not match the module, or the styles of some modules cannot be
            determined; one message has all of them.
        TypeError: ``module`` is not a module, or the plan is neither a style nor a mapping of paths to styles.

    Example:
        >>> plan = complete_plan(model, {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
    """
    platform = platform_of_argument(module, "complete_plan: module", module=True)
    entries = entries_of(module, parallelize_plan)
    proposal = _Proposal(Coverage.of(platform, module, entries), plain_output)
    coverage = proposal.coverage
    _refuse("the plan does not match the module", misfits(platform, module, coverage.plan, coverage.matched))
    problems = [
        f"{unit.path or 'the module'} ({type(unit.module).__name__}): {reason}"
        for unit in proposal.units
        if (reason := proposal.problem(unit)) is not None
    ]
    _refuse("no style can be determined for these modules", problems)
    styles = {unit.path: style for unit in proposal.units if (style := proposal.style(unit)) is not None}
    added = _with_globs(styles, [path for path, _ in platform.get_cells_and_names(module)])
    nested = [
        f"{path!r} has entries for modules inside only; add one for '' as well" for path in added if path in entries
    ]
    _refuse("these paths need an entry for the module itself", nested)
    return {**entries, **added}


def _refuse(head: str, problems: Sequence[str]) -> None:
    if problems:
        raise PlanError("\n  - ".join([f"complete_plan: {head}:", *problems]))


def _with_globs(styles: Mapping[str, ParallelStyle], paths: list[str]) -> dict[str, ParallelStyle]:
    """Return the styles by pattern; paths that differ only in numbers share one, unless it matches others."""
    added: dict[str, ParallelStyle] = {}
    for path, style in styles.items():
        glob = ".".join("*" if part.isdecimal() else escape(part) for part in path.split("."))
        same = [repr(styles.get(other)) for other in paths if path_matches(glob, other)]
        added.setdefault(glob if len(same) > 1 and set(same) == {repr(style)} else escape(path), style)
    return added


@dataclass(frozen=True)
class _Proposal:
    """Styles for the modules that a plan does not cover, and the reasons why no style can be determined for some.

    Attributes:
        coverage: the coverage of the plan.
        plain_output: whether the model is to return plain tensors.
    """

    coverage: Coverage
    plain_output: bool

    @cached_property
    def gets_dtensors(self) -> bool:
        """Whether styles have outputs other than shards of features, and all of these outputs are DTensors.

        The output of the last layer leaves the model, so no other module receives it.
        """
        last = self.coverage.modules[self._last]
        outputs = [
            output for match in self.coverage.matched if match.module is not last for output in match.style.outputs()
        ]
        return {local for layout, local in outputs if layout != Shard(-1)} == {False}

    @cached_property
    def _last(self) -> str:
        """The path of the last module with parameters."""
        return ["", *self.coverage.layers_inside("")][-1]

    @cached_property
    def units(self) -> list[Unit]:
        """The modules that need a style; modules inside one that has own parameters are treated with it."""
        units = self.coverage.units
        whole = {unit.path for unit in units if unit.path and self._is_whole(unit.path)}
        return [unit for unit in units if whole.isdisjoint(parents(unit.path))]

    def _is_whole(self, path: str) -> bool:
        """Whether one style can replicate all of a module: no module inside has a style."""
        return not self.coverage.has_styles_inside(path)

    # -- styles ----------------------------------------------------------------------------------------------------

    def style(self, unit: Unit) -> ParallelStyle | None:
        """The style for a module without a problem; None if it stays plain."""
        tied = self._tied(unit)
        if tied:
            return next(style for style in self._layer_styles(unit) if _agrees(style, unit, tied))
        if any(self._may_get(unit, match) for match in self._sources):
            return HeadNorm()  # any other module has a problem
        if self.gets_dtensors:
            return NoParallel(use_local_output=self._returns_output(unit))
        stays_plain = any(self.coverage.layers_inside(unit.path)) or not self.coverage.takes_one_value(unit.path)
        return None if stays_plain else NoParallel(use_local_output=None)

    def _returns_output(self, unit: Unit) -> bool:
        """Whether a module is the layer that returns the model's output, which must be plain."""
        return self.plain_output and unit.path == self._last and self._is_linear(unit.path)

    def _layer_styles(self, unit: Unit) -> list[ParallelStyle]:
        """The styles that return complete outputs of a module and may lay out a tied parameter."""
        platform, module = self.coverage.platform, unit.module
        local = not self.gets_dtensors or self._returns_output(unit)
        styles: list[ParallelStyle] = [NoParallel(use_local_output=local if self.gets_dtensors else None)]
        if platform.is_linear_module(module) or platform.is_embedding_module(module):
            styles.append(ColwiseParallel(output_layouts=Replicate(), use_local_output=local))
            styles.append(RowwiseParallel(input_layouts=Replicate(), use_local_output=local))
        return [] if self.coverage.has_styles_inside(unit.path) else styles

    @cached_property
    def _tied_placements(self) -> dict[str, tuple[Placement, Match]]:
        """Placements of parameters that are tied to ones with a style, by each of their paths."""
        coverage = self.coverage
        placements = {}
        for slots in owners_by_parameter(coverage.platform, coverage.root).values():
            placed = [entry for path, _, _ in slots for entry in coverage.placed.get(path, ())]
            placements.update({path: placed[0] for path, _, _ in slots if placed})
        return placements

    def _tied(self, unit: Unit) -> dict[str, tuple[Placement, Match]]:
        """The tied parameters of a module, by name."""
        paths = {name: f"{unit.path}.{name}".strip(".") for name in unit.names}
        return {name: self._tied_placements[path] for name, path in paths.items() if path in self._tied_placements}

    # -- problems --------------------------------------------------------------------------------------------------

    def problem(self, unit: Unit) -> str | None:
        """The reason why no style can be determined for a module, or None."""
        reasons = (self._unclear, self._has_style, self._tied_problem, self._shards, self._features, self._own)
        return next((text for reason in reasons if (text := reason(unit)) is not None), None)

    def _unclear(self, unit: Unit) -> str | None:
        above = {id(self.coverage.modules[path]) for path in (unit.path, *parents(unit.path))}
        for match in self.coverage.matched:
            if id(match.module) in above and type(match.style).placements_for is ParallelStyle.placements_for:
                return (
                    f"{_named(match)} may lay out {', '.join(unit.names)} or not; let its placements_for return the "
                    "placements of all parameters that it lays out"
                )
        return None

    def _has_style(self, unit: Unit) -> str | None:
        match = next((match for match in self.coverage.matched if match.module is unit.module), None)
        if match is None:
            return None
        return (
            f"{_named(match)} leaves {', '.join(unit.names)} plain, and a second style would convert inputs and "
            "outputs again; use NoParallel(input_layout=..., output_layout=...), which replicates parameters too, or "
            "call hyper_parallel.distribute_module(model, mesh) after parallelize_module to replicate all plain "
            "parameters"
        )

    def _tied_problem(self, unit: Unit) -> str | None:
        tied = self._tied(unit)
        if not tied or any(_agrees(style, unit, tied) for style in self._layer_styles(unit)):
            return None
        name, (placement, match) = next(iter(tied.items()))
        return f"{name} is tied to a parameter that {_named(match)} lays out as {placement!r}; no style does that here"

    def _shards(self, unit: Unit) -> str | None:
        del unit
        match = next((match for match in self.coverage.matched if _hands_over_shards(match)), None)
        if match is None:
            return None
        return (
            f"it may get shards from {_named(match)} or complete tensors; give that style use_local_output=False, "
            "or the module a style, such as SequenceParallel(use_local_output=True) for shards of the sequence"
        )

    def _features(self, unit: Unit) -> str | None:
        for match in self._sources:
            if self._may_get(unit, match) and not self._is_norm_of_heads(unit, match):
                return (
                    f"it may get local features from {_named(match)} or complete tensors; give that style "
                    "use_local_output=False, or the module a style: RowwiseParallel() for a linear layer that gets "
                    "these features, HeadNorm() for a norm of heads"
                )
        return None

    def _own(self, unit: Unit) -> str | None:
        if not self.gets_dtensors or self._is_whole(unit.path):
            return None
        return (
            f"no style can replicate {', '.join(unit.names)} alone, because modules inside have styles; call "
            "hyper_parallel.distribute_module(model, mesh) after parallelize_module to replicate all plain parameters"
        )

    # -- who gets the local features of a layer --------------------------------------------------------------------

    @cached_property
    def _sources(self) -> list[Match]:
        """Linear layers that return local features."""
        return [match for match in self.coverage.matched if _returns_local_features(match)]

    def _may_get(self, unit: Unit, source: Match) -> bool:
        """Whether a module may get the local features of ``source``."""
        owner = self.coverage.caller(self.coverage.paths[id(source.module)])
        while True:
            if self._may_get_inside(unit, source, owner):
                return True
            if not owner or self._reads_features(owner):
                return False
            owner = self.coverage.caller(owner)  # no module inside reads them, so they leave this module

    def _may_get_inside(self, unit: Unit, source: Match, owner: str) -> bool:
        """Whether a module may get the local features of ``source`` from the module at ``owner``, which has them."""
        features, width = _weight_shape(source.module)
        if unit.path == owner:
            return _own_size(unit.module) != width
        siblings = (path for path in (unit.path, *parents(unit.path)) if path and self.coverage.is_called(path))
        entry = next((path for path in siblings if self.coverage.caller(path) == owner), None)
        if entry is None:
            return False
        if self._size(entry) != width or features != width:
            return self._size(entry) != width
        if self._is_linear(entry):
            return not self._reads_features(owner)
        return _QUERIES_OR_KEYS.search(entry.rpartition(".")[2]) is not None

    def _reads_features(self, path: str) -> bool:
        """Whether a layer in the module at ``path`` has a style for inputs that are local features."""
        inside = (match for match in self.coverage.matched if path in parents(self.coverage.paths[id(match.module)]))
        return any(Shard(1) in match.style.placements_for(match.module).values() for match in inside)

    def _is_norm_of_heads(self, unit: Unit, source: Match) -> bool:
        """Whether a module has the name of a norm of queries or keys, and the size of a head of ``source``."""
        owner = self.coverage.modules[self.coverage.caller(unit.path)]
        counts, size = HeadCounts.of(owner), _own_size(unit.module)
        if counts is None or size is None or _QUERIES_OR_KEYS.search(unit.path.rpartition(".")[2]) is None:
            return False
        return _weight_shape(source.module)[0] in (counts.heads * size, counts.kv_heads * size)

    def _is_linear(self, path: str) -> bool:
        return self.coverage.platform.is_linear_module(self.coverage.modules[path])

    def _size(self, path: str) -> int | None:
        """Number of input features of a module, from its parameters or those of layers inside; None if unknown."""
        layers = (self.coverage.modules[layer] for layer in (path, *self.coverage.layers_inside(path)))
        return next((size for layer in layers if (size := _own_size(layer)) is not None), None)


def _own_size(module: Any) -> int | None:
    """Number of input features of a module, from its own parameters: a layer's weight, or vectors of one size."""
    platform = platform_of(module)
    if platform.is_linear_module(module) or platform.is_embedding_module(module):
        return _weight_shape(module)[1]
    sizes = {tuple(value.shape) for value in platform.direct_parameters(module).values()}
    return next(iter(sizes))[0] if len(sizes) == 1 and all(len(size) == 1 for size in sizes) else None


def _weight_shape(module: Any) -> tuple[int, int]:
    """Output and input features of a linear layer, or rows and features of an embedding."""
    platform = platform_of(module)
    rows, columns = getattr(module, platform.layer_parameters(module)[0]).shape
    return int(rows), int(columns)


def _agrees(style: ParallelStyle, unit: Unit, tied: Mapping[str, tuple[Placement, Match]]) -> bool:
    """Whether a style lays out tied parameters as the style of the other path does."""
    placements = style.placements_for(unit.module)
    return all(placements[name] == placement for name, (placement, _) in tied.items())


def _named(match: Match) -> str:
    """The entry of the plan that gives a module its style, as text for messages."""
    return f"the entry {match.pattern!r} ({type(match.style).__name__})"


def _returns_local_features(match: Match) -> bool:
    """Whether a linear layer returns some of its output features as a local tensor, as far as is known."""
    by_features = Shard(0) in match.style.placements_for(match.module).values()
    if not by_features or not platform_of(match.module).is_linear_module(match.module):
        return False
    outputs = match.style.outputs() or ((Shard(-1), True),)
    return any(layout == Shard(-1) and local is not False for layout, local in outputs)


def _hands_over_shards(match: Match) -> bool:
    """Whether local shards enter or leave a module, apart from features of a linear layer."""
    if _returns_local_features(match):
        return False
    handed_over = (*match.style.inputs(), *match.style.outputs())
    return any(local is not False and not is_whole(layout) for layout, local in handed_over)
