"""The architecture page and its picture agree with the sources."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="[no-tool] the pages are not installed")


@pytest.fixture(scope="module")
def architecture(script):
    """The script as a module."""
    return script("architecture")


def test_the_picture_is_up_to_date(architecture):
    """The committed picture equals the one drawn from the sources; run ci/architecture.py to renew it."""
    assert architecture.TARGET.read_text(encoding="utf-8") == architecture.draw(architecture.arrows())


def test_every_folder_with_code_belongs_to_a_room(architecture):
    """The picture leaves out no folder of the package."""
    package = ROOT / architecture.PACKAGE
    modules = [path.relative_to(ROOT).with_suffix("") for path in package.rglob("*.py") if path.parent != package]
    outside = {str(path) for path in modules if architecture.room_of(".".join(path.parts)) is None}
    assert outside <= {
        f"{architecture.PACKAGE}/{name}"
        for name in (
            "core/__init__",
            "platform/__init__",
            "platform/built",
            "platform/select",
            "platform/tested",
        )
    }


def test_arrows_point_down_and_are_reduced(architecture):
    """No arrow closes a cycle, and none is implied by two others."""
    pairs = {("a", "b"), ("b", "c"), ("a", "c"), ("a", "d")}
    assert architecture.reduced(pairs) == {("a", "b"), ("b", "c"), ("a", "d")}
    heights = architecture.levels(architecture.arrows())
    assert all(heights[source] > heights[target] for source, target in architecture.arrows())


def test_rooms_do_not_cover_each_other(architecture):
    """No two rooms have the same place in the picture."""
    heights = architecture.levels(architecture.arrows())
    assert len({(heights[room], column) for room, (_, column) in architecture.ROOMS.items()}) == len(heights)


def test_the_walk_names_functions_that_exist():
    """Each step of the walk names a file and a function or method that is defined in it."""
    steps = re.findall(r"^\|[^|]+\| `([\w/]+\.py)` \| `(\w+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(steps) >= 8
    for file, function in steps:
        tree = ast.parse((ROOT / "hyper_parallel" / file).read_text(encoding="utf-8"))
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, (file, function)
