"""Apply a plan to a module: check all of it, then shard."""

from __future__ import annotations

import warnings
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from hyper_parallel.core.dtensor.dtensor import DTensor, resolve_mesh
from hyper_parallel.core.dtensor.events import module_path, set_module_path, watchers
from hyper_parallel.core.dtensor.module import replicate_module
from hyper_parallel.core.dtensor.parameter_paths import MODULE_PATH, module_label, replacing_parameters
from hyper_parallel.core.shard.refusals import note_style_output
from hyper_parallel.core.tensor_parallel.plan import Match, check_plan, matched_modules
from hyper_parallel.core.tensor_parallel.plan_names import resolve_plan
from hyper_parallel.core.tensor_parallel.styles.boundary import is_whole
from hyper_parallel.platform.select import platform_of_argument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["apply_plan", "check_named", "name_entry", "name_modules", "parallelize_module", "trace_modules"]


_TRACED = "_hyper_parallel_traced"
_ENTRY = "_hyper_parallel_entry"

# Per context: the modules whose forward runs, with the path that was current before.
_RUNNING: ContextVar[tuple[tuple[int, str], ...]] = ContextVar("hyper_parallel_running", default=())


def name_modules(platform: Platform, root: Any) -> None:
    """Record on every module under ``root`` its path from the outermost root; a shared module keeps its first path."""
    prefix = root.__dict__.get(MODULE_PATH, "")
    named = {id(root)}
    for path, module in platform.get_cells_and_names(root):
        full = ".".join(part for part in (prefix, path) if part)
        if id(module) not in named:
            named.add(id(module))
            module.__dict__[MODULE_PATH] = full


def name_entry(module: Any, mesh: DeviceMesh, entry: str, fix: str) -> None:
    """Record on a module, whose path is known, the entry of the plan that gave it its style.

    Args:
        module: the module.
        mesh: its mesh.
        entry: pattern and style.
        fix: end of the message: how to make the output a plain tensor; may be ``""``.
    """
    clause = (
        f"the last DTensor that a style returned is the output of {module_label(module)}, entry {entry} of the plan"
    )
    module.__dict__[_ENTRY] = repr(mesh), clause + fix


def trace_modules(platform: Platform, root: Any) -> None:
    """Register hooks that record which module runs, for the event log, and which returned a DTensor, for messages."""
    for _, module in platform.get_cells_and_names(root):
        if not module.__dict__.get(_TRACED):
            module.__dict__[_TRACED] = True
            platform.register_forward_pre_hook(module, _entering, prepend=True)
            platform.register_forward_hook(module, _leaving, always_call=True)


def _entering(module: Any, args: Any) -> None:
    del args
    path = module.__dict__.get(MODULE_PATH)
    if path and watchers():
        _RUNNING.set((*_RUNNING.get(), (id(module), module_path())))
        set_module_path(path)


def _leaving(module: Any, args: Any, output: Any) -> None:
    del args
    entry = module.__dict__.get(_ENTRY)
    if entry is not None and isinstance(output, DTensor):
        note_style_output(entry)
    running = _RUNNING.get()
    # If recording began inside this forward, the log has no entry of the module.
    if running and running[-1][0] == id(module):
        _RUNNING.set(running[:-1])
        set_module_path(running[-1][1])


ModuleT = TypeVar("ModuleT")


def parallelize_module(
    module: ModuleT,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, Any] | str | None = None,
    *,
    src_data_rank: int | None = 0,
) -> ModuleT:
    """Parallelize ``module`` in place by ``parallelize_plan``.

    Styles act on the mesh axis ``tp``, or on the only axis. On a 1-D mesh, parameters that no style covers stay plain.
    This is right if activations are local (``use_local_output=True``); if DTensors pass through such a module, use
    :class:`NoParallel`. On a mesh of several axes all activations are DTensors, so parameters that no style covers
    are replicated.

    Args:
        module: the model.
        device_mesh: the mesh, by default the current one.
        parallelize_plan: one style for ``module`` itself, or styles by path; a segment of a path may be a glob
            (``layers.*.fc1``), and ``""`` is the module itself. A style may be a name in the convention of
            Transformers: ``"colwise"``, ``"rowwise"``, ``"colwise_rep"``, ``"rowwise_rep"``, ``"sequence_parallel"``,
            ``"replicate"``, ``"replicate_kv"``, ``"mla_kv_a_proj"``, ``"local_colwise"``, ``"local_rowwise"``,
            ``"moe_tp_experts"``, ``"ep_dispatch_experts"``, ``"local"``, ``"gather"``. ``"auto"`` is the plan
            that a model of Transformers has itself (``tp_plan``, ``base_model_tp_plan``).
        src_data_rank: position in the mesh of the rank whose parameter values are used; None: every rank keeps its
            own values.

    Returns:
        ``module``. Tied parameters stay tied.

    Raises:
        PlanError: (a ValueError) all problems of the plan; no parameter has been changed.
        TypeError: ``module`` is not a module, or the plan is neither a style nor a mapping of paths to styles.
    """
    mesh = resolve_mesh(device_mesh)
    if parallelize_plan is None:
        warnings.warn("parallelize_module: no parallelize_plan given; the module stays as it is", stacklevel=2)
        return module
    platform = platform_of_argument(module, "parallelize_module: module", module=True)
    plan = resolve_plan(module, parallelize_plan)
    for note in check_named(platform, module, mesh, plan):
        warnings.warn(f"parallelize_module: {note}", stacklevel=2)
    apply_plan(platform, module, mesh, plan, src_data_rank)
    return module


def check_named(
    platform: Platform, module: Any, mesh: DeviceMesh, plan: ParallelStyle | Mapping[str, Any]
) -> list[str]:
    """Name the modules for messages, check a plan, and return notes on what is probably unintended.

    Raises:
        PlanError: (a ValueError) all problems of the plan.
    """
    name_modules(platform, module)
    report = check_plan(module, mesh, plan)
    report.raise_problems()
    return list(report.notes)


def apply_plan(
    platform: Platform,
    module: Any,
    mesh: DeviceMesh,
    plan: ParallelStyle | Mapping[str, Any],
    src_data_rank: int | None = 0,
) -> None:
    """Shard a module by a plan that was checked; the arguments are those of :func:`parallelize_module`."""
    with replacing_parameters(platform, module) as ties:
        for match in matched_modules(module, plan):
            match.style.src_data_rank = src_data_rank
            match.style.apply_within(match.owner, match.module, mesh)
            ties.restore()
            _name_entry(match, mesh)
    if mesh.ndim > 1:
        replicate_module(platform, module, mesh, src_data_rank=src_data_rank)
    trace_modules(platform, module)


def _name_entry(match: Match, mesh: DeviceMesh) -> None:
    """Record on a module the entry of its style, for messages on the DTensors that it returns."""
    outputs = match.style.outputs()
    if outputs:
        is_plain_whole = all(is_whole(layout) for layout, _ in outputs)
        fix = ", where use_local_output=True makes it a plain tensor" if is_plain_whole else ""
        name_entry(match.module, mesh, f"{match.pattern!r} ({type(match.style).__name__})", fix)
