"""`ci/release.py`: the version follows from the fragments, and a release changes exactly what names it."""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def release(monkeypatch, tmp_path, script):
    """The script, working on a small project of its own."""
    module = script("release")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "ci" / "changelog.d").mkdir(parents=True)
    (tmp_path / "ci" / "changelog.d" / "README.md").write_text("# Fragments\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.0.1\ndate-released: 2000-01-01\n")
    return module


@pytest.mark.parametrize("current, kinds, released, expected", [
    ((0, 1, 0), {"fixed", "added"}, False, (0, 1, 0)),
    ((0, 1, 3), {"fixed", "changed"}, True, (0, 1, 4)),
    ((0, 1, 3), {"fixed", "added"}, True, (0, 2, 0)),
    ((0, 1, 3), {"breaking"}, True, (0, 2, 0)),
    ((1, 4, 2), {"added"}, True, (1, 5, 0)),
    ((1, 4, 2), {"added", "breaking"}, True, (2, 0, 0)),
])  # fmt: skip
def test_the_version_follows_from_the_kinds(release, current, kinds, released, expected):
    """The first release keeps the version; later ones count as the page on stability says."""
    assert release.next_version(current, kinds, released=released) == expected


def test_mistakes_are_one_line(release, tmp_path, capsys):
    """Nothing to release, an unknown kind, a missing version and a wrong command give status 2."""
    assert release.main([]) == 2
    assert "python ci/release.py notes" in capsys.readouterr().err
    assert release.main(["notes"]) == 2
    assert capsys.readouterr().err == "release: no fragment in ci/changelog.d: there is nothing to release\n"
    (tmp_path / "ci" / "changelog.d" / "shards.broken.md").write_text("Shards.\n")
    assert release.main(["notes"]) == 2
    assert capsys.readouterr().err == "release: fragments of unknown kind: broken\n"
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    assert release.main(["notes"]) == 2
    assert capsys.readouterr().err == 'release: pyproject.toml has no line like version = "0.1.0"\n'


@pytest.mark.skipif(shutil.which("towncrier") is None, reason="[no-tool] towncrier is not installed")
def test_a_release_writes_changelog_version_and_notes(release, tmp_path, capsys):
    """After the first release, a fragment of kind added makes the next minor one; fragments are used up."""
    fragments = tmp_path / "ci" / "changelog.d"
    (fragments / "shards.fixed.md").write_text("Shards are whole.\n")
    assert release.main(["notes"]) == 0
    assert capsys.readouterr().out.startswith("version 0.1.0\n\n## Fixed\n\n- Shards are whole.")
    assert release.main(["prepare"]) == 0
    assert "Shards are whole." in (tmp_path / "CHANGELOG.md").read_text()
    assert not (fragments / "shards.fixed.md").exists()
    (fragments / "meshes.added.md").write_text("Meshes have names.\n")
    assert release.main(["prepare"]) == 0
    assert "version 0.2.0" in capsys.readouterr().out
    assert release.version_in((tmp_path / "pyproject.toml").read_text()) == (0, 2, 0)
    assert (tmp_path / "CITATION.cff").read_text().startswith("cff-version: 1.2.0\nversion: 0.2.0\ndate-released: 20")
    assert "Shards" not in (tmp_path / "reports" / "release-notes.md").read_text()


@pytest.mark.skipif(shutil.which("towncrier") is None, reason="[no-tool] towncrier is not installed")
@pytest.mark.parametrize("later", [False, True])
def test_the_first_release_keeps_the_text_that_is_written(release, tmp_path, capsys, later):
    """A section marked (unreleased) gets a date, and then what later fragments add; the version stays."""
    (tmp_path / "CHANGELOG.md").write_text("# hyper-parallel 0.1.0 (unreleased)\n\n## Ranks\n\n- Ranks.\n")
    fragments = tmp_path / "ci" / "changelog.d"
    if later:
        (fragments / "shards.added.md").write_text("Shards are complete.\n")
    assert release.main(["prepare"]) == 0
    assert "version 0.1.0" in capsys.readouterr().out
    first, _, rest = (tmp_path / "CHANGELOG.md").read_text().partition("\n")
    assert first.startswith("# hyper-parallel 0.1.0 (20")
    assert rest.startswith("\n## Ranks\n\n- Ranks.\n")
    assert ("Shards are complete." in rest) is later
    assert "Ranks." in (tmp_path / "reports" / "release-notes.md").read_text()
    assert [path.name for path in fragments.iterdir()] == ["README.md"]
    (fragments / "meshes.added.md").write_text("Meshes have names.\n")
    assert release.main(["prepare"]) == 0
    text = (tmp_path / "CHANGELOG.md").read_text()
    assert text.index("0.2.0") < text.index("Meshes have names.") < text.index("0.1.0") < text.index("- Ranks.")


def test_the_citation_has_the_version_of_the_project():
    """CITATION.cff and pyproject.toml name the same version and licence."""
    if not (ROOT / "CITATION.cff").exists():
        pytest.skip("[no-tool] the checkout's files are not installed")
    cited, project = (ROOT / "CITATION.cff").read_text(), (ROOT / "pyproject.toml").read_text()
    for name in ("version", "license"):
        (value,) = [line.partition(": ")[2] for line in cited.splitlines() if line.startswith(f"{name}: ")]
        assert f'\n{name} = "{value}"\n' in project
