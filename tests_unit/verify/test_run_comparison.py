"""Two reports side by side: what got worse."""

import json

import pytest

from hyper_parallel.cli import main
from hyper_parallel.verify.pages.report_pages import comparison_page
from hyper_parallel.verify.run_comparison import compare_reports

HEADER = {"date": "2026-01-02", "versions": {"torch": "2.13"}, "command": "<it>"}


def operator(name, outcome="ok", checks=7, state="checked"):
    """An operator of a sweep."""
    return {
        "op": name, "platform": "torch", "outcome": outcome, "checks": checks, "coverage": {"uneven": {"state": state}},
    }  # fmt: skip


def sweep(*operators):
    """A report of verify ops."""
    return {"header": HEADER, "columns": ["uneven"], "operators": list(operators)}


@pytest.fixture
def compared(tmp_path):
    """Return the comparison of two documents, written as files."""

    def compare(before, after):
        paths = [tmp_path / "before.json", tmp_path / "after.json"]
        for path, document in zip(paths, (before, after), strict=True):
            path.write_text(json.dumps(document))
        return compare_reports(*paths)

    return compare


def test_what_got_worse_comes_first(compared):
    """Fewer checks, a worse outcome, a column left out and a lost operator are worse; the contrary is better."""
    before = sweep(operator("a", "ok", 7), operator("b", "wrong", 3), operator("c"))
    after = sweep(operator("a", "crash", 6, "not exercised"), operator("b", "ok", 4), operator("d"))
    comparison = compared(before, after)
    assert [(change.what, change.before, change.after) for change in comparison.worse] == [
        ("a on torch: outcome", "ok", "crash"),
        ("a on torch: checks", "7", "6"),
        ("a on torch: uneven", "checked", "not exercised"),
        *((f"c on torch: {what}", shown, "absent") for what, shown in
          (("outcome", "ok"), ("checks", "7"), ("uneven", "checked"))),
    ]  # fmt: skip
    verdicts = [change.verdict for change in comparison.changes]
    assert verdicts == ["worse"] * 6 + ["better"] * 2 + ["other"] * 3
    assert comparison.equal == 1
    assert not comparison.ok
    assert comparison.text().splitlines()[-1] == "6 worse, 11 changed, 1 equal"
    assert comparison.text().startswith("worse   a on torch: outcome: ok -> crash\n")


def test_the_same_report_twice_is_equal(compared):
    """Two equal reports have no changes; two reports without any value compare nothing, which is not ok."""
    assert compared(sweep(operator("a")), sweep(operator("a"))).ok
    assert not compared(sweep(), sweep()).ok


def test_small_changes_of_times_are_noise(compared):
    """A ratio or a time counts from a quarter on; a budget always counts."""
    rows = [{"name": "add", "ratio": 1.0, "ok": True}, {"name": "start", "seconds": 2.0, "ok": True}]
    after = [{"name": "add", "ratio": 1.2, "ok": False}, {"name": "start", "seconds": 1.5, "ok": True}]
    comparison = compared({"rows": rows}, {"rows": after})
    assert [(change.what, change.verdict) for change in comparison.changes] == [
        ("add: in budget", "worse"), ("start", "better"),
    ]  # fmt: skip
    slower = compared({"rows": rows}, {"rows": [rows[0], {**rows[1], "seconds": 2.5}]})
    assert [(change.what, change.before, change.after, change.verdict) for change in slower.changes] == [
        ("start", "2", "2.5", "worse"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "before, after, worse",
    [
        ({"survivors": [], "score": 1.0, "survived": 0}, {"survivors": [], "score": 0.5, "survived": 1},
         ["score", "survived"]),
        ({"name": "torch", "total": 97.5, "failures": [], "ranks": 4, "ok": True},
         {"name": "torch", "total": 97.0, "failures": ["x"], "ranks": 3, "ok": False},
         ["torch: covered", "torch: ranks", "torch: gates"]),
        ({"runs": [{"name": "m", "platform": "torch", "launch": "simulated", "ok": True}]},
         {"runs": [{"name": "m", "platform": "torch", "launch": "simulated", "ok": False}]},
         ["m on torch (simulated): equal"]),
    ],
)  # fmt: skip
def test_reports_of_other_commands(compared, before, after, worse):
    """Mutation, coverage and models are compared, too."""
    assert [change.what for change in compared(before, after).worse] == worse
    assert compared(after, before).ok


def test_damaged_reports_are_named(compared):
    """Values of another kind are an error that names the files."""
    with pytest.raises(ValueError, match=r"before\.json, .*after\.json cannot be shown: a file is damaged"):
        compared(sweep(operator("a", "odd")), sweep(operator("a")))
    with pytest.raises(ValueError, match=r"cannot be shown: .* is damaged"):
        compared({"rows": [1]}, {"rows": []})


def test_the_page_shows_both_runs(compared):
    """The page has the verdict, every change and both headers beside each other; text is escaped."""
    page = comparison_page(compared(sweep(operator("<a>", checks=3)), sweep(operator("<a>", checks=2))))
    for text in ("1 worse, 1 changed, 2 equal", "&lt;a&gt; on torch: checks", "2.13", "&lt;it&gt;", "first run"):
        assert text in page
    assert "nothing differs" in comparison_page(compared({"rows": []}, {"rows": []}))


def test_the_command_prints_and_writes(tmp_path, capsys):
    """The status is 1 where something got worse, 0 otherwise; the page is written, JSON has a header."""
    for name, checks in (("before", 3), ("after", 2)):
        (tmp_path / f"{name}.json").write_text(json.dumps(sweep(operator("a", checks=checks))))
    before, after, page = (str(tmp_path / name) for name in ("before.json", "after.json", "out/page.html"))
    assert main(["compare", before, after, "--html", page]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 worse, 1 changed, 2 equal"
    assert "Two runs side by side" in (tmp_path / "out" / "page.html").read_text()
    assert main(["compare", after, before, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["headers"][0], "date" in report["header"]) == (True, HEADER, True)
