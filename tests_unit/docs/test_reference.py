"""`docs/reference` documents every public name; `tox -e docs` builds it, and fails on a warning."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

SETTINGS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "conf.py"


@pytest.fixture(scope="module")
def settings():
    """Return Sphinx's settings as a module."""
    spec = importlib.util.spec_from_file_location("reference_conf", SETTINGS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_public_name_without_a_description_is_named(settings):
    """A missing public name, or member of the platform contract, fails the build and is named."""
    everything = {missing.removeprefix("member ").split()[0] for missing in settings.undescribed(set())}
    assert {"hyper_parallel.DTensor", "hyper_parallel.verify.simulate", "all_reduce", "_create_group"} <= everything
    assert settings.undescribed(everything) == []
    assert settings.undescribed(everything - {"all_reduce"}) == ["member all_reduce of the platform contract"]
    without = everything - {"hyper_parallel.DTensor", "hyper_parallel.core.dtensor.DTensor"}
    assert settings.undescribed(without) == ["hyper_parallel.DTensor", "hyper_parallel.core.dtensor.DTensor"]


def test_every_mark_and_fixture_of_the_plugin_is_described():
    """The plugin's page has each mark with its arguments, and each fixture."""
    from hyper_parallel.pytest_plugin import fixtures
    from hyper_parallel.pytest_plugin.marks import MARKS

    page = SETTINGS.with_name("pytest_plugin.rst").read_text()
    assert not [mark for mark in MARKS if f"``{mark.partition(':')[0]}``" not in page]
    assert not [name for name in (*fixtures.ON_RANKS, "world_size", "launch_name", "platform_name")
                if f".. py:data:: {name}\n" not in page]  # fmt: skip


def test_every_page_is_in_the_table_of_contents():
    """Every page of the reference is reachable from its index."""
    pages = {page.stem for page in SETTINGS.parent.glob("*.rst")} - {"index"}
    listed = SETTINGS.with_name("index.rst").read_text().split(":maxdepth: 1")[1].split()
    assert pages == set(listed)


def test_a_line_of_a_diagram_describes_one_tensor():
    """A diagram of layouts in a docstring has a line for each tensor; a formatter that joins lines makes it prose."""
    library = SETTINGS.parents[2] / "hyper_parallel" / "core"
    trees = {path: ast.parse(path.read_text()) for path in library.rglob("*.py")}
    texts = [
        (path.name, ast.get_docstring(node) or "")
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
    ]
    lines = [(name, line) for name, text in texts for line in text.splitlines() if re.match(r"    \w+_[A-Z]+  ", line)]
    assert len(lines) > 20
    assert [line for line in lines if len(re.findall(r"\b[a-z]+_[A-Z]+\b", line[1])) > 1] == []
