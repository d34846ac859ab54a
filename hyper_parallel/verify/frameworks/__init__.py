"""The frameworks as the harness sees them; each is imported when it is first asked for."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from hyper_parallel.transport.frames import hide_folder

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.frameworks.contract.harness import HarnessPlatform

__all__ = ["harness_of"]

hide_folder(Path(__file__).parent)  # what records a program stands between it and the framework


@cache
def harness_of(platform: Platform) -> HarnessPlatform:
    """Return what the harness needs of a platform's framework."""
    harness: HarnessPlatform = import_module(f"{__name__}.{platform.platform_type}.harness").build(platform)
    return harness
