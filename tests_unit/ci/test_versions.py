"""`ci/versions.py`: the tables of versions are made of the results of the suites."""

import pytest

HEAD = "| environment | suite | passed | failed | skipped | on |\n|---|---|--:|--:|--:|---|\n"
PAGE = f"# Versions\n\n{HEAD}| py310-torch210 | unit | 5 | 0 | 1 | 2025-01-01 |\n\nend\n"


def results(day, *failed, passed=1):
    """A JUnit file: these tests failed (in a fixture if their name says so), so many passed, and one was skipped."""
    kinds = {test: "error" if "fixture" in test else "failure" for test in failed}
    cases = [f'<testcase classname="pkg.test_a" name="{test}"><{kind}/></testcase>' for test, kind in kinds.items()]
    cases += ['<testcase classname="pkg.test_a" name="good"/>'] * passed
    errors = list(kinds.values()).count("error")
    numbers = f'errors="{errors}" failures="{len(failed) - errors}" skipped="1" tests="{len(cases) + 1}"'
    return (
        f'<testsuites><testsuite name="pytest" {numbers} timestamp="{day}T15:00:00+00:00">{"".join(cases)}'
        '<testcase classname="pkg.test_a" name="left"><skipped/></testcase></testsuite></testsuites>'
    )


@pytest.fixture
def versions(tmp_path, monkeypatch, script):
    """The script with a page of its own."""
    module = script("versions")
    monkeypatch.setattr(module, "PAGE", tmp_path / "versions.md")
    module.PAGE.write_text(PAGE)
    return module


@pytest.fixture
def write(versions, tmp_path):
    """`write(environment, text)`: these results and no others; returns the lines of the page afterwards."""

    def run(environment, text, suite="unit"):
        folder = tmp_path / environment
        folder.mkdir()
        (folder / f"{suite}.xml").write_text(text)
        for _ in range(2):  # again changes nothing
            assert versions.main([str(tmp_path)]) == 0
        (folder / f"{suite}.xml").unlink()
        folder.rmdir()
        return versions.PAGE.read_text().splitlines()

    return run


def test_new_results_replace_those_of_their_suite_and_others_stay(write):
    """A row has what passed, failed with errors, and was skipped, and the day; rows without results are kept."""
    write("py312-torch214", results("2026-11-28", passed=4))
    assert write("py310-torch210-mindspore28", results("2026-11-29", passed=7)) == [
        "# Versions",
        "",
        *HEAD.splitlines(),
        "| py310-torch210 | unit | 5 | 0 | 1 | 2025-01-01 |",
        "| py310-torch210-mindspore28 | unit | 7 | 0 | 1 | 2026-11-29 |",
        "| py312-torch214 | unit | 4 | 0 | 1 | 2026-11-28 |",
        "",
        "end",
    ]


def test_failures_that_pass_when_run_again_leave_the_table(write):
    """A run of some tests again has a row of its own; those that fail again stay failures of the suite."""
    write("py310-torch210", results("2026-11-27", "test_a", "test_b[1]", "test_b[2]", "test_c"))
    again = results("2026-11-30", "test_b[2]", passed=0)
    again = again.replace("</testsuite>", '<testcase classname="pkg.test_a" name="test_a"/></testsuite>')
    assert write("py310-torch210", again, "unit-again")[2:] == [
        *HEAD.splitlines(),
        "| py310-torch210 | unit | 1 | 4 | 1 | 2026-11-27 |",
        "| py310-torch210 | unit-again | 0 | 1 | 1 | 2026-11-30 |",
        "",
        "| environment | suite | test that fails | cases | since |",
        "|---|---|---|--:|---|",
        "| py310-torch210 | unit | `pkg.test_a.test_b` | 1 | 2026-11-27 |",
        "| py310-torch210 | unit | `pkg.test_a.test_c` | 1 | 2026-11-27 |",
        "",
        "end",
    ]


def test_a_failure_keeps_the_day_since_which_it_fails(write):
    """Cases of a test are one row; a test that fails again keeps its day, one that passes leaves the table."""
    write("py310-torch210", results("2026-11-27", "test_a", "test_b[1]", "test_b[2|x]"))
    write("py312-torch214", results("2026-11-28", "test_fixture"))
    lines = write("py310-torch210", results("2026-11-30", "test_b[1]", "test_c"))
    assert lines[2:] == [
        *HEAD.splitlines(),
        "| py310-torch210 | unit | 1 | 2 | 1 | 2026-11-30 |",
        "| py312-torch214 | unit | 1 | 1 | 1 | 2026-11-28 |",
        "",
        "| environment | suite | test that fails | cases | since |",
        "|---|---|---|--:|---|",
        "| py310-torch210 | unit | `pkg.test_a.test_b` | 1 | 2026-11-27 |",
        "| py310-torch210 | unit | `pkg.test_a.test_c` | 1 | 2026-11-30 |",
        "| py312-torch214 | unit | `pkg.test_a.test_fixture` | 1 | 2026-11-28 |",
        "",
        "end",
    ]
    write("py310-torch210", results("2026-12-01"))
    assert write("py312-torch214", results("2026-12-01"))[2:] == [
        *HEAD.splitlines(),
        "| py310-torch210 | unit | 1 | 0 | 1 | 2026-12-01 |",
        "| py312-torch214 | unit | 1 | 0 | 1 | 2026-12-01 |",
        "",
        "end",
    ]


def test_without_results_the_page_stays(versions, tmp_path, capsys):
    """A folder without results is an error that says how to make some; a page without the table is one, too."""
    folder = tmp_path / "py310-things"  # not of tox
    folder.mkdir()
    (folder / "unit.xml").write_text(results("2026-11-28"))
    assert versions.main([str(tmp_path)]) == 1
    expected = f"no results in {tmp_path}: run `tox run -m edges` or `tox run -m matrix` first\n"
    assert capsys.readouterr().err == expected
    assert versions.PAGE.read_text() == PAGE
    with pytest.raises(ValueError, match=r"^versions\.md has no table with the head \| environment \| suite \| passed"):
        versions.updated("no table", [])


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "is not complete XML (no element found: line 1, column 0)"),
        ("<testsuites><testsuite>", "is not complete XML (no element found: line 1, column 23)"),
        ("<html/>", "has no results of pytest"),
        ('<testsuites><testsuite tests="5"/></testsuites>', "has no results of pytest"),
        ('<testsuites><testsuite tests="0" timestamp="2026-11-28T15:00:00"/></testsuites>', "has no results of pytest"),
    ],
)
def test_a_file_that_is_no_result_is_named_and_the_page_stays(text, problem, versions, tmp_path, capsys):
    """A run that was stopped leaves an empty or cut file: it must not replace the row of a whole run."""
    file = tmp_path / "py310-torch210" / "unit.xml"
    file.parent.mkdir()
    file.write_text(text)
    assert versions.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{file} {problem}: run the suite again, or delete the file\n"
    assert versions.PAGE.read_text() == PAGE


def test_a_run_of_a_part_does_not_replace_the_whole(versions, tmp_path, capsys):
    """`tox -e py310-torch210 -- some/folder` writes the same file as the whole suite: the row stays, and it is said."""
    file = tmp_path / "py310-torch210" / "unit.xml"
    file.parent.mkdir()
    file.write_text(results("2026-11-28"))
    assert versions.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "py310-torch210/unit.xml has 2 tests, less than half of the 6 on the page: "
        "run the whole suite, or delete its row from the page first\n"
    )
    assert versions.PAGE.read_text() == PAGE
    file.write_text(results("2026-11-28", passed=2))
    assert versions.main([str(tmp_path)]) == 0
