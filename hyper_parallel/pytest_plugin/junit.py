"""What the plugin adds to a JUnit file: where the run comes from, and titles over what each rank printed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from _pytest.junitxml import xml_key

from hyper_parallel.pytest_plugin.capability import count_cards
from hyper_parallel.pytest_plugin.selection import selected

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

__all__ = ["describe_run", "titled"]

_OF_RANK = re.compile(r"Captured ((?:stdout|collectives) of rank \d+) ")


def describe_run(config: pytest.Config) -> None:
    """Write date, revision, versions, command, frameworks and cards of this run into its JUnit file, if it has one."""
    from hyper_parallel.verify.run_header import PROPERTY, RunHeader, revision_of

    file = config.stash.get(xml_key, None)
    if file is None:
        return
    device = config.getoption("hp_device")
    facts = {
        **RunHeader(("pytest", *map(str, config.invocation_params.args))).facts(),
        "revision": revision_of(config.rootpath),
        "frameworks": ", ".join(selected(config)) or "none",
        "device": device,
        **({} if device == "cpu" else {"cards": str(count_cards(device))}),
    }
    for name, text in facts.items():
        file.add_global_property(PROPERTY + name, text)


def titled(sections: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the sections of a test for a JUnit file, which keeps no titles and no sections of collectives.

    Args:
        sections: pairs of a title and a text; those of ranks become printed output that begins with the title.
    """
    found = [(_OF_RANK.match(title), title, text) for title, text in sections]
    return [
        (title, text) if rank is None else ("Captured stdout call", f"--- {rank[1]} ---\n{text.rstrip()}\n")
        for rank, title, text in found
    ]
