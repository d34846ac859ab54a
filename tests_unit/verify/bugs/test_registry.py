"""The corpus's registry: facts of programs, read without a framework."""

import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.verify.bugs import registry
from hyper_parallel.verify.bugs.registry import bugs_named, find_bugs, read_facts

FOLDER = Path(registry.__file__).parent
PROGRAMS = sorted(path for path in FOLDER.glob("*/*.py") if path.name != "__init__.py")
GOOD = '"""Wrong. Reported in repository 1."""\nMESH = {"tp": 3}\nDIFFERS = ("loss", None)\nCAUSE = "stale"\n'


@pytest.mark.parametrize("path", PROGRAMS, ids=[f"{path.parent.name}-{path.stem}" for path in PROGRAMS])
def test_a_program_is_a_short_file_of_a_user(path):
    """A program has at most 80 lines and names nothing of this library."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    assert "hyper_parallel" not in text


@pytest.mark.parametrize("path", PROGRAMS, ids=[f"{path.parent.name}-{path.stem}" for path in PROGRAMS])
def test_a_program_is_in_the_readme_with_its_source(path):
    """The README lists every program with the report that it comes from and what goes wrong."""
    bug = read_facts(path, path.parent.name)
    (row,) = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith(f"| `{bug.name}` |")]
    assert bug.source in row
    assert bug.sentence.removesuffix(".") in row


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


def test_a_fact_that_is_missing_or_wrong_is_an_error(tmp_path):
    """The message names the file, and what it lacks or which values there are."""
    path = tmp_path / "case.py"
    path.write_text(GOOD)
    bug = read_facts(path, "torch")
    assert (bug.sentence, bug.source, bug.world_size) == ("Wrong.", "repository 1", 3)
    assert (bug.kind, bug.tensor) == ("loss", "*")
    for old, new, message in (
        ("Reported in", "From", f"{path}: the program has no a docstring like 'What goes wrong. Reported in"),
        ('CAUSE = "stale"\n', "", f"{path}: the program has no CAUSE"),
        ('"stale"', '"old"', f"{path}: CAUSE is 'old'; there are missing-reduction, "),
        ('"loss"', '"lost"', f"{path}: DIFFERS has the kind 'lost'; there are value, output, "),
    ):
        path.write_text(GOOD.replace(old, new))
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
            read_facts(path, "torch")
        assert str(caught.value).startswith(message)


@pytest.mark.platforms("torch")
def test_the_reference_is_the_same_form_or_the_files_own():
    """One device runs the form that the ranks run, or `single` where the file has it."""
    (own,) = bugs_named(["torch"], ["dropout_in_evaluation"])
    assert own.reference(broken=True) is own.load().single
    (same,) = bugs_named(["torch"], ["equal_positions"])
    assert same.reference(broken=True).__qualname__ == same.program(broken=True).__qualname__


def test_an_unknown_name_is_an_error_with_near_ones():
    """A name that no program has is refused; similar ones are listed."""
    assert [bug.name for bug in bugs_named(["torch"], ["router_weight"])] == ["router_weight"]
    with pytest.raises(ValueError, match=r"^no bug of torch is called 'router'; near: router_weight"):
        bugs_named(["torch"], ["router"])
    with pytest.raises(ValueError, match=r"^no bug of torch is called '§'$"):
        bugs_named(["torch"], ["§"])
