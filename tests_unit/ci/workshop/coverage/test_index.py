"""Pages and files beside the coverage reports."""

import xml.etree.ElementTree as ET

import pytest

from workshop.coverage.index import write_pit

REPORT = {
    "operators": {"add": {"killed": 2}, "view": {"killed": 1}},
    "survivors": [{"op": "view", "kind": "drop", "change": "x", "full": "killed"}],
}


def test_every_false_mutant_is_one_mutation(tmp_path):
    """A killed mutant is detected, a survivor is not, and each has its own place."""
    root = ET.parse(write_pit(REPORT, tmp_path / "new" / "mutation.xml")).getroot()  # noqa: S314 - our own file
    mutations = [
        (mutation.findtext("mutatedMethod"), mutation.findtext("lineNumber"), mutation.get("detected"))
        for mutation in root
    ]
    assert mutations == [("add", "1", "true"), ("add", "2", "true"), ("view", "1", "true"), ("view", "2", "false")]
    assert {mutation.get("status") for mutation in root} == {"KILLED", "SURVIVED"}


def test_a_report_that_cannot_be_written_is_an_error(tmp_path):
    """A file in place of the folder is an error that names it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/mutation\.xml cannot be written: "):
        write_pit(REPORT, tmp_path / "file" / "mutation.xml")
