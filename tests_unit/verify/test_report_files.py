"""Files of reports: a file that cannot be written or read is one error that names it."""

import pytest

from hyper_parallel.verify.report_files import read_json, read_json_rows, write_text


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    """Missing folders are made; a file in place of a folder is an error that names the path."""
    path = write_text(tmp_path / "new" / "x.html", "text")
    assert path.read_text() == "text"
    with pytest.raises(ValueError, match=r"^.*/new/x\.html/y\.html cannot be written: (Not a directory|File exists)$"):
        write_text(path / "y.html", "text")


def test_a_report_must_have_its_keys(tmp_path):
    """An object or a row without a needed key is refused as another version's, another type as no report."""
    path = tmp_path / "report.json"
    path.write_text('{"a": 1}')
    assert read_json(path, ["a"], "make") == {"a": 1}
    with pytest.raises(
        ValueError, match=r"report\.json has no b, c: it is not a report of `make`, or another version wrote it$"
    ):
        read_json(path, ["a", "b", "c"], "make")
    with pytest.raises(ValueError, match=r"report\.json is not a report of `make`: it is not a list$"):
        read_json_rows(path, ["a"], "make")
    path.write_text('[{"a": 1}, {"b": 2}]')
    with pytest.raises(ValueError, match=r"report\.json has no a: it is not a report of"):
        read_json_rows(path, ["a"], "make")


def test_rows_stand_alone_or_in_a_report(tmp_path):
    """The rows of a report, beside its header, are read as those of a bare list are."""
    path = tmp_path / "report.json"
    for text in ('[{"a": 1}]', '{"header": {"date": "today"}, "rows": [{"a": 1}]}'):
        path.write_text(text)
        assert read_json_rows(path, ["a"], "make") == [{"a": 1}]
