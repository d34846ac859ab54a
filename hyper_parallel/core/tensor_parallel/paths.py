"""Records each module's path, for error messages and the event log."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import module_path, set_module_path, watchers
from hyper_parallel.core.dtensor.parameter_paths import MODULE_PATH, module_label
from hyper_parallel.core.dtensor.style_outputs import note_style_output

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["name_entry", "name_modules", "trace_modules"]

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
    """Record on a module, which has its path, the entry of the plan that it has its style by.

    Args:
        module: the module.
        mesh: its mesh.
        entry: pattern and style.
        fix: the end of the clause, on what makes the output a plain tensor; or ``""``.
    """
    clause = (
        f"the last DTensor that a style returned is the output of {module_label(module)}, entry {entry} of the plan"
    )
    module.__dict__[_ENTRY] = repr(mesh), clause + fix


def trace_modules(platform: Platform, root: Any) -> None:
    """Register hooks that tell the event log which module is running, and messages which one returned a DTensor."""
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
    # If recording began inside this forward, the module was never entered.
    if running and running[-1][0] == id(module):
        _RUNNING.set(running[:-1])
        set_module_path(running[-1][1])
