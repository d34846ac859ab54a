"""The modules of a model with parameters that no style of a plan places. Nothing is changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.parameter_paths import owners_by_parameter, path_matches
from hyper_parallel.core.dtensor.placements import Placement
from hyper_parallel.core.tensor_parallel.plan import Match, layouts_by_parameter, matched_modules, parents
from hyper_parallel.core.tensor_parallel.plan_names import left_alone, resolve_plan

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["Coverage", "Unit"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Unit:
    """A module that a style could cover, with parameters that no style places.

    Attributes:
        path: path of the module.
        module: the module.
        names: names of the parameters, relative to the module.
    """

    path: str
    module: Any
    names: tuple[str, ...]


@dataclass(frozen=True)
class Coverage:
    """The modules and parameters of a model that a plan covers.

    Attributes:
        platform: the framework.
        root: the model.
        modules: every module by path, a shared one by its first.
        plan: styles by path.
        matched: modules with styles.
        alone: paths of modules that the plan excludes.
    """

    platform: Platform
    root: Any
    modules: dict[str, Any]
    plan: Any
    matched: list[Match]
    alone: tuple[str, ...]

    @staticmethod
    def of(platform: Platform, root: Any, entries: Mapping[Any, Any]) -> Coverage:
        """Return what the entries of a plan, as written, cover of ``root``.

        Raises:
            PlanError: (a ValueError) a style's name that does not exist.
            TypeError: entries that are neither styles nor mappings to styles.
        """
        plan = resolve_plan(root, entries)
        first: dict[int, tuple[str, Any]] = {}
        for path, module in platform.get_cells_and_names(root):
            first.setdefault(id(module), (path, module))
        modules = dict(first.values())
        return Coverage(platform, root, modules, plan, matched_modules(root, plan), tuple(left_alone(entries)))

    @cached_property
    def paths(self) -> dict[int, str]:
        """First paths of modules by their id."""
        return {id(module): path for path, module in self.modules.items()}

    @cached_property
    def placed(self) -> dict[str, list[tuple[Placement, Match]]]:
        """Placements by path of the parameter."""
        return layouts_by_parameter(self.matched)

    @cached_property
    def units(self) -> list[Unit]:
        """The modules that need a style, in the model's order.

        Parameters of a module that is never called, such as a list of parameters or weight norm, belong to the module
        around it.
        """
        slots = (slot for group in owners_by_parameter(self.platform, self.root).values() for slot in group)
        covered = {(id(owner), name) for path, owner, name in slots if path in self.placed}
        names: dict[str, list[str]] = {}
        for path, module in self.modules.items():
            if not self._is_left_alone(module):
                unit = path if self.is_called(path) else self.caller(path)
                inside = path[len(unit) :].strip(".")
                own = (name for name in self.platform.direct_parameters(module) if (id(module), name) not in covered)
                names.setdefault(unit, []).extend(f"{inside}.{name}".strip(".") for name in own)
        return [Unit(path, self.modules[path], tuple(names[path])) for path in self.modules if names.get(path)]

    def _is_left_alone(self, module: Any) -> bool:
        """Whether the plan excludes a module, or the module is already parallelized."""
        values = self.platform.direct_parameters(module).values()
        return id(module) in self._alone or any(isinstance(value, DTensor) for value in values)

    @cached_property
    def _alone(self) -> frozenset[int]:
        """Ids of the modules that the plan excludes."""
        everything = self.platform.get_cells_and_names(self.root) if self.alone else ()
        return frozenset(
            id(module) for path, module in everything if any(path_matches(pattern, path) for pattern in self.alone)
        )

    # -- how modules are called ------------------------------------------------------------------------------------

    def is_called(self, path: str) -> bool:
        """Whether a module is called with a first argument, which a style can convert: containers are not."""
        parameters = self._parameters(path)
        return bool(parameters) and parameters[0].kind in _POSITIONAL

    def takes_one_value(self, path: str) -> bool:
        """Whether a module can be called with one argument and no more is required."""
        required = [each for each in self._parameters(path) if each.default is each.empty]
        return self.is_called(path) and len([each for each in required if each.kind in _POSITIONAL]) <= 1

    def _parameters(self, path: str) -> list[inspect.Parameter]:
        return list(inspect.signature(self.platform.get_cell_construct(self.modules[path])).parameters.values())

    def caller(self, path: str) -> str:
        """The path of the nearest module above ``path`` that is called; the model itself if none is."""
        return next((up for up in parents(path) if self.is_called(up)), "")

    def layers_inside(self, path: str) -> Iterator[str]:
        """Yield paths of modules in the module at ``path`` that are called and have parameters."""
        start = f"{path}." if path else ""
        for inner, module in self.modules.items():
            if inner and inner.startswith(start) and self.is_called(inner) and self.platform.direct_parameters(module):
                yield inner

    def has_styles_inside(self, path: str) -> bool:
        """Whether styles cover modules in the module at ``path``."""
        return any(path in parents(self.paths[id(match.module)]) for match in self.matched)
