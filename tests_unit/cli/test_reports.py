"""The command ``reports``: what is in a folder, its start page, and links that lead both ways."""

from __future__ import annotations

import json
import re

from hyper_parallel.cli import main
from hyper_parallel.verify.pages import page
from hyper_parallel.verify.pages.render import render
from hyper_parallel.verify.report import command_line


def written(path, *, good, verdict="equal <5>"):
    """Write a page with a verdict."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with command_line(["hyper-parallel", "verify", "a&b"]):
        path.write_text(render("report.html", title="Programs", footer="", good=good, verdict=verdict, sections={}))


def test_a_folder_has_a_start_page(tmp_path, capsys):
    """Pages and JSON reports of a folder and its folders are rows, failed ones first; pages link back, once."""
    written(tmp_path / "a b.html", good=True)
    written(tmp_path / "night" / "c.html", good=False)
    (tmp_path / "plain.html").write_text(page("no verdict", "x"))
    (tmp_path / "foreign.html").write_text("<html></html>")
    (tmp_path / "d.json").write_text(json.dumps({"header": {"date": "2026", "command": "x"}, "ok": True}))
    (tmp_path / "e.json").write_text("[1]")
    start = tmp_path / "index.html"
    for _ in range(2):
        assert main(["reports", str(tmp_path), "--html", str(start)]) == 1
    lines = capsys.readouterr().out.splitlines()[-5:]
    assert lines[0] == f"{tmp_path}/night/c.html: FAILED: equal <5>"
    assert lines[1:4] == [
        f"{tmp_path}/a b.html: passed: equal <5>", f"{tmp_path}/d.json: passed: data for programs",
        f"{tmp_path}/plain.html: no verdict: no verdict",
    ]  # fmt: skip
    assert lines[4] == "4 reports, 1 failed"
    text = start.read_text()
    assert "1 of 4 reports failed" in text
    links = re.findall(r'<a href="([^#"]+)"><code>', text)
    assert links == ["night/c.html", "a%20b.html", "d.json", "plain.html"]
    assert "hyper-parallel verify &#39;a&amp;b&#39;" in text
    back = re.findall(r'<p class="start"><a href="([^"]*)">', (tmp_path / "night" / "c.html").read_text())
    assert back == ["../index.html"]
    assert "index.html" not in (tmp_path / "foreign.html").read_text()


def test_the_list_is_json(tmp_path, capsys):
    """--json prints every report; nothing failed gives status 0."""
    written(tmp_path / "a.html", good=True)
    assert main(["reports", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], [row["verdict"] for row in document["reports"]]) == (True, ["equal <5>"])


def test_a_folder_without_reports_is_invalid_input(tmp_path, capsys):
    """A missing folder, a file and an empty folder are named, with status 2."""
    assert main(["reports", str(tmp_path / "no")]) == 2
    assert capsys.readouterr().err == f"hyper-parallel: error: the folder {tmp_path / 'no'} does not exist\n"
    (tmp_path / "file").write_text("")
    assert main(["reports", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"hyper-parallel: error: {tmp_path / 'file'} is not a folder\n"
    assert main(["reports", str(tmp_path)]) == 2
    assert "has no report: pages of --html FILE and JSON reports" in capsys.readouterr().err
