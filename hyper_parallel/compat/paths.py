"""Maps import paths of other programs to modules of this library.

A finder at the end of ``sys.meta_path`` serves the paths that have no file here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hyper_parallel._lazy import OTHER_HOMES

__all__ = ["MODULES", "NAMES", "install"]

_TOP = "hyper_parallel"

MODULES: dict[str, str | None] = {
    "core.activation_checkpoint": "compat.activation_checkpoint",
    "core.checkpoint.layout": "compat.layouts",
    "core.checkpoint.loader": "compat.earlier",
    "core.checkpoint.saver": "compat.earlier",
    "core.context_parallel.async_context_parallel": "compat.context_parallel",
    "core.context_parallel.async_dsa_context_parallel": "compat.refusals",
    "core.context_parallel.context_parallel": "compat.context_parallel",
    "core.context_parallel.dsa_context_parallel": "compat.refusals",
    "core.device_mesh": "core.dtensor.mesh",
    "core.distributed_checkpoint": "compat.layouts",
    "core.dtensor.placement_types": "core.dtensor.placements",
    "core.dtensor.redistribute_infer": "compat.layouts",
    "core.fully_shard": "compat.fully_shard",
    "core.fully_shard.api": "compat.fully_shard",
    "core.fully_shard.utils": "compat.fully_shard",
    "core.hsdp": "compat.earlier",
    "core.layout": "core.dtensor.layout",
    "core.parameter_init": "compat.earlier",
    "core.pipeline_parallel": "compat.pipeline",
    "core.pipeline_parallel.comm_compute_overlap": "compat.pipeline",
    "core.pipeline_parallel.hook_coordinator": "compat.pipeline",
    "core.pipeline_parallel.scheduler": "compat.pipeline",
    "core.placement_types": "core.dtensor.placements",
    "core.shard.api": "core.shard.custom.sharding_plan",
    "core.shard.sharding_plan": "core.shard.custom.sharding_plan",
    "custom_ops": None,
    "custom_ops.experimental": "compat.refusals",
    "platform.mindspore.autograd_compat": "compat.activation_checkpoint",
    "platform.mindspore.pipeline_parallel": None,
    "platform.mindspore.pipeline_parallel._utils": "compat.pipeline",
    "platform.torch.activation_checkpoint": "compat.activation_checkpoint",
    "platform.torch.fully_shard": None,
    "platform.torch.fully_shard.utils": "compat.fully_shard",
}
"""Paths without a file here, with the module that provides their names; None for a package of other paths."""

NAMES: dict[str, dict[str, str]] = {
    "": {
        **dict.fromkeys(
            ("HSDPCell", "hsdp", "hsdp_sync_stream", "init_parameters", "parallelize_value_and_grad"), "compat.earlier"
        ),
        **dict.fromkeys(("MetaStepType", "PipelineStage", "ScheduleInterleaved1F1B"), "compat.pipeline"),
        **dict.fromkeys(
            ("destroy_process_group", "get_backend", "get_process_group_ranks", "init_process_group", "split_group"),
            "compat.process_groups",
        ),
    },
    "core.dtensor.dtensor": {"distribute_tensor": "core.dtensor.module"},
    "core.dtensor.layout": {"_infer_slice_area_by_rank": "compat.layouts"},
    "platform": {"get_platform": "platform.select"},
}
"""By module that other programs import from: names that this library defines in a different module, with that module.
"""


class _Finder(MetaPathFinder):
    """Finds the paths of :data:`MODULES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of a path in the table; None for all others."""
        del path, target
        short = fullname.removeprefix(f"{_TOP}.")
        if short == fullname or short not in MODULES:
            return None
        is_package = any(other.startswith(f"{short}.") for other in MODULES)
        return ModuleSpec(fullname, _Alias(MODULES[short]), is_package=is_package)


class _Alias(Loader):
    """Loader of a module whose names are those of ``home``, which is imported at the first use of a name.

    Args:
        home: path of the module that defines the names, without the top package; None for a package without names.
    """

    def __init__(self, home: str | None) -> None:
        self._home = home

    def exec_module(self, module: ModuleType) -> None:
        """Define the module's names."""
        if self._home is None:
            module.__doc__ = "Other programs import modules of this package."
            return
        home = f"{_TOP}.{self._home}"
        module.__doc__ = f"The names of {home}."

        def find(name: str) -> Any:
            return getattr(importlib.import_module(home), name)

        vars(module).update(__getattr__=find, __dir__=lambda: dir(importlib.import_module(home)))


def install() -> None:
    """Install the finder for the paths of the tables; once per process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    for module, homes in NAMES.items():
        full = f"{_TOP}.{module}" if module else _TOP
        OTHER_HOMES[full] = {name: f"{_TOP}.{home}" for name, home in homes.items()}
