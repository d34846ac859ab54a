"""`ci/changelog.py`: every change brings one well-formed fragment."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "ci" / "changelog.py"


@pytest.fixture(scope="module")
def changelog(script):
    """The script as a module."""
    return script("changelog")


def test_the_projects_own_fragments_are_fine(changelog):
    """The fragments in ci/changelog.d keep the rules."""
    assert changelog.problems(changelog.FOLDER) == []


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("thing.md", "A thing.", "name it"),
        ("thing.new.md", "A thing.", "name it"),
        ("Thing.added.md", "A thing.", "name it"),
        ("thing.added.txt", "A thing.", "name it"),
        ("thing.added.md", "a thing", "full stop"),
        ("thing.added.md", "", "full stop"),
        ("thing.added.md", "- A thing.", "plain sentences"),
        ("thing.added.md", "# A thing.", "plain sentences"),
        ("thing.added.md", "A thing. " * 100 + "End.", "characters"),
    ],
)
def test_a_bad_fragment_fails_the_check(changelog, tmp_path, capsys, name, text, message):
    """A fragment with a wrong name or form fails the check, and the message says what to do."""
    (tmp_path / name).write_text(text)
    assert changelog.main(["check"], tmp_path) == 1
    assert message in capsys.readouterr().err


def test_build_groups_by_kind(changelog, tmp_path, capsys):
    """`build` prints one section with breaking changes first, each fragment as one bullet on one line."""
    (tmp_path / "README.md").write_text("not a fragment")
    (tmp_path / "b.fixed.md").write_text("B is\nright.\n")
    (tmp_path / "a.breaking.md").write_text("A is gone.")
    assert changelog.main(["build", "1.0"], tmp_path) == 0
    expected = "## 1.0\n\n### Breaking changes\n\n- A is gone.\n\n### Fixed\n\n- B is right.\n"
    assert capsys.readouterr().out.strip() == expected.strip()


def test_a_wrong_call_shows_the_usage(changelog, capsys):
    """A mistyped command is an error, not a silent success."""
    assert changelog.main(["chekc"]) == 2
    assert "changelog.py check" in capsys.readouterr().err
