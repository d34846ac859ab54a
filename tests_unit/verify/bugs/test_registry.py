"""The corpus's registry: facts of programs, read without a framework."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.verify.bugs import registry
from hyper_parallel.verify.bugs.registry import CALLS, bugs_named, find_bugs
from hyper_parallel.verify.engine.causes import CAUSES
from hyper_parallel.verify.frameworks.contract.records import KINDS

FOLDER = Path(registry.__file__).parent
BUGS = [bug for framework in ("torch", "mindspore") for bug in find_bugs(framework)]
IDS = [f"{bug.framework}-{bug.name}" for bug in BUGS]


def functions(framework):
    """The functions of a framework's programs by name, each with its module and number of lines."""
    return {
        node.name: (path.stem, node.end_lineno - node.lineno + 1)
        for path in (FOLDER / framework).glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and path.stem != "base"
    }


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_programs_import_their_base_alone(framework):
    """Programs stand for users' files: of this library they name the few shared functions of their folder only."""
    for path in (FOLDER / framework).glob("*.py"):
        named = [line for line in path.read_text(encoding="utf-8").splitlines() if "hyper_parallel" in line]
        assert all(line.startswith(f"from hyper_parallel.verify.bugs.{framework}.base import ") for line in named)
        assert path.stem != "base" or not named


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_every_program_is_a_short_function_with_facts(framework):
    """A program is a function of at most 70 lines in the module that its facts name; no function lacks facts."""
    found = functions(framework)
    assert {bug.name: bug.module for bug in find_bugs(framework)} == {
        name: module for name, (module, _) in found.items()
    }
    assert max(lines for _, lines in found.values()) <= 70


@pytest.mark.parametrize("bug", BUGS, ids=IDS)
def test_a_program_is_in_the_readme_with_its_source(bug):
    """The README lists every program with the report that it comes from and what goes wrong."""
    (row,) = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith(f"| `{bug.name}` |")]
    assert bug.source in row
    assert bug.sentence.removesuffix(".") in row


@pytest.mark.parametrize("bug", BUGS, ids=IDS)
def test_facts_are_words_of_the_harness(bug):
    """Kind and cause are among those that the harness names, and the sentence is one."""
    assert bug.kind in (*KINDS, CALLS)
    assert bug.cause in CAUSES
    assert bug.sentence.endswith(".")


def test_axes_have_unequal_sizes():
    """A mesh of several axes has no two of equal size, and at least two ranks."""
    for framework in ("torch", "mindspore"):
        for bug in find_bugs(framework):
            assert bug.world_size > 1, bug.name
            assert len(set(bug.mesh.values())) == len(bug.mesh), bug.name


def test_facts_are_read_without_the_framework():
    """Listing the bugs of PyTorch does not import PyTorch."""
    code = "import sys; from hyper_parallel.verify.bugs.registry import find_bugs; print(len(find_bugs('torch')))"
    code += "; assert not {'torch', 'mindspore'} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) > 10


@pytest.mark.platforms("torch")
def test_the_reference_is_the_same_form_or_the_fixed_one(monkeypatch):
    """One device runs the form that the ranks run, or the fixed one where it has the bug, too."""
    (own,) = bugs_named(["torch"], ["dropout_in_evaluation"])
    (same,) = bugs_named(["torch"], ["equal_positions"])
    for bug, form in ((own, False), (same, True)):
        ran = []
        monkeypatch.setattr(bug.load(), bug.name, ran.append)
        bug.reference(broken=True)()
        assert ran == [form]


def test_an_unknown_name_is_an_error_with_near_ones():
    """A name that no program has is refused; similar ones are listed."""
    assert [bug.name for bug in bugs_named(["torch"], ["router_weight"])] == ["router_weight"]
    with pytest.raises(ValueError, match=r"^no bug of torch is called 'router'; did you mean router_weight"):
        bugs_named(["torch"], ["router"])
    with pytest.raises(ValueError, match=r"^no bug of torch is called '§'$"):
        bugs_named(["torch"], ["§"])
