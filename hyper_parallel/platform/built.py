"""Imported by the fork servers of ranks, so that ranks start with the platform of their framework already built."""

import sys

from hyper_parallel.platform.select import FRAMEWORKS, platform_named

__all__: list[str] = []

for name in FRAMEWORKS:
    if name in sys.modules:
        platform_named(name)
