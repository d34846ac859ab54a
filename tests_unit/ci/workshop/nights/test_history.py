"""The history keeps a few values of every night and says what changed since the night before."""

import json

import pytest

from workshop.commands import main
from workshop.nights.history import night_of, read_history
from workshop.nights.reports import read_reports

TESTS = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure/></testcase><testcase name="c"><error/></testcase>
<testcase name="d"><skipped message="no device"/></testcase><testcase name="e"><skipped/></testcase>
<testcase name="f"><skipped message="no device"/></testcase>
</testsuite></testsuites>"""


def operator(name, platform, outcome, checks):
    """An operator of a sweep."""
    return {"op": name, "platform": platform, "outcome": outcome, "checks": checks, "coverage": {}}


REPORTS = {
    "operators.json": {
        "columns": [],
        "operators": [
            operator("a", "torch", "ok", 5), operator("b", "torch", "wrong", 2), operator("a", "mindspore", "ok", 3),
        ],
    },
    "models.json": {"runs": [{"platform": "torch", "ok": True}, {"platform": "torch", "ok": False}]},
    "bench.json": {"rows": [{"name": "block", "ok": True, "ratio": 1.25}]},
    "mutants.json": {"survivors": [], "score": 0.99, "survived": 1},
    "fuzz.json": {
        "programs": 4, "steps": {},
        "outcomes": {"torch": {"equal": 3, "wrong": 1, "internal error": 0, "hang": 0}},
    },
    "gate.json": {"name": "torch", "total": 97.5, "failures": [], "ranks": 3, "ok": True},
    "seeded.json": {"seeded": 9, "found": {"full": 8, "reduced": 7}, "missed": ["tied"], "outcomes": []},
}  # fmt: skip


@pytest.fixture
def reports(tmp_path):
    """Return a folder with a report of every kind, and files that are none."""
    folder = tmp_path / "reports"
    (folder / "npu-2").mkdir(parents=True)
    for name, content in REPORTS.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "npu-2" / "st.xml").write_text(TESTS)
    (folder / "other.json").write_text("[1]")
    (folder / "other.xml").write_text("<coverage/>")
    (folder / "log.txt").write_text("not read")
    return folder


def test_a_night_has_the_totals_of_its_reports(reports):
    """Counts and ratios of every kind of report are kept; words are not; tests are named by folder and file."""
    night = night_of(read_reports([reports]))
    assert {name: measured.value for name, measured in night.values.items()} == {
        "block": 1.25,
        "seeded bugs found in full models": 8,
        "seeded bugs found in reduced models": 7,
        "seeded bugs found in full models only": 1,
        "random programs on torch": 4,
        "random programs on torch: wrong": 1,
        "random programs on torch: internal error": 0,
        "random programs on torch: hang": 0,
        "torch: covered": 97.5,
        "torch: ranks": 3,
        "models on torch: equal": 1,
        "models on torch: not equal": 1,
        "score": 0.99,
        "survived": 1,
        "tests of npu-2/st: executed": 3,
        "tests of npu-2/st: failed": 2,
        "tests of npu-2/st: skipped": 3,
        "operators on mindspore: checks": 3,
        "operators on mindspore: ok": 1,
        "operators on mindspore: wrong": 0,
        "operators on mindspore: crash": 0,
        "operators on mindspore: unexercised": 0,
        "operators on torch: checks": 7,
        "operators on torch: ok": 1,
        "operators on torch: wrong": 1,
        "operators on torch: crash": 0,
        "operators on torch: unexercised": 0,
    }
    assert night.skipped == {"npu-2/st": {"no device": 2, "without a reason": 1}}
    assert {suite: list(names) for suite, names in night.failed.items()} == {"npu-2/st": ["b", "c"]}


def test_equal_reports_of_two_cells_are_two_values(tmp_path):
    """The values of a report in a folder have the folder's name before theirs, so that no cell hides another's."""
    for cell, covered in (("cpu-torch", 97.5), ("npu-torch-2", 61.0)):
        (tmp_path / cell).mkdir()
        (tmp_path / cell / "gate.json").write_text(json.dumps({**REPORTS["gate.json"], "total": covered}))
    values = night_of(read_reports([tmp_path])).values
    assert values["cpu-torch: torch: covered"].value == 97.5
    assert values["npu-torch-2: torch: covered"].value == 61.0


def test_names_of_failed_tests_are_kept_for_two_nights(reports, tmp_path):
    """Older nights keep the number of failures only, and a history from before there were names is read."""
    path = tmp_path / "nights.json"
    for _ in range(3):
        assert main(["trend", str(path), "--add", str(reports)]) == 0
    content = json.loads(path.read_text())
    day = content["nights"][0]["header"]["date"][:10]
    assert [night["failed"] for night in content["nights"]] == [{}, *[{"npu-2/st": {"b": day, "c": day}}] * 2]
    content["nights"][2]["failed"] = {"npu-2/st": ["b"]}  # as it was before there were days
    path.write_text(json.dumps(content))
    assert read_history(path)[2].failed == {"npu-2/st": {"b": day}}
    for night in content["nights"]:
        del night["failed"]
    path.write_text(json.dumps(content))
    assert [night.failed for night in read_history(path)] == [{}] * 3


def test_the_last_night_is_compared_with_the_one_before(reports, tmp_path, capsys):
    """Nights are added to the file, the oldest are dropped; text and page show what got worse first."""
    path, page = tmp_path / "history" / "nights.json", tmp_path / "page.html"
    command = ["trend", str(path), "--keep", "2", "--html", str(page), "--add", str(reports)]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "27 values, and no night before to compare them with"
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 worse, 0 changed, 27 equal"
    (reports / "bench.json").write_text(json.dumps({"rows": [{"name": "block", "ok": True, "ratio": 1.5}]}))
    (reports / "models.json").unlink()
    (reports / "npu-2" / "st.xml").write_text(TESTS.replace("<failure/>", ""))
    (reports / "new.xml").write_text("<testsuite><testcase/></testsuite>")
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 nights, ")
    assert lines[1:] == [
        "worse   models on torch: equal: 1 -> absent",
        "worse   models on torch: not equal: 1 -> absent",
        "better  tests of npu-2/st: failed: 2 -> 1",
        "other   tests of new: executed: absent -> 1",
        "other   tests of new: failed: absent -> 0",
        "other   tests of new: skipped: absent -> 0",
        "skipped  npu-2/st: 2 tests: no device",
        "skipped  npu-2/st: 1 tests: without a reason",
        "2 worse, 6 changed, 24 equal",
    ]
    assert len(read_history(path)) == 2
    assert '<div class="verdict bad"><strong>2 worse, 6 changed, 24 equal' in page.read_text()
    assert "no device" in page.read_text()
    assert main(["trend", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["nights"][1]["values"]["block"] == [1.5, "time"]


@pytest.mark.parametrize(
    "values, message",
    [
        ({"a": [1, "much"]}, "ValueError: 'a' has the value 1, 'much'"),
        ({"a": ["<1>", "more"]}, "ValueError: 'a' has the value '<1>', 'more'"),
        ({"a": [True, "more"]}, "ValueError: 'a' has the value True, 'more'"),
        ({"a": 3}, "TypeError: cannot unpack non-iterable int object"),
    ],
)
def test_a_damaged_history_is_one_line(values, message, tmp_path, capsys):
    """A history with values of the wrong kind is refused with status 2, and stays as it is."""
    path = tmp_path / "nights.json"
    path.write_text(json.dumps({"nights": [{"header": {}, "values": values, "skipped": {}}]}))
    before = path.read_text()
    assert main(["trend", str(path)]) == 2
    expected = (
        f"python ci/workshop: error: {path} cannot be shown: it is damaged, or another version wrote it ({message})\n"
    )
    assert capsys.readouterr().err == expected
    assert path.read_text() == before


def test_files_that_are_no_reports(tmp_path, capsys):
    """A file that is named and is not a report, and a history without nights, are one line and status 2."""
    path, history = tmp_path / "a.xml", tmp_path / "nights.json"
    path.write_text("<coverage/>")
    assert main(["trend", str(history), "--add", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"python ci/workshop: error: {path} is not a JUnit file: its root is coverage, not testsuites\n"
    )
    path.write_text("<testsuites>")
    assert main(["trend", str(history), "--add", str(path)]) == 2
    assert f"{path} is not a JUnit file: no element found" in capsys.readouterr().err
    cut = tmp_path / "cut.json"
    cut.write_text('{"runs": ')
    assert main(["trend", str(history), "--add", str(cut)]) == 2
    assert f"{cut} is not a report: Expecting value" in capsys.readouterr().err
    history.write_text('{"nights": []}')
    assert main(["trend", str(history)]) == 2
    assert capsys.readouterr().err == f"python ci/workshop: error: {history} has no nights: add one with --add REPORT\n"
