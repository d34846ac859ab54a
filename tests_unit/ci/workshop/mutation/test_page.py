"""The page on the verifier's power shows its report."""

import json
import re

import pytest

from workshop.mutation.page import mutation_page, read_mutation


def test_a_survivor_fails_the_verdict(samples):
    """A single survivor fails the verdict, and is listed with the result of the full sweep."""
    page = mutation_page(samples.mutation())
    assert '<div class="verdict bad"><strong>7 of 8 changed rules noticed; 1 survived</strong><p>score 0.8750' in page
    survivors = page[page.index(">Survivors</h2>") : page.rindex(">Kinds")]
    assert "<code>matmul</code>" in survivors
    assert (
        '<td>dropped &lt;Partial&gt;</td><td>row 3: Partial(sum) is Replicate</td><td class="bad">held</td>'
        in survivors
    )
    assert page.count("the row is claimed by another") == 2


def test_no_survivors_is_a_good_verdict(samples):
    """The verdict is good if all mutants were noticed, and bad without mutants, which give no share."""
    assert '<div class="verdict good"><strong>7 of 7 changed rules noticed</strong>' in mutation_page(
        samples.mutation(0)
    )
    nothing = {**samples.mutation(0), "mutants": 0, "killed": 0, "equivalent": 0, "score": 0.0}
    page = mutation_page(nothing)
    assert '<div class="verdict bad"><strong>0 of 0 changed rules noticed</strong>' in page
    (row,) = re.findall(r"<tr[^>]*><th[^>]*>swapped dim.*?</tr>", page)
    assert row.endswith('<td class="quiet" data-key="">n/a</td></tr>')


def test_a_report_of_another_version_is_rejected(samples, tmp_path):
    """A file that lacks a key of the page is an error that names the file, the key and the fix."""
    path = tmp_path / "mutation.json"
    path.write_text(json.dumps(samples.mutation()))
    assert read_mutation(path)["killed"] == 7
    report = samples.mutation()
    del report["kinds"], report["score"]
    path.write_text(json.dumps(report))
    message = (
        f"{path} has no score, kinds: it is not a report of `python ci/workshop mutants`, or another version wrote it"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_mutation(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="has no mutants, killed, "):
        read_mutation(path)
