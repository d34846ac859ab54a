"""Draw the packages and their imports: `python ci/architecture.py` writes docs/architecture.svg.

Everything in the picture is read from the sources: a room is a folder, an arrow says that a file of one room imports
from the other. An arrow that others imply (a → b → c implies a → c) is left out, and so are imports for type checkers.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hyper_parallel"
TARGET = ROOT / "docs" / "architecture.svg"

# Room -> its purpose in a few words, and its column in the picture. A file belongs to the room with the longest
# matching folder.
ROOMS = {
    "errors": ("exceptions, layout notation", 2),
    "platform/contract": ("what a framework must provide", 1),
    "platform/torch/versions": ("PyTorch's private names", 0),
    "platform/mindspore/versions": ("MindSpore's private names", 1),
    "platform/torch": ("PyTorch: facets, operators", 0),
    "platform/mindspore": ("MindSpore: facets, operators", 1),
    "transport": ("communication between ranks", 2),
    "core/dtensor": ("meshes, layouts, redistribution", 3),
    "core/shard": ("sharding rules, dispatch", 3),
    "core/tensor_parallel": ("styles and plans", 3),
    "core/data_parallel": ("fully sharded parameters", 2),
    "core/context_parallel": ("sequences over an axis", 1),
    "core/expert_parallel": ("experts over an axis", 0),
    "core/checkpoint": ("sharded checkpoints", 4),
    "compat": ("another release's names", 4),
    "verify": ("verification", 2),
    "verify/frameworks": ("the harness's side of frameworks", 1),
    "pytest_plugin": ("tests on ranks", 1),
    "cli": ("the command hyper-parallel", 2),
}
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" role="img">
<title>Packages of hyper_parallel; an arrow points to the package that is imported</title>
<style>text {{ text-anchor: middle; }} path {{ fill: none; stroke: #7a8699; stroke-width: 1.5; }}</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<polygon points="0 0 8 4 0 8" fill="#7a8699"/></marker></defs>"""
BOX, GAP = (206, 52), (26, 58)


def room_of(module: str) -> str | None:
    """Return the room of a module such as ``hyper_parallel.core.shard.rule``, or None outside all rooms."""
    path = module.removeprefix(f"{PACKAGE}.").replace(".", "/")
    rooms = [room for room in ROOMS if path == room or path.startswith(f"{room}/")]
    return max(rooms, key=len, default=None)


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield what a module imports when it runs, inside functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            yield from imports(node)


def arrows(root: Path = ROOT) -> set[tuple[str, str]]:
    """Return the pairs (importing room, imported room) of all files under ``root``."""
    pairs = set()
    for path in sorted((root / PACKAGE).rglob("*.py")):
        source = room_of(".".join(path.relative_to(root).with_suffix("").parts))
        for name in imports(ast.parse(path.read_text(encoding="utf-8"))):
            target = room_of(name) if name.startswith(f"{PACKAGE}.") else None
            if source is not None and target is not None and source != target:
                pairs.add((source, target))
    return pairs


def reduced(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the pairs that no chain of other pairs implies."""

    @cache
    def reachable(room: str) -> frozenset[str]:
        targets = {target for source, target in pairs if source == room}
        return frozenset(targets.union(*map(reachable, targets)))

    return {
        (source, target)
        for source, target in pairs
        if not any(target in reachable(other) for start, other in pairs if start == source and other != target)
    }


def levels(pairs: set[tuple[str, str]]) -> dict[str, int]:
    """Return the height of each room: one more than the highest room that it imports."""

    @cache
    def height(room: str) -> int:
        return max((height(target) + 1 for source, target in pairs if source == room), default=0)

    return {room: height(room) for room in ROOMS}


def draw(pairs: set[tuple[str, str]]) -> str:
    """Return the picture as SVG, readable on light and dark pages."""
    heights = levels(pairs)
    top, columns = max(heights.values()), 1 + max(column for _, column in ROOMS.values())
    width, height = columns * (BOX[0] + GAP[0]) + GAP[0], (top + 1) * (BOX[1] + GAP[1]) - GAP[1] + 24
    place = {
        room: (GAP[0] + column * (BOX[0] + GAP[0]), 12 + (top - heights[room]) * (BOX[1] + GAP[1]))
        for room, (_, column) in ROOMS.items()
    }
    lines = [HEAD.format(width=width, height=height)]
    for source, target in sorted(reduced(pairs)):
        (x, y), (other_x, other_y) = place[source], place[target]
        start, end = (x + BOX[0] // 2, y + BOX[1]), (other_x + BOX[0] // 2, other_y - 2)
        middle = (start[1] + end[1]) // 2
        lines.append(
            f'<path d="M{start[0]} {start[1]} C{start[0]} {middle} {end[0]} {middle} {end[0]} {end[1]}" '
            'marker-end="url(#head)"/>'
        )
    for room, (x, y) in place.items():
        name = f"{room}.py" if (ROOT / PACKAGE / f"{room}.py").exists() else f"{room}/"
        lines += [
            f'<rect x="{x}" y="{y}" width="{BOX[0]}" height="{BOX[1]}" rx="8" fill="#eef3fb" stroke="#4a76b8"/>',
            f'<text x="{x + BOX[0] // 2}" y="{y + 22}" font-size="14" font-weight="600" fill="#1b2a41">{name}</text>',
            f'<text x="{x + BOX[0] // 2}" y="{y + 40}" font-size="12" fill="#41516b">{ROOMS[room][0]}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    """Write the picture."""
    TARGET.write_text(draw(arrows()), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
