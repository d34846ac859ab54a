"""The conformance matrix: member by framework, device and transport, as data and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hyper_parallel.platform.contract.inventory import MEMBERS
from hyper_parallel.verify import pages

__all__ = ["Column", "page", "summary"]

# Framework, device and transport, and what was found per member.
Column = tuple[tuple[str, str, str], Mapping[str, str]]


def summary(columns: Sequence[Column]) -> str:
    """A line per column: how many members are served, and the gaps with their reasons."""
    lines = []
    for names, found in columns:
        gaps = [f"  {member}: {value.removeprefix('gap: ')}" for member, value in found.items() if value != "served"]
        served = sum(value == "served" for value in found.values())
        lines += [f"{' / '.join(names)}: {served} of {len(found)} served", *gaps]
    return "\n".join(lines)


def page(columns: Sequence[Column]) -> str:
    """An HTML table: a row per member, a column per run; a gap shows its reason."""
    heads: list[pages.Column | str] = [
        "member",
        pages.Column("facet", choice=True),
        *(" / ".join(names) for names, _ in columns),
    ]
    rows: list[list[pages.Value]] = [
        [pages.Html(f"<code>{member}</code>"), facet, *(_cell(found.get(member, "not run")) for _, found in columns)]
        for facet, members in MEMBERS.items()
        for member in members
    ]
    text = "What a platform must offer, and which framework offers it on which device and transport"
    return pages.page("Platform contract", pages.table(text, heads, rows, search=True, tall=True))


def _cell(found: str) -> pages.Cell:
    kind = {"served": "good", "not run": "quiet"}.get(found, "bad")
    return pages.Cell(found, kind=kind)
