"""PyTorch's recorder beside MindSpore's: what the sources of both write into a log, and ask of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from hyper_parallel.verify import frameworks
from hyper_parallel.verify.frameworks.contract.records import DECISIONS, KINDS, OBSERVED, THRESHOLDS

ROOM = Path(frameworks.__file__).parent
ASKED = ("limits", "changes", "perturbation")
FEATURES = re.compile("`((?:file|hook|kind|note|limits|changes|perturbation) [^`]+)`")


def sources_of(framework):
    """The syntax trees of the files of a framework's folder that its recorder reaches, by name."""
    found, waiting = {}, ["hooks"]
    while waiting:
        name = waiting.pop()
        file = ROOM / framework / f"{name}.py"
        if name in found or not file.exists():  # a package stands for what is in it
            found.setdefault(name, ast.Module([], []))
            continue
        found[name] = ast.parse(file.read_text(encoding="utf-8"))
        here = f"hyper_parallel.verify.frameworks.{framework}"
        for node in ast.walk(found[name]):
            if isinstance(node, ast.ImportFrom) and str(node.module) == here:
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{here}."):
                waiting.append(node.module.removeprefix(f"{here}.").partition(".")[0])
    return found


def literal(node, constants):
    """The text that an expression stands for."""
    if isinstance(node, ast.Subscript):
        return THRESHOLDS[node.slice.value]
    return node.value if isinstance(node, ast.Constant) else constants.get(ast.unparse(node), "")


def features_in(name, tree):
    """What one file of a recorder records, notes, asks for and replaces."""
    constants = {
        ast.unparse(node.targets[0]): node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    yield f"file {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            if owner.lstrip("_") in ASKED:
                yield f"{owner} {node.attr}"
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("notes"):
            yield f"note {literal(node.slice, constants)}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.endswith("log.add"):
                yield f"kind {literal(node.args[0], constants)}"
            elif called.endswith(("notes.setdefault", "self._note")):
                yield f"note {literal(node.args[0], constants)}"
            elif called.endswith("notes.update"):
                keys = [key for inner in ast.walk(node) if isinstance(inner, ast.Dict) for key in inner.keys]
                yield from (f"note {literal(key, constants)}" for key in keys)
            elif called.endswith("self._replace") and name == "hooks":
                yield from hooks_of(node.args[2])


def hooks_of(made):
    """The function that sees what was replaced; of a partial call the one that it is given."""
    given = [keyword.value for keyword in made.keywords] or made.args[:1] if isinstance(made, ast.Call) else [made]
    return (f"hook {ast.unparse(function).rpartition('.')[2].lstrip('_')}" for function in given)


def features_of(framework):
    """Everything that the sources of a framework's recorder have, by name."""
    found = {feature for name, tree in sources_of(framework).items() for feature in features_in(name, tree)}
    return {feature for feature in found if feature.partition(" ")[2]}


@pytest.fixture(name="rows")
def fixture_rows():
    """Rows of the room's table of differences: features of PyTorch's recorder, and what MindSpore's has or why not."""
    text = (ROOM / "README.md").read_text(encoding="utf-8").partition("## What PyTorch's recorder has")[2]
    table = [line.strip("|").split(" | ") for line in text.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    return [(FEATURES.findall(cells[0]), cells[1].strip()) for cells in table]


def test_every_feature_of_pytorchs_recorder_exists_on_mindspore_or_is_listed(rows):
    """A feature of PyTorch's recorder alone stands in the room's table with a reason, and nothing else stands there."""
    lacking = features_of("torch") - features_of("mindspore")
    listed = [feature for features, _ in rows for feature in features]
    assert sorted(listed) == sorted(lacking)
    assert all(reason for _, reason in rows)


def test_the_kinds_of_records_are_known_ones():
    """Both recorders use kinds of the contract only, and those of results are the same."""
    torch, mindspore = (
        {feature.partition(" ")[2] for feature in features_of(framework) if feature.startswith("kind ")}
        for framework in ("torch", "mindspore")
    )
    assert torch <= {*KINDS, *DECISIONS, *OBSERVED}
    assert torch - mindspore == {*DECISIONS, "collective"}


def test_counterparts_on_mindspore_exist(rows):
    """A method that the table names as MindSpore's counterpart is one of its recorder."""
    tree = sources_of("mindspore")["recorder"]
    methods = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    named = {name for _, reason in rows for name in re.findall(r"`Recorder\.(\w+)`", reason)}
    assert named
    assert named <= methods
