"""The conformance matrix: member by framework, device and transport, as data and as a page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from hyper_parallel.platform.contract.inventory import MEMBERS

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
    heads = "".join(f"<th>{html.escape(' / '.join(names))}</th>" for names, _ in columns)
    rows = []
    for facet, members in MEMBERS.items():
        rows.append(f'<tr><th colspan="{len(columns) + 1}">{facet}</th></tr>')
        for member in members:
            cells = "".join(f"<td>{html.escape(found.get(member, 'not run'))}</td>" for _, found in columns)
            rows.append(f"<tr><td><code>{member}</code></td>{cells}</tr>")
    body = "\n".join(rows)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Conformance matrix</title>\n'
        f"<h1>Platform contract</h1>\n<table>\n<tr><th>member</th>{heads}</tr>\n{body}\n</table>\n</html>\n"
    )
