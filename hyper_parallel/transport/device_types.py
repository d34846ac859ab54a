"""Facts about devices without a framework: variables that hide them, tools that list them, MindSpore's build."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["TOOLS", "VISIBLE", "dry_run", "has_plugin"]

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Environment variables with the numbers of the devices that a process sees, separated by commas."""

TOOLS = {"cuda": "nvidia-smi", "npu": "npu-smi info"}
"""Commands of the drivers."""

_PLUGIN = "lib/plugin/libmindspore_ascend.so*"
_DRY_RUN = "MS_SIMULATION_LEVEL"


def dry_run(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a message, with the fix, if MindSpore would run dry, without computing or sending; else None.

    Args:
        environment: the variables.
    """
    level = environment.get(_DRY_RUN)
    if not level:
        return None
    return f"{_DRY_RUN}={level}: MindSpore runs dry, without values and without HCCL", f"unset {_DRY_RUN}"


def has_plugin(package: Path) -> bool:
    """Return whether MindSpore's installed ``package`` has the plugin for Ascend; its CPU build has none."""
    return any(package.glob(_PLUGIN))
