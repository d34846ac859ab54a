"""`ci/versions.py`: the table of versions is made of the results of the suites."""

import pytest

PAGE = "# Versions\n\n| environment | suite |\n|---|---|\n| py310-torch210 | unit | 5 | 0 | 1 | 2025-01-01 |\n\nend\n"
RESULTS = (
    '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" '
    'timestamp="2026-11-28T15:00:00+00:00"></testsuite></testsuites>'
)


@pytest.fixture
def versions(tmp_path, monkeypatch, script):
    """The script with a page of its own."""
    module = script("versions")
    monkeypatch.setattr(module, "PAGE", tmp_path / "versions.md")
    module.PAGE.write_text(PAGE)
    return module


def test_new_results_replace_those_of_their_suite_and_others_stay(versions, tmp_path):
    """A row has what passed, failed with errors, and was skipped, and the day; rows without results are kept."""
    for environment in ("py312-torch214", "py310-torch210-mindspore28"):
        (tmp_path / environment).mkdir()
        (tmp_path / environment / "unit.xml").write_text(RESULTS)
    for _ in range(2):  # again changes nothing
        assert versions.main([str(tmp_path)]) == 0
    assert versions.PAGE.read_text().splitlines() == [
        "# Versions",
        "",
        "| environment | suite | passed | failed | skipped | on |",
        "|---|---|--:|--:|--:|---|",
        "| py310-torch210 | unit | 5 | 0 | 1 | 2025-01-01 |",
        "| py310-torch210-mindspore28 | unit | 4 | 3 | 3 | 2026-11-28 |",
        "| py312-torch214 | unit | 4 | 3 | 3 | 2026-11-28 |",
        "",
        "end",
    ]


def test_without_results_the_page_stays(versions, tmp_path, capsys):
    """A folder without results is an error that says how to make some; a page without a table is one, too."""
    assert versions.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == "no results: run `tox run -m edges` or `tox run -m matrix` first\n"
    assert versions.PAGE.read_text() == PAGE
    with pytest.raises(ValueError, match=r"^versions\.md has no table$"):
        versions.table("no table", [])
