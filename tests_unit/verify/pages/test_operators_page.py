"""The operator matrix shows the sweep's report, without a verdict of its own."""

import json
import re

import pytest

from hyper_parallel.verify.pages.operators_page import operators_page, read_report
from hyper_parallel.verify.prove.table import stored_table


def body(page, caption):
    """Return the rows of a table by its caption."""
    return re.search(rf"<caption><span>{caption}.*?<tbody>(.*?)</tbody>", page, re.DOTALL)[1].split("</tr>")


def test_every_operator_of_every_framework_is_a_row(samples):
    """Rows are sorted by operator, the frameworks beside each other; numbers keep a key to sort by."""
    page = operators_page([samples.sweep("torch"), samples.sweep("mindspore")])
    rows = body(page, "Checks per operator and framework")
    names = [re.findall(r"<code>(\w+)</code>.*?<td>(\w+)</td>", row, re.DOTALL) for row in rows]
    assert [name for row in names for name in row] == [
        (op, platform) for op in ("add", "argsort", "matmul", "zeros") for platform in ("mindspore", "torch")
    ]
    assert '<td class="number" data-key="1200">1,200</td>' in rows[0]


def test_not_applicable_and_not_exercised_differ(samples):
    """Not applicable checks are shown quietly; checks that were left out are marked, counted and filtered by."""
    page = operators_page([samples.sweep()])
    (row,) = [row for row in body(page, "Checks per operator") if ">argsort<" in row]
    assert '<td class="number quiet" data-key="">n/a</td>' in row
    assert '<td class="number bad" data-key="0">none</td>' in row
    assert '<td class="bad" data-key="uneven">uneven</td>' in row
    (framework,) = [row for row in body(page, "What was verified per framework") if "torch" in row]
    assert '<td class="number warn" data-key="2">2 of 3</td>' in framework
    assert '<td class="number good" data-key="3">3 of 3</td>' in framework


def test_the_reasons_of_what_was_not_verified_are_shown(samples):
    """A row lists findings, exemptions, absences, skipped samples, unreached rows and refusals."""
    operator = {
        **samples.operator("f", "torch", "wrong", forward=3),
        "wrong": [{"problem": "is <2>", "places": "Shard(0)"}], "skipped": {"all zero": 2},
        "unexercised": ["Shard(5)"], "rejected": {"PlacementError: no": 7},
    }  # fmt: skip
    report = {**samples.sweep("torch", operator, samples.operator("g", "torch", "absent")), "ok": False}
    page = operators_page([report])
    for text in (
        "is &lt;2&gt; (Shard(0))", "all zero (2 samples)", "claimed rows without a sample: Shard(5)",
        "7 placements were refused with an error: PlacementError: no", "torch has no such operator", "FAILED",
        "(4 notes)",
    ):  # fmt: skip
        assert text in page
    assert "exempt: why &lt;not&gt;" in operators_page([samples.sweep()])
    assert "INTERRUPTED" in operators_page([{**report, "interrupted": "Ctrl-C"}])


def test_a_report_of_another_version_is_rejected(samples, tmp_path):
    """A file that is not a report, or that lacks the columns, is an error that names it and the fix."""
    path = tmp_path / "operators-torch.json"
    path.write_text(json.dumps(samples.sweep()))
    assert read_report(path)["ok"]
    path.write_text('{"operators": []}')
    again = (
        "it is not a report of `hyper-parallel verify ops --report operators-torch.json`, or another version wrote it"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path} has no columns: {again}')}$"):
        read_report(path)
    path.write_text('{"columns": [], "operators": [{"op": "add"}]}')
    with pytest.raises(ValueError, match="has no coverage: it is not a report of"):
        read_report(path)
    path.write_text("{")
    message = (
        f"{path} is not a report of `hyper-parallel verify ops --report operators-torch.json`: Expecting property name"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        read_report(path)


def test_an_operator_leads_to_its_rule_samples_refusals_and_counts(samples):
    """The name in the matrix links to the operator's part, with checks per placements, the least checked first."""
    operator = {
        **samples.operator("f", "torch", forward=1203), "rule": "f(x, <y>) in rules.a", "by_sample": {"sample 0": 1203},
        "skipped": {"all zero": 2}, "rejected": {"no <such>": 7}, "missing": ["Shard(1)"], "by_mesh": {"2x2": 4},
        "by_placement": {"R, R": 1200, "S(0), <P>": 3},
    }  # fmt: skip
    page = operators_page([samples.sweep("torch", operator, samples.operator("g", "torch"))])
    assert '<a href="#f-torch"><code>f</code></a>' in page
    detail = page[page.index('<details id="f-torch">') : page.index('<details id="g-torch">')]
    lines = [
        "f</code> on torch: ok, 1,203 checks", "<li>f(x, &lt;y&gt;) in rules.a</li>", "<li>sample 0: 1,203 checks</li>",
        "<li>not checked: all zero (2 samples)</li>", "<li>no &lt;such&gt; (7 placements)</li>", "<li>Shard(1)</li>",
        "<li>2x2: 4</li>", "S(0), &lt;P&gt;", "R, R",
    ]  # fmt: skip
    places = [detail.index(line) for line in lines]
    assert places == sorted(places)
    assert "<table" not in page[page.index('<details id="g-torch">') :]


def test_levels_of_rows_are_a_column(samples):
    """A row of the matrix says how many rows of the rule are proven and tested; an unknown operator has none."""
    page = operators_page([samples.sweep("torch", *map(samples.operator, ("argsort", "f"), ("torch", "torch")))])
    rows = body(page, "Checks per operator and framework")
    counts = stored_table().counts("argsort")
    (argsort,) = [row for row in rows if ">argsort<" in row]
    assert f"proven {counts['proven']}" in argsort
    (unknown,) = [row for row in rows if ">f<" in row]
    assert "no rows" in unknown
