"""The harness's interfaces to the frameworks; each framework is imported at its first use."""

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

hide_folder(Path(__file__).parent)  # recorders wrap calls between the program and the framework


@cache
def harness_of(platform: Platform) -> HarnessPlatform:
    """Return the harness interface of a platform's framework."""
    harness: HarnessPlatform = import_module(f"{__name__}.{platform.platform_type}.harness").build(platform)
    return harness
