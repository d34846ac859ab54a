"""The recording in the README is made of what commands print."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="[no-tool] the README is not installed")


@pytest.fixture
def recording(monkeypatch, tmp_path, script):
    """The script, in a project of its own."""
    module = script("recording")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    return module


def lines_of(text):
    """Return the lines of a picture and their classes."""
    return [(node.get("class"), node.text) for node in ET.fromstring(text) if node.tag.endswith("text")]  # noqa: S314 - our own


def test_a_recording_has_commands_and_the_ends_of_their_output(recording):
    """A command, its first lines and its last one; text is escaped, and verdicts have their colours."""
    printed = ["equal <3", *(f"line {number}" for number in range(9)), "FAILED one"]
    lines = lines_of(recording.picture([("run --it", printed)]))
    assert lines[0] == ("command", "$ run --it")
    assert lines[1] == ("good", "equal <3")
    assert lines[-2:] == [("plain", "  ..."), ("bad", "FAILED one")]
    assert len(lines) == 1 + recording.SHOWN + 2


def test_the_readmes_model_is_recorded(recording, monkeypatch, tmp_path, capsys):
    """The file of the README is written for the commands; a README without it is an error."""
    (tmp_path / "README.md").write_text("no model")
    assert recording.main() == 2
    assert capsys.readouterr().err.startswith("recording: README.md has no block of Python")
    (tmp_path / "README.md").write_text("```python\n# my_model.py\nimport os\n```\n")
    monkeypatch.setattr(recording, "COMMANDS", ("hyper-parallel --version",))
    assert recording.main() == 0
    lines = lines_of((tmp_path / "docs" / "first-run.svg").read_text())
    assert lines[0] == ("command", "$ hyper-parallel --version")
    assert lines[1][1].startswith("hyper-parallel ")


def test_the_recording_of_the_readme_shows_both_verdicts():
    """The picture in docs has the README's commands, one equal and one that diverges."""
    lines = lines_of((ROOT / "docs" / "first-run.svg").read_text())
    assert sum(kind == "command" and text.startswith("$ ") for kind, text in lines) == 2
    assert {"good", "bad"} <= {kind for kind, _ in lines}
