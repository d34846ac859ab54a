"""The versions of Python and of both frameworks on which all suites pass; `docs/versions.md` has the runs.

No version is refused because it is newer: it may work, and reports name it.
"""

from __future__ import annotations

import re

__all__ = ["OLDEST", "PYTHONS", "TESTED", "newer_than_tested", "older_than_supported"]

TESTED = {
    "torch": ("2.13", "2.14"),
    "mindspore": ("2.10",),
}
"""Minor versions, oldest first. Older ones may be installed; `docs/versions.md` says what is known of them."""

OLDEST = {"torch": "2.10", "mindspore": "2.8"}
"""The oldest minor versions that are supported, as in ``pyproject.toml``."""

PYTHONS = {"torch": ((3, 10), (3, 14)), "mindspore": ((3, 10), (3, 12))}
"""The oldest and the newest Python for which a framework has wheels."""


def newer_than_tested(framework: str, version: str) -> str:
    """Return a sentence if ``version`` is newer than every tested one, else an empty text.

    Args:
        framework: ``torch`` or ``mindspore``.
        version: version as the framework reports it, such as ``2.16.0.dev20261120+cpu``.
    """
    newest = TESTED[framework][-1]
    if _minor(version) <= _minor(newest):
        return ""
    return f"{framework} {version} is newer than {newest}, the newest that this version of hyper_parallel was tested on"


def older_than_supported(framework: str, version: str) -> str:
    """Return a sentence if ``version`` is older than every supported one, else an empty text; arguments as above."""
    oldest = OLDEST[framework]
    if not _minor(version) or _minor(version) >= _minor(oldest):
        return ""
    return f"{framework} {version} is older than {oldest}, the oldest that this version of hyper_parallel supports"


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
