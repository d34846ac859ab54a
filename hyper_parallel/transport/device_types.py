"""Facts about devices, found without importing a framework: variables that hide devices, and tools that list them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["TOOLS", "VISIBLE", "dry_run", "has_plugin"]

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Environment variables with the numbers of the devices that a process sees, separated by commas."""

TOOLS = {"cuda": "nvidia-smi", "npu": "npu-smi info"}
"""Commands of the drivers that list the devices."""

_PLUGIN = "lib/plugin/libmindspore_ascend.so*"
_DRY_RUN = "MS_SIMULATION_LEVEL"


def dry_run(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a message and its fix if MindSpore is set to a dry run, which computes and sends nothing; else None.

    Args:
        environment: the variables.
    """
    level = environment.get(_DRY_RUN)
    if not level:
        return None
    return f"{_DRY_RUN}={level}: MindSpore makes a dry run, without values and without HCCL", f"unset {_DRY_RUN}"


def has_plugin(package: Path) -> bool:
    """Return whether MindSpore's installed ``package`` has the plugin for Ascend; its CPU build has none."""
    return any(package.glob(_PLUGIN))
