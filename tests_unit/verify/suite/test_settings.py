"""Checks in pyproject.toml: tables, worlds, budgets, and what is wrong with them."""

import pytest

from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.suite.settings import KINDS, TABLE, find_settings, read_settings

GOOD = """\
[tool.hyper_parallel.verify]
timeout = 200
seconds = 60

[tool.hyper_parallel.verify.programs.ddp]
run = "train.py --batch 24"
world_size = [2, 3]
seconds = 9.5

[tool.hyper_parallel.verify.diffs.zero]
a = "torchrun train.py --zero 2"

[tool.hyper_parallel.verify.models.tiny]
spec = "case.py:case"
mesh = ["2x2"]
"""


@pytest.fixture
def settings(tmp_path):
    """Return a function that writes the settings of a folder."""
    path = tmp_path / "pyproject.toml"

    def write(text):
        path.write_text(text)
        return path

    return write


def test_a_list_of_worlds_is_a_check_for_each(settings):
    """Names say the world, options are spelt with hyphens, and the budget of a check replaces the shared one."""
    found = read_settings(settings(GOOD))
    assert [(check.name, check.kind, check.seconds, check.place) for check in found] == [
        ("ddp (world-size 2)", "program", 9.5, ("pyproject.toml", 5)),
        ("ddp (world-size 3)", "program", 9.5, ("pyproject.toml", 5)),
        ("zero", "diff", 60, ("pyproject.toml", 10)),
        ("tiny (mesh 2x2)", "model", 60, ("pyproject.toml", 13)),
    ]
    assert found[1].options == {"run": "train.py --batch 24", "world-size": 3}
    assert all(check.shared == {"timeout": 200} for check in found)
    assert [check.script for check in found] == ["train.py", "train.py", "train.py", "case.py"]


def test_the_nearest_file_with_the_table_is_found(settings, tmp_path):
    """A file without the table is passed over; without any, both ways out are named."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.other]\n")
    with pytest.raises(InputError) as raised:
        find_settings(inner)
    assert str(raised.value) == (
        f"no pyproject.toml in {inner} or above it has a table [tool.hyper_parallel.verify], whose checks "
        "`hyper-parallel verify` runs; add one, or name what to verify, as in `hyper-parallel verify program train.py`"
    )
    path = settings(GOOD)
    assert find_settings(inner) == path


@pytest.mark.parametrize(
    "text, said",
    [
        ("[tool", "{} cannot be read: Expected ']' at the end of a table declaration (at end of document)"),
        ("", "{} has no table [tool.hyper_parallel.verify]"),
        ("[tool.hyper_parallel]\nverify = 3\n", "{}: tool.hyper_parallel.verify must be a table"),
        (
            "[tool.hyper_parallel.verify.program.a]\n",
            "{}: [tool.hyper_parallel.verify] has no check; checks are tables "
            + ", ".join(f"[tool.hyper_parallel.verify.{group}.NAME]" for group in KINDS)
            + "; did you mean programs?",
        ),
        (
            "[tool.hyper_parallel.verify.programs]\nrun = 3\n",
            "{0}: [{1}] must have a table for each check: [{1}.NAME]".replace("{1}", f"{TABLE}.programs"),
        ),
        (
            "[tool.hyper_parallel.verify.programs.a]\nseconds = true\n",
            "{}: [tool.hyper_parallel.verify] a: seconds is True; it must be a number above 0",
        ),
        (
            "[tool.hyper_parallel.verify.programs.a]\nworld-size = []\n",
            "{}: [tool.hyper_parallel.verify] a: give the worlds as one non-empty list: world-size or mesh",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_file(settings, text, said):
    """Every message names the file and the table."""
    path = settings(text)
    with pytest.raises(InputError) as raised:
        read_settings(path)
    assert str(raised.value) == said.format(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """The system's reason is in the message."""
    with pytest.raises(InputError) as raised:
        read_settings(tmp_path / "none.toml")
    assert str(raised.value) == f"{tmp_path / 'none.toml'} cannot be read: No such file or directory"
